"""Architecture -> model file: the one place that knows which families exist.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from dlmrt.models import diffusion_gemma, llada2, qwen3
from dlmrt.models.config import ModelConfig
from dlmrt.models.layers import Rename
from dlmrt.ops.spec import Attend, Ops, Tensor


class Family(Protocol):
    """What a model file offers; the files themselves are the objects."""

    ADAPTER: str  # how the names of the residual adapter's tensors begin
    CONTEXT_DIFFERS: bool  # whether rows that extend the context run otherwise than canvas rows
    EMBEDDING: str  # name of the table [V, D] of input embeddings
    HEAD: str  # name of the head [V, D] where it is not tied
    RENAMES: Sequence[Rename]  # how files spell tensors
    JOINS_EXPERTS: bool  # plain files hold stacked experts, gate and up in one tensor; else one matrix an expert
    UNQUANTIZED: str  # expression found in names of matrices, beside embedding and head, that stay as they are
    STOP_TOKENS: tuple[str, ...]  # texts of tokens that end an answer, beside the EOS ids of the files
    ROUTER: str  # end of the names of matrices that choose experts; "": no experts
    FLOAT32: tuple[str, ...]  # ends of names of tensors that stay float32 whatever the model runs in

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that the model needs, no more and no fewer."""

    def adapter_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Those of `tensor_shapes` that are the residual adapter, none without the pathway."""

    def has_residual(self, config: ModelConfig) -> bool:
        """Whether the checkpoint has a residual pathway."""

    def forward(
        self, ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, ids: Tensor, positions: Tensor,
        attend: Attend, *, z: Tensor | None = None, where: Tensor | None = None, is_context: bool = False,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [T, D] (normalised) of rows `ids` [T] at `positions` [T].

        Args:
            z: residual [T, D] that the rows consume, None for 0.
            where: bool [T], rows that receive it; None for all.
            is_context: the rows are final ids that extend the context, not a canvas.
        """

    def head(self, ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
        """Logits [T, V] of normalised hidden states [T, D]."""

    def soft_embedding(self, ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, probs: Tensor) -> Tensor:
        """The residual z [T, D] of next-step input."""


_FAMILIES = {
    "A2DQwen2LMHeadModel": qwen3,
    "A2DQwen3LMHeadModel": qwen3,
    "DiffusionGemmaForBlockDiffusion": diffusion_gemma,
    "Fast_dLLM_QwenForCausalLM": qwen3,
    "LLaDA2MoeModelLM": llada2,
    "Qwen2ForCausalLM": qwen3,
    "Qwen3ForCausalLM": qwen3,
    "SDARForCausalLM": qwen3,
}
ARCHITECTURES = tuple(_FAMILIES)


def family_of(config: ModelConfig) -> Family:
    """The model file of `config`."""
    return cast(Family, _FAMILIES[config.architecture])
