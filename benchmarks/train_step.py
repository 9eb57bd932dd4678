"""A training step of On-Policy Residual Learning, piece by piece, against one without any of its system's pieces.

    python benchmarks/train_step.py --prompts 2 --responses 16 --json benchmarks/results/train_step.json

The same kept states of real rollouts go through all arms. *All off*: every state is a sequence of its own [prompt ;
clean prefix ; canvas], padded to the longest of its micro-batch, under a dense mask; states are dealt to ranks by
turns; every residual is captured. Pieces are added in this order: packing with the staircase, dealing by cost, capture
of a reservoir only. Losses of all arms agree, which is checked. Ranks are simulated: their micro-batches run one after
the other in this process, and a step takes as long as the slowest rank.

`train` is replay to gradients; `step` adds the rollouts. With short blocks "all off" repeats the prompt for every state
and is an easy opponent, so the ratio to a fairer one stands beside it: one row [prompt ; clean ; one noisy copy] for
each state index, by its formula in rows.

Source: ours; the pieces and the comparison are named on ORL's project page (arXiv 2610.20687).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from conditions import conditions
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.decode.sampling import banned_ids
from dlmrt.models.families import family_of
from dlmrt.ops import eager as ops
from dlmrt.types import DecodeConfig
from orl.attention import staircase
from orl.cost import CostModel, deal
from orl.data import Mixture
from orl.evaluate import Setting
from orl.losses import state_losses
from orl.packing import CLEAN, PAD, Share
from orl.recipe import DataSection
from orl.replay import ReplayBatch, ReplayResponse, packed_logits, replay_response, residual_inputs, state_weights
from orl.rollout import RolloutPool, RolloutRequest
from orl.tasks.types import Problem
from orl.train_recipe import LossSection

EVERYTHING = 64  # residuals a block, more than a block has steps

Logits = Callable[[Mapping[str, Tensor], ReplayBatch], Tensor]
Plan = list[list[list[Share]]]  # [rank][micro-batch] -> shares


def padded_logits(params: Mapping[str, Tensor], batch: ReplayBatch) -> Tensor:
    """Logits [R, V] of `batch` without the staircase: states as rows of a padded batch under a dense mask."""
    config, length = batch.config, batch.diffusion.canvas_length
    family = family_of(config)
    longest = max(state.start for state in batch.states) + length
    shape = (len(batch.states), longest)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    copy, block_start = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.int64)
    has_z = any(state.residual_LD is not None for state in batch.states)
    z = torch.zeros(*shape, config.hidden_size) if has_z else None
    where = torch.zeros(shape, dtype=torch.bool)
    rows = []
    for i, (part, state) in enumerate((owner, state) for owner in batch.parts for state in owner.states):
        start, end = state.start, state.start + length
        ids[i, :start], ids[i, start:end] = torch.from_numpy(part.clean_S[:start]), torch.from_numpy(state.canvas_L)
        positions[i, :end] = torch.arange(end)
        copy[i, :start], copy[i, start:end], block_start[i, start:end] = CLEAN, 0, start
        own_z, own_where = residual_inputs([state], torch.arange(end) >= start, config)
        if z is not None and own_z is not None and own_where is not None:
            z[i, :end], where[i, :end] = own_z, own_where
        rows.append(i * longest + torch.arange(start, end) - batch.diffusion.logit_shift)
    segment = torch.zeros(shape, dtype=torch.int64)
    visible = staircase(segment, copy, positions, block_start, batch.diffusion, grid=batch.parts[0].grid)
    hidden = family.forward(ops, params, config, ids, positions, ops.MaskedAttention(visible), z=z, where=where)
    return family.head(ops, params, config, hidden.flatten(0, 1)[torch.cat(rows)[batch.used]])


def turns(responses: Sequence[ReplayResponse], length: int, budget: int, num_ranks: int) -> Plan:
    """States as sequences of their own, dealt by turns in the order of capture; padded rows within the budget."""
    states = [
        (r, s, state.start + length) for r, response in enumerate(responses) for s, state in enumerate(response.states)
    ]
    ranks: Plan = []
    for rank in range(num_ranks):
        bins: list[list[Share]] = []
        longest = 0
        for response, state, rows in states[rank::num_ranks]:
            longest = max(longest, rows)
            if not bins or (len(bins[-1]) + 1) * longest > budget:
                bins.append([])
                longest = rows
            bins[-1].append(Share(response=response, states=(state,)))
        ranks.append(bins)
    return ranks


def packed(
    responses: Sequence[ReplayResponse], length: int, budget: int, num_ranks: int, cost: CostModel | None
) -> Plan:
    """Responses packed; dealt by cost, or by turns without a cost model."""
    num_clean, num_states = [len(r.clean_S) for r in responses], [len(r.states) for r in responses]
    options: dict[str, Any] = {"canvas_length": length, "budget": budget}
    if cost is not None:
        costs = [cost.response(len(r.clean_S), [s.start for s in r.states]) for r in responses]
        return deal(costs, num_clean, num_states, num_ranks=num_ranks, **options)
    ranks = []
    for rank in range(num_ranks):
        mine = range(rank, len(responses), num_ranks)
        (bins,) = deal(
            [1.0] * len(mine), [num_clean[i] for i in mine], [num_states[i] for i in mine], num_ranks=1, **options
        )
        ranks.append([[Share(response=mine[s.response], states=s.states) for s in shares] for shares in bins])
    return ranks


class Step:
    """The model, the kept states and how a plan is run and timed."""

    def __init__(self, model: str, responses: list[ReplayResponse], budget: int) -> None:
        checkpoint = open_checkpoint(resolve(model))
        self.config, self.responses, self.budget = checkpoint.config, responses, budget
        self.params = {n: t.requires_grad_() for n, t in load_params(checkpoint, dtype="float32").items()}
        self.weights = state_weights(responses, "response")

    def run(self, plan: Plan, logits_of: Logits, banned: Tensor) -> tuple[float, float, list[float]]:
        """(loss, norm of the gradient, seconds of each rank)."""
        section, loss, seconds = LossSection(kl_weight=0.0), 0.0, []
        for parameter in self.params.values():
            parameter.grad = None
        for bins in plan:
            began = time.perf_counter()
            for shares in filter(None, bins):
                batch = ReplayBatch(self.responses, self.weights, shares, self.config)
                losses = state_losses(logits_of(self.params, batch), batch, section, banned=banned, reference_RV=None)
                torch.autograd.backward(losses.loss)
                loss += float(losses.loss.detach())
            seconds.append(time.perf_counter() - began)
        norm = torch.stack([p.grad.norm() for p in self.params.values() if p.grad is not None]).norm()
        return loss, float(norm), seconds


def with_examples(mixture: Mixture, number: int, num_shots: int) -> Problem:
    """A problem behind `num_shots` solved ones: prompts as long as real ones are."""
    problem = mixture.problem(number, 0)
    shots = [mixture.problem(number * (num_shots + 1) + i, 0) for i in range(1, num_shots + 1)]
    text = "".join(f"{shot.prompt}\n{shot.response}\n\n" for shot in shots)
    return replace(problem, prompt=text + problem.prompt)


def roll_out(options: argparse.Namespace, per_block: int) -> tuple[list[ReplayResponse], float]:
    """All answers with `per_block` residuals a block, and the seconds it took."""
    mixture = Mixture.of(DataSection(tasks=tuple(options.task)))
    requests = [
        RolloutRequest(problem=with_examples(mixture, number, options.shots), number=number, response_idx=r)
        for number in range(1_000_000, 1_000_000 + options.prompts)
        for r in range(options.responses)
    ]
    config = DecodeConfig(**Setting.parse(options.setting).options)
    engine = Engine.load(options.model, executor=options.executor, num_threads=1)
    with RolloutPool([engine], config, per_block=per_block, seed=0) as pool:
        began = time.perf_counter()
        trajectories = pool.roll_out(requests, policy_version=0)
        seconds = time.perf_counter() - began
    return [replay_response(trajectory, LossSection()) for trajectory in trajectories], seconds


def slices_over_packed(responses: Sequence[ReplayResponse], length: int) -> float:
    """Rows of the fairer alternative over packed rows: one [prompt ; clean ; noisy copy] for each state index."""
    rows = 0
    for response in responses:
        starts = [state.start for state in response.states]
        copies = max(starts.count(start) for start in starts)
        rows += copies * (len(response.clean_S) + length * len(set(starts)))
    return rows / packed_rows(responses, length)


def packed_rows(responses: Sequence[ReplayResponse], length: int) -> int:
    """Rows of all responses with their clean rows once."""
    return sum(len(response.clean_S) + length * len(response.states) for response in responses)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms on the same states; best of the repeats."""
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    responses, kept_s = roll_out(options, options.per_block)
    _, all_s = roll_out(options, EVERYTHING)
    _, none_s = roll_out(options, 0)
    step = Step(options.model, responses, options.rows)
    with Engine.load(options.model, executor=options.executor, num_threads=1) as engine:
        banned = torch.zeros(step.config.vocab_size, dtype=torch.bool)
        banned[torch.from_numpy(banned_ids(engine.config, engine.tokenizer.known_ids)).long()] = True
    assert step.config.diffusion is not None
    length = step.config.diffusion.canvas_length
    shape = (responses, length, options.rows, options.ranks)
    arms: list[tuple[str, Plan, Logits, float]] = [
        ("all off", turns(*shape), padded_logits, all_s),
        ("+ packing and staircase", packed(*shape, None), packed_logits, all_s),
        ("+ dealing by cost", packed(*shape, CostModel.of(step.config)), packed_logits, all_s),
        ("+ reservoir capture", packed(*shape, CostModel.of(step.config)), packed_logits, kept_s),
    ]
    rows = []
    for name, plan, logits_of, rollout_s in arms:
        repeats = [step.run(plan, logits_of, banned) for _ in range(options.repeats)]
        loss, norm, _ = repeats[0]
        slowest = [max(seconds) for _, _, seconds in repeats]
        mean = statistics.mean(statistics.mean(seconds) for _, _, seconds in repeats)
        rows.append({
            "arm": name, "loss": loss, "gradient_norm": norm, "train_s": min(slowest), "train_s_all": slowest,
            "slowest_over_mean_rank": min(slowest) / mean, "rollout_s": rollout_s,
            "step_s": min(slowest) + rollout_s / options.ranks,
        })  # fmt: skip
        for key in ("loss", "gradient_norm"):
            first, found = rows[0][key], rows[-1][key]
            assert abs(found - first) <= 1e-4 * abs(first), (name, key, found, first)
    return {
        "schema": "orl.train_step/1",
        "conditions": conditions(num_threads=1, device="cpu; not run on a GPU", **settings),
        "num_responses": len(responses),
        "num_states": sum(len(r.states) for r in responses),
        "packed_rows": packed_rows(responses, length),
        "slices_over_packed_rows": slices_over_packed(responses, length),
        "rollout_s": {"no capture": none_s, "reservoir": kept_s, "everything": all_s},
        "arms": rows,
        "train_speedup": rows[0]["train_s"] / rows[-1]["train_s"],
        "step_speedup": rows[0]["step_s"] / rows[-1]["step_s"],
    }  # fmt: skip


def main() -> None:
    """Parse arguments, measure, print a table and one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="dlmrt-tiny")
    parser.add_argument("--task", action="append", default=None, help="may be repeated; default: chain_sum")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--shots", type=int, default=0, help="solved problems before each prompt")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--per-block", type=int, default=4, help="residuals kept a block")
    parser.add_argument("--setting", default="threshold=0.9,temperature=1")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a micro-batch")
    parser.add_argument("--ranks", type=int, default=8, help="simulated processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--json", type=Path, help="write the report here too")
    options = parser.parse_args()
    options.task = options.task or ["chain_sum"]
    torch.set_num_threads(1)
    report = measure(options)
    for row in report["arms"]:
        ratio = report["arms"][0]["train_s"] / row["train_s"]
        print(f"{row['arm']:<26}{row['train_s']:8.2f} s train ({ratio:.2f} x){row['step_s']:8.2f} s step")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
