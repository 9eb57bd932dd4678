"""Answers of the current weights with the states that their decoder went through.

The engine that users run makes them; nothing here decides a token. While it decodes, `Capture` copies what each step
consumed and predicted into arrays that were allocated once: small ones (canvas, unresolved slots, entropies) of every
step, the residual z of a few. Which ones is known before the copy: a reservoir whose draws depend on (seed, block,
step), hence neither on the executor nor on how many engines share the work. Capture changes no token.

Weights reach the engines in memory, in place, with a version number that every trajectory carries.

Legend: K denoising steps of a block, N of them with a kept residual, L canvas slots, D model width.

Source: ours; reservoir sampling is algorithm R (J. S. Vitter, ACM TOMS 11 (1985)).
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from dlmrt.decode.engine import Engine
from dlmrt.decode.loop import BlockEvent, Event, StepEvent
from dlmrt.types import Bool, DecodeConfig, Float32, GenerateResult, Int32, Message
from orl.errors import StaleRolloutError
from orl.packing import ROLLOUT_STREAM, STATES_STREAM, generator
from orl.tasks.types import Problem


@dataclass(frozen=True, kw_only=True)
class BlockTrajectory:
    """One block: its final ids, also right of the answer's end, and what its steps consumed and predicted.

    Example: start 37, L 32, num_pinned 0, num_answer 21 (the last is EOS), K 5, kept_steps (0, 1, 3).
    """

    start: int  # sequence position of slot 0
    ids_L: Int32  # whole block; slots that no step decided hold noise
    num_pinned: int  # leading slots that belong to the prompt
    num_answer: int  # slots behind those that belong to the answer, stop token included
    canvas_KL: Int32
    is_unresolved_KL: Bool
    committed_KL: Bool
    entropy_KL: Float32  # nats, of the step's own prediction, at its temperature
    argmax_KL: Int32
    confidence_KL: Float32  # of the argmax
    temperature_K: Float32  # that divided the step's logits
    kept_steps: tuple[int, ...]  # ascending; step 0 is always kept and consumed no residual
    residual_NLD: Float32 | None  # z that the kept steps after step 0 consumed; None where the pathway is off

    @property
    def is_answer_L(self) -> Bool:
        """Slots of the answer."""
        slots = np.arange(len(self.ids_L))
        return (slots >= self.num_pinned) & (slots < self.num_pinned + self.num_answer)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One answer with its states."""

    number: int  # problem number in the stream
    response_idx: int  # among the answers to that problem
    seed: int
    policy_version: int  # updates that the weights had seen
    result: GenerateResult
    blocks: tuple[BlockTrajectory, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One answer to be made."""

    problem: Problem
    number: int
    response_idx: int


def request_seed(seed: int, request: RolloutRequest) -> int:
    """The decoding seed of one answer: 53 bits, from (seed of the run, problem, response)."""
    return int(generator(seed, request.number, ROLLOUT_STREAM, request.response_idx).integers(1 << 53))


def reservoir_slot(seed: int, *, block: int, step: int, capacity: int) -> int | None:
    """Where the residual of `step` (from 1) of `block` goes among `capacity` slots, None if it is not kept.

    After n steps each of them is kept with probability min(1, capacity / n).
    """
    if step <= capacity:
        return step - 1
    slot = int(generator(seed, block, STATES_STREAM, step).integers(step))
    return slot if slot < capacity else None


class Capture:
    """Collects the trajectory of one request at a time into buffers that are allocated once.

    Args:
        max_steps: most denoising steps of a block.
        per_block: residuals kept a block.
    """

    def __init__(self, *, canvas_length: int, hidden_size: int, max_steps: int, per_block: int) -> None:
        shape = (max_steps, canvas_length)
        self._canvas_KL, self._argmax_KL = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        self._is_unresolved_KL, self._committed_KL = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        self._entropy_KL, self._confidence_KL = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        self._temperature_K = np.zeros(max_steps, dtype=np.float32)
        self._residual_NLD = np.zeros((per_block, canvas_length, hidden_size), dtype=np.float32)
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Forget the request before; `seed` keys the choice of states."""
        self._seed = seed
        self._blocks: list[BlockTrajectory] = []
        self._start_block()

    def blocks(self) -> tuple[BlockTrajectory, ...]:
        """What was captured since `begin`."""
        return tuple(self._blocks)

    def observe(self, event: Event) -> None:
        """Take one event of the loop."""
        if isinstance(event, StepEvent):
            self._step(event)
        elif isinstance(event, BlockEvent) and self._num_steps:
            self._blocks.append(self._close(event))
            self._start_block()

    def _start_block(self) -> None:
        self._num_steps, self._num_pinned, self._has_residual = 0, 0, False
        self._step_of_slot: dict[int, int] = {}

    def _step(self, event: StepEvent) -> None:
        state, prediction, step = event.state, event.prediction, event.state.step
        self._canvas_KL[step], self._argmax_KL[step] = state.canvas_L, prediction.argmax_L
        self._is_unresolved_KL[step], self._committed_KL[step] = state.is_unresolved_L, state.committed_L
        self._entropy_KL[step], self._confidence_KL[step] = state.entropy_L, prediction.argmax_confidence_L
        self._temperature_K[step] = state.temperature
        self._num_steps, self._num_pinned = step + 1, int(event.after.is_pinned_L.sum())
        if step == 0:
            return
        slot = reservoir_slot(self._seed, block=state.block_idx, step=step, capacity=len(self._residual_NLD))
        if slot is not None:
            self._step_of_slot[slot] = step
            if state.residual_LD is not None:
                self._residual_NLD[slot] = state.residual_LD
                self._has_residual = True

    def _close(self, event: BlockEvent) -> BlockTrajectory:
        used = sorted(self._step_of_slot, key=self._step_of_slot.__getitem__)
        end = self._num_steps
        return BlockTrajectory(
            start=event.start,
            ids_L=event.ids_L.astype(np.int32),
            num_pinned=self._num_pinned,
            num_answer=len(event.answer),
            canvas_KL=self._canvas_KL[:end].copy(),
            is_unresolved_KL=self._is_unresolved_KL[:end].copy(),
            committed_KL=self._committed_KL[:end].copy(),
            entropy_KL=self._entropy_KL[:end].copy(),
            argmax_KL=self._argmax_KL[:end].copy(),
            confidence_KL=self._confidence_KL[:end].copy(),
            temperature_K=self._temperature_K[:end].copy(),
            kept_steps=(0, *(self._step_of_slot[slot] for slot in used)),
            residual_NLD=self._residual_NLD[used] if self._has_residual else None,
        )


class RolloutPool:
    """Engines that answer side by side, each on one thread; the answers are those that one engine alone would give.

    Args:
        engines: of one model; closed with the pool.
        config: decode settings; the seed is set per request.
        per_block: residuals kept a block.
        seed: of the run.
    """

    def __init__(self, engines: Sequence[Engine], config: DecodeConfig, *, per_block: int, seed: int) -> None:
        self.engines, self.config, self.seed = engines, config, seed
        self.policy_version = 0
        settings, hidden_size = engines[0].settings(config), engines[0].config.hidden_size
        self._free: queue.SimpleQueue[tuple[Engine, Capture]] = queue.SimpleQueue()
        for engine in engines:
            capture = Capture(
                canvas_length=settings.canvas_length, hidden_size=hidden_size,
                max_steps=settings.max_denoising_steps, per_block=per_block,
            )  # fmt: skip
            self._free.put((engine, capture))
        self._threads = ThreadPoolExecutor(len(engines), thread_name_prefix="rollout")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for engine in self.engines:
            engine.close()

    def publish(self, params: Mapping[str, Float32], policy_version: int) -> None:
        """Hand over the weights after update `policy_version`; no disk, no copy but the engines' own packing."""
        list(self._threads.map(lambda engine: engine.assign(params), self.engines))
        self.policy_version = policy_version

    def roll_out(self, requests: Sequence[RolloutRequest], *, policy_version: int) -> list[Trajectory]:
        """Answer `requests`, in their order.

        Raises:
            StaleRolloutError: the engines hold the weights of another version.
        """
        if policy_version != self.policy_version:
            raise StaleRolloutError(
                f"the engines hold version {self.policy_version} of the weights and version {policy_version} is "
                "trained; publish the weights after every update"
            )
        return list(self._threads.map(self._answer, requests))

    def _answer(self, request: RolloutRequest) -> Trajectory:
        engine, capture = self._free.get()
        try:
            seed = request_seed(self.seed, request)
            capture.begin(seed)
            prompt = [Message(role="user", content=request.problem.prompt)]
            result = engine.generate(prompt, self.config, observe=capture.observe, seed=seed)
            return Trajectory(
                number=request.number, response_idx=request.response_idx, seed=seed,
                policy_version=self.policy_version, result=result, blocks=capture.blocks(),
            )  # fmt: skip
        finally:
            self._free.put((engine, capture))
