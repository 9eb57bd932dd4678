"""One request at a time in torch: the executor that every other one is compared with.

It keeps keys and values of the committed context per layer and runs the model functions as they are written, one
operation after the other. Only `extend` grows the context: what a canvas forward computes is thrown away, so a block
that is still being denoised can never be found in the cache. The cache is exact, not approximate.

`dense_logits` is the same model without any cache, under any mask: the yardstick for caches and masks.

Legend: C committed tokens, L canvas positions, S sequence positions, T rows of one forward, D model width,
V vocabulary, G key/value heads, H head width.

Left out on purpose: batches and in-place caches; speed is the business of the other executors.

Source: ours; the shift rule (slot 0 reads the last committed row) as in SJTU-DENG-Lab/Diffulex 184ba97.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dlmrt.checkpoint.load import Checkpoint, load_params
from dlmrt.errors import UsageError
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.context import ContextChecks, check_ids, diffusion_of
from dlmrt.models.families import family_of
from dlmrt.ops import eager
from dlmrt.ops.spec import Ops
from dlmrt.types import Bool, Float32, Int32

_OPS = cast(Ops, eager)


class EagerDenoiser(ContextChecks):
    """Implements `dlmrt.types.Denoiser`.

    Args:
        params: weights by Hugging Face name, on one device and all of one floating dtype, which is also that of the
            activations.
        config: of the checkpoint; needs its `diffusion` section.
        ops: operations that the model functions get.
    """

    name = "eager"

    def __init__(self, params: Mapping[str, Tensor], config: ModelConfig, *, ops: Ops = _OPS) -> None:
        super().__init__(config)
        self._family = family_of(config)
        self._params, self._ops = params, ops
        self._table = params[self._family.EMBEDDING]
        self._device = self._table.device
        self.dtype = str(self._table.dtype).removeprefix("torch.")
        self.reset()

    def reset(self) -> None:
        """Forget the committed context."""
        layers = map(self.config.attention, range(self.config.num_layers))
        self._keys = [
            self._table.new_empty(1, 0, layer.num_kv_heads, layer.head_dim) for layer in layers
        ]  # [1, C, G, H]
        self._values = list(self._keys)
        self._grid = 0  # where a block starts, modulo its length
        self._hidden = self._table.new_empty(1, 0, self.config.hidden_size)  # [1, C, D], kept only for logit_shift

    @torch.inference_mode()
    def assign(self, params: Mapping[str, Float32]) -> None:
        """Take other weights of the same shapes, in place, and forget the committed context."""
        self.reset()
        for name, values in params.items():
            self._params[name].copy_(torch.from_numpy(values))

    @property
    def num_threads(self) -> int | None:
        """CPU threads of forwards, torch's for the whole process; None on another device."""
        return torch.get_num_threads() if self._device.type == "cpu" else None

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""
        return self._keys[0].shape[1]

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """See `Denoiser.truncate`."""
        self._check_truncation(length)
        self._keys = [k[:, :length] for k in self._keys]
        self._values = [v[:, :length] for v in self._values]
        self._hidden = self._hidden[:, :length]

    @torch.inference_mode()
    def extend(self, ids_S: Int32) -> None:
        """See `Denoiser.extend`."""
        if not len(ids_S):
            return
        start = self.context_length
        self._check_extension(ids_S)
        keys = torch.arange(start + len(ids_S), device=self._device)
        rows = keys[start:]
        visible = self._per_layer(
            lambda window: context_visible(self.diffusion, rows, keys, grid=self._grid, window=window)
        )
        hidden = self._run(ids_S, visible, is_context=True)
        if self.diffusion.logit_shift:
            self._hidden = torch.cat((self._hidden, hidden), dim=1)

    @torch.inference_mode()
    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """See `Denoiser.forward`."""
        return _numpy(self._logits(canvas_L, residual_LD, where_L))

    def _logits(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Tensor:
        self._check_canvas(canvas_L, residual_LD)
        z, where = self._residual(canvas_L, residual_LD, where_L)
        start, length = self.context_length, len(canvas_L)
        visible = self._per_layer(
            lambda window: canvas_visible(self.diffusion, start, length, window=window, device=self._device)
        )
        if self.diffusion.logit_shift and start and length == 1:
            hidden = self._hidden[:, -1:]  # next-token prediction: the only row is a committed one
        else:
            hidden = self._run(canvas_L, visible, is_context=False, z=z, where=where)
            if self.diffusion.logit_shift:
                # Slot 0 of the whole sequence has no row before it. It is the prompt's, so what it reads is not used.
                first = self._hidden[:, -1:] if start else hidden[:, :1]
                hidden = torch.cat((first, hidden[:, :-1]), dim=1)
        logits: Tensor = self._family.head(self._ops, self._params, self.config, hidden)[0]
        return logits

    @torch.inference_mode()
    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """See `Denoiser.soft_embedding`."""
        return _numpy(self._soft_embedding(torch.from_numpy(probs_LV).to(self._device)))

    def _soft_embedding(self, probs: Tensor) -> Tensor:
        z: Tensor = self._family.soft_embedding(self._ops, self._params, self.config, probs)
        return z

    def _per_layer(self, visible: Callable[[int | None], Tensor | None]) -> list[Tensor | None]:
        """What rows see in each layer, computed once a window."""
        windows = [self.config.attention(layer_idx).window for layer_idx in range(self.config.num_layers)]
        by_window = {window: visible(window) for window in set(windows)}
        return [by_window[window] for window in windows]

    def _run(
        self, ids_T: Int32, visible: list[Tensor | None], *, is_context: bool, z: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [1, T, D] of rows behind the context, which they join if they are `is_context`."""
        ids = _indices(ids_T).to(self._device)
        positions = torch.arange(self.context_length, self.context_length + len(ids_T), device=self._device)
        attend = eager.CachedAttention(self._keys, self._values, visible, write=is_context)
        hidden: Tensor = self._family.forward(
            self._ops, self._params, self.config, ids[None], positions[None], attend, z=z, where=where,
            is_context=is_context,
        )  # fmt: skip
        return hidden

    def _residual(
        self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if residual_LD is None:
            return None, None
        where_L = self._residual_rows(canvas_L, where_L)
        z = torch.from_numpy(residual_LD).to(self._device, self._table.dtype)
        return z[None], None if where_L is None else torch.from_numpy(where_L).to(self._device)[None]


def context_visible(
    diffusion: DiffusionConfig, rows_T: Tensor, keys_S: Tensor, *, grid: int = 0, window: int | None = None
) -> Tensor:
    """Bool [T, S]: which committed positions `keys_S` a committed position of `rows_T` sees; blocks start at `grid`."""
    if diffusion.context_attention == "causal" or diffusion.in_block_attention == "causal":
        visible = keys_S <= rows_T[:, None]
    else:
        block = diffusion.canvas_length
        visible = (keys_S - grid) // block <= ((rows_T - grid) // block)[:, None]
    return visible if window is None else visible & (keys_S > rows_T[:, None] - window)


def canvas_visible(
    diffusion: DiffusionConfig, start: int, length: int, *, window: int | None, device: torch.device | None = None
) -> Tensor | None:
    """Bool [L, start + L]: what canvas rows see of the context and the canvas; None: everything.

    A window counts the canvas as one position: each row sees the last window - 1 committed ones.
    """
    if diffusion.in_block_attention == "causal":
        visible = torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)
        return visible if window is None else visible.triu(start - window + 1)
    if window is None or start < window:
        return None
    return (torch.arange(start + length, device=device) > start - window).expand(length, -1)


def quantize_inputs(checkpoint: Checkpoint, params: Mapping[str, Tensor]) -> dict[str, Tensor | eager.QuantizedInput]:
    """`params` of `checkpoint` with the inputs of quantised weights rounded as their formats say: W4A4, W8A8.

    The arithmetic of kernels that multiply quantised numbers, for comparison with them; slow.
    """
    rounded: dict[str, Tensor | eager.QuantizedInput] = dict(params)
    for name, weight in checkpoint.weights().items():
        quantizers = [quantizer for quantizer in weight.input_quantizers() if quantizer is not None]
        if quantizers:
            assert len(quantizers) == len(weight.pieces), name
            rounded[name] = eager.QuantizedInput(params[name], quantizers)
    return rounded


def load_denoiser(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> EagerDenoiser:
    """Load the weights of `checkpoint` in `dtype`; `num_threads` sets torch's CPU threads for the whole process."""
    if num_threads is not None:
        if num_threads < 1:
            raise UsageError(f"num_threads is {num_threads}; it must be at least 1")
        torch.set_num_threads(num_threads)
    diffusion_of(checkpoint.config)
    return EagerDenoiser(load_params(checkpoint, dtype=dtype), checkpoint.config)


@torch.inference_mode()
def dense_logits(
    params: Mapping[str, Tensor], config: ModelConfig, ids_S: Int32, visible_SS: Bool,
    *, residual_SD: Float32 | None = None, where_S: Bool | None = None,
) -> Float32:  # fmt: skip
    """Logits float32 [S, V] of a whole sequence under one mask, no cache, no shift: row i is the model's own row i."""
    family = family_of(config)
    check_ids(ids_S, config.vocab_size)
    ids = _indices(ids_S)
    z = None if residual_SD is None else torch.from_numpy(residual_SD).to(params[family.EMBEDDING].dtype)
    where = None if where_S is None else torch.from_numpy(where_S)
    hidden = family.forward(
        _OPS, params, config, ids[None], torch.arange(len(ids_S))[None],
        eager.MaskedAttention(torch.from_numpy(visible_SS)[None]),
        z=None if z is None else z[None], where=None if where is None else where[None],
    )  # fmt: skip
    return _numpy(family.head(_OPS, params, config, hidden)[0])


def _indices(ids: Int32) -> Tensor:
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))


def _numpy(values: Tensor) -> Float32:
    result: Float32 = values.float().cpu().numpy()
    return result
