"""What a denoiser refuses: ids, contexts and residuals that do not fit its model. The same for every executor.

Source: ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlmrt.errors import UsageError
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.families import family_of
from dlmrt.types import Bool, Float32, Int32


class ContextChecks:
    """A model's configuration and the checks of `dlmrt.types.Denoiser`, which says what is refused.

    Args:
        config: of the checkpoint; needs its `diffusion` section.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.diffusion = diffusion_of(config)
        self.vocab_size = config.vocab_size
        self.has_residual = family_of(config).has_residual(config)
        self._grid = 0  # where a block starts, modulo its length

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""
        raise NotImplementedError

    def _check_truncation(self, length: int) -> None:
        if not 0 <= length <= self.context_length:
            raise UsageError(f"cannot truncate a context of {self.context_length} tokens to {length}")
        if length < self.context_length:
            self._check_boundary(length)

    def _check_extension(self, ids_S: Int32) -> None:
        """Of a context that is not empty; the first ids of one lay the grid of blocks."""
        self._check_ids(ids_S)
        if not self.context_length and self.diffusion.block_anchor == "prompt_end":
            self._grid = len(ids_S) % self.diffusion.canvas_length
        self._check_boundary(self.context_length)

    def _check_canvas(self, canvas_L: Int32, residual_LD: Float32 | None) -> None:
        self._check_ids(canvas_L)
        self._check_shift(self.context_length)
        if residual_LD is None:
            return
        if not self.has_residual:
            raise UsageError("this checkpoint has no residual pathway (diffusion.residual.kind is 'none'); pass None")
        wanted = (len(canvas_L), self.config.hidden_size)
        if residual_LD.shape != wanted:
            raise UsageError(f"the residual has shape {list(residual_LD.shape)}; it must have {list(wanted)}")

    def _check_ids(self, ids: npt.NDArray[np.generic]) -> None:
        check_ids(ids, self.vocab_size)

    def _check_shift(self, num_committed: int) -> None:
        if self.diffusion.logit_shift and not num_committed and self.diffusion.block_anchor == "prompt_end":
            raise UsageError(
                "a model with logit_shift 1 predicts slot 0 from the token before it; commit one token first"
            )

    def _check_boundary(self, length: int) -> None:
        block = self.diffusion.canvas_length
        if self.diffusion.context_attention == "block_causal" and length and (length - self._grid) % block:
            raise UsageError(
                f"the committed context would end at {length}, inside a block of {block} positions that see each "
                "other; commit and truncate whole blocks"
            )

    def _residual_rows(self, canvas_L: Int32, where_L: Bool | None) -> Bool | None:
        """The rows that receive a residual; None: all."""
        if where_L is None and self.diffusion.residual.where == "masked":
            is_masked_L: Bool = np.asarray(canvas_L) == self.diffusion.mask_token_id
            return is_masked_L
        return where_L


def check_ids(ids: npt.NDArray[np.generic], vocab_size: int) -> None:
    """Refuse ids that have no row in the embedding table.

    Raises:
        UsageError: there is one.
    """
    if len(ids) and (np.min(ids) < 0 or np.max(ids) >= vocab_size):
        raise UsageError(f"token ids must lie within 0..{vocab_size - 1}; got {np.min(ids)}..{np.max(ids)}")


def diffusion_of(config: ModelConfig) -> DiffusionConfig:
    """The section of `config` that makes the model a diffusion model.

    Raises:
        UsageError: there is none.
    """
    if config.diffusion is None:
        raise UsageError(
            f"{config.architecture} without a 'diffusion' section is an auto-regressive model; convert it, or add the "
            "section to config.json"
        )
    return config.diffusion
