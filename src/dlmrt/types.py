"""Nouns that cross layers: frozen, keyword-only, one line a field.

Legend: B requests, L canvas positions, S sequence positions, D model width, V vocabulary. Times are seconds on a
monotonic clock; counts start with `num_`; ids are token ids.

Source: names and counting rules from docs/design.md (glossary), which follow the field's usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "cancelled"]
EndReason = Literal["eos", "stop_token", "stop_string", "max_tokens", "cancelled"]


class Message(TypedDict):
    """One turn of a conversation. Example: ``{"role": "user", "content": "What is 2 + 3?"}``."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Settings of one request. `None` means: the checkpoint's generation_config.json, else the built-in of the rule.

    Example: ``DecodeConfig(threshold=0.9, max_tokens=128, seed=7)``.
    """

    commit_rule: str | None = None  # a name of decode.rules.RULES
    canvas_length: int | None = None  # block length; only where the checkpoint's attention is not tied to its own
    threshold: float | None = None  # commit where confidence > threshold; within [0, 1]
    edit_threshold: float | None = None  # joint_threshold edits above it; 0: every difference. No edits: rule threshold
    max_post_edit_steps: int | None = None  # edit rounds after the last masked position was filled
    min_commit: int | None = None  # positions committed by a step at the least
    sub_block_length: int | None = None  # sub_blocks: positions of a block that are decided before any to their right
    max_denoising_steps: int | None = None  # cap of denoising steps a block
    entropy_bound: float | None = None  # nats; cumulative entropy that one step may accept
    t_min: float | None = None  # temperature schedule of entropy_bound: value at the last step
    t_max: float | None = None  # and at the first
    stop_entropy: float | None = None  # nats; mean entropy below which a stable canvas ends
    stability_threshold: int | None = None  # further equal argmax canvases before a canvas may end
    temperature: float | None = None  # 0: argmax and one fixed noise stream, whatever the seed
    top_k: int | None = None  # keep the k most probable ids; 0: all
    top_p: float | None = None  # keep the smallest set with at least this mass; 1: all
    min_p: float | None = None  # keep ids with at least this share of the best probability; 0: all
    seed: int | None = None  # of the request; None: drawn from the operating system and reported
    noise_seed: int = 0  # varies the noise stream of uniform canvases at temperature 0
    max_tokens: int | None = None  # completion tokens, stop token included
    stop: tuple[str, ...] = ()  # strings that end the text; not shown
    stop_token_ids: tuple[int, ...] = ()  # ids that end the answer, beside the checkpoint's EOS ids
    ignore_eos: bool = False  # go on past EOS ids up to max_tokens
    use_residual: bool = True  # False: decode without the residual pathway (z = 0), where the checkpoint has one


@dataclass(frozen=True, kw_only=True)
class ForwardRecord:
    """One forward of one request.

    Example: ``ForwardRecord(kind="denoise", block_idx=0, step=3, num_rows=32, num_finalised=4)``.
    """

    kind: Literal["prefill", "denoise", "commit"]
    block_idx: int  # -1 for prefill
    step: int  # denoising step within the block, from 0; -1 otherwise
    num_rows: int  # positions that went through the model
    num_finalised: int = 0  # visible completion tokens that never changed after this forward; they sum to the answer
    num_edits: int = 0  # committed positions that this step changed
    mean_entropy: float = 0.0  # nats, over the positions that were open


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What one denoising step consumed and decided; kept when recording is on, also right of EOS.

    All arrays have the length of the canvas.
    """

    block_idx: int
    step: int
    start: int  # sequence position of canvas slot 0
    canvas_L: Int32  # ids handed to the denoiser
    residual_LD: Float32 | None  # z consumed (before the adapter); None stands for 0
    is_unresolved_L: Bool  # positions not decided in `canvas_L`
    entropy_L: Float32  # nats, of this step's prediction
    committed_L: Bool  # positions decided or edited by this step
    temperature: float


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Everything countable about one request.

    Example: 41 completion tokens, 2 blocks, 9 denoising and 2 commit forwards: tpf_total 41/11, tpf_denoise 41/9.
    """

    seed: int
    executor: str
    dtype: str
    commit_rule: str
    end_reason: EndReason
    forwards: tuple[ForwardRecord, ...]
    num_blocks: int
    num_cached_prompt_tokens: int  # prompt tokens whose keys and values were reused
    graphs: bool = False  # whether captured CUDA graphs ran the forwards
    settings: Mapping[str, Any]  # in effect for this request, every default resolved
    prompt_token_ids: tuple[int, ...]
    states: tuple[StepState, ...] = ()  # only with record=True
    # Whole canvases at their end, prompt part and right of EOS included; open slots hold what the last forward saw.
    blocks: tuple[Int32, ...] = ()  # only with record=True
    logprobs: tuple[TokenLogprob, ...] = ()  # one per id of the answer; only with record=True


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts and times of one request, as every surface reports them."""

    prompt_tokens: int
    completion_tokens: int  # up to and including the stop token; no padding
    num_prefill_forwards: int
    num_denoise_steps: int
    num_commit_forwards: int
    num_blocks: int
    num_edits: int
    prefill_s: float
    decode_s: float
    time_to_first_block_s: float
    total_s: float

    @property
    def num_forwards(self) -> int:
        """Denoise and commit forwards; prefill is counted apart."""
        return self.num_denoise_steps + self.num_commit_forwards

    @property
    def tpf_total(self) -> float:
        """Completion tokens per forward, commit forwards included."""
        return self.completion_tokens / max(1, self.num_forwards)

    @property
    def tpf_denoise(self) -> float:
        """Completion tokens per denoising step."""
        return self.completion_tokens / max(1, self.num_denoise_steps)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of wall time, prefill included."""
        return self.completion_tokens / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]  # visible completion ids, stop token included when one ended the answer
    finish_reason: FinishReason
    usage: Usage
    record: RequestRecord


@dataclass(frozen=True, kw_only=True)
class TextEvent:
    """Committed text, in order; the concatenation equals the final text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural log-probabilities at the forward that finalised a token; not an autoregressive likelihood."""

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most probable first; as many as were asked for


@dataclass(frozen=True, kw_only=True)
class TokensEvent:
    """The answer ids of one closed block, stop token included; over all blocks they are `GenerateResult.token_ids`."""

    block_idx: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # one per id


@dataclass(frozen=True, kw_only=True)
class CanvasEvent:
    """The canvas after one denoising step."""

    block_idx: int
    step: int
    start: int  # sequence position of slot 0, prompt included
    canvas_L: Int32  # ids after the step's commits
    is_unresolved_L: Bool
    changed_L: Bool  # slots whose id this step set or edited
    confidence_L: Float32  # probability of the predicted id
    text: str  # the canvas decoded, undecided positions shown as U+2591


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one step draws. Example: ``Sampling(temperature=1.0, is_greedy=True, seed=0)``."""

    temperature: float  # divides the logits; > 0
    is_greedy: bool  # the token is argmax; filters then change nothing
    seed: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one forward says about each slot. Confidence is a probability, entropy is in nats."""

    argmax_L: Int32  # most probable id; the lowest on ties
    argmax_confidence_L: Float32
    token_L: Int32  # id that a commit writes: argmax, or the draw
    confidence_L: Float32  # of token_L
    entropy_L: Float32
    probs_LV: Float32 | None = None  # the tempered, unfiltered distribution; only when asked for
    logits_LV: Float32 | None = None  # tempered, less the row's maximum, -inf at banned ids; with probs_LV


@runtime_checkable
class Denoiser(Protocol):
    """What the decode loop asks of an executor: one request's committed context and forwards over a canvas.

    The eager executor, the scripted denoiser of `dlmrt.testing` and a recorded trajectory all implement it.
    """

    name: str  # executor name for records: "eager", "cpu", "scripted", ...
    dtype: str
    vocab_size: int  # V, width of the head
    has_residual: bool

    def reset(self) -> None:
        """Forget the committed context."""

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens.

        Raises:
            UsageError: `length` is outside the context, or cuts a block whose tokens have seen each other.
        """

    def extend(self, ids_S: Int32) -> None:
        """Append final ids to the committed context (prefill chunk or commit forward), visible as the config says.

        Raises:
            UsageError: an id is outside the vocabulary, or the context ends inside a block of a block-causal model: its
                tokens would have to see these.
        """

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """Logits float32 [L, V] of a canvas behind the context; row i predicts canvas position i (shift applied).

        Args:
            canvas_L: ids of the canvas, slot 0 at position `context_length`.
            residual_LD: z as `soft_embedding` gives it; None stands for 0.
            where_L: rows that receive z; None: as the config says (all, or those that hold the mask token).

        Raises:
            UsageError: an id is outside the vocabulary; a residual has another shape, or the model no pathway for it;
                shifted logits behind an empty context, unless the grid of blocks starts at position 0: then a short
                prompt stands in the first block.
        """

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """The residual z float32 [L, D] that `forward` takes: probabilities times the input embedding."""


@runtime_checkable
class Predictor(Protocol):
    """A denoiser that predicts where its head lies, so that the logits need not be put together in one place."""

    def predict(
        self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None, sampling: Sampling, banned: Int32,
        *, block: int, step: int, open_L: Bool,
    ) -> Prediction:  # fmt: skip
        """What `dlmrt.decode.sampling.predict` says of the logits that `Denoiser.forward` returns; no `*_LV`."""

    def predicted_residual(self) -> Float32:
        """The residual z float32 [L, D] of the last prediction's distribution."""


@runtime_checkable
class Assignable(Protocol):
    """A denoiser whose weights can be replaced between two requests, as training does after every update."""

    def assign(self, params: Mapping[str, Float32]) -> None:
        """Take other weights of the same shapes, in place, and forget the committed context."""
