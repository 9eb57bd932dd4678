"""Every rate against numbers worked out by hand."""

from __future__ import annotations

import pytest

from rates import Answer, summarise, tpf_denoise, tpf_total, tpf_total_orl, tps_e2e, wilson


def answer(num_tokens, steps, commits, seconds=1.0, **rest):
    return Answer(
        num_tokens=num_tokens, seconds=seconds, num_denoise_steps=steps, num_commit_forwards=commits,
        num_blocks=commits + 1, **rest,
    )  # fmt: skip


def test_ratio_of_sums_and_mean_of_ratios_are_both_given():
    """100 tokens in 10 forwards and 4 in 4: 104 / 14 = 7.43 over the run, (10 + 1) / 2 = 5.5 an answer."""
    told = tpf_total([answer(100, 9, 1), answer(4, 4, 0)])
    assert told["run"] == pytest.approx(104 / 14)
    assert told["mean"] == told["median"] == 5.5
    assert told["p10"] == pytest.approx(1 + 0.1 * 9)


def test_tokens_per_second_counts_whole_requests():
    """K62: a canvas may arrive as one chunk, so no rate comes from the time between chunks."""
    told = tps_e2e([answer(30, 1, 0, seconds=0.1), answer(10, 1, 0, seconds=0.1)])
    assert told["run"] == pytest.approx(40 / 0.2)
    assert told["median"] == pytest.approx(200)
    assert told["p99"] == pytest.approx(100 + 0.99 * 200)
    rates = {name for name in summarise([answer(30, 1, 0, seconds=0.1)]) if name.startswith("tps")}
    assert rates == {"tps_e2e"}


def test_denoise_leaves_commit_forwards_out():
    assert tpf_denoise([answer(41, 9, 1)]) == pytest.approx(41 / 9)


def test_orl_counts_one_commit_a_block_and_no_stop_token():
    """41 tokens, the last one a stop token, 9 steps in 2 blocks of which one was committed: 40 / 11."""
    assert tpf_total_orl([answer(41, 9, 1, ends_with_stop=True)]) == pytest.approx(40 / 11)
    assert tpf_total_orl([answer(41, 9, 1)]) == pytest.approx(41 / 11)


def test_wilson_interval():
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 .. 0.3662; nothing of 10 starts at 0."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 10)[0] == pytest.approx(0, abs=1e-12)


def test_autoregressive_answers_have_no_tokens_per_forward():
    told = summarise([Answer(num_tokens=5, seconds=0.5), Answer(num_tokens=15, seconds=0.5)])
    assert set(told) == {"num", "num_tokens", "tps_e2e"}
    assert told["num_tokens"]["median"] == 10
    judged = summarise([answer(5, 1, 0, passed=True), answer(5, 1, 0, passed=False)])
    assert judged["verified_rate"] == 0.5
    assert judged["tpf_denoise"] == 5
