"""Precedence, ranges and refusals of decode settings."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from dlmrt.decode.settings import RULE_FIELDS, resolve, with_overrides
from dlmrt.errors import CheckpointError, UnknownOptionError, UsageError
from dlmrt.testing import END, END_OF_TEXT, MASK, tiny_config
from dlmrt.types import DecodeConfig

MASKED = tiny_config()
INDEL = tiny_config(diffusion={"delete_token_id": 1, "split_token_id": 2})
UNIFORM = tiny_config(diffusion={"noise": "uniform", "commit_rule": "entropy_bound"})
FILE = {
    "max_new_tokens": 16, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [7, END],
    "transformers_version": "5.24.0", "diffusion": {"commit_rule": "threshold", "threshold": 0.8},
}  # fmt: skip


def test_built_in_defaults() -> None:
    plain = resolve(DecodeConfig(), MASKED, {})
    assert (plain.commit_rule, plain.threshold, plain.min_commit, plain.max_denoising_steps) == ("threshold", 0.9, 1, 8)
    assert (plain.temperature, plain.max_tokens, plain.seed) == (0.0, 1024, 0)
    joint = resolve(DecodeConfig(commit_rule="joint_threshold"), MASKED, {})
    assert (joint.threshold, joint.edit_threshold, joint.max_post_edit_steps) == (0.95, 0.9, 16)
    assert joint.max_denoising_steps == 8 + 16
    bound = resolve(DecodeConfig(), UNIFORM, {})
    assert (bound.entropy_bound, bound.t_min, bound.t_max, bound.stop_entropy) == (0.1, 0.4, 0.8, 0.005)
    assert (bound.stability_threshold, bound.max_denoising_steps, bound.temperature) == (1, 48, 1.0)
    assert resolve(DecodeConfig(commit_rule="steps"), MASKED, {}).max_denoising_steps == 8


def test_none_means_not_given_for_every_field() -> None:
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(DecodeConfig)), None)
    assert resolve(DecodeConfig(**nothing), MASKED, {}) == resolve(DecodeConfig(), MASKED, {})


def test_numpy_numbers_are_numbers() -> None:
    """What callers compute goes into records as Python's own numbers."""
    plain: dict[str, Any] = {"seed": 2**64 - 1, "threshold": 0.5, "stop_token_ids": (7,), "ignore_eos": True}
    numbers = {"seed": np.uint64(2**64 - 1), "threshold": np.float32(0.5), "stop_token_ids": (np.int64(7),),
               "ignore_eos": np.bool_(True)}  # fmt: skip
    given = resolve(DecodeConfig(**numbers), MASKED, {})
    assert given == resolve(DecodeConfig(**plain), MASKED, {})
    assert json.loads(json.dumps(given.as_dict()))["seed"] == 2**64 - 1


def test_overriding_one_value_keeps_the_others() -> None:
    """K69, K23: request > generation_config.json > built-in, value by value; effective settings can be printed."""
    from_file = resolve(DecodeConfig(seed=1), MASKED, FILE)
    assert (from_file.max_tokens, from_file.temperature, from_file.top_k, from_file.top_p) == (16, 0.6, 20, 0.95)
    assert from_file.threshold == 0.8 and from_file.eos_token_ids == {7, END, END_OF_TEXT}
    lifted = resolve(DecodeConfig(seed=1, max_tokens=100), MASKED, FILE)
    assert dataclasses.replace(lifted, max_tokens=16) == from_file
    other_rule = resolve(DecodeConfig(seed=1, commit_rule="steps"), MASKED, FILE)
    assert other_rule.top_k == 20 and "threshold" not in other_rule.as_dict()
    assert from_file.as_dict()["threshold"] == 0.8 and from_file.as_dict()["eos_token_ids"] == [7, END, END_OF_TEXT]


def test_upstream_spellings_of_the_file() -> None:
    gemma = {
        "max_denoising_steps": 12, "t_min": 0.1, "t_max": 0.2, "sampler_config": {"entropy_bound": 0.3},
        "stability_threshold": 2, "confidence_threshold": 0.01, "max_new_tokens": None,
    }  # fmt: skip
    bound = resolve(DecodeConfig(), UNIFORM, gemma)
    assert (bound.max_denoising_steps, bound.t_min, bound.t_max, bound.entropy_bound) == (12, 0.1, 0.2, 0.3)
    assert (bound.stability_threshold, bound.stop_entropy, bound.max_tokens) == (2, 0.01, 1024)
    assert resolve(DecodeConfig(), MASKED, {"confidence_threshold": 0.7}).threshold == 0.7
    greedy = resolve(DecodeConfig(), MASKED, {"do_sample": False, "temperature": 0.6, "top_k": 20})
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)


VALUES = {
    "threshold": 0.5, "edit_threshold": 0.5, "max_post_edit_steps": 3, "min_commit": 2, "max_denoising_steps": 5,
    "entropy_bound": 0.5, "t_min": 0.5, "t_max": 0.9, "stop_entropy": 0.5, "stability_threshold": 2,
}  # fmt: skip


@pytest.mark.parametrize("rule", RULE_FIELDS)
@pytest.mark.parametrize("field", VALUES)
def test_a_field_without_effect_is_refused(rule: str, field: str) -> None:
    """K70"""
    config = DecodeConfig(commit_rule=rule, **{field: VALUES[field]})
    if field in RULE_FIELDS[rule]:
        assert getattr(resolve(config, INDEL, {}), field) == getattr(config, field)
        return
    with pytest.raises(UsageError, match=f"{field} has no effect"):
        resolve(config, INDEL, {})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("threshold", [-0.1, 1.5, math.nan, "0.5", True]),
        ("canvas_length", [0, -1, 10**9, 4.0, True]),
        ("max_denoising_steps", [0, -3, 2.5]),
        ("min_commit", [0, 9]),
        ("temperature", [-1, math.nan, math.inf, 1e-9]),
        ("top_k", [-1, 1.5]),
        ("top_p", [0, -0.5, 1.01, math.nan]),
        ("min_p", [-0.1, 2]),
        ("seed", [-1, 2**64, 1.0]),
        ("max_tokens", [0, -1, "5", 1.0]),
        ("seed", [10**5000, "7", True]),
        ("entropy_bound", [math.inf, 10**5000]),
        ("commit_rule", ["treshold", 3, [], ["threshold"], {}]),
        ("stop_token_ids", [(-1,), (10**6,), (True,), 5, b"x", "7", (MASK,), ([1],)]),
        ("stop", [("",), (3,), "", 5, {"a"}, "\ud800", "a\udcffb"]),
        ("ignore_eos", ["false", 0, 1, []]),
        ("use_residual", ["", 1, math.nan]),
    ],
)
def test_nonsense_is_refused_by_name(field: str, values: list[Any]) -> None:
    """K70, K46"""
    for value in values:
        with pytest.raises(UsageError, match=field):
            resolve(DecodeConfig(**{field: value}), MASKED, {})


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (DecodeConfig(commit_rule="entropy_bound", t_min=0.9, t_max=0.5), "t_min"),
        (DecodeConfig(commit_rule="steps", max_denoising_steps=9), "max_denoising_steps"),
        (DecodeConfig(noise_seed=1), "noise_seed"),
        (DecodeConfig(commit_rule="threshold", edit_threshold=0.5), "joint_threshold"),
    ],
)
def test_contradictions_are_refused(config: DecodeConfig, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        resolve(config, MASKED, {})


def test_noise_seed_acts_only_where_the_seed_does_not() -> None:
    assert resolve(DecodeConfig(noise_seed=3, temperature=0, seed=9), UNIFORM, {}).noise_key == 3
    assert resolve(DecodeConfig(temperature=1, seed=9), UNIFORM, {}).noise_key == 9
    with pytest.raises(UsageError, match="noise_seed"):
        resolve(DecodeConfig(noise_seed=3, temperature=1), UNIFORM, {})


@pytest.mark.parametrize(
    "file",
    [
        {"diffusion": {"treshold": 0.5}},
        {"diffusion": {"threshold": 1.5}},
        {"temperature": -1},
        {"diffusion": {"stop": ["x"]}},
        {"diffusion": ["threshold"]},
        {"diffusion": "threshold"},
        {"diffusion": {"commit_rule": ["threshold"]}},
        {"diffusion": {"commit_rule": "treshold"}},
        {"sampler_config": 0.1},
        {"do_sample": "false"},
        {"eos_token_id": ["1"]},
        {"max_new_tokens": "16"},
    ],
)
def test_a_wrong_file_is_refused(file: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        resolve(DecodeConfig(), MASKED, file)


def test_canvas_length_is_fixed_where_attention_is_tied_to_it() -> None:
    tied = tiny_config(diffusion={"context_attention": "block_causal", "block_anchor": "position_zero"})
    assert resolve(DecodeConfig(canvas_length=8), tied, {}).canvas_length == 8
    with pytest.raises(UsageError, match="canvas_length"):
        resolve(DecodeConfig(canvas_length=4), tied, {})
    assert resolve(DecodeConfig(canvas_length=7), MASKED, {}).max_denoising_steps == 7


def test_schedule_of_temperatures() -> None:
    """First step at t_max, last just above t_min; temperature scales it, 0 keeps it."""
    settings = resolve(DecodeConfig(max_denoising_steps=4), UNIFORM, {})
    assert [settings.step_temperature(step) for step in range(4)] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert dataclasses.replace(settings, temperature=0.5).step_temperature(0) == pytest.approx(0.4)
    greedy = dataclasses.replace(settings, temperature=0.0)
    assert greedy.is_greedy and greedy.step_temperature(0) == pytest.approx(0.8)
    assert resolve(DecodeConfig(), MASKED, {}).step_temperature(3) == 1.0


def test_overrides_name_the_nearest_option_and_leave_the_config_alone() -> None:
    """K68"""
    config = DecodeConfig(threshold=0.5)
    assert with_overrides(config, {"threshold": 0.7}).threshold == 0.7 and config.threshold == 0.5
    with pytest.raises(UnknownOptionError, match="did you mean 'threshold'"):
        with_overrides(config, {"treshold": 0.7})
    for given in ({}, {"threshold": 0.5}, "threshold"):
        with pytest.raises(UsageError, match="pass a DecodeConfig"):
            with_overrides(given, {})  # type: ignore[arg-type]


def test_stop_accepts_one_string_or_many() -> None:
    for given in ("ab", ["ab"], ("ab",)):
        assert resolve(DecodeConfig(stop=given), MASKED, {}).stop == ("ab",)  # type: ignore[arg-type]
    assert resolve(DecodeConfig(ignore_eos=True), MASKED, {}).eos_token_ids == frozenset()


def test_an_unset_seed_is_drawn_only_where_it_acts() -> None:
    """K19: no seed, two runs differ."""
    drawn = {resolve(DecodeConfig(temperature=1), MASKED, {}).seed for _ in range(4)}
    assert len(drawn) == 4 and all(0 <= seed < 2**53 for seed in drawn)


def test_an_auto_regressive_checkpoint_is_refused() -> None:
    with pytest.raises(UsageError, match="auto-regressive"):
        resolve(DecodeConfig(), dataclasses.replace(MASKED, diffusion=None), {})
