"""Answer ids of closed blocks with their log-probabilities, for callers that need more than text.

The log-probability of a token is taken from the forward that finalised it: the last one that changed its slot, the
same one that `ForwardRecord.num_finalised` credits. The distribution is the tempered, unfiltered one that confidences
are of. It is not an autoregressive likelihood: the forward saw undecided slots on both sides.

Legend: L canvas slots, V vocabulary.

Source: ours; SGLang documents its dLLM log-probabilities the same way.
"""

from __future__ import annotations

import math

import numpy as np

from dlmrt.decode.loop import BlockEvent, StepEvent
from dlmrt.types import TokenLogprob, TokensEvent

_LEAST = 1e-38  # a probability that underflowed still has a finite logarithm, which JSON can hold


class TokenTrace:
    """Follows the steps of the open block; `num_top` most probable ids are kept for each slot."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._slots: dict[int, TokenLogprob] = {}
        self._num_pinned = 0

    def step(self, event: StepEvent) -> None:
        """Take the prediction of every slot that the step changed."""
        after, prediction = event.after, event.prediction
        self._num_pinned = int(after.is_pinned_L.sum())
        for slot in np.flatnonzero(after.changed_L).tolist():
            token = int(after.answer_L[slot])
            if token == prediction.argmax_L[slot]:
                probability = prediction.argmax_confidence_L[slot]
            elif token == prediction.token_L[slot]:
                probability = prediction.confidence_L[slot]
            else:  # joint_threshold_indel moved it here, or took it instead of an id with a meaning of its own
                assert prediction.probs_LV is not None
                probability = prediction.probs_LV[slot, token]
            self._slots[slot] = TokenLogprob(logprob=_log(probability), top=self._top(event, slot))

    def close(self, event: BlockEvent) -> TokensEvent:
        """The answer ids of the block that ended; the next block starts clean."""
        slots, self._slots = self._slots, {}
        return TokensEvent(
            block_idx=event.block_idx, token_ids=event.answer,
            logprobs=tuple(slots[self._num_pinned + offset] for offset in range(len(event.answer))),
        )  # fmt: skip

    def _top(self, event: StepEvent, slot: int) -> tuple[tuple[int, float], ...]:
        if not self._num_top:
            return ()
        assert event.prediction.probs_LV is not None
        probs_V = event.prediction.probs_LV[slot]
        count = min(self._num_top, len(probs_V))
        kth = np.partition(probs_V, -count)[-count]
        ids = np.flatnonzero(probs_V >= kth)  # ascending, so a stable sort gives ties to the lower id
        order = ids[np.argsort(-probs_V[ids], kind="stable")][:count]
        return tuple((int(token), _log(probs_V[token])) for token in order if probs_V[token] > 0)


def _log(probability: float) -> float:
    return math.log(max(float(probability), _LEAST))
