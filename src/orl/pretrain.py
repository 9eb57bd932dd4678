"""Pre-training of a small diffusion language model (or its auto-regressive twin) on verifiable tasks.

One loop: take packed sequences, forward with the eager operations (`orl.objective`), weighted cross-entropy, Muon and
AdamW (`orl.optimizers`), cosine schedule.

Nothing random lives in torch: data and noise are functions of (seed, number), the self-conditioning coin of (seed,
step), so a killed run resumes exactly from parameters, optimizer state and a few integers.

Under torchrun several processes share every step (`orl.ranks`, `orl.shard`): each holds a part of the parameters and
runs a part of the micro-batches; loss, gradients and tokens are those of one process.

Source: ours; sources of the parts are named in their modules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.sampling import banned_ids
from dlmrt.models import qwen3
from dlmrt.models.config import ModelConfig
from orl.data import PackedStream
from orl.errors import DivergedError
from orl.interrupt import uninterrupted
from orl.objective import Batch, batch_loss
from orl.optimizers import Optimizers, learning_rate_ratio, why_unusable
from orl.packing import COIN_STREAM, Rows, generator
from orl.precision import autocast
from orl.ranks import TrainRanks, joined
from orl.recipe import PretrainRecipe
from orl.run_folder import FolderRun
from orl.shard import ShardedParams, run_with, whole
from orl.start import init_params, load_init, model_config, noise_of, open_tokenizer, restore_params

Evaluate = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a step reports."""

    step: int
    num_steps: int
    loss: float
    rows_per_s: float  # packed rows, padding included, of this step
    seconds_left: float  # training alone, at the pace of this process so far


def pretrain(
    recipe: PretrainRecipe, run_dir: Path, *, evaluate: Evaluate | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop_after_s: float | None = None,
) -> Path:  # fmt: skip
    """Run (or resume) the recipe in `run_dir`; return the folder of the newest checkpoint.

    Ctrl-C saves the state of the last whole step and raises KeyboardInterrupt; another call goes on from there.

    Args:
        evaluate: called every `run.eval_every_steps` with the folder of the current checkpoint; its dict goes into
            metrics.jsonl.
        stop_after_s: save and return early after this many seconds (another call goes on).

    Raises:
        RunFolderError: the folder belongs to another recipe or its state to another model.
        RecipeError: values of the recipe contradict each other or its checkpoint.
        DivergedError: too many steps in a row gave no usable gradient.
    """
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    with joined() as ranks, Run(recipe, run_dir, ranks) as run:
        return _pretrain(run, evaluate, on_progress if ranks.is_main else None, stop_after_s)


def _pretrain(
    run: Run, evaluate: Evaluate | None, on_progress: Callable[[Progress], None] | None, stop_after_s: float | None
) -> Path:
    recipe, ranks = run.recipe, run.ranks
    num_steps, started = recipe.optim.steps, time.monotonic()
    first_step, last_save, spent_s = run.step, started, 0.0
    try:
        if run.evaluate_if_due(evaluate):  # the one that the call before was interrupted in
            run.save()
        while run.step < num_steps:
            with uninterrupted():
                entry = run.train_step()
                run.log(entry)
            spent_s += recipe.optim.bins_per_step * recipe.data.pack_tokens / entry["rows_per_s"]
            if on_progress:
                left_s = (num_steps - run.step) * spent_s / (run.step - first_step)
                on_progress(Progress(step=run.step, num_steps=num_steps, loss=entry["loss"],
                                     rows_per_s=entry["rows_per_s"], seconds_left=left_s))  # fmt: skip
            run.evaluate_if_due(evaluate)
            is_last = run.step == num_steps
            now = time.monotonic()
            is_late = stop_after_s is not None and now - started > stop_after_s
            # The clocks of several processes differ, and saving takes all of them.
            is_late, is_due = ranks.from_main((is_late, now - last_save > recipe.run.save_every_s))
            if is_last or is_late or is_due:
                run.save()
                last_save = time.monotonic()
            if is_late:
                break
    except KeyboardInterrupt:
        if ranks.size == 1:  # several may be a step apart: their last common state stands
            run.save()
        raise
    return run.export()


class Run(FolderRun[PretrainRecipe]):
    """Everything that a step changes: parameters, optimizers, stream, counters; and how it is saved."""

    def _set_up(self, ranks: TrainRanks, opened: ExitStack) -> None:
        recipe, run_dir = self.recipe, self.path
        if ranks.is_main:
            self.codec = open_tokenizer(recipe, run_dir / "tokenizer")
        ranks.wait()
        if not ranks.is_main:
            self.codec = open_tokenizer(recipe, run_dir / "tokenizer")
        self.config = model_config(recipe, self.codec)
        params = init_params(self.config, recipe.run.seed)
        self.step = self.evaluated_step = self.num_rows = 0
        self.num_skipped, self.num_skipped_in_a_row = 0, 0
        saved = ranks.from_main(self.folder.load_state() if self.folder else None)
        if self.folder:
            self.folder.watch(recipe, 0 if saved is None else int(saved[1]["step"]))
        if saved is not None:
            restore_params(params, saved[0], run_dir)
        elif recipe.run.init:
            load_init(params, self.config, recipe.run.init)
        self.params = ShardedParams({name: tensor.to(ranks.device) for name, tensor in params.items()})
        self.optimizers = Optimizers(self.params.parameters(), recipe.optim, dtype=recipe.run.dtype)
        self.banned = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=ranks.device)
        self.banned[torch.from_numpy(banned_ids(self.config, self.codec.known_ids)).long()] = True
        noise = noise_of(self.config, self.codec)
        self.stream = PackedStream(recipe.data, recipe.objective, noise, self.codec, recipe.run.seed)
        if saved is not None:
            self._restore(*saved)

    def train_step(self) -> dict[str, Any]:
        """Take one step and return its line of metrics.

        Raises:
            DivergedError: it was the last of `optim.max_skipped_steps` in a row without a usable gradient.
        """
        section, began = self.recipe.optim, time.monotonic()
        bins = self.stream.take(section.bins_per_step)
        entry = step_gradients(
            self.params, self.config, self.recipe, bins, self.step, self.ranks, banned=self.banned
        )  # fmt: skip
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.params.parameters().values(), section.grad_clip)))
        ratio = learning_rate_ratio(self.step, section.steps, section.warmup_steps, section.lr_end_ratio)
        has_targets = bool(entry["denominator"])
        reason = why_unusable(entry["loss"], {"grad": norm}) if has_targets else "no row has a target"
        if reason is None:
            self.optimizers.step(ratio)
            self.num_skipped_in_a_row = 0
        else:
            self.optimizers.clear()
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
            if self.num_skipped_in_a_row >= section.max_skipped_steps:
                raise DivergedError(
                    f"{self.num_skipped_in_a_row} steps in a row were skipped, step {self.step + 1} because {reason}; "
                    "lower optim.muon_lr and optim.adamw_lr, or check the data"
                )
        num_rows = section.bins_per_step * self.recipe.data.pack_tokens
        self.step += 1
        self.num_rows += num_rows
        numbers = np.unique(np.concatenate([rows.problem for rows in bins]))
        return {
            "step": self.step,
            **entry,
            "grad_norm": norm,
            **{f"{name}_lr": base * ratio for name, base in self.optimizers.base_lr.items()},
            **({} if reason is None else {"skipped": reason}),
            "num_skipped": self.num_skipped,
            "num_left_out": self.stream.num_left_out,
            "problems": numbers[numbers >= 0].tolist(),
            "num_rows": self.num_rows,
            "rows_per_s": round(num_rows / max(1e-9, time.monotonic() - began), 1),
        }

    def evaluate_if_due(self, evaluate: Evaluate | None) -> bool:
        """Evaluate every few steps and after the last, each time once; whether it did."""
        section = self.recipe
        is_due = self.step % section.run.eval_every_steps == 0 or self.step == section.optim.steps
        if evaluate is None or not is_due or self.evaluated_step == self.step:
            return False
        folder = self.export()
        found = evaluate(folder) if self.ranks.is_main else None
        with uninterrupted():
            self.log({"step": self.step, "eval": found})
            self.evaluated_step = self.step
        return True

    def save(self) -> None:
        """Write the state of this step; Ctrl-C waits for it. It passes through the memory of every process."""
        tensors = {f"param.{name}": tensor for name, tensor in self._whole().items()} | self.optimizers.tensors()
        counters = {name: getattr(self, name) for name in _COUNTERS}
        if self.folder:
            with uninterrupted():
                self.folder.save_state(self.step, tensors, {"stream": self.stream.state(), **counters})

    def export(self) -> Path:
        """Write the checkpoint of this step and return its folder."""
        target, tensors = self.path / "model", self._whole()
        if self.ranks.is_main:
            save_checkpoint(target, self.config, tensors, tokenizer_files=self.path / "tokenizer")
        return target

    def _whole(self) -> dict[str, Tensor]:
        return {name: whole(tensor.detach()).cpu() for name, tensor in self.params.parameters().items()}

    def _restore(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        self.optimizers.restore(tensors)
        self.stream.restore(extra["stream"])
        self.step, self.num_rows = int(extra["step"]), int(extra["num_rows"])
        # Absent from states of early versions.
        self.num_skipped = int(extra.get("num_skipped", 0))
        self.num_skipped_in_a_row = int(extra.get("num_skipped_in_a_row", 0))
        self.evaluated_step = int(extra.get("evaluated_step", self.step))


_COUNTERS = ("num_rows", "num_skipped", "num_skipped_in_a_row", "evaluated_step")


def step_gradients(
    params: Mapping[str, Tensor], config: ModelConfig, recipe: PretrainRecipe, bins: Sequence[Rows], step: int,
    ranks: TrainRanks | None = None, *, banned: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add up the gradients of one step's micro-batches; the denominator is the whole step's.

    Several processes take the micro-batches in turns, those with a first pass apart from the others.
    """
    section, objective, ranks = recipe.optim, recipe.objective, ranks or TrainRanks()
    denominator = float(sum(rows.weights.sum(dtype=np.float64) for rows in bins))
    coins = generator(recipe.run.seed, step, COIN_STREAM).random(len(bins))
    use_z = qwen3.has_residual(config)
    micros = [
        (use_z and bool(coins[first] < objective.self_conditioning_p), bins[first : first + section.bins_per_micro])
        for first in range(0, len(bins), section.bins_per_micro)
    ]
    if ranks.size > 1:
        micros.sort(key=lambda micro: micro[0])
    total, reports = 0.0, []
    for number, ((self_condition, rows), is_own) in enumerate(ranks.rounds(micros)):
        batch = Batch(rows, device=ranks.device)
        if not is_own:
            batch.weights.zero_()
        dealt = micros[number * ranks.size : (number + 1) * ranks.size]

        def loss_of(
            params: Mapping[str, Tensor], batch: Batch = batch, self_condition: bool = self_condition,
            run_first_pass: bool = any(micro[0] for micro in dealt),
        ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
            return batch_loss(
                params, config, batch, self_condition=self_condition, denominator=denominator,
                run_first_pass=run_first_pass, banned=banned,
            )  # fmt: skip

        with autocast(recipe.run.dtype, ranks.device):
            loss, report = run_with(params, loss_of)
        torch.autograd.backward(loss)
        total += float(loss.detach())
        reports += [report] if is_own else []
    parts = ranks.gathered((total, reports))
    reports = [report for _, part in parts for report in part]
    means = {}
    for key in reports[0]:
        known = [report[key] for report in reports if not math.isnan(report[key])]
        if known:
            means[key] = float(np.mean(known))
    return {"loss": sum(part for part, _ in parts), "denominator": denominator, **means}
