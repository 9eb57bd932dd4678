"""States from gold answers: what is corrupted, what is supervised, and their residual."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.eager.executor import EagerDenoiser
from orl.gold import gold_response, self_condition
from orl.packing import Example, Noise, Share
from orl.replay import ReplayBatch, packed_logits, reference_logits

NOISE = Noise(canvas_length=8, mask_token_id=3, pad_token_id=0, random_ids=np.arange(4, 60, dtype=np.int32))
ids = st.integers(4, 59)
examples = st.builds(
    Example, number=st.integers(0, 999), prompt_ids=st.lists(ids, min_size=1, max_size=12).map(tuple),
    response_ids=st.lists(ids, max_size=30).map(lambda tokens: (*tokens, 2)),
)  # fmt: skip


@settings(deadline=None)  # the machine may be busy
@given(example=examples, copy=st.integers(0, 3), is_uniform=st.booleans(), is_grid_at_zero=st.booleans())
def test_open_slots_are_the_corrupted_ones_of_the_answer(
    example: Example, copy: int, is_uniform: bool, is_grid_at_zero: bool
):
    noise = dataclasses.replace(NOISE, is_grid_at_zero=is_grid_at_zero)
    noise = dataclasses.replace(noise, mask_token_id=None) if is_uniform else noise
    made = gold_response(example, noise, seed=1, response_idx=copy, states_per_block=2)
    whole = [*example.prompt_ids, *example.response_ids]
    num_prompt, answer_end = len(example.prompt_ids), len(whole)
    first = num_prompt // 8 * 8 if is_grid_at_zero else num_prompt  # the decoder's own rule
    num_blocks = -(-(answer_end - first) // 8)
    assert len(made.states) == 2 * num_blocks
    assert made.grid == first % 8
    whole += [0] * (first + 8 * num_blocks - answer_end)
    assert made.clean_S.tolist() == whole[:-8]
    for at, state in enumerate(made.states):
        assert state.start == first + at // 2 * 8
        np.testing.assert_array_equal(state.targets_L, whole[state.start : state.start + 8])
        kept = ~state.is_unresolved_L
        np.testing.assert_array_equal(state.canvas_L[kept], state.targets_L[kept])
        if not is_uniform:
            assert (state.canvas_L[~kept] == 3).all()
        positions = state.start + np.arange(8)
        is_prompt = positions < num_prompt
        assert not state.is_unresolved_L[is_prompt].any(), "the prompt's part of a block is pinned"
        np.testing.assert_array_equal(state.is_open_L, state.is_unresolved_L & (positions < answer_end))
        np.testing.assert_array_equal(state.is_gated_L, state.is_open_L)
        np.testing.assert_array_equal(state.is_anchored_L, ~is_prompt & ~state.is_open_L)
        assert state.source_entropy is None


def test_copies_of_one_answer_are_corrupted_differently_and_repeatably():
    example = Example(number=7, prompt_ids=(5, 6), response_ids=tuple(range(10, 40)))

    def canvases(copy: int) -> list[list[int]]:
        made = gold_response(example, NOISE, seed=1, response_idx=copy, states_per_block=1)
        return [state.canvas_L.tolist() for state in made.states]

    assert canvases(0) == canvases(0)
    assert canvases(0) != canvases(1)


def test_every_second_answer_gets_the_soft_embedding_of_a_first_pass(make_recipe, make_model, make_examples):
    config, params = make_model(make_recipe(model={"logit_shift": 1}))
    noise = dataclasses.replace(NOISE, random_ids=np.arange(4, 250, dtype=np.int32))
    responses = [
        gold_response(e, noise, seed=0, response_idx=0, states_per_block=2) for e in make_examples(3, vocab_size=250)
    ]
    banned = torch.arange(config.vocab_size) == 3
    made = list(self_condition(params, config, responses, banned=banned))
    has_residual = [[state.residual_LD is not None for state in response.states] for response in made]
    assert [set(flags) for flags in has_residual] == [{True}, {False}, {True}]
    table = params["model.embed_tokens.weight"].detach().numpy()
    for state, given_state in zip(made[0].states, responses[0].states, strict=True):
        assert state.residual_LD.shape == (8, config.hidden_size)
        assert np.abs(state.residual_LD).max() <= np.abs(table).max(), "a mean of rows of the table"
        np.testing.assert_array_equal(state.canvas_L, given_state.canvas_L)


def test_first_block_that_begins_with_the_prompt_reads_what_the_decoder_reads(make_recipe, make_model):
    """Shifted logits, a prompt shorter than a block: slot 0 has no row before it, neither here nor there."""
    config, params = make_model(make_recipe(model={"logit_shift": 1}))
    config = dataclasses.replace(
        config, diffusion=dataclasses.replace(config.diffusion, block_anchor="position_zero")
    )  # fmt: skip
    example = Example(number=3, prompt_ids=(5, 6, 7), response_ids=(*range(10, 22), 2))
    noise = dataclasses.replace(NOISE, is_grid_at_zero=True)
    made = gold_response(example, noise, seed=0, response_idx=0, states_per_block=1)
    states = tuple(dataclasses.replace(s, is_anchored_L=np.ones(8, dtype=bool)) for s in made.states)
    whole = dataclasses.replace(made, states=states)
    batch = ReplayBatch([whole], [1.0], [Share(response=0, states=(0, 1))], config)
    packed, alone = (logits(params, batch).detach().numpy() for logits in (packed_logits, reference_logits))
    np.testing.assert_allclose(packed, alone, atol=1e-5)
    denoiser = EagerDenoiser({name: tensor.detach() for name, tensor in params.items()}, config)
    for state, found in zip(states, packed.reshape(2, 8, -1), strict=True):
        denoiser.reset()
        denoiser.extend(made.clean_S[: state.start])
        np.testing.assert_allclose(found, denoiser.forward(state.canvas_L, None, None), atol=1e-4)
