"""From trajectories to the exact inputs of chosen states, and their logits under the weights being trained.

A response becomes clean rows (prompt and every block but the last, once) with noisy states hanging off them: each state
is a canvas behind the clean rows before its block, with the residual z that the decoder consumed there, bit for bit.
Gradients reach the weights through canvas and clean rows; z is data.

Two ways to the logits, equal in loss and gradient: `reference_logits` runs each state as a sequence of its own under a
dense mask; `packed_logits` runs all rows of several responses in one forward (`orl.attention.StaircaseAttention`).

Which slots count, and how, is decided here from the recorded statistics (gates never read the model being trained):
open slots (undecided, not right of the answer's end), gated ones among them, anchored ones (all others of the block).

Legend: L canvas slots, D model width, T packed rows, S states, R slots that carry a loss, V vocabulary.

Source: ORL (arXiv 2610.20687, project page); ours otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlmrt.models import layers
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.ops import eager as ops
from dlmrt.ops.spec import Ops
from dlmrt.types import Bool, Float32, Int32
from orl.attention import Canvases, Layout, staircase
from orl.kernels import Kind, staircase_attention
from orl.packing import CLEAN, Share
from orl.rollout import BlockTrajectory, Trajectory
from orl.train_recipe import LossSection
from orl.two_pass import TwoPassStaircase

_OPS = cast(Ops, ops)


@dataclass(frozen=True, kw_only=True)
class ReplayState:
    """What one denoising step consumed, and what the loss asks of it. All arrays have the canvas' length."""

    start: int  # sequence position of slot 0
    canvas_L: Int32
    residual_LD: Float32 | None  # None stands for 0
    is_unresolved_L: Bool  # undecided slots, also right of the answer's end
    targets_L: Int32  # final ids
    is_open_L: Bool  # undecided slots of the answer: U of the method
    is_gated_L: Bool  # open slots that get cross-entropy
    is_anchored_L: Bool  # slots that are held near the start model
    own_entropy_L: Float32 | None  # nats, as recorded of this step; None: not recorded
    source_entropy_L: Float32 | None  # nats, of the step before; None: there is none
    source_entropy: float | None  # mean of it over the slots that were open then
    own_temperature: float = 1.0  # that `own_entropy_L` was recorded at
    source_temperature: float = 1.0  # that `source_entropy_L` was recorded at; 1 where there is none


@dataclass(frozen=True, kw_only=True)
class ReplayResponse:
    """One kept answer."""

    number: int  # of the problem
    clean_S: Int32  # prompt and all blocks but the last
    grid: int  # where the block grid starts, modulo the canvas length
    states: tuple[ReplayState, ...]


def replay_response(trajectory: Trajectory, section: LossSection) -> ReplayResponse:
    """The states whose residual was kept, with their gates."""
    blocks = trajectory.blocks
    start, length = blocks[0].start, len(blocks[0].ids_L)
    prompt = np.array(trajectory.result.record.prompt_token_ids, dtype=np.int32)
    return ReplayResponse(
        number=trajectory.number,
        clean_S=np.concatenate([prompt[:start], *(block.ids_L for block in blocks[:-1])]),
        grid=start % length,
        states=tuple(state for block in blocks for state in _states(block, section)),
    )


def _states(block: BlockTrajectory, section: LossSection) -> Iterator[ReplayState]:
    is_answer_L = block.is_answer_L
    is_free_L = np.arange(len(block.ids_L)) >= block.num_pinned
    for at, step in enumerate(block.kept_steps):
        is_open_L = block.is_unresolved_KL[step] & is_answer_L
        is_gated_L = gate(block.entropy_KL[step], is_open_L, section)
        source_entropy = None
        if step:
            was_open_L = block.is_unresolved_KL[step - 1] & is_answer_L
            source_entropy = float(block.entropy_KL[step - 1][was_open_L].mean()) if was_open_L.any() else None
        yield ReplayState(
            start=block.start,
            canvas_L=block.canvas_KL[step],
            residual_LD=block.residual_NLD[at - 1] if step and block.residual_NLD is not None else None,
            is_unresolved_L=block.is_unresolved_KL[step],
            targets_L=block.ids_L,
            is_open_L=is_open_L,
            is_gated_L=is_gated_L,
            is_anchored_L=is_free_L & ~is_gated_L,
            own_entropy_L=block.entropy_KL[step],
            source_entropy_L=block.entropy_KL[step - 1] if step else None,
            source_entropy=source_entropy,
            own_temperature=float(block.temperature_K[step]),
            source_temperature=float(block.temperature_K[step - 1]) if step else 1.0,
        )


def gate(entropy_L: Float32, is_open_L: Bool, section: LossSection) -> Bool:
    """Open slots that are uncertain enough for cross-entropy.

    quantile: the `gate_level` share of largest entropy, at least one; entropy: those above `gate_level` nats; all.
    """
    if section.gate == "all" or not is_open_L.any():
        return is_open_L
    if section.gate == "entropy":
        return is_open_L & (entropy_L > section.gate_level)
    count = max(1, round(section.gate_level * int(is_open_L.sum())))
    order = np.argsort(np.where(is_open_L, -entropy_L, np.inf), kind="stable")
    is_gated_L = np.zeros_like(is_open_L)
    is_gated_L[order[:count]] = True
    return is_gated_L


def state_weights(responses: Sequence[ReplayResponse], norm: str) -> list[float]:
    """Weight of each state of each response in the loss; times its number of states they sum to 1.

    Counted over the whole update before it is packed or sharded, so neither can change the loss.
    """
    numbers = [response.number for response in responses]
    if norm == "response":
        return [1 / (len(responses) * len(r.states)) for r in responses]
    num_prompts = len(set(numbers))
    return [1 / (num_prompts * numbers.count(r.number) * len(r.states)) for r in responses]


class ReplayBatch:
    """Some states of some responses as tensors, ready for either way to the logits.

    Args:
        shares: which states of which response; clean rows are cut behind the last one needed.
        weights: of a state, one a response.
        device: of the parameters.
        attention: how the staircase is computed (`orl.kernels`).
    """

    def __init__(
        self, responses: Sequence[ReplayResponse], weights: Sequence[float], shares: Sequence[Share],
        config: ModelConfig, *, device: str = "cpu", attention: Kind = "auto",
    ) -> None:  # fmt: skip
        assert config.diffusion is not None
        self.device, self.attention = device, attention
        self.config, self.diffusion = config, config.diffusion
        self.parts = [_Part(responses[s.response], [responses[s.response].states[i] for i in s.states]) for s in shares]
        self.states = [state for part in self.parts for state in part.states]
        per_part = [(weights[share.response], len(share.states)) for share in shares]
        self.weight_S = torch.tensor([weight for weight, count in per_part for _ in range(count)])
        self._gather_slots()
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "used":
                setattr(self, name, value.to(device))

    def _gather_slots(self) -> None:
        """Slots with a loss, flat over all states."""
        length, states = self.diffusion.canvas_length, self.states

        def flat(rows: list[npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(rows)).to(dtype)[used]

        open_, gated, anchored = (
            np.concatenate([getattr(state, name) for state in states])
            for name in ("is_open_L", "is_gated_L", "is_anchored_L")
        )
        used = torch.from_numpy(open_ | gated | anchored)
        self.used = used
        self.state_R = torch.arange(len(states)).repeat_interleave(length)[used]
        self.targets_R = flat([state.targets_L for state in states], torch.int64)
        self.is_open_R, self.is_gated_R, self.is_anchored_R = (
            torch.from_numpy(values)[used] for values in (open_, gated, anchored)
        )
        nothing = np.full(length, np.nan, dtype=np.float32)
        self.own_entropy_R, self.source_entropy_R = (
            flat([nothing if (h := getattr(state, name)) is None else h for state in states], torch.float32)
            for name in ("own_entropy_L", "source_entropy_L")
        )
        sources = [np.nan if state.source_entropy is None else state.source_entropy for state in states]
        self.source_entropy_S = torch.tensor(sources, dtype=torch.float32)
        self.own_temperature_S, self.source_temperature_S = (
            torch.tensor([getattr(state, name) for state in states], dtype=torch.float32)
            for name in ("own_temperature", "source_temperature")
        )

    @property
    def num_rows(self) -> int:
        """Rows of the packed forward."""
        return sum(part.num_rows for part in self.parts)


class _Part:
    """States of one response, in the order of their blocks, behind as many clean rows as they see."""

    def __init__(self, response: ReplayResponse, states: Sequence[ReplayState]) -> None:
        self.states = sorted(states, key=lambda state: state.start)
        self.clean_S = response.clean_S[: self.states[-1].start]
        self.grid = response.grid
        self.num_rows = len(self.clean_S) + sum(len(state.canvas_L) for state in self.states)


def packed_logits(params: Mapping[str, Tensor], batch: ReplayBatch, *, always_residual: bool = False) -> Tensor:
    """Logits [R, V] of all slots with a loss, in one forward over all rows.

    Args:
        always_residual: run the adapter also where every z is 0; the same parameters of a sharded model must get a
            gradient on every process.
    """
    config, length = batch.config, batch.diffusion.canvas_length
    ids, positions, predicted_by, layout, noisy = [], [], [], [], []
    row = 0
    for part in batch.parts:
        num_clean = len(part.clean_S)
        starts = [state.start for state in part.states]
        canvases, first = [], row + num_clean
        for start in dict.fromkeys(starts):
            canvases.append(Canvases(start=start, first_row=first, count=starts.count(start)))
            first += starts.count(start) * length
        layout.append((row, num_clean, part.grid, tuple(canvases)))
        ids += [part.clean_S, *(state.canvas_L for state in part.states)]
        positions += [np.arange(num_clean), *(start + np.arange(length) for start in starts)]
        noisy += [np.zeros(num_clean, dtype=bool), np.ones(len(starts) * length, dtype=bool)]
        for i, start in enumerate(starts):
            own = row + num_clean + i * length + np.arange(length)
            before = row + start - 1 if start else own[0]  # slot 0 of a whole sequence is the prompt's: no matter
            predicted_by.append(np.append(before, own[:-1]) if batch.diffusion.logit_shift else own)
        row += part.num_rows
    is_noisy = torch.from_numpy(np.concatenate(noisy))
    z, where = residual_inputs(batch.states, is_noisy, config, always=always_residual)
    ids_T, positions_T = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(positions))
    ids_T, positions_T, is_noisy = (t.to(batch.device) for t in (ids_T, positions_T, is_noisy))
    z, where = (None if t is None else t.to(batch.device) for t in (z, where))
    family = family_of(config)
    if family.CONTEXT_DIFFERS:
        hidden = _two_passes(params, config, ids_T, positions_T, is_noisy, layout, z, where)
    else:
        attend = staircase_attention(layout, config, device=batch.device, kind=batch.attention)
        hidden = family.forward(_OPS, params, config, ids_T, positions_T, attend, z=z, where=where)
    rows_R = torch.from_numpy(np.concatenate(predicted_by))[batch.used].to(batch.device)
    logits: Tensor = family.head(_OPS, params, config, hidden[rows_R])
    return logits


def _two_passes(
    params: Mapping[str, Tensor], config: ModelConfig, ids_T: Tensor, positions_T: Tensor, is_noisy_T: Tensor,
    layout: Sequence[Layout], z: Tensor | None, where: Tensor | None,
) -> Tensor:  # fmt: skip
    """Final hidden states [T, D], clean rows run as context and noisy ones as canvases."""
    family, attend, is_clean_T = family_of(config), TwoPassStaircase(layout, config), ~is_noisy_T
    hidden = torch.zeros(len(ids_T), config.hidden_size, dtype=params[family.EMBEDDING].dtype, device=ids_T.device)
    if is_clean_T.any():
        clean = family.forward(
            _OPS, params, config, ids_T[is_clean_T], positions_T[is_clean_T], attend.context, is_context=True
        )
        hidden = hidden.to(clean.dtype).index_put((is_clean_T.nonzero()[:, 0],), clean)
    noisy = family.forward(
        _OPS, params, config, ids_T[is_noisy_T], positions_T[is_noisy_T], attend.canvases,
        z=None if z is None else z[is_noisy_T], where=None if where is None else where[is_noisy_T],
    )  # fmt: skip
    return hidden.to(noisy.dtype).index_put((is_noisy_T.nonzero()[:, 0],), noisy)


def reference_logits(params: Mapping[str, Tensor], batch: ReplayBatch) -> Tensor:
    """The same, each state as a sequence of its own under the dense staircase; not where context rows run otherwise."""
    config, length = batch.config, batch.diffusion.canvas_length
    family = family_of(config)
    assert not family.CONTEXT_DIFFERS, "compare with the eager executor instead"
    found = []
    for part in batch.parts:
        for state in part.states:
            start = state.start
            ids = torch.from_numpy(np.concatenate([part.clean_S[:start], state.canvas_L]))
            positions = torch.arange(start + length)
            is_noisy = positions >= start
            copy, block_start = torch.where(is_noisy, 0, CLEAN), torch.where(is_noisy, start, 0)
            visible = staircase(torch.zeros_like(copy), copy, positions, block_start, batch.diffusion, grid=part.grid)
            z, where = residual_inputs([state], is_noisy, config)
            attend = ops.MaskedAttention(visible)
            hidden = family.forward(_OPS, params, config, ids, positions, attend, z=z, where=where)
            rows = (torch.arange(start, start + length) - batch.diffusion.logit_shift).clamp(min=0)
            found.append(hidden[rows])
    logits: Tensor = family.head(_OPS, params, config, torch.cat(found)[batch.used])
    return logits


@torch.no_grad()
def residual_ratio(params: Mapping[str, Tensor], states: Sequence[ReplayState], config: ModelConfig) -> float | None:
    """Norm of what the adapter adds over the norm of the embeddings it is added to.

    None without any residual, and for families with an adapter of another form.
    """
    given = [state for state in states if state.residual_LD is not None]
    if not given or family_of(config).ADAPTER != layers.ADAPTER:
        return None
    ids = torch.from_numpy(np.concatenate([state.canvas_L for state in given]))
    z = torch.from_numpy(np.concatenate([state.residual_LD for state in given if state.residual_LD is not None]))
    table = params[family_of(config).EMBEDDING]
    embeddings, z = ops.embed(table, ids.to(table.device)), z.to(table.device)
    added = layers.mix_residual(ops, params, config, torch.zeros_like(embeddings), z, None)
    return float(added.norm() / embeddings.norm())


def residual_inputs(
    states: Sequence[ReplayState], is_noisy_T: Tensor, config: ModelConfig, *, always: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Residual [T, D] of the noisy rows and the rows that receive it; (None, None) where no state has one."""
    if not (always and family_of(config).has_residual(config)) and all(s.residual_LD is None for s in states):
        return None, None
    assert config.diffusion is not None
    z = torch.zeros(len(is_noisy_T), config.hidden_size)
    nothing = np.zeros((config.diffusion.canvas_length, config.hidden_size), dtype=np.float32)
    given = [nothing if state.residual_LD is None else state.residual_LD for state in states]
    z[is_noisy_T] = torch.from_numpy(np.concatenate(given))
    if config.diffusion.residual.where == "all":
        return z, is_noisy_T
    where = is_noisy_T.clone()
    where[is_noisy_T] = torch.from_numpy(np.concatenate([state.is_unresolved_L for state in states]))
    return z, where
