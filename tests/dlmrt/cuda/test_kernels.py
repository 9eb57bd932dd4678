"""Each kernel in Triton's interpreter against torch or numpy: odd sizes, splits, tile edges, rows beyond the count."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dlmrt.cuda.kernels import attention, head, loop, matmul, moe, ring, rows
from dlmrt.cuda.memory import Ring
from dlmrt.decode.indel import EditIds
from dlmrt.decode.rules import (
    BlockState,
    entropy_bound_step,
    indel_step,
    quota_step,
    start_block,
    threshold_step,
)
from dlmrt.decode.sampling import filter_mask, predict
from dlmrt.ops import eager, formats, numerics
from dlmrt.types import Prediction, Sampling

F32 = tl.float32


def scalar(value, dtype=torch.int32):
    return torch.tensor([value], dtype=dtype)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("m", "used", "n", "k", "splits"), [(3, 3, 20, 40, 1), (20, 17, 70, 100, 2), (2, 0, 16, 16, 1)]
)
def test_matmul(m, used, n, k, splits):
    """Rows beyond the count are not written where a whole tile is beyond it."""
    x, weight = normal(m, k), normal(n, k, seed=1)
    part = torch.zeros(splits, m, n)
    per = -(-k // (splits * 16)) * 16
    grid = (-(-n // 32), -(-m // 16), splits)
    matmul.matmul[grid](
        x, weight, weight, weight, part, scalar(used), M=m, N=n, K=k, PER=per, BM=16, BN=32, BK=16, FORMAT="float",
        BLOCK=0, CDT=F32,
    )  # fmt: skip
    expected = x @ weight.T if used else torch.zeros(m, n)
    assert torch.allclose(part.sum(0), expected, atol=1e-4)


@pytest.mark.parametrize("block", [0, 16])
def test_matmul_of_e4m3_weights_and_their_scales(block):
    x, weight = normal(5, 48), normal(40, 48, seed=1).to(torch.float8_e4m3fn)
    scales = normal(40, 1, seed=2).abs() if not block else normal(3, 3, seed=2).abs()
    spread = scales if not block else scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[:40]
    part = torch.zeros(1, 5, 40)
    matmul.matmul[(2, 1, 1)](
        x, weight, scales.contiguous(), scales, part, scalar(5), M=5, N=40, K=48, PER=48, BM=16, BN=32, BK=16,
        FORMAT="fp8", BLOCK=block, CDT=F32,
    )  # fmt: skip
    assert torch.allclose(part[0], x @ (weight.float() * spread).T, atol=1e-4)


def test_matmul_of_nvfp4_weights_equals_the_dequantised_ones():
    """Every code occurs; two matrices with scales of their own stand in one weight."""
    values = [normal(20, 64, seed=seed).numpy() * (seed + 1) for seed in range(2)]
    packed = [formats.quantize_nvfp4(value) for value in values]
    plain = np.concatenate([formats.dequantize_nvfp4(*parts) for parts in packed])
    codes, scales = (torch.from_numpy(np.concatenate([parts[at] for parts in packed])) for at in range(2))
    shared = torch.tensor([float(parts[2]) for parts in packed for _ in range(20)])
    x, part = normal(3, 64, seed=4), torch.zeros(2, 3, 40)
    matmul.matmul[(2, 1, 2)](
        x, codes, scales.view(torch.float8_e4m3fn), shared, part, scalar(3), M=3, N=40, K=64, PER=32, BM=16, BN=32,
        BK=32, FORMAT="nvfp4", BLOCK=0, CDT=F32,
    )  # fmt: skip
    assert torch.allclose(part.sum(0), x @ torch.from_numpy(plain).T, atol=1e-4)
    assert len(np.unique(codes.numpy() & 15)) == 16


@pytest.mark.parametrize("format", ["float", "fp8", "fp8 blocks", "nvfp4"])
@pytest.mark.parametrize("is_row", [True, False])
def test_matmul_of_experts_in_every_format(format, is_row):
    """Two experts are chosen, one by three entries, one by none of the rest; others' entries are not touched."""
    num_experts, n, k, top_k, rows = 3, 20, 32, 2, 3
    plain = normal(num_experts, n, k, seed=1)
    shared, block = torch.ones(num_experts, n), 16 if format == "fp8 blocks" else 0
    if format == "nvfp4":
        parts = [formats.quantize_nvfp4(matrix.numpy() * (expert + 1)) for expert, matrix in enumerate(plain)]
        weight, scales = (torch.from_numpy(np.stack([part[at] for part in parts])) for at in range(2))
        scales = scales.view(torch.float8_e4m3fn)
        shared = torch.stack([torch.full((n,), float(part[2])) for part in parts])
        plain = torch.from_numpy(np.stack([formats.dequantize_nvfp4(*part) for part in parts]))
    elif format.startswith("fp8"):
        weight = plain.to(torch.float8_e4m3fn)
        scales = normal(num_experts, 2, 2, seed=2).abs() if block else normal(num_experts, n, seed=2).abs()
        spread = scales.repeat_interleave(16, 1)[:, :n].repeat_interleave(16, 2) if block else scales[:, :, None]
        plain = weight.float() * spread
    else:
        weight = scales = plain
    lists = torch.zeros(num_experts, rows, dtype=torch.int32)
    lists[0, :3], lists[2, :1] = torch.tensor([0, 2, 5]), 3
    counts = torch.tensor([3, 0, 1], dtype=torch.int32)
    x, out = normal(rows if is_row else rows * top_k, k), torch.full((rows * top_k, n), -7.0)
    moe.matmul_experts[(1, 1, num_experts)](
        x, weight.contiguous(), scales.contiguous(), shared, out, lists, counts, M=rows, N=n, KD=k, K=top_k, BM=16,
        BN=32, BK=16, IS_ROW=is_row, FORMAT=format.split()[0], BLOCK=block, CDT=F32,
    )  # fmt: skip
    for expert, entries in ((0, [0, 2, 5]), (2, [3])):
        for entry in entries:
            expected = plain[expert] @ x[entry // top_k if is_row else entry]
            assert torch.allclose(out[entry], expected, atol=1e-4)
    assert (out[[1, 4]] == -7).all()


def test_products_of_e2m1_codes_and_e4m3_scales_are_exact_in_bfloat16():
    codes = formats.unpack_e2m1(np.arange(16, dtype=np.uint8)[:, None])[:, 0]
    scales = formats.e4m3_to_float32(np.arange(127, dtype=np.uint8))
    products = torch.from_numpy(codes[:, None] * scales[None, :])
    assert torch.equal(products.bfloat16().float(), products)


@pytest.mark.parametrize(("has_x", "splits"), [(True, 0), (True, 2), (False, 3)])
def test_norm_takes_the_sum_before_it(has_x, splits):
    m, d = 3, 24
    x, part, weight = normal(m, d), normal(max(splits, 1), m, d, seed=1), normal(d, seed=2)
    total, y, operand = (torch.zeros(m, d) for _ in range(3))
    rows.norm[(m,)](
        x if has_x else part, part, weight, total, y, operand, scalar(2), M=m, eps=1e-6, D=d, DP=32, S=splits,
        HAS_X=has_x, HAS_WEIGHT=True, HAS_TOTAL=True, HAS_Y=True, HAS_OPERAND=True, NVFP4=False,
    )  # fmt: skip
    expected = (x if has_x else 0) + part[:splits].sum(0)
    assert torch.allclose(total[:2], expected[:2], atol=1e-6)
    assert torch.allclose(y[:2], eager.rms_norm(expected, weight, eps=1e-6)[:2], atol=1e-5)
    assert torch.equal(operand[:2], y[:2]) and not y[2].any(), "a row beyond the count is not touched"


def nvfp4_operand(operand, m, width):
    """Packed codes [m, width / 2] and bits of scales [m, width / 16] of an operand."""
    codes, scales = operand.numpy()[: m * width // 2], operand.numpy()[m * width // 2 :]
    return codes.reshape(m, -1), scales.reshape(m, -1)


def assert_nvfp4(operand, values):
    """`operand` holds what the reference quantises `values` to; where all are 0, a scale says nothing."""
    m, width = values.shape
    codes, scales = nvfp4_operand(operand, m, width)
    expected_codes, expected_scales, _ = formats.quantize_nvfp4(values.numpy(), np.float32(1))
    groups = np.abs(values.numpy()).reshape(m, -1, 16).max(-1) > 0
    assert np.array_equal(scales[groups], expected_scales[groups])
    assert np.array_equal(codes, expected_codes)


def test_norm_and_gate_quantise_what_they_write_to_nvfp4():
    """Ties, zeros, groups beyond the scales' range; the reference is that of the file format."""
    m, d = 2, 48
    x = normal(m, d)
    x[0, :16], x[1, 16:32] = 0, x[1, 16:32] * 1e-4
    operand = torch.full((m * d * 9 // 16,), 255, dtype=torch.uint8)
    y = torch.zeros(m, d)
    rows.norm[(m,)](
        x, x, x, x, y, operand, scalar(m), M=m, eps=1e-6, D=d, DP=64, S=0, HAS_X=True, HAS_WEIGHT=False,
        HAS_TOTAL=False, HAS_Y=True, HAS_OPERAND=True, NVFP4=True,
    )  # fmt: skip
    assert_nvfp4(operand, y)
    part, plain = normal(1, m, 2 * d, seed=3), torch.zeros(m, d)
    for target, is_nvfp4 in ((operand, True), (plain, False)):
        rows.gate[(m, 2)](part, target, scalar(m), M=m, F=d, BF=32, S=1, IS_GELU=False, ENTRIES=1, NVFP4=is_nvfp4)
    assert_nvfp4(operand, plain)
    exact = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.0, 1.0, 2.0, 3.0, 4.0]])
    operand = torch.zeros(9, dtype=torch.uint8)
    rows.sum_rows[(1, 1)](
        exact, exact, exact, operand, scalar(1), M=1, scale=1.0, cap=0.0, D=16, BD=16, S=0, HAS_X=True,
        HAS_FACTOR=False, HAS_CAP=False, NVFP4=True,
    )  # fmt: skip
    assert_nvfp4(operand, exact)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation):
    part = normal(2, 3, 40)
    out = torch.zeros(3, 20)
    rows.gate[(3, 2)](
        part, out, scalar(3), M=3, F=20, BF=16, S=2, IS_GELU=activation == "gelu_tanh", ENTRIES=1, NVFP4=False
    )
    gate, up = part.sum(0).split(20, dim=1)
    assert torch.allclose(out, eager._ACTIVATIONS[activation](gate) * up, atol=1e-5)


@pytest.mark.parametrize(("turning", "is_value_key"), [(8, False), (4, False), (8, True)])
def test_heads_are_normed_rotated_and_stored(turning, is_value_key):
    """Partial rotation leaves the rest of a head; without v, the value is the key's projection, normed alone."""
    n, g, h, m = 2, 1, 8, 2
    part = normal(2, m, (n + g if is_value_key else n + 2 * g) * h)
    q_norm, k_norm = normal(h, seed=1), normal(h, seed=2)
    inv_freq = 100.0 ** -(torch.arange(0, turning, 2) / turning)
    phase = torch.arange(16)[:, None] * inv_freq
    q, cache, positions = torch.zeros(m, n, h), torch.zeros(16, 2, g, h), torch.tensor([3, 9], dtype=torch.int32)
    rows.qk_norm_rope_store[(m, n + 2 * g)](
        part, part, q_norm, k_norm, phase.cos(), phase.sin(), positions, q, cache, scalar(m), M=m, eps=1e-6, N=n, G=g,
        H=h, HP=8, R=turning, S=2, HAS_BIAS=False, HAS_NORM=True, IS_VALUE_NORMED=is_value_key,
        IS_VALUE_KEY=is_value_key,
    )  # fmt: skip
    heads = part.sum(0).view(m, -1, h)

    def turn(x, weight):
        x = eager.rms_norm(x, weight, eps=1e-6)
        first, second = x[..., :turning].chunk(2, dim=-1)
        cos, sin = (table[positions.long()][:, None] for table in (phase.cos(), phase.sin()))
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., turning:]), dim=-1)

    value = eager.rms_norm(heads[:, n : n + g], None, eps=1e-6) if is_value_key else heads[:, n + g :]
    assert torch.allclose(q, turn(heads[:, :n], q_norm), atol=1e-5)
    assert torch.allclose(cache[positions.long(), 0], turn(heads[:, n : n + g], k_norm), atol=1e-5)
    assert torch.allclose(cache[positions.long(), 1], value, atol=1e-5)
    assert not cache[:3].any()


@pytest.mark.parametrize(("sees", "begins"), [((0, 1, 40, 64), None), ((33, 33, 33, 33), (0, 7, 30, 32))])
def test_attention(sees, begins):
    """Lengths 0, 1, behind a chunk and full; windows that begin inside a tile."""
    m, n, g, h, chunk, positions = 4, 2, 1, 8, 32, 64
    q, cache = normal(m, n, h), normal(positions, 2, g, h, seed=1)
    visible = torch.tensor(sees, dtype=torch.int32)
    first = visible if begins is None else torch.tensor(begins, dtype=torch.int32)
    chunks = positions // chunk
    acc, lse, y = torch.zeros(chunks, m, n, h), torch.zeros(chunks, m, n), torch.zeros(m, n * h)
    attention.attention[(1, g, chunks)](
        q, cache, visible, first, acc, lse, scalar(m), M=m, scale=h**-0.5, N=n, G=g, H=h, HP=16, CHUNK=chunk, BR=16,
        BC=16, HAS_FIRST=begins is not None, CDT=F32,
    )  # fmt: skip
    attention.attention_merge[(m, n)](acc, lse, y, scalar(m), M=m, N=n, H=h, HP=8, J=chunks, JP=2, NVFP4=False)
    at = torch.arange(positions)
    mask = (at < visible[:, None]) & (at >= (0 if begins is None else first[:, None]))
    expected = eager.scaled_dot_product(q, cache[:, 0], cache[:, 1], mask).nan_to_num(0.0)
    assert torch.allclose(y, expected, atol=1e-5)


def test_words_and_noise_are_those_of_the_counter_contract():
    """Philox is bit-equal; Gumbel noise is float32 of the float64 reference, also at the smallest and largest words."""
    seed, step, block, slots = 2**63 + 12345, 3, 7, torch.arange(2, dtype=torch.int32)
    words, noise = torch.zeros(32, 2, dtype=torch.int32), torch.zeros(32, 2)
    _write_words[(1,)](
        torch.tensor([seed - 2**64]), scalar(8), scalar(step), scalar(block), slots, words, noise, BN=32, BM=2
    )
    groups = np.arange(10)[None, :]
    expected = numerics._words(seed, groups, step, block, 1 | slots.numpy().astype(np.int64)[:, None] << 8)
    assert np.array_equal(words.numpy().view(np.uint32), expected.reshape(2, -1)[:, 8:40].T)
    reference = numerics.gumbel(seed, block=block, step=step, slots_R=slots.numpy(), vocab_size=40)[:, 8:].T
    assert np.allclose(noise.numpy(), reference, atol=3e-6)


def test_noise_of_extreme_words_is_finite():
    words, noise = torch.tensor([0, 1, -1, -2], dtype=torch.int32), torch.zeros(4)
    _write_noise[(1,)](words, noise, BN=4)
    u = (words.numpy().view(np.uint32) + 0.5) * 2.0**-32
    assert torch.isfinite(noise).all()
    assert np.allclose(noise.numpy()[:2], -np.log(-np.log1p(-u))[:2], rtol=1e-6)


def run_head(logits_of, *, banned=(), temperature=1.0, cap=0.0, seed=5, tile=32):
    """Statistics of rows x and weights w by the two kernels, as arrays by name."""
    x, weight = logits_of
    m, (vocab, width) = len(x), weight.shape
    tiles = -(-vocab // tile)
    bits = np.zeros(-(-vocab // 32), dtype=np.uint32)
    np.bitwise_or.at(bits, np.array(banned, dtype=int) // 32, np.uint32(1) << np.array(banned, dtype=np.uint32) % 32)
    floats = {name: torch.zeros(tiles, m) for name in ("max", "sum", "weighted", "score", "logit")}
    ids = {name: torch.zeros(tiles, m, dtype=torch.int32) for name in ("argmax", "sample")}
    out = {name: torch.zeros(m) for name in ("argmax_confidence", "confidence", "entropy", "lse", "peak")}
    out |= {name: torch.zeros(m, dtype=torch.int32) for name in ("argmax", "token")}
    out["finite"] = torch.zeros(m, dtype=torch.uint8)
    out["logits"] = torch.zeros(m, vocab)
    head.head_stats[(tiles, 1)](
        x, weight, torch.from_numpy(bits.view(np.int32)), scalar(temperature, torch.float32), scalar(seed, torch.int64),
        scalar(2), scalar(1), floats["max"], floats["sum"], floats["weighted"], ids["argmax"], floats["score"],
        ids["sample"], floats["logit"], out["logits"], scalar(m), cap, 0, M=m, V=vocab, K=width, BM=16, BN=tile, BK=16,
        HAS_CAP=cap > 0, IS_SAMPLED=True, HAS_LOGITS=True, CDT=F32,
    )  # fmt: skip
    head.head_merge[(m,)](
        floats["max"], floats["sum"], floats["weighted"], ids["argmax"], floats["score"], ids["sample"],
        floats["logit"], torch.ones(m, dtype=torch.uint8), out["argmax"], out["argmax_confidence"], out["token"],
        out["confidence"], out["entropy"], out["lse"], out["peak"], out["finite"], scalar(m), M=m, T=tiles,
        TP=1 << (tiles - 1).bit_length(), IS_SAMPLED=True,
    )  # fmt: skip
    return out


def test_head_statistics_and_draws_equal_the_reference():
    """Cap, then temperature, then bans; equal logits in different tiles: the lower id; the draw is Gumbel-max."""
    x, weight = normal(3, 16), normal(70, 16, seed=1)
    weight[60] = weight[3] = 3 * x[0] / x[0].norm()
    out = run_head((x, weight), banned=(5, 33), temperature=0.7, cap=6.0)
    logits = (6.0 * torch.tanh(x @ weight.T / 6.0) / 0.7).double()
    logits[:, [5, 33]] = -torch.inf
    probs = logits.softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(-1)
    assert out["argmax"][0] == 3
    assert torch.equal(out["argmax"], logits.argmax(-1).int()) and out["finite"].all()
    assert torch.allclose(out["argmax_confidence"].double(), probs.amax(-1), atol=1e-5)
    assert torch.allclose(out["entropy"].double(), entropy, atol=1e-5)
    assert torch.allclose(out["lse"].double(), logits.logsumexp(-1), atol=1e-5)
    noise = numerics.gumbel(5, block=1, step=2, slots_R=np.arange(3, dtype=np.int32), vocab_size=70)
    token = (logits + torch.from_numpy(noise)).argmax(-1)
    assert torch.equal(out["token"], token.int())
    assert torch.allclose(out["confidence"].double(), probs.gather(1, token[:, None])[:, 0], atol=1e-5)


def test_a_row_with_a_logit_that_is_not_finite_is_marked():
    x, weight = normal(2, 16), normal(40, 16, seed=1)
    x[1, 0] = float("inf")
    out = run_head((x, weight), banned=(7,))
    assert out["finite"].tolist() == [1, 0] and 0 <= int(out["token"][1]) < 40


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_a_logit_that_is_not_finite_counts_unless_its_id_is_banned(value):
    """In the first tile and in the last one, whose ids do not fill it."""
    x, weight = normal(2, 16).abs(), normal(40, 16, seed=1)
    expected = run_head((x, weight), banned=(7, 39))
    weight[7, 3], weight[39, 3] = value, -value
    banned = run_head((x, weight), banned=(7, 39))
    for name in ("argmax", "token", "confidence", "entropy", "lse", "finite"):
        assert torch.equal(banned[name], expected[name]), name
    for others in ((7,), (39,), ()):
        assert run_head((x, weight), banned=others)["finite"].tolist() == [0, 0]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.6, 0.0), (5, 0.5, 0.2), (0, 1.0, 0.3)])
def test_filters_leave_exactly_what_the_reference_leaves(top_k, top_p, min_p):
    """With ties at the edge: top-k keeps all of them, top-p the lower ids."""
    vocab = 20
    logits = normal(1, vocab)[0].mul(2).round().div(2)[None].contiguous()
    peak, lse = logits.amax(-1), logits.logsumexp(-1)
    weights = torch.exp(logits - peak[:, None]).numpy()
    kept = filter_mask(weights, top_k=top_k, top_p=top_p, min_p=min_p)[0]
    seen = set()
    for seed in range(3):
        token, confidence = scalar(-1), scalar(0.0, torch.float32)
        head.filtered_draw[(1,)](
            logits, peak, lse, torch.ones(1, dtype=torch.uint8), scalar(top_k, torch.int64),
            scalar(top_p, torch.float64), scalar(min_p, torch.float32), scalar(seed, torch.int64), scalar(0), scalar(0),
            token, confidence, scalar(1), V=vocab, BV=16,
        )  # fmt: skip
        noise = numerics.gumbel(seed, block=0, step=0, slots_R=np.zeros(1, dtype=np.int32), vocab_size=vocab)[0]
        expected = int(np.where(kept, (logits - peak)[0].numpy() + noise, -np.inf).argmax())
        assert int(token) == expected
        assert np.isclose(float(confidence), float(torch.exp(logits[0, expected] - lse[0])))
        seen.add(expected)
    assert seen <= set(np.flatnonzero(kept))


@pytest.mark.parametrize("is_logits", [True, False])
def test_soft_embedding(is_logits):
    logits, table = normal(3, 50), normal(50, 20, seed=1)
    probs = logits.softmax(-1)
    part = torch.zeros(2, 3, 20)
    head.soft_embedding[(1, 1, 2)](
        logits if is_logits else probs, logits.logsumexp(-1), table, part, scalar(3), M=3, V=50, D=20, PER=32, BM=16,
        BD=32, BV=16, IS_LOGITS=is_logits, CDT=F32,
    )  # fmt: skip
    assert torch.allclose(part.sum(0), probs @ table, atol=1e-5)


class Settings:
    """What the reference rules read."""

    def __init__(self, **values):
        self.__dict__ |= {
            "edit_threshold": None,
            "max_post_edit_steps": 0,
            "min_commit": 1,
            "canvas_length": 6,
        } | values


def draw_block(seed, *, num_pinned=1):
    """A block in the middle of its steps, and a prediction with ties."""
    rng = np.random.default_rng(seed)
    length = 6
    is_open = rng.random(length) < 0.6
    is_open[:num_pinned] = False
    canvas = rng.integers(0, 5, length).astype(np.int32)
    nothing = np.zeros(length, dtype=bool)
    state = BlockState(
        canvas_L=canvas, answer_L=canvas, is_open_L=is_open, is_pinned_L=np.arange(length) < num_pinned,
        committed_L=nothing, changed_L=nothing, step=int(rng.integers(0, 3)), num_full_steps=int(rng.integers(0, 2)),
        num_repeats=int(rng.integers(0, 2)),
    )  # fmt: skip
    quarters = (rng.integers(0, 5, (3, length)) / 4).astype(np.float32)
    prediction = Prediction(
        argmax_L=rng.integers(0, 5, length).astype(np.int32), argmax_confidence_L=quarters[0],
        token_L=rng.integers(0, 5, length).astype(np.int32), confidence_L=quarters[1], entropy_L=quarters[2],
    )  # fmt: skip
    return state, prediction


def commit(name, state, prediction, constants=(), more=None, **numbers):
    """State arrays and scalars behind one commit kernel, by name; `more` are those that it keeps between steps."""
    kernel = getattr(loop, name)
    tensors = {
        "argmax": prediction.argmax_L, "argmax_confidence": prediction.argmax_confidence_L, "token": prediction.token_L,
        "confidence": prediction.confidence_L, "entropy": prediction.entropy_L, "was_open": state.is_open_L,
        "is_free": ~state.is_pinned_L, "canvas": state.canvas_L, "answer": state.answer_L, "is_open": state.is_open_L,
        "committed": state.committed_L, "changed": state.changed_L,
    }  # fmt: skip
    tensors = {
        name: torch.from_numpy(values.astype(np.uint8) if values.dtype == bool else values.copy())
        for name, values in tensors.items()
    }
    for key in ("step", "num_full_steps", "num_repeats", "num_edits", "is_done"):
        tensors[key] = scalar(int(getattr(state, key)))
    tensors |= {key: scalar(value, dtype) for key, (value, dtype) in numbers.items()} | (more or {})
    kernel[(1,)](**{key: tensors[key] for key in kernel.arg_names if key in tensors}, L=6, LP=8, **dict(constants))
    return tensors


def assert_state(tensors, after):
    for key, values in (("canvas", after.canvas_L), ("answer", after.answer_L), ("is_open", after.is_open_L),
                        ("committed", after.committed_L), ("changed", after.changed_L)):  # fmt: skip
        assert np.array_equal(tensors[key].numpy(), values.astype(tensors[key].numpy().dtype)), key
    for key in ("step", "num_edits", "is_done"):
        assert int(tensors[key]) == int(getattr(after, key)), key


@pytest.mark.parametrize(("seed", "is_edited"), list(itertools.product(range(6), (False, True))))
def test_threshold_rules(seed, is_edited):
    state, prediction = draw_block(seed)
    settings = Settings(
        max_denoising_steps=4, threshold=0.5, min_commit=1 + seed % 2, edit_threshold=0.25 if is_edited else None,
        max_post_edit_steps=2,
    )  # fmt: skip
    tensors = commit(
        "commit_threshold", state, prediction, {"IS_EDITED": is_edited}.items(), threshold=(0.5, torch.float32),
        min_commit=(settings.min_commit, torch.int32), max_steps=(4, torch.int32),
        edit_threshold=(0.25, torch.float32), max_post_edit_steps=(2, torch.int32),
    )  # fmt: skip
    after = threshold_step(settings, state, prediction)
    assert_state(tensors, after)
    assert int(tensors["num_full_steps"]) == after.num_full_steps


@pytest.mark.parametrize("seed", range(5))
def test_rule_steps(seed):
    state, prediction = draw_block(seed)
    tensors = commit("commit_steps", state, prediction, max_steps=(4, torch.int32))
    assert_state(tensors, quota_step(Settings(max_denoising_steps=4), state, prediction))


@pytest.mark.parametrize("seed", range(6))
def test_rule_entropy_bound(seed):
    state, prediction = draw_block(seed)
    settings = Settings(max_denoising_steps=4, entropy_bound=0.6, stop_entropy=0.6, stability_threshold=seed % 2)
    tensors = commit(
        "commit_entropy_bound", state, prediction, entropy_bound=(0.6, torch.float64),
        stop_entropy=(0.6, torch.float64), stability_threshold=(seed % 2, torch.int32), max_steps=(4, torch.int32),
    )  # fmt: skip
    after = entropy_bound_step(settings, state, prediction)
    assert_state(tensors, after)
    assert int(tensors["num_repeats"]) == after.num_repeats


MASK, DELETE, SPLIT, NUM_IDS = 33, 7, 35, 40  # of a vocabulary of two words


def banned_words(ids):
    words = np.zeros(2, dtype=np.uint32)
    np.bitwise_or.at(words, np.array(ids) // 32, np.uint32(1) << (np.array(ids) % 32).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))


def is_banned(words, token):
    return bool(int(words[token // 32]) >> (token % 32) & 1)


@pytest.mark.parametrize(("seed", "budget", "num_words"), [(0, 0, 30), (1, 3, 30), (2, 12, 3), (3, 30, 2), (4, 30, 1)])
def test_rule_with_deletions_and_splits(seed, budget, num_words):
    """Whole blocks of random predictions: what the two kernels leave is what the readable rule leaves, step by step."""
    rng, length = np.random.default_rng(seed), 6
    allowed = rng.choice([token for token in range(NUM_IDS) if token not in (MASK, DELETE, SPLIT)], num_words, False)
    banned = np.setdiff1d(np.arange(NUM_IDS), [*allowed, DELETE, SPLIT]).astype(np.int32)
    settings = Settings(
        max_denoising_steps=20, threshold=0.4, edit_threshold=0.1, max_post_edit_steps=budget,
        edit_ids=EditIds(mask=MASK, delete=DELETE, split=SPLIT),
    )  # fmt: skip
    ids = {"VOCAB": NUM_IDS, "MASK": MASK, "DELETE": DELETE, "SPLIT": SPLIT}
    num_looked = 0
    for num_pinned in (0, 2):
        canvas_L = np.full(length, MASK, np.int32)
        canvas_L[:num_pinned] = allowed[0]
        state = start_block(canvas_L, num_pinned)
        kept = {
            "seen": torch.full((64, length), 99, dtype=torch.int32), "tried": torch.full((length, 2), -1).int(),
            "is_original": torch.ones(length, dtype=torch.uint8), "banned": banned_words(banned),
            "other_banned": torch.zeros(2, dtype=torch.int32), "other": torch.zeros(length, dtype=torch.int32),
            "wanted": torch.zeros(length, dtype=torch.int32), "is_other": torch.ones(length, dtype=torch.uint8),
            "needs_other": scalar(1), "threshold": scalar(0.4, torch.float32), "max_steps": scalar(20),
            "edit_threshold": scalar(0.1, torch.float32), "max_post_edit_steps": scalar(budget),
        }  # fmt: skip
        while not state.is_done:
            logits = rng.normal(0, 2, (length, NUM_IDS)).astype(np.float32)
            logits[:, [DELETE, SPLIT]] += 1
            sampling = Sampling(temperature=1.0, is_greedy=True, seed=0)
            prediction = predict(logits, sampling, banned, block=0, step=state.step, with_probs=True)
            tensors = commit("propose_edits", state, prediction, ids.items(), more=kept)
            if int(tensors["needs_other"]):
                num_looked += 1
                others = [token for token in range(NUM_IDS) if not is_banned(tensors["other_banned"], token)]
                best = [max(others, key=lambda token, row=row: row[token]) for row in logits]
                kept["other"].copy_(torch.tensor(best, dtype=torch.int32))
            tensors = commit("apply_edits", state, prediction, ids.items(), more=kept | tensors)
            state = indel_step(settings, state, prediction)
            assert_state(tensors, state)
            assert int(tensors["num_full_steps"]) == state.num_full_steps
            np.testing.assert_array_equal(kept["is_original"].numpy() != 0, state.history.is_original_L)
            state = replace(state, canvas_L=np.where(state.is_open_L, MASK, state.canvas_L))
    assert num_looked or num_words == 1


@pytest.mark.parametrize(
    ("ids", "is_open", "is_done", "max_tokens", "expected"),
    [
        ([9, 9, 9, 9], [0, 0, 1, 0], 0, 99, (2, 2, 0, 1)),  # a decided run, the block goes on
        ([9, 5, 9, 9], [0, 0, 0, 0], 1, 99, (2, 2, 1, 0)),  # an EOS id ends the answer
        ([9, 9, 6, 5], [0, 0, 0, 0], 1, 99, (3, 3, 2, 0)),  # a stop id before it
        ([9, 9, 9, 9], [0, 0, 0, 1], 0, 3, (3, 3, 3, 0)),  # the length limit
        ([9, 9, 5, 9], [0, 0, 0, 0], 1, 3, (3, 3, 1, 0)),  # EOS on the last token that fits
        ([5, 9, 9, 9], [1, 0, 0, 0], 0, 99, (0, 0, 0, 1)),  # nothing decided yet
    ],
)
def test_settle(ids, is_open, is_done, max_tokens, expected):
    names = ("num_settled", "num_answer", "end_reason", "is_continued", "is_urgent")
    out = {name: scalar(0, torch.int64 if name == "num_answer" else torch.int32) for name in names}
    loop.settle[(1,)](
        torch.tensor(ids, dtype=torch.int32), torch.tensor(is_open, dtype=torch.uint8), scalar(is_done),
        torch.tensor([1 << 5], dtype=torch.int32), torch.tensor([1 << 6], dtype=torch.int32),
        scalar(max_tokens, torch.int64), scalar(0), **out, L=4, LP=4, IS_STICKY=True,
    )  # fmt: skip
    assert tuple(int(out[name]) for name in names[:4]) == expected
    assert int(out["is_urgent"]) == 1 - expected[3]


def test_uniform_noise_is_that_of_the_reference():
    allowed = torch.arange(3, 40, dtype=torch.int32)
    canvas, key = torch.full((6,), -1, dtype=torch.int32), 2**40 + 9
    loop.renoise[(1,)](
        torch.tensor([1, 0, 1, 1, 1, 1], dtype=torch.uint8), scalar(2), scalar(5), allowed, scalar(len(allowed)),
        scalar(key, torch.int64), canvas, L=6, LP=8, MASK=-1,
    )  # fmt: skip
    expected = numerics.uniform_ids(key, block=5, step=2, length=6, allowed=allowed.numpy())
    expected[1] = -1
    assert np.array_equal(canvas.numpy(), expected)


def test_records_pass_the_ring_in_order_and_only_when_complete():
    """Ten records through four slots, read as they come; a ring that is not set up takes none."""
    device_ring = Ring(torch.device("cpu"))
    payload, number = torch.arange(5, dtype=torch.uint8), scalar(0)
    fields = torch.tensor([[number.data_ptr(), 4, 4], [payload.data_ptr(), 8, 5]])

    def write():
        ring.pack_record[(3,)](device_ring.control, fields, 2, BYTES=4)
        ring.publish[(1,)](device_ring.control, device_ring.control, HAS_RANKS=False, IS_DEVICE=False)

    write()
    assert int(device_ring.control[3]) == 0
    device_ring.reset(4, 13)
    assert device_ring.take() is None
    for count in range(10):
        number.fill_(count)
        write()
        record = device_ring.take()
        assert record[:4] == (2).to_bytes(4, "little") and record[4:8] == count.to_bytes(4, "little")
        assert record[8:13] == bytes(range(5))
        assert device_ring.take() is None


# Kernels that expose device functions.


@triton.jit
def _write_words(seed, first_id, step, block, slots, words, noise, BN: tl.constexpr, BM: tl.constexpr):
    made = head.sample_words(
        tl.load(seed), tl.load(first_id), tl.load(step), tl.load(block), tl.load(slots + tl.arange(0, BM)), BN, BM
    )
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(words + at, made.to(tl.int32, bitcast=True))
    tl.store(noise + at, head.gumbel_of_words(made))


@triton.jit
def _write_noise(words, noise, BN: tl.constexpr):
    at = tl.arange(0, BN)
    tl.store(noise + at, head.gumbel_of_words(tl.load(words + at).to(tl.uint32, bitcast=True)))
