"""Exact numpy references of numbers that all executors agree on: rotary frequencies, counter-based random numbers.

Philox-4x32-10 turns (key, counter) into four 32-bit words with no state between calls, so a draw depends only on
(seed, stream, block, step, position): not on the executor, the number of threads or what was drawn before.

The counter contract, which every executor keeps:

    key      = the 64-bit seed, low word first
    counter  = (group, step, block, stream | slot << 8)

    NOISE    group = slot // 4, slot field 0; word slot % 4 of the result is the noise of canvas slot `slot`;
             `step` is the denoising step that consumes the canvas, 0 for the block's first
    SAMPLE   group = id // 4, slot field = canvas slot; word id % 4 belongs to vocabulary id `id`

Legend: L positions, R rows (some of the L positions), V vocabulary, H head width.

Source: Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), constants from its section 3;
rope scaling formulas: transformers 5.24.0 modeling_rope_utils.py (compared in tests/dlmrt/ops).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dlmrt.models.config import RopeConfig

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NOISE, SAMPLE = 0, 1  # streams of the counter contract

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW_32, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(key: int, counter: npt.NDArray[np.integer]) -> UInt32:
    """Philox-4x32-10 of `key` (64 bits) for counters [..., 4] of 32-bit words -> words [..., 4]."""
    key_0, key_1 = key & 0xFFFFFFFF, key >> 32
    c_0, c_1, c_2, c_3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    for _ in range(_ROUNDS):
        product_0, product_1 = c_0 * _MULTIPLIER_0, c_2 * _MULTIPLIER_1
        c_0, c_1 = (product_1 >> _32) ^ c_1 ^ np.uint64(key_0), product_1 & _LOW_32
        c_2, c_3 = (product_0 >> _32) ^ c_3 ^ np.uint64(key_1), product_0 & _LOW_32
        key_0, key_1 = (key_0 + _WEYL_0) & 0xFFFFFFFF, (key_1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack((c_0, c_1, c_2, c_3), axis=-1).astype(np.uint32)


def _words(
    seed: int, group: npt.NDArray[np.integer], step: int, block: int, last: npt.NDArray[np.integer] | int
) -> UInt32:
    """Words [..., 4] of the counters (group, step, block, last), broadcast."""
    parts = np.broadcast_arrays(group, step, block, last)
    return philox(seed, np.stack(parts, axis=-1))


def uniform_ids(seed: int, *, block: int, step: int, length: int, allowed: Int32) -> Int32:
    """Ids [L] drawn uniformly from `allowed` for the canvas that `step` of `block` consumes.

    The multiply-high of a 32-bit word picks the index; its bias is below len(allowed) / 2**32, which no run can see.
    """
    words = _words(seed, np.arange((length + 3) // 4), step, block, NOISE).reshape(-1)[:length]
    return allowed[(words.astype(np.uint64) * np.uint64(len(allowed)) >> _32).astype(np.int64)]


def gumbel(seed: int, *, block: int, step: int, slots_R: Int32, vocab_size: int) -> Float64:
    """Standard Gumbel noise [R, V] of canvas slots `slots_R`; argmax(logits + noise) draws from softmax(logits).

    -log(-log1p(-u)) with u = (word + 0.5) * 2**-32 within (0, 1), in float64. This form is fine where it matters: large
    noise, the only kind that wins, comes from small u, which float32 also resolves to 2**-33, so an executor that
    computes in float32 (with u kept below 1) picks the same id but for ties within rounding. The plain form
    -log(-log(u)) rounds u to 1 in float32 once in 2**25 ids, which is once in a few steps of a large vocabulary.
    """
    group = np.arange((vocab_size + 3) // 4)[None, :]
    words = _words(seed, group, step, block, SAMPLE | slots_R.astype(np.int64)[:, None] << 8)
    u = (words.reshape(len(slots_R), 4 * group.size)[:, :vocab_size] + 0.5) * 2.0**-32
    noise: Float64 = -np.log(-np.log1p(-u))
    return noise


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> tuple[Float32, float]:
    """Inverse frequencies float32 [R/2] of the head's first R numbers, which turn, and the factor on cos and sin.

    R is `head_dim` times the partial rotary factor; with "proportional" it is `head_dim`, and the factor says which
    share of the frequencies is not 0. Computed in float64 and rounded once: tables rounded to bf16 make positions 256
    and 257 equal.
    """
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    if rope.kind == "proportional":
        inv_freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        inv_freq[rotary_dim // 2 :] = 0.0
        return inv_freq.astype(np.float32), 1.0
    head_dim = rotary_dim
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv_freq = rope.theta**-exponent
    if rope.kind == "default":
        return inv_freq.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (inv_freq / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        low = rope.original_max_position_embeddings / rope.low_freq_factor
        high = rope.original_max_position_embeddings / rope.high_freq_factor
        smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
        scaled = np.where(wavelength > low, inv_freq / rope.factor, np.where(wavelength < high, inv_freq, blended))
        return scaled.astype(np.float32), 1.0
    assert rope.kind == "yarn"

    def dimension(rotations: float) -> float:
        """Index of the pair that turns `rotations` times within the original context."""
        wavelength = rope.original_max_position_embeddings / rotations
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low_dim = max(math.floor(dimension(rope.beta_fast)), 0)
    high_dim = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low_dim) / max(high_dim - low_dim, 0.001), 0, 1)
    scaled = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return scaled.astype(np.float32), attention_factor
