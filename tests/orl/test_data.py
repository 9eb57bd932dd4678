"""The data stream: order, position, shares, what is left out, and the tokenizer of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from dlmrt.decode.sampling import banned_ids
from dlmrt.errors import UsageError
from orl import data as data_module
from orl.data import Mixture, PackedStream, encode_problem, held_out, prepare_tokenizer
from orl.errors import RecipeError, UnknownTaskError
from orl.packing import CLEAN, Rows
from orl.recipe import DataSection, PretrainRecipe
from orl.start import model_config, noise_of, stop_id_of
from orl.tasks import get_task
from orl.tasks.types import Problem
from orl.tasks.wordings import reword


@pytest.fixture
def make_stream(codec):
    def make(recipe: PretrainRecipe) -> PackedStream:
        noise = noise_of(model_config(recipe, codec), codec)
        return PackedStream(recipe.data, recipe.objective, noise, codec, recipe.run.seed)

    return make


def assert_same(first: list[Rows], second: list[Rows]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name in vars(one):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_stream_gives_every_problem_once_pool_after_pool(make_recipe, make_stream):
    stream = make_stream(make_recipe(objective={"kind": "ar"}, data={"pool_problems": 10}))
    seen: list[int] = []
    while stream.pool_idx < 3:
        (rows,) = stream.take(1)
        seen += sorted(set(rows.problem.tolist()) - {-1})
    assert sorted(seen) == list(range(30))
    assert stream.num_left_out == 0


@pytest.mark.parametrize("taken", [1, 3, 8])
def test_stream_goes_on_exactly_from_its_state(make_recipe, make_stream, taken: int):
    """K59"""
    recipe = make_recipe(data={"pool_problems": 6})
    straight, resumed = make_stream(recipe), make_stream(recipe)
    straight.take(taken)
    resumed.restore(straight.state())
    assert_same(straight.take(7), resumed.take(7))
    assert straight.state() == resumed.state()


def test_number_of_bins_taken_at_once_does_not_change_the_stream(make_recipe, make_stream):
    recipe = make_recipe(data={"pool_problems": 6})
    one, many = make_stream(recipe), make_stream(recipe)
    assert_same([one.take(1)[0] for _ in range(9)], many.take(9))


def test_problems_that_do_not_fit_are_left_out_and_counted(make_recipe, make_stream):
    recipe = make_recipe(objective={"kind": "ar"}, data={"pool_problems": 20})
    lengths = []
    stream = make_stream(recipe)
    while stream.pool_idx < 1:
        (rows,) = stream.take(1)
        lengths += Counter(rows.problem[rows.problem >= 0].tolist()).values()
    limit = sorted(lengths)[9]
    stream = make_stream(make_recipe(objective={"kind": "ar"}, data={"pool_problems": 20, "pack_tokens": limit}))
    seen = set()
    while stream.pool_idx < 1:
        seen |= set(stream.take(1)[0].problem.tolist()) - {-1}
    num_longer = sum(length > limit for length in lengths)
    assert 0 < num_longer == stream.num_left_out == 20 - len(seen)
    assert stream.state()["num_left_out"] == num_longer


def test_pool_without_a_fitting_problem_is_refused(make_recipe, make_stream):
    stream = make_stream(make_recipe(data={"pack_tokens": 8}))
    with pytest.raises(RecipeError, match=r"shortest problem of 24 needs \d+ rows and data.pack_tokens is 8; raise it"):
        stream.take(1)


def test_mixture_keeps_its_shares():
    mixture = Mixture.of(DataSection(tasks=("chain_sum", "spell_backward"), weights=(3.0, 1.0)))
    tasks = Counter(mixture.problem(number, 0).task for number in range(400))
    assert 260 < tasks["chain_sum"] < 340
    assert mixture.problem(5, 0) == mixture.problem(5, 0)


def test_mixture_refuses_unknown_tasks_and_wrong_weights():
    with pytest.raises(UnknownTaskError, match="did you mean 'chain_sum'") as caught:
        Mixture.of(DataSection(tasks=("chain_sums",)))
    assert isinstance(caught.value, UsageError)
    with pytest.raises(RecipeError, match="data.weights has 1 entries for 2 tasks"):
        Mixture.of(DataSection(tasks=("chain_sum", "equations"), weights=(1.0,)))


def test_held_out_takes_turns_and_shares_no_prompt_with_training():
    mixture = Mixture.of(DataSection(tasks=("chain_sum", "spell_backward")))
    problems = held_out(mixture, 3)
    assert [p.task for p in problems] == ["chain_sum", "spell_backward"] * 3
    assert {p.split for p in problems} == {"heldout"}
    assert not {p.prompt for p in problems} & {mixture.problem(number, 0).prompt for number in range(50)}


@pytest.mark.parametrize("wordings", ["one", "many"])
def test_tokenizer_is_trained_on_the_wordings_of_the_data(tmp_path: Path, monkeypatch, wordings: str):
    section = DataSection(tasks=("chain_sum",), wordings=wordings, vocab_size=300, tokenizer_problems=5)
    seen: list[str] = []

    def train(problems: Iterable[Problem], *, vocab_size: int) -> None:
        seen.extend(problem.response for problem in problems)

    monkeypatch.setattr(data_module, "train_tokenizer", train)
    monkeypatch.setattr(data_module, "write_tokenizer", lambda tokenizer, folder: None)
    prepare_tokenizer(section, tmp_path / "tokenizer")
    plain = [get_task("chain_sum").problem(index, "train") for index in range(5)]
    assert seen == [(reword(problem) if wordings == "many" else problem).response for problem in plain]
    assert (seen == [problem.response for problem in plain]) == (wordings == "one")


@pytest.mark.parametrize("kind", ["mask", "uniform"])
def test_noise_is_what_the_decoder_draws(codec, make_recipe, kind: str):
    """Ids of uniform noise are all but the banned ones: EOS ids are among them, holes of the vocabulary are not."""
    config = model_config(make_recipe(objective={"kind": kind}), codec)
    config = dataclasses.replace(config, vocab_size=config.vocab_size + 4)
    noise = noise_of(config, codec)
    banned = banned_ids(config, codec.known_ids)
    assert sorted([*noise.random_ids.tolist(), *banned.tolist()]) == list(range(config.vocab_size))
    assert set(config.eos_token_ids) <= set(noise.random_ids.tolist())
    assert noise.random_ids.dtype == np.int32
    assert not noise.is_grid_at_zero
    grid = dataclasses.replace(config.diffusion, block_anchor="position_zero")
    assert noise_of(dataclasses.replace(config, diffusion=grid), codec).is_grid_at_zero
    with pytest.raises(RecipeError, match="no padding id .* add pad_token_id"):
        noise_of(dataclasses.replace(config, pad_token_id=None), codec)


def test_gold_answers_end_as_the_model_ends_its_own(codec, make_recipe):
    """The family's end of turn, the template's where it is an EOS id, any EOS id; without one a refusal."""
    config = model_config(make_recipe(), codec)
    end, pad = config.eos_token_ids
    assert stop_id_of(dataclasses.replace(config, eos_token_ids=(pad, end)), codec) == end
    assert stop_id_of(dataclasses.replace(config, eos_token_ids=(pad,)), codec) == pad
    with pytest.raises(RecipeError, match="names no EOS token"):
        stop_id_of(dataclasses.replace(config, eos_token_ids=()), codec)
    tokenizer = Tokenizer.from_str(codec.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|role_end|>"])
    other = SimpleNamespace(tokenizer=tokenizer)
    llada2 = dataclasses.replace(config, architecture="LLaDA2MoeModelLM")
    assert stop_id_of(llada2, other) == tokenizer.token_to_id("<|role_end|>")


def test_literal_special_text_is_trained_as_ordinary_text(codec, make_recipe):
    """K01 (d): "<|mask|>" in prompt or answer never becomes the reserved id, nor do the ids that end a turn."""
    text = "a <|mask|> b <|im_end|> c <|endoftext|><|im_start|>"
    problem = Problem(task="chain_sum", prompt=text, response=text, index=0, split="train", metadata={})
    example = encode_problem(codec, problem, 0, stop_id=codec.tokenizer.token_to_id("<|im_end|>"))
    reserved = set(codec.special_ids)
    assert 3 in reserved
    assert 3 not in example.prompt_ids + example.response_ids
    assert not set(example.response_ids[:-1]) & reserved
    assert example.response_ids[-1] == codec.tokenizer.token_to_id("<|im_end|>")
    assert codec.decode(example.response_ids) == text
    # The template's own marks are the only special ids of the prompt.
    marks = [token for token in example.prompt_ids if token in reserved]
    assert marks == [1, 2, 1]


def test_clean_rows_of_the_stream_hold_the_text_of_their_problems(codec, make_recipe, make_stream):
    recipe = make_recipe()
    stream = make_stream(recipe)
    (rows,) = stream.take(1)
    for number in sorted(set(rows.problem.tolist()) - {-1}):
        clean = rows.ids[(rows.problem == number) & (rows.copy == CLEAN)]
        problem = stream.mixture.problem(number, recipe.run.seed)
        text = f"user\n{problem.prompt}\nassistant\n{problem.response}"
        assert codec.decode(clean) == text


def test_tokenizer_is_made_once_and_whole(tmp_path: Path, tokenizer_dir: Path):
    target = tmp_path / "tokenizer"
    partial = tmp_path / ".tokenizer.partial"
    partial.mkdir()
    (partial / "tokenizer.json").write_text("{")  # of a process that was killed
    prepare_tokenizer(DataSection(), target, source=tokenizer_dir)
    names = {path.name for path in target.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert not partial.exists()
    before = (target / "tokenizer.json").read_bytes()
    prepare_tokenizer(DataSection(vocab_size=290, tokenizer_problems=1), target)
    assert (target / "tokenizer.json").read_bytes() == before


def test_tokenizer_that_cannot_be_made_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match="has no tokenizer.json"):
        prepare_tokenizer(DataSection(), tmp_path / "a", source=tmp_path)
    with pytest.raises(RecipeError, match="data.vocab_size is 200; it must be at least 260"):
        prepare_tokenizer(DataSection(vocab_size=200), tmp_path / "b")
    assert not (tmp_path / "b").exists()
