"""The recipe of `orl train`: every number of On-Policy Residual Learning, one section a stage.

Defaults are for models of 1-100 M parameters. Arms of a comparison are settings of one recipe: `gold` states instead of
rollouts, `aec.weight = 0`, `rollout.policy = "start"`, `rollout.use_residual = false`.

Source: ours; the method is arXiv 2610.20687, whose values for these keys are not published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from orl.errors import RecipeError
from orl.precision import ComputeType
from orl.recipe import check_range, refuse_change
from orl.trackers import TrackerName


@dataclass(frozen=True, kw_only=True)
class PromptSection:
    """Which prompts an update rolls out; problem numbers go up and never repeat."""

    tasks: tuple[str, ...] = ()  # names of orl.tasks; empty: all
    weights: tuple[float, ...] = ()  # share of each task, same order; empty: equal
    wordings: Literal["one", "many"] = "one"  # of gold workings, where they are used; see orl.tasks.wordings
    per_update: int = 16
    first_number: int = 1_000_000  # in the stream of problems, past those of pre-training

    def __post_init__(self) -> None:
        check_range(self, "per_update", 1)
        check_range(self, "first_number", 0)


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """How answers are made: the decoder that will be deployed, with the weights of this update."""

    source: Literal["policy", "gold"] = "policy"  # gold: no rollout; states are gold answers with random corruption
    policy: Literal["current", "start"] = "current"  # start: stale rollouts, the start model's for ever
    responses: int = 8  # per prompt
    setting: str = "threshold=0.9,temperature=1"  # decode settings, as of `orl evaluate --setting`
    use_residual: bool = True  # False: roll out, train and evaluate without the residual
    executor: Literal["auto", "cpu", "eager"] = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    workers: int = 0  # engines of one thread each; 0: one a core
    # Most that entropies of replayed states may differ from those that the decoder recorded, in the mean over open
    # slots and as a share of log V; above it rollouts are stale or inexact, which ends the run.
    max_entropy_gap: float = 0.02

    def __post_init__(self) -> None:
        check_range(self, "max_entropy_gap", 0)
        check_range(self, "responses", 1)
        check_range(self, "workers", 0)


@dataclass(frozen=True, kw_only=True)
class KeepSection:
    """Which answers train: verified ones that pass the filters."""

    max_per_prompt: int = 4  # the first distinct ones; 0: all
    max_repeated_share: float = 0.5  # answers with a larger share of repeated 4-grams are dropped
    on_no_success: Literal["skip", "gold"] = "skip"  # prompt without a kept answer: left out, or its gold answer
    max_empty_updates: int = 1  # updates in a row without any kept answer, gold ones apart, that end the run

    def __post_init__(self) -> None:
        check_range(self, "max_per_prompt", 0)
        check_range(self, "max_empty_updates", 1)
        check_range(self, "max_repeated_share", 0, 1)


@dataclass(frozen=True, kw_only=True)
class StatesSection:
    """Which states of a kept answer are replayed: step 0 of every block and `per_block` later ones."""

    per_block: int = 4
    norm: Literal["response", "prompt"] = "response"  # weights: equal per answer, or per prompt with a kept one

    def __post_init__(self) -> None:
        check_range(self, "per_block", 0)


@dataclass(frozen=True, kw_only=True)
class LossSection:
    """Gated cross-entropy + `aec_weight` x adjacent entropy contraction + `kl_weight` x capped reverse KL.

    Gates read the recorded statistics, never the model being trained: slots would leak out of the anchor.
    """

    gate: Literal["quantile", "entropy", "all"] = "quantile"  # unresolved slots that get cross-entropy
    gate_level: float = 0.5  # quantile: share of the slots, most uncertain first; entropy: nats
    aec: Literal["hinge_mean", "hinge_token", "log_ratio", "cap", "minent"] = "hinge_mean"  # orl.losses; Eq. 2
    aec_weight: float = 5.0
    aec_rho: float = 0.25  # share by which entropy is to fall from step to step
    kl_weight: float = 0.1
    kl_cap: float = 1.0  # nats a slot

    def __post_init__(self) -> None:
        check_range(self, "aec_rho", 0, 1)
        check_range(self, "gate_level", 0, 1 if self.gate == "quantile" else math.inf)
        if self.aec == "log_ratio" and self.aec_rho == 1:
            raise RecipeError("aec_rho is 1, which asks log_ratio for an infinite contraction; lower it")
        check_range(self, "aec_weight kl_weight kl_cap", 0)
        if self.gate == "all":
            refuse_change(self, "gate_level", "gate is 'all'")
        if not self.kl_weight:
            refuse_change(self, "kl_cap", "kl_weight is 0")
        if self.aec in ("cap", "minent"):
            refuse_change(self, "aec_rho", f"aec is {self.aec!r}")


@dataclass(frozen=True, kw_only=True)
class UpdateSection:
    """AdamW in two groups, each clipped by itself: the backbone, and the residual pathway."""

    updates: int = 200
    lr: float = 1e-4
    residual_lr_ratio: float = 1.0  # learning rate of the residual pathway over `lr`
    lr_end_ratio: float = 0.1
    warmup_updates: int = 5
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    rows_per_micro: int = 4096  # packed rows of one forward; the gradients of an update are added up
    max_skipped_updates: int = 5  # in a row without a usable gradient that end the run

    def __post_init__(self) -> None:
        check_range(self, "updates rows_per_micro max_skipped_updates", 1)
        check_range(self, "lr residual_lr_ratio warmup_updates weight_decay", 0)
        check_range(self, "lr_end_ratio", 0, 1)
        check_range(self, "grad_clip", 1e-9)


@dataclass(frozen=True, kw_only=True)
class TuneSection:
    """Which parameters train, and what their backward keeps. The residual adapter always trains."""

    what: Literal["full", "lora", "adapter"] = "full"  # all but routers; low-rank factors; the adapter alone
    lora_rank: int = 32
    lora_alpha: float = 64.0  # scale of the factors' product: alpha / rank
    new_adapter_width: int = 0  # of a fresh adapter for a start model that has none; 0: the start model's own
    checkpoint_layers: bool = False  # keep a layer's input alone and compute the layer again in backward

    def __post_init__(self) -> None:
        check_range(self, "lora_rank", 1)
        check_range(self, "lora_alpha new_adapter_width", 0)

    @property
    def lora_scale(self) -> float:
        """Factor of the low-rank product."""
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Evaluation on held-out problems under several settings: what the best checkpoint is chosen by."""

    every_updates: int = 25
    problems: int = 8  # per task
    settings: tuple[str, ...] = ("threshold=0.99", "threshold=0.9", "threshold=0.7")  # as of `orl evaluate`
    accuracy_slack: float = 0.005  # matched accuracy: the start model's best less this
    max_accuracy_loss: float = 0.02  # below the start model's best at every setting: an alert
    max_coverage_loss: float = 0.1  # of the share of prompts with a kept answer, against the first updates': an alert
    patience: int = 3  # alerts in a row that end the run

    def __post_init__(self) -> None:
        check_range(self, "every_updates problems patience", 1)
        check_range(self, "accuracy_slack max_accuracy_loss max_coverage_loss", 0, 1)
        if not self.settings:
            raise RecipeError("settings is empty; give at least one decode setting")


@dataclass(frozen=True, kw_only=True)
class TrainRunSection:
    """Where and how the run lives."""

    init: str = "dlmrt-tiny"  # the start model: name, folder or hub id
    seed: int = 0
    dtype: ComputeType = "auto"  # of forwards; auto: bfloat16 where the hardware multiplies it, else float32
    attention: Literal["auto", "enumerated", "flex", "triton"] = "auto"  # of replay; auto: triton on a GPU
    num_threads: int = 0  # of torch; 0: its choice
    save_every_s: float = 120.0
    tracker: TrackerName = "none"  # also tensorboard, trackio or wandb, each with its own package

    def __post_init__(self) -> None:
        check_range(self, "seed num_threads save_every_s", 0)


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """A whole run of On-Policy Residual Learning."""

    prompts: PromptSection = field(default_factory=PromptSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    keep: KeepSection = field(default_factory=KeepSection)
    states: StatesSection = field(default_factory=StatesSection)
    loss: LossSection = field(default_factory=LossSection)
    optim: UpdateSection = field(default_factory=UpdateSection)
    tune: TuneSection = field(default_factory=TuneSection)
    eval: EvalSection = field(default_factory=EvalSection)
    run: TrainRunSection = field(default_factory=TrainRunSection)
