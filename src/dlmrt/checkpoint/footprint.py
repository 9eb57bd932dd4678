"""What a model takes and what a forward reads, in bytes, from its configuration alone.

Weights are counted as `dlmrt.checkpoint.convert` would write them. A forward reads every matrix once; of the experts of
a layer those that some row chose, of the input table nothing worth counting (a few rows), unless it is also the head or
makes the soft embedding of the residual. A forward cannot be faster than these bytes over the memory's bandwidth; that
is a ceiling, not a forecast: arithmetic, launches and activations come on top.

Experts that a block touches are, without a better number, those of independent uniform choices; trained routers repeat
themselves and touch fewer.

Source: ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from dlmrt.checkpoint.assemble import ModelWeight
from dlmrt.checkpoint.policy import Policy, module_of, quantized_files, shape_of
from dlmrt.checkpoint.scheme import QuantFormat, Scheme
from dlmrt.checkpoint.tensorfile import size_of
from dlmrt.errors import UsageError
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.models.layers import STACKED, file_names

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PREFILL_ROWS = 512  # of one forward that extends the context

Sizes = Mapping[str, int]  # tensor of the model -> bytes


def float_sizes(config: ModelConfig, dtype: str) -> dict[str, int]:
    """Tensor -> bytes with every tensor in `dtype`."""
    return {name: math.prod(shape) * ITEM_BYTES[dtype] for name, shape in _shapes(config).items()}


def quantized_sizes(config: ModelConfig, format: QuantFormat, policy: Policy) -> dict[str, int] | None:
    """Tensor -> bytes of a file of `format`; None: the policy chooses nothing, or a matrix does not fit the format."""
    shapes, sizes = _shapes(config), dict.fromkeys(_shapes(config), 0)
    scheme = Scheme(format=format, dialect="compressed-tensors", has_static_inputs=False)
    try:
        chosen = quantized_files(config, shapes, policy)
    except UsageError:
        return None
    for file in file_names(shapes, joins=False):
        shape = shape_of(file, shapes)
        if module_of(file) not in chosen:
            num_bytes = math.prod(shape) * ITEM_BYTES[config.dtype]
        elif shape[1] % scheme.column_multiple:
            return None
        else:
            layout = scheme.layout(*shape).values()
            num_bytes = sum(size_of(dtype, part_shape) for dtype, part_shape in layout)
        sizes[file.sources[0]] += num_bytes
    return sizes


def stored_sizes(weights: Mapping[str, ModelWeight]) -> dict[str, int]:
    """Tensor -> bytes as the files hold it."""
    return {
        name: sum(
            tensor.num_bytes // (piece.part[1] if piece.part else 1)
            for piece in weight.pieces
            for tensor in piece.weight.parts.values()
        )
        for name, weight in weights.items()
    }


def read_bytes(config: ModelConfig, sizes: Sizes, *, rows: int, experts: float | None = None) -> float:
    """Bytes of weights that a forward of `rows` reads.

    Args:
        experts: of a layer, that some row chooses; None: those of uniform choices.
    """
    family = family_of(config)
    share = 1.0 if config.moe is None else (experts or touched_experts(config, rows)) / config.moe.num_experts
    is_head = family.HEAD not in sizes
    has_soft_embedding = rows > 1 and config.diffusion is not None and family.has_residual(config)
    times = {family.EMBEDDING: int(is_head) + int(has_soft_embedding)}
    return sum(size * (share if re.fullmatch(STACKED, name) else times.get(name, 1)) for name, size in sizes.items())


def touched_experts(config: ModelConfig, rows: int) -> float:
    """Experts of a layer that `rows` independent uniform choices touch, within the capacity of a block."""
    moe = config.moe
    assert moe is not None
    share = moe.num_experts_per_token / moe.num_experts
    touched = moe.num_experts * (1 - (1 - share) ** rows)
    return touched if moe.expert_capacity is None else min(touched, max(moe.expert_capacity, moe.num_experts_per_token))


def kv_bytes(config: ModelConfig, length: int, *, is_read: bool = False) -> int:
    """Bytes of keys and values of `length` tokens, all that are kept; `is_read`: those that a window still sees."""
    item = ITEM_BYTES[config.dtype]
    total = 0
    for layer in map(config.attention, range(config.num_layers)):
        seen = length if layer.window is None or not is_read else min(length, layer.window - 1)
        total += 2 * layer.num_kv_heads * layer.head_dim * item * seen
    return total


def buffer_bytes(config: ModelConfig) -> int:
    """Bytes of logits, probabilities of the residual, and activations of the widest forward; an estimate."""
    rows = config.diffusion.canvas_length if config.diffusion else 1
    tables = 2 if config.diffusion is not None and family_of(config).has_residual(config) else 1
    heads = config.num_heads + 2 * config.num_kv_heads
    width = 4 * config.hidden_size + 2 * config.intermediate_size + heads * config.head_dim
    return 4 * rows * config.vocab_size * tables + max(rows, _PREFILL_ROWS) * width * ITEM_BYTES[config.dtype]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return family_of(config).tensor_shapes(config)
