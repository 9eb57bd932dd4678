"""Row-wise kernels: embedding, norm with the sum before it, gated activation, rotation and storing of keys, residual.

A value that a projection made arrives as partial sums [S, M, N]; the kernels here add them in the order of S, together
with the skip stream if there is one, so that a sum costs no kernel of its own. Statistics are float32. What the next
projection reads is written as its operand, in NVFP4 if that multiplies so: quantising costs no kernel either.

Legend: M rows at most, D width (DP the power of two from D on), S splits, H head width, R numbers of a head that turn.

Source: ours; arithmetic as in dlmrt.ops.eager, without rounding between the steps of one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_sum(x, part, at, mask, STRIDE: tl.constexpr, S: tl.constexpr, HAS_X: tl.constexpr):
    """x[at] plus part[0, at], part[1, at], ... in this order; without x, `x` is `part`."""
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(0 if HAS_X else 1, S):
        total += tl.load(part + split * STRIDE + at, mask=mask, other=0.0)
    return total


@triton.jit
def quantize_nvfp4(values, B: tl.constexpr):
    """Packed codes uint8 [B / 2] and e4m3 scales [B / 16] of values [B]; no factor beyond the block scales."""
    groups = tl.reshape(values, (B // 16, 16))
    magnitude = tl.abs(groups)
    peak = tl.max(magnitude, 1)
    scales = tl.minimum(tl.maximum(peak / 6.0, 0.001953125), 448.0).to(tl.float8e4nv)
    share = tl.div_rn(magnitude, scales.to(tl.float32)[:, None] + tl.zeros_like(magnitude))
    # Halfway between two codes the even one is taken.
    code = (share > 0.25).to(tl.int32) + (share >= 0.75).to(tl.int32) + (share > 1.25).to(tl.int32)
    code += (share >= 1.75).to(tl.int32) + (share > 2.5).to(tl.int32) + (share >= 3.5).to(tl.int32)
    code += (share > 5.0).to(tl.int32)
    code = code | tl.where(groups < 0, 8, 0)
    low, high = tl.split(tl.reshape(code, (B // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), scales.to(tl.uint8, bitcast=True)


@triton.jit
def store_operand(operand, values, row, first, M: tl.constexpr, D: tl.constexpr, B: tl.constexpr, NVFP4: tl.constexpr):
    """Numbers first .. first + B - 1 of a row of D as operand; beyond D they are 0.

    NVFP4: codes [M, D / 2], behind them scales [M, D / 16]; D and `first` are multiples of 16.
    """
    if NVFP4:
        codes, scales = quantize_nvfp4(values, B)
        pair, group = first // 2 + tl.arange(0, B // 2), first // 16 + tl.arange(0, B // 16)
        tl.store(operand + row.to(tl.int64) * (D // 2) + pair, codes, mask=pair < D // 2)
        tl.store(operand + M * (D // 2) + row.to(tl.int64) * (D // 16) + group, scales, mask=group < D // 16)
    else:
        d = first + tl.arange(0, B)
        tl.store(operand + row.to(tl.int64) * D + d, values.to(operand.dtype.element_ty), mask=d < D)


@triton.jit
def embed(table, ids, x, rows, scale, first, V: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """x[m] = table[ids[m]] * scale; `scale` is rounded to the table's type first. Grid: rows.

    The table holds ids first .. first + V - 1; rows of others are 0.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.arange(0, DP)
    token = tl.load(ids + row).to(tl.int64) - first
    is_here = (token >= 0) & (token < V)
    values = tl.load(table + token * D + d, mask=is_here & (d < D), other=0.0).to(tl.float32)
    tl.store(x + row * D + d, values * scale, mask=d < D)


@triton.jit
def sum_rows(
    x, part, factor, y, rows, M: tl.constexpr, scale, cap, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr,
    HAS_X: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_CAP: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """y = cap(scale * (x + sum of part) * factor). Grid: rows, tiles of D."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = row.to(tl.int64) * D + d
    total = load_sum(x, part, at, d < D, M * D, S, HAS_X) * scale
    if HAS_FACTOR:
        total *= tl.load(factor).to(tl.float32)
    if HAS_CAP:
        total = cap * (2.0 / (1.0 + tl.exp(total * (-2.0 / cap))) - 1.0)
    store_operand(y, total, row, tl.program_id(1) * BD, M, D, BD, NVFP4)


@triton.jit
def norm(
    x, part, weight, total, y, operand, rows, M: tl.constexpr, eps, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
    HAS_X: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_Y: tl.constexpr,
    HAS_OPERAND: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x + sum of part; writes the sum, the norm in float32 and the norm as operand, each if wanted."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.arange(0, DP)
    at = row.to(tl.int64) * D + d
    values = load_sum(x, part, at, d < D, M * D, S, HAS_X)
    if HAS_TOTAL:
        tl.store(total + at, values, mask=d < D)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    if HAS_WEIGHT:
        values *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if HAS_Y:
        tl.store(y + at, values, mask=d < D)
    if HAS_OPERAND:
        store_operand(operand, values, row, 0, M, D, DP, NVFP4)


@triton.jit
def activate(gate, IS_GELU: tl.constexpr):
    """silu, or gelu with the tanh form: x sigmoid(2 c (x + 0.044715 x^3))."""
    if IS_GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def gate(
    part, operand, rows, M: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, S: tl.constexpr, IS_GELU: tl.constexpr,
    ENTRIES: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """operand[m, f] = act(g) * u of partial sums [S, M, 2 F], gate columns first. Grid: rows, tiles of F.

    ENTRIES: values of one row, one for each expert that it chose; 1 without experts.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows) * ENTRIES:
        return
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    stride = M * 2 * F
    at = row.to(tl.int64) * 2 * F + f
    gated = load_sum(part, part, at, f < F, stride, S, HAS_X=False)
    up = load_sum(part, part, at + F, f < F, stride, S, HAS_X=False)
    out = activate(gated, IS_GELU) * up
    store_operand(operand, out, row, tl.program_id(1) * BF, M, F, BF, NVFP4)


@triton.jit
def head_vector(
    part, bias, row, column, h, M: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Numbers `h` of the head at `column` of one row of partial sums [S, M, WIDTH]."""
    values = load_sum(part, part, row.to(tl.int64) * WIDTH + column + h, h < H, M * WIDTH, S, HAS_X=False)
    if HAS_BIAS:
        values += tl.load(bias + column + h, mask=h < H, other=0.0).to(tl.float32)
    return values


@triton.jit
def qk_norm_rope_store(
    part, bias, q_norm, k_norm, cos, sin, positions, q, cache, rows, M: tl.constexpr, eps, N: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_VALUE_NORMED: tl.constexpr, IS_VALUE_KEY: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of q and k, write q [M, N, H] and the rows' keys and values into the cache.

    `part` holds q, k and v side by side; IS_VALUE_KEY: only q and k, the value is the key before norm and rotation.
    The cache is [C, 2, G, H]. Grid: rows, N + 2 G heads.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    head = tl.program_id(1)
    h = tl.arange(0, HP)
    position = tl.load(positions + row).to(tl.int64)
    WIDTH: tl.constexpr = (N + G) * H if IS_VALUE_KEY else (N + 2 * G) * H
    source = head
    if IS_VALUE_KEY:
        source = tl.where(head >= N + G, head - G, head)
    mine = head_vector(part, bias, row, source * H, h, M, WIDTH, H, S, HAS_BIAS)
    rstd = tl.rsqrt(tl.sum(mine * mine, 0) / H + eps)
    if head >= N + G:
        if IS_VALUE_NORMED:
            mine *= rstd
        place = (position * 2 + 1) * G * H + (head - N - G) * H + h
        tl.store(cache + place, mine.to(cache.dtype.element_ty), mask=h < H)
        return
    # Pairs that turn are (i, i + R / 2); the partner is read again, which costs a cached line and no shuffle.
    partner = tl.where(h < R // 2, h + R // 2, tl.where(h < R, h - R // 2, h))
    other = head_vector(part, bias, row, source * H, partner, M, WIDTH, H, S, HAS_BIAS)
    if HAS_NORM:
        weight = k_norm
        if head < N:
            weight = q_norm
        mine *= rstd * tl.load(weight + h, mask=h < H, other=0.0).to(tl.float32)
        other *= rstd * tl.load(weight + partner, mask=h < H, other=0.0).to(tl.float32)
    angle = position * (R // 2) + h % (R // 2)
    turned_cos = tl.load(cos + angle, mask=h < R, other=1.0)
    turned_sin = tl.load(sin + angle, mask=h < R, other=0.0)
    turned = mine * turned_cos + tl.where(h < R // 2, -other, other) * turned_sin
    if head < N:
        tl.store(q + (row.to(tl.int64) * N + head) * H + h, turned.to(q.dtype.element_ty), mask=h < H)
    else:
        place = position * 2 * G * H + (head - N) * H + h
        tl.store(cache + place, turned.to(cache.dtype.element_ty), mask=h < H)


@triton.jit
def window_start(positions, first, rows, WINDOW: tl.constexpr, IS_SHARED: tl.constexpr, MP: tl.constexpr):
    """First position that each row sees; IS_SHARED: all rows see what the first one sees. Grid: 1."""
    m = tl.arange(0, MP)
    is_row = m < tl.load(rows)
    place = tl.load(positions + (m * 0 if IS_SHARED else m), mask=is_row, other=0)
    tl.store(first + m, tl.maximum(place - WINDOW + 1, 0), mask=is_row)


@triton.jit
def residual_add(
    x,
    part,
    where,
    rows,
    M: tl.constexpr,
    alpha,
    D: tl.constexpr,
    BD: tl.constexpr,
    S: tl.constexpr,
    HAS_WHERE: tl.constexpr,
):
    """x += alpha * sum of part on the rows of `where`. Grid: rows, tiles of D."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    wanted = 1
    if HAS_WHERE:
        wanted = tl.load(where + row).to(tl.int32)
    if wanted == 0:
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = row.to(tl.int64) * D + d
    delta = load_sum(part, part, at, d < D, M * D, S, HAS_X=False)
    tl.store(x + at, tl.load(x + at, mask=d < D) + alpha * delta, mask=d < D)


@triton.jit
def hidden_store(hidden, positions, cache, rows, D: tl.constexpr, DP: tl.constexpr):
    """cache[positions[m]] = hidden[m]. Grid: rows."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.arange(0, DP)
    values = tl.load(hidden + row.to(tl.int64) * D + d, mask=d < D)
    tl.store(cache + tl.load(positions + row).to(tl.int64) * D + d, values, mask=d < D)


@triton.jit
def shift(hidden, cache, context, y, rows, D: tl.constexpr, DP: tl.constexpr):
    """y[m] = hidden[m - 1], y[0] = cache[context - 1], as operand. Grid: rows.

    Slot 0 of a whole sequence has no row before it: it is the prompt's, so what it reads is not used.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.arange(0, DP)
    if row == 0:
        values = tl.load(cache + tl.maximum(tl.load(context) - 1, 0).to(tl.int64) * D + d, mask=d < D)
    else:
        values = tl.load(hidden + (row - 1).to(tl.int64) * D + d, mask=d < D)
    tl.store(y + row.to(tl.int64) * D + d, values.to(y.dtype.element_ty), mask=d < D)
