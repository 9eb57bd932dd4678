"""Decode settings from options, files and `/set`."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.cli.options import ALIASES, HELP, canonical_settings, changed_setting
from dlmrt.errors import UnknownOptionError, UsageError
from dlmrt.types import DecodeConfig

FIELDS = [field.name for field in dataclasses.fields(DecodeConfig)]


def test_every_setting_is_an_option():
    assert list(HELP) == FIELDS
    assert set(ALIASES) <= set(FIELDS)
    aliases = [alias for known in ALIASES.values() for alias in known]
    assert len({*aliases, *FIELDS}) == len(aliases) + len(FIELDS)


@given(name=st.sampled_from(sorted(ALIASES)), value=st.integers(1, 9), data=st.data())
def test_an_alias_is_the_setting(name, value, data):
    alias = data.draw(st.sampled_from(ALIASES[name]))
    assert canonical_settings({alias: value}, source="x") == canonical_settings({name: value}, source="x") != {}


def test_sections_of_upstream_files_are_read():
    raw = {
        "sampler_config": {"entropy_bound": 0.1},
        "temperature_schedule": {"t_min": 0.4, "t_max": 0.8},
        "stopping_config": {"confidence_threshold": 0.005, "stability_threshold": 1},
    }
    expected = {"entropy_bound": 0.1, "t_min": 0.4, "t_max": 0.8, "stop_entropy": 0.005, "stability_threshold": 1}
    assert canonical_settings(raw, source="x") == expected


@pytest.mark.parametrize(
    ("raw", "settings"),
    [
        ({"threshold": 1}, {"threshold": 1.0}),
        ({"threshold": None}, {}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"], "stop_token_ids": [3]}, {"stop": ("a", "b"), "stop_token_ids": (3,)}),
        ({"steps": 4, "max_denoising_steps": 4}, {"max_denoising_steps": 4}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
    ],
)
def test_values_are_normalised(raw, settings):
    assert canonical_settings(raw, source="x") == settings


@pytest.mark.parametrize(
    "raw", [{"threshold": True}, {"threshold": "0.9"}, {"top_k": 1.5}, {"stop": [1]}, {"ignore_eos": 1}, {"seed": "x"}]
)
def test_values_of_a_wrong_type_are_refused(raw):
    with pytest.raises(UsageError, match="must be"):
        canonical_settings(raw, source="x")


def test_unknown_key_in_a_section_names_the_nearest():
    with pytest.raises(UnknownOptionError, match=r"sampler_config\.entropy_bound"):
        canonical_settings({"sampler_config": {"entropy_bond": 1.0}}, source="x")


@pytest.mark.parametrize(
    ("key", "text", "name", "value"),
    [
        ("threshold", "0.9", "threshold", 0.9),
        ("max-tokens", "12", "max_tokens", 12),
        ("steps", "3", "max_denoising_steps", 3),
        ("commit_rule", "steps", "commit_rule", "steps"),
        ("stop", "END", "stop", ("END",)),
        ("stop", "42", "stop", ("42",)),
        ("stop", '["a", "b"]', "stop", ("a", "b")),
        ("stop_token_ids", "[1, 2]", "stop_token_ids", (1, 2)),
        ("ignore_eos", "true", "ignore_eos", True),
    ],
)
def test_set_reads_text(key, text, name, value):
    """K68: the configuration that was passed in stays as it was."""
    before = DecodeConfig(seed=5)
    after = changed_setting(before, key, text)
    assert after == dataclasses.replace(before, **{name: value})
    assert before == DecodeConfig(seed=5)
    assert changed_setting(after, key, "null") == before


def test_set_refuses_what_it_does_not_know():
    with pytest.raises(UnknownOptionError, match="did you mean 'threshold'"):
        changed_setting(DecodeConfig(), "treshold", "1")
