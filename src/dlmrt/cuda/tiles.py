"""Sizes of tiles, in one place. They depend on shapes and on the architecture, never on how many rows a request has.

The limit that shapes them is shared memory: 227 KB a block on sm_90 and sm_100, 99 KB on sm_120. Numbers are untuned:
chosen so that every kernel fits without spills when compiled ahead of time (tests/dlmrt/cuda/test_compile.py).

Source: ours.
"""

from __future__ import annotations

TILE_K = 64  # inputs a projection reads at once; 128 for packed formats, whose scale blocks must not be cut
PACKED_TILE_K = 128
TILE_N = 64
SCALED_TILE_N = 128  # of block-scaled products: with fewer rows sm_100 has no instruction for them
TILE_V = 128  # ids of one tile of the head
TILE_SOFT = 64  # ids that a soft embedding reads at once
MIN_PROGRAMS = 264  # two for each of 132 multiprocessors
MAX_SPLITS = 8
CHUNK = 512  # positions of one attention program; longer for forwards of many rows, which fill the card anyway
MANY_ROWS = 64
LONG_CHUNK = 2048
SHARED_BYTES = {90: 232_448, 100: 232_448, 120: 101_376}  # most that a block may ask for, by capability


def tile_k(dtype: str) -> int:
    """Inputs that a projection with weights of `dtype` reads at once."""
    return PACKED_TILE_K if dtype in ("nvfp4", "fp8") else TILE_K


def num_splits(n: int, k: int, step: int) -> int:
    """Parts of K whose sums are added up afterwards: as many as fill the card, each at least four steps long."""
    splits, tiles = 1, -(-n // TILE_N)
    while tiles * splits < MIN_PROGRAMS and splits < MAX_SPLITS and k >= 8 * splits * step:
        splits *= 2
    return splits


def per_split(k: int, splits: int, step: int) -> int:
    """Inputs of one part, a multiple of `step`."""
    return -(-k // (splits * step)) * step


def row_tile(max_rows: int, most: int = 64) -> int:
    """Rows of one tile of a projection; the hardware multiplies at least 16."""
    return min(max(16, power_of_two(max_rows)), most)


def power_of_two(value: int) -> int:
    """The least power of two from `value` on."""
    return 1 << max(value - 1, 0).bit_length()


def chunk_length(max_rows: int) -> int:
    """Positions of one attention program."""
    return CHUNK if max_rows <= MANY_ROWS else LONG_CHUNK


def attention_tile(head_dim: int, capability: int) -> tuple[int, int]:
    """Rows and positions of an attention tile that fit the shared memory."""
    is_small = SHARED_BYTES.get(capability, min(SHARED_BYTES.values())) < 200_000
    if head_dim <= 128:
        return (64, 64)
    if head_dim <= 256:
        return (32, 32) if is_small else (64, 64)
    return (16, 32) if is_small else (32, 32)
