"""Model shapes that the benchmarks run, as checkpoints of random weights written on demand.

Values do not matter for speed; shapes, formats and vocabulary do. All have the Qwen3 backbone, so that one file serves
every runtime: the diffusion model of dlmrt, and the auto-regressive model of the same tensors in its peers.

Source: ours; sizes of SmolLM2-135M, Gemma-3-270M and Qwen3-0.6B from their public configuration files; 1.4b is
nobody's, 2.9 GB for benchmarks of loading.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from child import ROOT
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.checkpoint.tensorfile import in_memory
from dlmrt.models import qwen3
from dlmrt.models.config import DiffusionConfig, ModelConfig, RopeConfig

CACHE = ROOT / "build" / "benchmarks"
CANVAS = 32
CONTEXT = 256
MAX_POSITIONS = 1024
SHARD_BYTES = 1_000_000_000
_ONE = 0x3F80  # bits of bfloat16

# layers, width, heads, key/value heads, head width, width of the MLP, vocabulary
SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "tiny": (8, 256, 4, 2, 64, 768, 8192),
    "135m": (30, 576, 9, 3, 64, 1536, 49_152),
    "270m": (18, 640, 4, 1, 256, 2048, 262_144),
    "0.6b": (28, 1024, 16, 8, 128, 3072, 151_936),
    "1.4b": (24, 2048, 16, 8, 128, 5632, 151_936),
}


def config_of(shape: str) -> ModelConfig:
    """The diffusion model of a shape: mask noise, blocks of CANVAS, no residual pathway, tied head."""
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab = SHAPES[shape]
    return ModelConfig(
        architecture="Qwen3ForCausalLM", hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=True, eos_token_ids=(), pad_token_id=None,
        bos_token_id=None, dtype="bfloat16",
        diffusion=DiffusionConfig(canvas_length=CANVAS, noise="mask", mask_token_id=vocab - 1),
    )  # fmt: skip


def checkpoint_of(shape: str, dtype: str = "bfloat16") -> tuple[Path, str]:
    """Folder of the shape's random checkpoint, written at the first call, and the dtype to load it in.

    4-bit formats are files of their own, whose every matrix but the embedding and the head is quantised; all others are
    made from the bfloat16 file when it is loaded.
    """
    model = CACHE / shape / "model"
    if not model.exists():  # saving is atomic: what exists is whole
        _write(model, shape)
    if dtype not in ("nvfp4", "int4"):
        return model, dtype
    folder = CACHE / shape / dtype
    if not folder.exists():
        print(f"writing {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        convert_checkpoint(folder, open_checkpoint(model), format=dtype, policy="linears")
    return folder, "auto"


def size_on_disk(folder: Path) -> int:
    """Bytes of a checkpoint's tensor files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _write(folder: Path, shape: str) -> None:
    print(f"writing {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    config, rng = config_of(shape), np.random.default_rng(0)
    tensors = {}
    for name, dims in qwen3.tensor_shapes(config).items():
        bits = np.full(dims, _ONE, np.uint16)
        if len(dims) > 1:  # either sign, magnitude within 1/64 and 1/32: bits are drawn faster than normal numbers
            bits = rng.integers(0, 1 << 16, dims, np.uint16) & np.uint16(0x807F) | np.uint16(0x3C80)
        tensors[name] = in_memory(name, config.dtype, bits, folder)
    save_checkpoint(folder, config, tensors, max_shard_bytes=SHARD_BYTES)
