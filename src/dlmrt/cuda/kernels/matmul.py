"""Projections of few rows: weights are the large side of the tile, K is split over the grid, nothing is atomic.

Every kernel writes partial sums [S, M, N] in float32 and whoever reads the value adds them up in the order of S (see
`rows`). A row's result thus depends on its own operand and on N, K and the tile of K alone: not on how many rows there
are, not on the card.

The number of rows is read from the device; programs beyond it leave. `CDT` is the type that is multiplied: bfloat16,
or float32 with IEEE products. FORMAT says how weights are kept, and what `scales` holds:

    float   plain numbers; no scales
    fp8     e4m3; float32, one a row (BLOCK 0) or one for BLOCK x BLOCK values, BK = BLOCK
    nvfp4   two e2m1 codes a byte [N, K / 2]; e4m3 [N, K / 16]; `shared` float32 [N], the scale of each row's own matrix

NVFP4 weights are exact in bfloat16: a product of e2m1 code and e4m3 block scale has at most six significant bits, and
an e4m3 number fewer. Scales of rows and of the matrix multiply the sum. Columns of NVFP4 stay packed: even and odd ones
are two products, so nothing is interleaved.

Legend: M rows, N outputs, K inputs, S splits.

Source: ours; bit layout of e2m1 and block order as in dlmrt.ops.formats.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_to_float32(code):
    """Value of a code 0..15: the magnitude's three bits become exponent and mantissa of a float32 times 2**-126.

    That number may be subnormal, so the product that scales it back must not flush; it is exact.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def products(
    x, source, is_row, weight, scales, shared, n, first, N: tl.constexpr, K: tl.constexpr, PER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """Sums float32 [BN, BM] over inputs first .. first + PER of weight[n, k] x[source, k]."""
    acc = tl.zeros((BN, BM), tl.float32)
    row, rows = n[:, None].to(tl.int64), source[None, :].to(tl.int64) * K
    for begin in range(0, PER, BK):
        if FORMAT == "nvfp4":
            pair = (first + begin) // 2 + tl.arange(0, BK // 2)
            is_weight = (n[:, None] < N) & (pair[None, :] < K // 2)
            codes = tl.load(weight + row * (K // 2) + pair[None, :], mask=is_weight, other=0).to(tl.int32)
            scale = tl.load(scales + row * (K // 16) + pair[None, :] // 8, mask=is_weight, other=0.0).to(tl.float32)
            is_input = is_row[None, :] & (pair[:, None] < K // 2)
            even = tl.load(x + rows + 2 * pair[:, None], mask=is_input, other=0.0)
            odd = tl.load(x + rows + 2 * pair[:, None] + 1, mask=is_input, other=0.0)
            low = (e2m1_to_float32(codes & 15) * scale).to(CDT)
            high = (e2m1_to_float32(codes >> 4) * scale).to(CDT)
            acc = tl.dot(low, even.to(CDT), acc, input_precision="ieee")
            acc = tl.dot(high, odd.to(CDT), acc, input_precision="ieee")
        else:
            k = first + begin + tl.arange(0, BK)
            w_tile = tl.load(weight + row * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
            x_tile = tl.load(x + rows + k[:, None], mask=is_row[None, :] & (k[:, None] < K), other=0.0)
            if FORMAT == "fp8":
                product = tl.dot(w_tile.to(tl.float32).to(CDT), x_tile.to(CDT), input_precision="ieee")
                if BLOCK > 0:
                    block = n // BLOCK * tl.cdiv(K, BLOCK) + (first + begin) // BLOCK
                    product *= tl.load(scales + block, mask=n < N, other=0.0)[:, None]
                acc += product
            else:
                acc = tl.dot(w_tile.to(CDT), x_tile.to(CDT), acc, input_precision="ieee")
    if FORMAT == "nvfp4":
        acc *= tl.load(shared + n, mask=n < N, other=0.0)[:, None]
    if FORMAT == "fp8" and BLOCK == 0:
        acc *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    return acc


@triton.jit
def matmul(
    x, weight, scales, shared, part, rows, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """part[s, m, n] = sum over the s-th PER inputs of x[m, k] weight[n, k]. Grid: N tiles, M tiles, S."""
    if tl.program_id(1) * BM >= tl.load(rows):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    acc = products(x, m, m < M, weight, scales, shared, n, split * PER, N, K, PER, BM, BN, BK, FORMAT, BLOCK, CDT)
    at = split.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(part + at, acc, mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def matmul_nvfp4_both(
    x, weight, scales, shared, part, rows, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `matmul` of NVFP4 weights with operands of `rows.store_operand` in NVFP4 too: native block-scaled products.

    K and PER are multiples of BK. sm_100 multiplies natively with BN = 128 only.
    """
    if tl.program_id(1) * BM >= tl.load(rows):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    acc = tl.zeros((BN, BM), tl.float32)
    row = n[:, None].to(tl.int64)
    for begin in range(0, PER, BK):
        pair = (split * PER + begin) // 2 + tl.arange(0, BK // 2)
        group = (split * PER + begin) // 16 + tl.arange(0, BK // 16)
        w_tile = tl.load(weight + row * (K // 2) + pair[None, :], mask=n[:, None] < N, other=0)
        x_tile = tl.load(x + m[None, :] * (K // 2) + pair[:, None], mask=m[None, :] < M, other=0)
        w_scale = tl.load(scales + row * (K // 16) + group[None, :], mask=n[:, None] < N, other=0.0)
        x_scale = tl.load(x + M * (K // 2) + m[:, None] * (K // 16) + group[None, :], mask=m[:, None] < M, other=0)
        x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(w_tile, w_scale, "e2m1", x_tile, x_scale, "e2m1", acc)
    acc *= tl.load(shared + n, mask=n < N, other=0.0)[:, None]
    at = split.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(part + at, acc, mask=(n[:, None] < N) & (m[None, :] < M))
