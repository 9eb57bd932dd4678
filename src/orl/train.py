"""On-Policy Residual Learning: one update per batch of fresh rollouts, then everything is thrown away.

An update: roll out answers with the current weights and the decoder that will be deployed (`orl.rollout`); verify and
choose (`orl.retain`); replay the chosen states with the residual they consumed (`orl.replay`); gated cross-entropy,
adjacent entropy contraction, anchor (`orl.losses`); one optimizer step; hand the weights to the engines, in memory.

Nothing random lives in torch: problems are numbered, decoding seeds, kept states and noise are functions of (seed,
number), so a killed run goes on exactly from parameters, optimizer state and a few integers.

Under torchrun several processes share every update (`orl.ranks`, `orl.shard`): each rolls out a part of the prompts,
all of them know all answers, and each replays a part of them, dealt by cost. The result is that of one process.

Left out on purpose: several updates per rollout (off-policy: recorded entropies and residuals turn stale).

Source: ORL (arXiv 2610.20687, project page); the reconstruction is described in docs/design.md.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmrt.checkpoint.load import load_params
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import ResolvedDecode
from dlmrt.models.families import family_of
from dlmrt.types import DecodeConfig
from orl.data import Mixture, encode_problem, held_out
from orl.diagnostics import rollout_report
from orl.errors import DivergedError, NothingVerifiedError, RecipeError, RunFolderError, StaleRolloutError
from orl.evaluate import Setting, evaluate
from orl.gold import gold_response, self_condition
from orl.gradients import accumulate_gradients
from orl.interrupt import uninterrupted
from orl.optimizers import PathwayOptimizers, learning_rate_ratio, why_unusable
from orl.ranks import TrainRanks, joined
from orl.recipe import DataSection
from orl.replay import ReplayResponse, replay_response
from orl.retain import judge, shared_part
from orl.rollout import RolloutPool, RolloutRequest
from orl.run_folder import FolderRun
from orl.selection import Evaluations
from orl.shard import ShardedParams, whole
from orl.start import noise_of, stop_id_of
from orl.train_recipe import TrainRecipe
from orl.tune import plain_weights, start_checkpoint, trained_params


@dataclass(frozen=True, kw_only=True)
class UpdateProgress:
    """What an update reports."""

    update: int
    num_updates: int
    loss: float
    verified_rate: float | None  # None without rollouts
    tpf_total: float | None
    seconds_left: float  # at the pace of this process so far, evaluations included


def train(
    recipe: TrainRecipe, run_dir: Path, *, on_progress: Callable[[UpdateProgress], None] | None = None,
    stop_after_s: float | None = None,
) -> Path:  # fmt: skip
    """Run (or resume) the recipe in `run_dir`; return the folder of the best checkpoint so far.

    Ctrl-C saves the state of the last whole update and raises KeyboardInterrupt; another call goes on from there.

    Args:
        stop_after_s: save and return early after this many seconds (another call goes on).

    Raises:
        RunFolderError: the folder belongs to another recipe, or its state to another model.
        RecipeError: the recipe asks for something that its start model cannot do.
        NothingVerifiedError: no answer was kept for `keep.max_empty_updates` updates in a row.
        StaleRolloutError: replayed states are not those that were rolled out (`rollout.max_entropy_gap`).
        DivergedError: too many updates in a row gave no usable gradient.
    """
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    with joined() as ranks, TrainRun(recipe, run_dir, ranks) as run:
        started = last_save = time.monotonic()
        first = run.step
        try:
            if run.evaluate_if_due() and first:  # the one that the call before was interrupted in
                run.save()
            while run.step < recipe.optim.updates and not run.evaluations.stop_reason:
                with uninterrupted():
                    entry = run.update()
                    run.log(entry)
                run.evaluate_if_due()
                is_last = run.step == recipe.optim.updates
                now = time.monotonic()
                if on_progress and ranks.is_main:
                    left_s = (recipe.optim.updates - run.step) * (now - started) / (run.step - first)
                    on_progress(UpdateProgress(
                        update=run.step, num_updates=recipe.optim.updates, loss=entry["loss"],
                        verified_rate=entry.get("verified_rate"), tpf_total=entry.get("tpf_total"), seconds_left=left_s,
                    ))  # fmt: skip
                is_late = stop_after_s is not None and now - started > stop_after_s
                # The clocks of several processes differ, and saving takes all of them.
                is_late, is_due = ranks.from_main((is_late, now - last_save > recipe.run.save_every_s))
                if is_last or is_late or is_due or run.evaluations.stop_reason:
                    run.save()
                    last_save = time.monotonic()
                if is_late:
                    break
        except KeyboardInterrupt:
            if ranks.size == 1:  # several may be an update apart: their last common state stands
                run.save()
            raise
        return run.export()


class TrainRun(FolderRun[TrainRecipe]):
    """Everything that an update changes: parameters, optimizer state, counters; and how it is saved."""

    def _set_up(self, ranks: TrainRanks, opened: ExitStack) -> None:
        recipe, run_dir = self.recipe, self.path
        self.adapter = run_dir / "start_adapter" if recipe.tune.new_adapter_width else None
        self.start = start_checkpoint(
            recipe.run.init, recipe.tune, run_dir / "start_adapter", ranks, seed=recipe.run.seed
        )
        self.config = self.start.config
        start = load_params(self.start, dtype="float32")
        self.fingerprint = _fingerprint(start)
        saved = ranks.from_main(self.folder.load_state() if self.folder else None)
        if self.folder:
            self.folder.watch(recipe, 0 if saved is None else int(saved[1]["step"]))
        self.params = trained_params(
            start, self.config, recipe.tune, seed=recipe.run.seed, saved=None if saved is None else saved[0],
            states=run_dir, device=ranks.device,
        )  # fmt: skip
        self.reference = ShardedParams({n: t.to(ranks.device) for n, t in start.items()}, trained=lambda name: False)
        self.trained = {name: p for name, p in self.params.parameters().items() if p.requires_grad}
        self.optimizers = PathwayOptimizers(self.trained, recipe.optim, adapter=family_of(self.config).ADAPTER)
        prompts = recipe.prompts
        self.mixture = Mixture.of(DataSection(tasks=prompts.tasks, weights=prompts.weights, wordings=prompts.wordings))
        self.step = self.policy_version = self.num_rows = self.num_generated_tokens = 0
        self.num_skipped = self.num_skipped_in_a_row = self.num_empty_in_a_row = 0
        self.evaluations = Evaluations(recipe.eval)
        self.coverages: list[float] = []  # of the updates since the last evaluation
        self.pool = opened.enter_context(self._open_pool())
        self.codec = self.pool.engines[0].tokenizer
        uses_gold = recipe.rollout.source == "gold" or recipe.keep.on_no_success == "gold"
        decoded = self.pool.engines[0].config  # with every token that ends an answer
        self.gold = (noise_of(decoded, self.codec), stop_id_of(decoded, self.codec)) if uses_gold else None
        self.banned = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=ranks.device)
        self.banned[torch.from_numpy(banned_ids(decoded, self.codec.known_ids)).long()] = True
        if saved is not None:
            self._restore(*saved)

    def update(self) -> dict[str, Any]:
        """Roll out, train once, publish; the line of metrics.

        Raises:
            NothingVerifiedError, DivergedError: see `train`.
        """
        began = time.monotonic()
        responses, report = self._responses()
        rolled_out = time.monotonic()
        section = self.recipe.optim
        ratio = learning_rate_ratio(self.step, section.updates, section.warmup_updates, section.lr_end_ratio)
        entry: dict[str, Any] = {"loss": 0.0}
        reason: str | None = "no answer was kept"
        if responses:
            entry = accumulate_gradients(
                self.params, self.reference, self.config, responses, self.recipe, banned=self.banned,
                ranks=self.ranks,
            )  # fmt: skip
            self._check_gap(entry["recorded_entropy_gap"])
            norms = self.optimizers.clip(section.grad_clip)
            entry |= {f"{group}_grad_norm": norm for group, norm in norms.items()}
            reason = why_unusable(entry["loss"], norms)
        self._count(reason, is_empty=not responses, report=report)
        self.coverages += [report["coverage"]] if "coverage" in report else []
        if reason is None:
            self.optimizers.step(ratio)
            self.policy_version += 1
            self._publish()
        else:
            self.optimizers.clear()
        self.step += 1
        self.num_rows += entry.get("num_rows", 0)
        self.num_generated_tokens += report.get("num_generated_tokens", 0)
        ended = time.monotonic()
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            **report,
            **entry,
            "lr": section.lr * ratio,
            **({} if reason is None else {"skipped": reason}),
            "num_skipped": self.num_skipped,
            "num_rows_total": self.num_rows,
            "num_generated_tokens_total": self.num_generated_tokens,
            "rollout_s": round(rolled_out - began, 3),
            "train_s": round(ended - rolled_out, 3),
        }

    def evaluate_if_due(self) -> bool:
        """Evaluate before the first update, every few ones and after the last, each time once; whether it did."""
        is_due = self.step % self.recipe.eval.every_updates == 0 or self.step == self.recipe.optim.updates
        if is_due := is_due and not self.evaluations.has(self.step):
            self.evaluate()
        return is_due

    def evaluate(self) -> None:
        """Measure the current weights on held-out problems, keep them if they are the best, stop on lost accuracy."""
        section = self.recipe.eval
        if self.recipe.rollout.policy == "start" or self.recipe.rollout.source == "gold":
            self._assign(self.pool.engines[:1])
        settings = [self._setting(text) for text in section.settings]
        began = time.monotonic()
        rows: list[dict[str, Any]] = []
        if self.ranks.is_main:
            rows = evaluate(self.pool.engines[0], held_out(self.mixture, section.problems), settings)["results"]
        rows = self.ranks.from_main(rows)
        if self.recipe.rollout.policy == "start":
            self._assign(self.pool.engines[:1], start=True)
        points = [(row["all"]["verified_rate"], row["all"]["tpf_total"]) for row in rows]
        found: dict[str, Any] = {
            row["setting"]: {
                "verified_rate": row["all"]["verified_rate"],
                "tpf_total": row["all"]["tpf_total"],
                "tpf_denoise": row["all"]["tpf_denoise"],
                "tasks": {task: summary["verified_rate"] for task, summary in row["tasks"].items()},
            }
            for row in rows
        }
        with uninterrupted():
            coverage = sum(self.coverages) / len(self.coverages) if self.coverages else None
            judged = self.evaluations.add(self.step, points, coverage)
            self.coverages = []
            stopped = self.evaluations.stop_reason
            self.log({
                "step": self.step, "eval": found, "matched_tpf": judged["matched_tpf"], "coverage": coverage,
                "is_alert": judged["is_alert"], "eval_s": round(time.monotonic() - began, 3),
                **({"stopped": stopped} if stopped else {}),
            })  # fmt: skip
            if self.evaluations.best is judged:
                self._write(self.path / "best")

    def save(self) -> None:
        """Write the state of this update; Ctrl-C waits for it. It passes through the memory of every process."""
        tensors = {f"param.{name}": whole(p.detach()) for name, p in self.trained.items()} | self.optimizers.tensors()
        extra = {name: getattr(self, name) for name in _COUNTERS} | {
            "start": self.fingerprint, "evaluations": self.evaluations.entries, "coverages": self.coverages,
        }  # fmt: skip
        if self.folder:
            with uninterrupted():
                self.folder.save_state(self.step, tensors, extra)

    def export(self) -> Path:
        """Write the newest weights to ``model``; the folder of the best ones."""
        self._write(self.path / "model")
        best = self.path / "best"
        return best if best.exists() else self.path / "model"

    def _responses(self) -> tuple[list[ReplayResponse], dict[str, Any]]:
        """What this update trains on, and the report of its rollouts."""
        recipe = self.recipe
        first = recipe.prompts.first_number + self.step * recipe.prompts.per_update
        numbers = range(first, first + recipe.prompts.per_update)
        if recipe.rollout.source == "gold":
            copies = recipe.keep.max_per_prompt or recipe.rollout.responses
            return self._gold(numbers, copies), {}
        problems = {number: self.mixture.problem(number, recipe.run.seed) for number in numbers}
        requests = [
            RolloutRequest(problem=problem, number=number, response_idx=r)
            for number, problem in problems.items()
            if number % self.ranks.size == self.ranks.rank
            for r in range(recipe.rollout.responses)
        ]
        version = 0 if recipe.rollout.policy == "start" else self.policy_version
        mine = judge(requests, self.pool.roll_out(requests, policy_version=version), recipe.keep)
        judged = [item for part in self.ranks.gathered(list(map(shared_part, mine))) for item in part]
        judged.sort(key=lambda item: (item.trajectory.number, item.trajectory.response_idx))
        kept = [item.trajectory for item in judged if item.dropped is None]
        if recipe.rollout.policy == "current" and any(t.policy_version != self.policy_version for t in kept):
            raise StaleRolloutError("a trajectory is of other weights than those being trained; discard it")
        responses = [replay_response(trajectory, recipe.loss) for trajectory in kept]
        report = rollout_report(judged, rho=recipe.loss.aec_rho)
        if recipe.keep.on_no_success == "gold":
            missing = sorted(set(numbers) - {trajectory.number for trajectory in kept})
            responses += self._gold(missing, 1)
            report["num_gold"] = len(missing)
        return responses, report

    def _gold(self, numbers: Sequence[int], copies: int) -> list[ReplayResponse]:
        assert self.gold is not None
        (noise, stop_id), seed = self.gold, self.recipe.run.seed
        examples = [encode_problem(self.codec, self.mixture.problem(n, seed), n, stop_id=stop_id) for n in numbers]
        responses = [
            gold_response(
                example, noise, seed=seed, response_idx=copy,
                states_per_block=1 + self.recipe.states.per_block,
            )
            for example in examples
            for copy in range(copies)
        ]  # fmt: skip
        if not self.recipe.rollout.use_residual:
            return responses
        return list(self_condition(self.params, self.config, responses, banned=self.banned))

    def _check_gap(self, gap: float | None) -> None:
        """Refuse to train on states that the decoder did not see, unless the recipe wants stale ones."""
        section = self.recipe.rollout
        if section.policy == "current" and gap is not None and gap > section.max_entropy_gap:
            raise StaleRolloutError(
                f"update {self.step + 1}: entropies of replayed states differ by {gap:.3g} of log V from those that "
                f"were recorded, above rollout.max_entropy_gap = {section.max_entropy_gap:g}; take rollout.dtype = "
                "'float32', or raise the key if rollouts may be that inexact"
            )

    def _count(self, reason: str | None, *, is_empty: bool, report: Mapping[str, Any]) -> None:
        """Count updates without a gradient, and end the run when there are too many in a row.

        Gold answers in the place of kept ones do not hide that nothing was kept; an update without any answer says
        nothing about divergence.
        """
        keep, section = self.recipe.keep, self.recipe.optim
        is_unverified = report.get("kept_share") == 0
        self.num_empty_in_a_row = self.num_empty_in_a_row + 1 if is_unverified else 0
        if not is_empty:
            self.num_skipped_in_a_row = 0 if reason is None else self.num_skipped_in_a_row + 1
        self.num_skipped += reason is not None
        if self.num_empty_in_a_row >= keep.max_empty_updates:
            raise NothingVerifiedError(
                f"update {self.step + 1}: none of {report.get('num_answers', 0)} answers was kept "
                f"({report.get('dropped', {})}); start from a model that solves some of these prompts, choose a more "
                "careful rollout.setting, or easier prompts.tasks"
            )
        if self.num_skipped_in_a_row >= section.max_skipped_updates:
            raise DivergedError(
                f"{self.num_skipped_in_a_row} updates in a row were skipped, update {self.step + 1} because {reason}; "
                "lower optim.lr"
            )

    def _open_pool(self) -> RolloutPool:
        section = self.recipe.rollout
        workers = section.workers or len(os.sched_getaffinity(0))
        if section.source == "gold":
            workers = 1  # for evaluation only
        with ExitStack() as opened:
            engines = [
                opened.enter_context(Engine.load(
                    self.start.folder, executor=section.executor, dtype=section.dtype, num_threads=1,
                    adapter=self.adapter,
                ))
                for _ in range(workers)
            ]  # fmt: skip
            config = DecodeConfig(**self._setting(section.setting).options)
            if section.source == "policy":
                self._check_decoder(engines[0].settings(config))
            pool = RolloutPool(engines, config, per_block=self.recipe.states.per_block, seed=self.recipe.run.seed)
            opened.pop_all()
        return pool

    def _check_decoder(self, settings: ResolvedDecode) -> None:
        """Refuse decoders whose answers all would be one, or whose text moves."""
        section = self.recipe.rollout
        assert self.config.diffusion is not None
        is_random = not settings.is_greedy or self.config.diffusion.noise == "uniform"
        if section.responses > 1 and not is_random:
            raise RecipeError(
                f"rollout.setting {section.setting!r} is greedy: {section.responses} answers of a mask model would be "
                "equal; set temperature above 0, or rollout.responses = 1"
            )
        if settings.commit_rule == "joint_threshold_indel":
            raise RecipeError(
                f"rollout.setting {section.setting!r} moves text between slots, so that final ids are no targets of "
                "earlier states; add commit_rule=joint_threshold"
            )

    def _setting(self, text: str) -> Setting:
        setting = Setting.parse(text)
        if self.recipe.rollout.use_residual:
            return setting
        return replace(setting, options={**setting.options, "use_residual": False})

    def _publish(self) -> None:
        """The engines get the weights of this version, unless the recipe wants stale rollouts."""
        if self.recipe.rollout.source == "policy" and self.recipe.rollout.policy == "current":
            self.pool.publish(_arrays(self._weights()), self.policy_version)

    def _assign(self, engines: Sequence[Engine], *, start: bool = False) -> None:
        """Give engines the weights for an evaluation, or the start model's back."""
        weights = self._weights(self.reference if start else None)
        for engine in engines:
            engine.assign(_arrays(weights))

    def _weights(self, params: ShardedParams | None = None) -> dict[str, Tensor]:
        """Plain weights of the model being trained, or of `params`; every process must ask."""
        return plain_weights(params or self.params, self.recipe.tune)

    def _write(self, folder: Path) -> None:
        tensors = self._weights()
        if self.ranks.is_main:
            save_checkpoint(
                folder, self.config, tensors, generation=self.start.generation, tokenizer_files=self.start.folder
            )

    def _restore(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        if extra["start"] != self.fingerprint:
            raise RunFolderError(
                f"the run in {self.path} began from other weights than {self.recipe.run.init} has now, and the "
                "anchor needs them; put them back, or take another --run-dir"
            )
        self.optimizers.restore(tensors)
        self.step = int(extra["step"])
        for name in _COUNTERS:
            setattr(self, name, int(extra[name]))
        self.evaluations = Evaluations(self.recipe.eval, extra["evaluations"])
        self.coverages = list(extra.get("coverages", []))  # absent from states of early versions
        self._publish()


_COUNTERS = (
    "policy_version", "num_rows", "num_generated_tokens", "num_skipped", "num_skipped_in_a_row", "num_empty_in_a_row",
)  # fmt: skip


def _arrays(params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Views of float32 parameters; nothing is copied."""
    return {name: tensor.detach().numpy() for name, tensor in params.items()}


def _fingerprint(params: Mapping[str, Tensor]) -> str:
    """A short hash of names, shapes and values."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(params):
        digest.update(f"{name}{tuple(params[name].shape)}".encode())
        digest.update(params[name].numpy().tobytes())
    return digest.hexdigest()
