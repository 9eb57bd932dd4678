"""On-Policy Residual Learning: one update per batch of fresh rollouts, then everything is thrown away.

An update: roll out answers with the current weights and the decoder that will be deployed (`orl.rollout`); verify and
choose (`orl.retain`); replay the chosen states with the residual they consumed (`orl.replay`); gated cross-entropy,
adjacent entropy contraction, anchor (`orl.losses`); one optimizer step; hand the weights to the engines, in memory.

Nothing random lives in torch: problems are numbered, decoding seeds, kept states and noise are functions of (seed,
number), so a killed run goes on exactly from parameters, optimizer state and a few integers.

Left out on purpose: several updates per rollout (off-policy: recorded entropies and residuals turn stale) and several
processes; the loss is normalised before packing, so ranks can share its micro-batches unchanged.

Source: ORL (arXiv 2610.20687, project page); the reconstruction is described in docs/design.md.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.decode.sampling import banned_ids
from dlmrt.types import DecodeConfig
from orl.data import Mixture, encode_problem, held_out
from orl.diagnostics import rollout_report
from orl.errors import DivergedError, NothingVerifiedError, RecipeError, RunFolderError, StaleRolloutError
from orl.evaluate import Setting, evaluate
from orl.frontier import matched_tpf
from orl.gold import gold_response, self_condition
from orl.interrupt import uninterrupted
from orl.losses import log_probs, state_losses
from orl.optimizers import PathwayOptimizers, learning_rate_ratio
from orl.packing import pack_shares
from orl.recipe import DataSection
from orl.replay import ReplayBatch, ReplayResponse, packed_logits, replay_response, state_weights
from orl.retain import judge
from orl.rollout import RolloutPool, RolloutRequest
from orl.run_folder import RunFolder
from orl.start import noise_of, restore_params
from orl.train_recipe import TrainRecipe

ARCHITECTURES = ("Qwen3ForCausalLM", "SDARForCausalLM")  # whose forward `orl.replay` runs


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
        DivergedError: too many updates in a row gave no usable gradient.
    """
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    with TrainRun(recipe, run_dir) as run:
        started = last_save = time.monotonic()
        first = run.step
        try:
            run.evaluate_if_due()
            while run.step < recipe.optim.updates and not run.stopped:
                with uninterrupted():
                    entry = run.update()
                    run.folder.log(entry)
                run.evaluate_if_due()
                is_last = run.step == recipe.optim.updates
                now = time.monotonic()
                if on_progress:
                    left_s = (recipe.optim.updates - run.step) * (now - started) / (run.step - first)
                    on_progress(UpdateProgress(
                        update=run.step, num_updates=recipe.optim.updates, loss=entry["loss"],
                        verified_rate=entry.get("verified_rate"), tpf_total=entry.get("tpf_total"), seconds_left=left_s,
                    ))  # fmt: skip
                is_late = stop_after_s is not None and now - started > stop_after_s
                if is_last or is_late or run.stopped or now - last_save > recipe.run.save_every_s:
                    run.save()
                    last_save = time.monotonic()
                if is_late:
                    break
        except KeyboardInterrupt:
            run.save()
            raise
        return run.export()


class TrainRun:
    """Everything that an update changes: parameters, optimizer state, counters; and how it is saved."""

    def __init__(self, recipe: TrainRecipe, run_dir: Path) -> None:
        self.recipe = recipe
        self.folder = RunFolder(run_dir)
        self.folder.check_recipe(recipe)
        self.start = open_checkpoint(resolve(recipe.run.init))
        self.config = self.start.config
        if self.config.architecture not in ARCHITECTURES or self.config.diffusion is None:
            raise RecipeError(
                f"run.init {recipe.run.init} is a {self.config.architecture}; training knows diffusion models of "
                f"{' and '.join(ARCHITECTURES)}"
            )
        self.reference = load_params(self.start, dtype="float32")
        self.params = {name: tensor.clone().requires_grad_() for name, tensor in self.reference.items()}
        self.fingerprint = _fingerprint(self.reference)
        self.optimizers = PathwayOptimizers(self.params, recipe.optim)
        prompts = recipe.prompts
        self.mixture = Mixture.of(DataSection(tasks=prompts.tasks, weights=prompts.weights))
        self.step = self.policy_version = self.num_rows = self.num_generated_tokens = 0
        self.num_skipped = self.num_skipped_in_a_row = self.num_empty_in_a_row = 0
        self.evaluations: list[dict[str, Any]] = []
        self.stopped = ""  # why the run ended before its last update
        self.pool = self._open_pool()
        self.codec = self.pool.engines[0].tokenizer
        self.noise = noise_of(self.config, self.codec)
        self.banned = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        self.banned[torch.from_numpy(banned_ids(self.pool.engines[0].config, self.codec.known_ids)).long()] = True
        saved = self.folder.load_state()
        if saved is not None:
            self._restore(*saved)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, trace)

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
            entry = self._accumulate(responses)
            norms = self.optimizers.clip(section.grad_clip)
            entry |= {f"{group}_grad_norm": norm for group, norm in norms.items()}
            reason = _unusable(entry["loss"], norms)
        self._count(reason, is_empty=not responses, report=report)
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

    def evaluate_if_due(self) -> None:
        """Evaluate before the first update, every few ones and after the last, each time once."""
        is_due = self.step % self.recipe.eval.every_updates == 0 or self.step == self.recipe.optim.updates
        if is_due and (not self.evaluations or self.evaluations[-1]["step"] != self.step):
            self.evaluate()

    def evaluate(self) -> None:
        """Measure the current weights on held-out problems, keep them if they are the best, stop on lost accuracy."""
        section = self.recipe.eval
        if self.recipe.rollout.policy == "start" or self.recipe.rollout.source == "gold":
            self._assign(self.pool.engines[:1])
        settings = [self._setting(text) for text in section.settings]
        began = time.monotonic()
        rows = evaluate(self.pool.engines[0], held_out(self.mixture, section.problems), settings)["results"]
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
        start = self.evaluations[0]["points"] if self.evaluations else points
        best_at_start = max(accuracy for accuracy, _ in start)
        matched = matched_tpf(points, best_at_start - section.accuracy_slack)
        is_alert = max(accuracy for accuracy, _ in points) < best_at_start - section.max_accuracy_loss
        self.evaluations.append({"step": self.step, "points": points, "matched_tpf": matched, "is_alert": is_alert})
        recent = self.evaluations[-section.patience :]
        if len(recent) == section.patience and all(item["is_alert"] for item in recent):
            self.stopped = f"accuracy stayed more than {section.max_accuracy_loss} below the start model's"
        self.folder.log({
            "step": self.step, "eval": found, "matched_tpf": matched, "is_alert": is_alert,
            "eval_s": round(time.monotonic() - began, 3), **({"stopped": self.stopped} if self.stopped else {}),
        })  # fmt: skip
        if self.best is self.evaluations[-1]:
            self._write(self.folder.path / "best")

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The evaluation with the most tokens per forward at matched accuracy; the earliest of equals."""
        reaching = [item for item in self.evaluations if item["matched_tpf"] is not None]
        return max(reaching, key=lambda item: item["matched_tpf"], default=None)

    def save(self) -> None:
        """Write the state of this update; Ctrl-C waits for it."""
        tensors = {f"param.{name}": tensor.detach() for name, tensor in self.params.items()} | self.optimizers.tensors()
        extra = {name: getattr(self, name) for name in _COUNTERS} | {
            "start": self.fingerprint, "evaluations": self.evaluations, "stopped": self.stopped,
        }  # fmt: skip
        with uninterrupted():
            self.folder.save_state(self.step, tensors, extra)

    def export(self) -> Path:
        """Write the newest weights to ``model``; the folder of the best ones."""
        self._write(self.folder.path / "model")
        best = self.folder.path / "best"
        return best if best.exists() else self.folder.path / "model"

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
            for r in range(recipe.rollout.responses)
        ]
        version = 0 if recipe.rollout.policy == "start" else self.policy_version
        judged = judge(requests, self.pool.roll_out(requests, policy_version=version), recipe.keep)
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
        seed = self.recipe.run.seed
        examples = [encode_problem(self.codec, self.mixture.problem(n, seed), n) for n in numbers]
        responses = [
            gold_response(
                example, self.noise, seed=seed, response_idx=copy,
                states_per_block=1 + self.recipe.states.per_block, policy_version=self.policy_version,
            )
            for example in examples
            for copy in range(copies)
        ]  # fmt: skip
        if not self.recipe.rollout.use_residual:
            return responses
        return list(self_condition(self.params, self.config, responses, banned=self.banned))

    def _accumulate(self, responses: Sequence[ReplayResponse]) -> dict[str, Any]:
        """Add up the gradients of all micro-batches; what they say."""
        recipe = self.recipe
        assert self.config.diffusion is not None
        length = self.config.diffusion.canvas_length
        weights = state_weights(responses, recipe.states.norm)
        bins = pack_shares(
            [len(response.clean_S) for response in responses], [len(response.states) for response in responses],
            canvas_length=length, budget=recipe.optim.rows_per_micro,
        )  # fmt: skip
        sums = {"loss": 0.0, "ce": 0.0, "aec": 0.0, "kl": 0.0}
        gaps, num_rows = [], 0
        for shares in bins:
            batch = ReplayBatch(responses, weights, shares, self.config)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.run.dtype == "bfloat16"):
                reference = None
                if recipe.loss.kl_weight:
                    with torch.no_grad():
                        reference = log_probs(packed_logits(self.reference, batch), self.banned)
                logits = packed_logits(self.params, batch)
                losses = state_losses(logits, batch, recipe.loss, banned=self.banned, reference_RV=reference)
            torch.autograd.backward(losses.loss)
            sums["loss"] += float(losses.loss.detach())
            for name, value in losses.sums(batch.weight_S).items():
                sums[name] += value
            gaps.append(losses.recorded_gap(batch, math.log(self._num_ids)))
            num_rows += batch.num_rows
        return {
            **sums,
            "aec_strength": 2 * recipe.loss.aec_weight * math.sqrt(max(0.0, sums["aec"])) / math.log(self._num_ids),
            "recorded_entropy_gap": float(np.nanmean(gaps)) if not all(map(math.isnan, gaps)) else None,
            "num_states": sum(len(response.states) for response in responses),
            "num_rows": num_rows,
            "num_micro": len(bins),
        }

    @property
    def _num_ids(self) -> int:
        return int((~self.banned).sum())

    def _count(self, reason: str | None, *, is_empty: bool, report: Mapping[str, Any]) -> None:
        """Count updates without a gradient, and end the run when there are too many in a row."""
        keep, section = self.recipe.keep, self.recipe.optim
        self.num_empty_in_a_row = self.num_empty_in_a_row + 1 if is_empty else 0
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
        engines = [
            Engine.load(self.start.folder, executor=section.executor, dtype=section.dtype, num_threads=1)
            for _ in range(workers)
        ]
        config = DecodeConfig(**self._setting(section.setting).options)
        settings = engines[0].settings(config)
        assert self.config.diffusion is not None
        if section.source == "policy" and section.responses > 1 and settings.is_greedy:
            if self.config.diffusion.noise == "mask":
                raise RecipeError(
                    f"rollout.setting {section.setting!r} is greedy: {section.responses} answers of a mask model would "
                    "be equal; set temperature above 0, or rollout.responses = 1"
                )
        return RolloutPool(engines, config, per_block=self.recipe.states.per_block, seed=self.recipe.run.seed)

    def _setting(self, text: str) -> Setting:
        setting = Setting.parse(text)
        if self.recipe.rollout.use_residual:
            return setting
        return replace(setting, options={**setting.options, "use_residual": False})

    def _publish(self) -> None:
        """The engines get the weights of this version, unless the recipe wants stale rollouts."""
        if self.recipe.rollout.source == "policy" and self.recipe.rollout.policy == "current":
            self.pool.publish(_arrays(self.params), self.policy_version)

    def _assign(self, engines: Sequence[Engine], *, start: bool = False) -> None:
        """Give engines the weights for an evaluation, or the start model's back."""
        for engine in engines:
            engine.assign(_arrays(self.reference if start else self.params))

    def _write(self, folder: Path) -> None:
        tensors = {name: tensor.detach() for name, tensor in self.params.items()}
        save_checkpoint(
            folder, self.config, tensors, generation=self.start.generation, tokenizer_files=self.start.folder
        )

    def _restore(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        restore_params(self.params, tensors, self.folder.states)
        if extra["start"] != self.fingerprint:
            raise RunFolderError(
                f"the run in {self.folder.path} began from other weights than {self.recipe.run.init} has now, and the "
                "anchor needs them; put them back, or take another --run-dir"
            )
        self.optimizers.restore(tensors)
        self.step = int(extra["step"])
        for name in _COUNTERS:
            setattr(self, name, int(extra[name]))
        self.evaluations, self.stopped = list(extra["evaluations"]), str(extra["stopped"])
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


def _unusable(loss: float, norms: Mapping[str, float]) -> str | None:
    """Why an update's gradient cannot be used, None if it can."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if not all(map(math.isfinite, norms.values())):
        return "the gradient is not finite"
    return None
