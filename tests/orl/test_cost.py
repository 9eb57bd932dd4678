"""Cost of responses by hand, and properties of how they are dealt to ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.models.config import MoeConfig, RopeConfig, SlidingConfig
from dlmrt.testing import tiny_config
from orl.cost import CostModel, active_weights, deal
from orl.packing import balance


def test_coefficients_of_a_dense_model_by_hand():
    config = tiny_config()
    per_layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32
    assert active_weights(config) == 2 * per_layer
    cost = CostModel.of(config)
    assert (cost.per_row, cost.per_loss_row) == (4 * per_layer, 2 * 32 * config.vocab_size)
    assert (cost.per_key, cost.per_window_key, cost.window) == (2 * 4 * 4 * 8, 0, None)


def test_a_row_meets_only_the_experts_that_it_is_routed_to():
    moe = MoeConfig(num_experts=8, num_experts_per_token=2, intermediate_size=16, num_dense_layers=1)
    config = tiny_config(architecture="LLaDA2MoeModelLM", moe=moe)
    dense = tiny_config(architecture="LLaDA2MoeModelLM", moe=MoeConfig(
        num_experts=2, num_experts_per_token=2, intermediate_size=16, num_dense_layers=1))  # fmt: skip
    assert active_weights(config) == active_weights(dense) + 6 * 32  # the router has a row for each expert


def test_cost_of_a_response_by_counting_pairs():
    cost = CostModel(per_row=1000, per_key=1, per_window_key=10, per_loss_row=7, window=5, canvas_length=4)
    num_clean, starts = 11, (3, 7, 7)
    rows = [(i + 1, min(i + 1, 5)) for i in range(num_clean)]
    rows += [(start + 4, min(start, 4) + 4) for start in starts for _ in range(4)]
    expected = 1000 * len(rows) + sum(wide + 10 * narrow for wide, narrow in rows) + 7 * 12
    assert cost.response(num_clean, starts) == expected


def test_layers_with_a_window_are_counted_apart():
    rope = RopeConfig()
    sliding = SlidingConfig(window=4, full_layers=(1,), full_head_dim=16, full_num_kv_heads=2, full_rope=rope)
    cost = CostModel.of(tiny_config(sliding=sliding))
    assert (cost.per_key, cost.per_window_key, cost.window) == (4 * 4 * 16, 4 * 4 * 8, 4)


responses = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=30)


@settings(max_examples=80, deadline=None)
@given(responses, st.integers(1, 6), st.integers(8, 200))
def test_every_state_is_dealt_once_and_every_rank_has_as_many_micro_batches(
    found: list[tuple[int, int]], num_ranks: int, budget: int
):
    num_clean, num_states = zip(*found, strict=True)
    costs = [clean + 4 * states for clean, states in found]
    ranks = deal(costs, num_clean, num_states, canvas_length=4, budget=budget, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(bins) for bins in ranks}) == 1
    counted = Counter((s.response, i) for bins in ranks for shares in bins for s in shares for i in s.states)
    assert counted == Counter({(r, i): 1 for r, count in enumerate(num_states) for i in range(count)})
    for bins in ranks:
        for shares in bins:
            rows = sum(num_clean[s.response] + 4 * len(s.states) for s in shares)
            assert rows <= budget or (len(shares) == 1 and len(shares[0].states) == 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_item(costs: list[float], num_ranks: int):
    """Graham's bound for dealing in any order; the costliest first makes it rarely tight."""
    ranks = balance(costs, num_ranks)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(costs)))
    totals = [sum(costs[i] for i in rank) for rank in ranks]
    assert max(totals) <= sum(costs) / num_ranks + max(costs) + 1e-6


@pytest.mark.parametrize("num_responses", [64, 128, 192])
def test_ranks_are_even_where_turns_are_not(num_responses: int):
    """8, 16, 24 answers to 8 prompts over 8 ranks, lengths log-normal: at most 5 % above the mean."""
    rng = np.random.default_rng(num_responses)
    cost = CostModel(per_row=7.2e9, per_key=5.9e5, per_window_key=0, per_loss_row=7.8e8, window=None, canvas_length=256)
    lengths = 200 + rng.lognormal(np.log(500), 0.7, num_responses).astype(int)
    costs = [cost.response(int(n), [s for s in range(200, int(n), 256) for _ in range(5)]) for n in lengths]

    def spread(ranks: list[list[int]]) -> float:
        totals = [sum(costs[i] for i in rank) for rank in ranks]
        return max(totals) * len(totals) / sum(totals)

    turns = [list(range(rank, num_responses, 8)) for rank in range(8)]
    assert spread(balance(costs, 8)) <= 1.05 < spread(turns)
