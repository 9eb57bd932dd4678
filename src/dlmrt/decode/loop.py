"""The denoising loop in numpy: the readable specification that native executors are compared with, token for token.

One generator over a `Denoiser`. Its steps are numbered in comments, other code cites the numbers:

     1  prefill         the whole prompt, or with block_anchor "position_zero" its whole blocks; each token once
     2  start canvas    the prompt's partial block pinned (by length, never by id), noise elsewhere, residual 0; rule
                        `sub_blocks` behind shifted logits: slot 0 takes the argmax of the last committed row
     3  cancel?         checked before every forward
     4  forward         canvas and residual behind the committed context -> logits
     5  predict         ban, temper, filter, draw; confidence and entropy (decode.sampling)
     6  commit          the rule decides, edits, ends the block (decode.rules)
     7  settle          decided leading slots join the answer until a stop id, the length limit or a stop string
     8  renoise         open slots get the mask, or fresh uniform ids; the residual is the step's soft prediction
     9  close block     each visible token is credited to the last forward that changed it
    10  commit forward  final ids extend the context, unless the answer has ended

The answer ends in step 7 as soon as everything before its end is decided; a block need not be finished right of that.
Rules that may still change a decided slot (edits, entropy_bound) settle when the block is done, not before.

A block whose last forward changed nothing already has final keys and values (mask noise, no residual in that forward).
This loop runs and counts its commit forward all the same; an executor that saves it counts what it runs.

Source: ours; block structure after LLaDA2.1 `generate` (ZHZisZZ/dllm ca17675), SDAR generate.py (JetAstra/SDAR c2041a8)
and transformers 5.24.0 models/diffusion_gemma; the residual is ORL's z (arXiv 2610.20687).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from dlmrt.decode.rules import RULES, BlockState, is_sticky, start_block
from dlmrt.decode.sampling import predict
from dlmrt.decode.settings import ResolvedDecode
from dlmrt.models.config import DiffusionConfig
from dlmrt.ops.numerics import uniform_ids
from dlmrt.types import (
    Bool,
    Denoiser,
    EndReason,
    Float32,
    ForwardRecord,
    Int32,
    Prediction,
    Predictor,
    Sampling,
    StepState,
)

PREFILL_CHUNK = 512

Watch = Callable[[list[int]], int | None]


@dataclass(frozen=True, kw_only=True)
class GivenDraws:
    """What a recorded run drew, to be taken instead of drawing anew; for uniform noise and rule entropy_bound.

    That rule decides by entropies: confidences stay those of the argmax. N blocks, S steps of a block, L canvas slots.
    """

    token_NSL: Int32  # drawn by each step
    noise_NSL: Int32  # held by open slots before each step


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """What the loop needs to know about one request. Lengths are already checked against the model's context."""

    prompt_S: Int32  # at least one id
    settings: ResolvedDecode
    diffusion: DiffusionConfig
    banned: Int32  # ids that may not be predicted or drawn as noise
    allowed: Int32  # the others, in ascending order
    cancel: threading.Event = field(default_factory=threading.Event)
    with_probs: bool = False  # every StepEvent carries the whole distribution
    given: GivenDraws | None = None
    watch: Watch | None = None  # gets each settled run of ids; returns how many of them count if the text ends there


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    """The prompt is in the context."""

    forwards: tuple[ForwardRecord, ...]


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One denoising step was taken."""

    state: StepState  # what it consumed and decided
    after: BlockState
    prediction: Prediction
    num_settled: int  # answer tokens settled so far, over all blocks


@dataclass(frozen=True, kw_only=True)
class BlockEvent:
    """One block is closed; the last one carries the reason of the end."""

    block_idx: int
    start: int  # sequence position of slot 0
    ids_L: Int32  # whole block as it stands, also right of the answer's end
    answer: tuple[int, ...]  # ids of this block that belong to the answer, stop token included
    forwards: tuple[ForwardRecord, ...]  # denoising steps, then the commit forward if one ran
    end_reason: EndReason | None


Event = PrefillEvent | StepEvent | BlockEvent


def decode(denoiser: Denoiser, request: LoopRequest) -> Generator[Event]:
    """Run one request; closing the generator abandons it, setting `request.cancel` ends it before the next forward.

    Raises:
        NonFiniteError: the model produced NaN or infinite logits.
    """
    length = request.settings.canvas_length
    denoiser.reset()
    # 1. Prefill.
    num_prompt = len(request.prompt_S)
    is_grid_at_zero = request.diffusion.block_anchor == "position_zero"
    start = num_prompt // length * length if is_grid_at_zero else num_prompt
    is_causal = request.diffusion.context_attention == "causal"
    prompt_forwards = prefill(denoiser, request.prompt_S[:start], length, request.cancel, is_causal=is_causal)
    yield PrefillEvent(forwards=prompt_forwards)
    pinned, block_idx, num_answer = request.prompt_S[start:], 0, 0
    end_reason: EndReason | None = None
    while end_reason is None:
        block = Block(denoiser, request, block_idx=block_idx, start=start, pinned=pinned, num_before=num_answer)
        yield from block.steps()
        end_reason = block.end_reason
        # 9. Close the block.
        forwards = block.credited_forwards()
        # 10. Commit forward.
        if end_reason is None:
            denoiser.extend(block.state.answer_L)
            forwards += (ForwardRecord(kind="commit", block_idx=block_idx, step=-1, num_rows=length),)
        yield BlockEvent(
            block_idx=block_idx, start=start, ids_L=block.state.answer_L, answer=tuple(block.answer), forwards=forwards,
            end_reason=end_reason,
        )  # fmt: skip
        num_answer += len(block.answer)
        start, pinned, block_idx = start + length, pinned[:0], block_idx + 1


def prefill(
    denoiser: Denoiser, prompt_S: Int32, length: int, cancel: threading.Event | None = None, *, is_causal: bool = True
) -> tuple[ForwardRecord, ...]:
    """Extend the context chunk by chunk; where it is not causal, each chunk ends where a block does.

    The grid then is that of the prompt's end, which is also the one of position 0 when only whole blocks are given.
    """
    chunk, records = max(PREFILL_CHUNK // length * length, length), []
    begin, size = 0, chunk if is_causal else chunk - (-len(prompt_S)) % length
    while begin < len(prompt_S) and not (cancel is not None and cancel.is_set()):
        ids_S = prompt_S[begin : begin + size]
        denoiser.extend(ids_S)
        records.append(ForwardRecord(kind="prefill", block_idx=-1, step=-1, num_rows=len(ids_S)))
        begin, size = begin + size, chunk
    return tuple(records)


class Block:
    """Steps 2 to 9 of one block; `decode.native` replays recorded steps through the same bookkeeping."""

    def __init__(
        self, denoiser: Denoiser, request: LoopRequest, *, block_idx: int, start: int, pinned: Int32, num_before: int
    ) -> None:
        self.denoiser, self.request, self.settings = denoiser, request, request.settings
        self.block_idx, self.start, self.num_before = block_idx, start, num_before
        self.answer: list[int] = []
        self.end_reason: EndReason | None = None
        self.is_redrawn = request.settings.commit_rule == "entropy_bound"  # decided slots are predicted anew
        # 2. Start canvas.
        canvas_L = self._noise(0)
        canvas_L[: len(pinned)] = pinned
        self.state = start_block(canvas_L, len(pinned))
        self.num_pinned = self.num_settled = len(pinned)
        self.residual_LD: Float32 | None = None
        self.records: list[ForwardRecord] = []
        self.changed_at_L = np.full(len(canvas_L), -1)  # step that last changed a slot's answer

    def steps(self) -> Iterator[StepEvent]:
        """Denoise until the block is done or the answer ends."""
        settings, denoiser = self.settings, self.denoiser
        has_residual = denoiser.has_residual and settings.use_residual
        is_local = self.request.diffusion.residual.where == "masked"
        if self._begins_decided():
            self._decide_first_slot()
        while not self.state.is_done and self.end_reason is None:
            # 3. Cancel?
            if self.request.cancel.is_set():
                self.end_reason = "cancelled"
                return
            before, step = self.state, self.state.step
            temperature = settings.step_temperature(step)
            # 4. Forward. 5. Predict.
            where_L = before.is_open_L if is_local and self.residual_LD is not None else None
            prediction = self._predict(before, where_L, self._sampling(temperature), has_residual=has_residual)
            if self.request.given is not None:
                drawn_L = self.request.given.token_NSL[self.block_idx, step]
                prediction = replace(prediction, token_L=np.where(before.is_pinned_L, prediction.token_L, drawn_L))
            # 6. Commit.
            after = RULES[settings.commit_rule](settings, before, prediction)
            assert after.committed_L.any() or not before.is_open_L.any(), "a step with open slots decides at least one"
            self.changed_at_L[after.changed_L] = step
            consumed, self.state = self.residual_LD, after
            # 7. Settle.
            self.settle()
            # 8. Renoise, unless nothing follows.
            if not after.is_done and self.end_reason is None:
                canvas_L = np.where(after.is_open_L, self._noise(step + 1), after.canvas_L)
                self.state = replace(after, canvas_L=canvas_L)
                if has_residual:
                    self.residual_LD = self._residual_of(prediction)
            self.records.append(denoise_record(self.block_idx, before, after, prediction))
            yield StepEvent(
                state=StepState(
                    block_idx=self.block_idx, step=step, start=self.start, canvas_L=before.canvas_L,
                    residual_LD=consumed, is_unresolved_L=before.is_open_L, entropy_L=prediction.entropy_L,
                    committed_L=after.committed_L, temperature=temperature,
                ),
                after=self.state, prediction=prediction, num_settled=self.num_before + len(self.answer),
            )  # fmt: skip

    def _predict(
        self, before: BlockState, where_L: Bool | None, sampling: Sampling, *, has_residual: bool
    ) -> Prediction:
        """Steps 4 and 5; a denoiser that predicts by itself does so unless someone wants to see whole distributions."""
        open_L = ~before.is_pinned_L if self.is_redrawn else before.is_open_L
        with_probs = self.request.with_probs or self.settings.edit_ids is not None
        if isinstance(self.denoiser, Predictor) and not with_probs:
            return self.denoiser.predict(
                before.canvas_L, self.residual_LD, where_L, sampling, self.request.banned, block=self.block_idx,
                step=before.step, open_L=open_L,
            )  # fmt: skip
        return predict(
            self.denoiser.forward(before.canvas_L, self.residual_LD, where_L), sampling, self.request.banned,
            block=self.block_idx, step=before.step, with_probs=with_probs or has_residual, open_L=open_L,
        )  # fmt: skip

    def _residual_of(self, prediction: Prediction) -> Float32:
        if prediction.probs_LV is not None:
            return self.denoiser.soft_embedding(prediction.probs_LV)
        assert isinstance(self.denoiser, Predictor)
        return self.denoiser.predicted_residual()

    def _begins_decided(self) -> bool:
        """Whether slot 0 is decided before the first step; nothing would be left to denoise in a block of one slot."""
        is_shifted = self.settings.commit_rule == "sub_blocks" and bool(self.request.diffusion.logit_shift)
        return is_shifted and not self.num_pinned and len(self.state.canvas_L) > 1

    def _decide_first_slot(self) -> None:
        """Step 2 behind shifted logits: the row that predicts slot 0 is final already, so this costs no forward."""
        canvas_L, is_open_L = self.state.canvas_L.copy(), self.state.is_open_L.copy()
        logits_LV = self.denoiser.forward(canvas_L[:1], None, None)
        sampling = self._sampling(self.settings.step_temperature(0))
        canvas_L[0] = predict(logits_LV, sampling, self.request.banned, block=self.block_idx, step=0).argmax_L[0]
        is_open_L[0] = False
        self.state = replace(self.state, canvas_L=canvas_L, is_open_L=is_open_L)

    def credited_forwards(self) -> tuple[ForwardRecord, ...]:
        """The block's denoising forwards with the visible tokens that each one finalised."""
        visible = self.changed_at_L[self.num_pinned : self.num_pinned + len(self.answer)]
        counts = np.bincount(visible, minlength=len(self.records))
        pairs = zip(self.records, counts.tolist(), strict=True)
        return tuple(replace(record, num_finalised=count) for record, count in pairs)

    def _noise(self, step: int) -> Int32:
        diffusion, length = self.request.diffusion, self.settings.canvas_length
        if self.request.given is not None:
            given_L: Int32 = self.request.given.noise_NSL[self.block_idx, step].copy()
            return given_L
        if diffusion.noise == "mask":
            return np.full(length, diffusion.mask_token_id, dtype=np.int32)
        return uniform_ids(
            self.settings.noise_key, block=self.block_idx, step=step, length=length, allowed=self.request.allowed
        )

    def _sampling(self, temperature: float) -> Sampling:
        s = self.settings
        is_greedy = s.is_greedy or self.request.given is not None
        return Sampling(
            temperature=temperature, is_greedy=is_greedy, seed=s.seed, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p
        )

    def settle(self) -> None:
        """Move newly settled ids into the answer and look for its end in them."""
        state, settings = self.state, self.settings
        if state.is_done:
            end = len(state.answer_L)
        elif is_sticky(settings):
            end = int(state.is_open_L.argmax())
        else:
            return
        ids = [int(token) for token in state.answer_L[self.num_settled : end]]
        if not ids:
            return
        self.num_settled = end
        room = settings.max_tokens - self.num_before - len(self.answer)
        if len(ids) >= room:
            ids, self.end_reason = ids[:room], "max_tokens"
        text_ids = ids
        for at, token in enumerate(ids):
            if token in settings.eos_token_ids or token in settings.stop_token_ids:
                # The stop token counts; it is not text.
                self.end_reason = "eos" if token in settings.eos_token_ids else "stop_token"
                ids, text_ids = ids[: at + 1], ids[:at]
                break
        kept = self.request.watch(text_ids) if self.request.watch is not None and text_ids else None
        if kept is not None:
            ids, self.end_reason = ids[:kept], "stop_string"
        self.answer += ids


def denoise_record(block_idx: int, before: BlockState, after: BlockState, prediction: Prediction) -> ForwardRecord:
    """Count one denoising forward; what it finalised is known when the block closes."""
    open_entropy = prediction.entropy_L[before.is_open_L]
    return ForwardRecord(
        kind="denoise", block_idx=block_idx, step=before.step, num_rows=len(before.canvas_L), num_edits=after.num_edits,
        mean_entropy=float(open_entropy.mean(dtype=np.float64)) if len(open_entropy) else 0.0,
    )  # fmt: skip
