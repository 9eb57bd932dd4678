"""Recipes: defaults, overrides, refusals, and that what is written is read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orl.errors import RecipeError
from orl.recipe import (
    DataSection,
    ObjectiveSection,
    OptimSection,
    PretrainRecipe,
    RunSection,
    build,
    differences,
    dump_recipe,
    load_recipe,
)
from orl.train_recipe import TrainRecipe

RECIPES = Path(__file__).parents[2] / "recipes"

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
recipes = st.builds(
    PretrainRecipe,
    data=st.builds(
        DataSection,
        tasks=st.lists(text, max_size=3).map(tuple),
        weights=st.lists(st.floats(1e-3, 10), max_size=3).map(tuple),
        tokenizer=text,
    ),
    objective=st.builds(ObjectiveSection, kind=st.sampled_from(["mask", "uniform", "ar"]), t_min=st.floats(1e-6, 1)),
    optim=st.builds(OptimSection, steps=st.integers(1, 10**9), muon_lr=st.floats(0, 1)),
    run=st.builds(RunSection, seed=st.integers(0, 2**63 - 1), init=text, save_every_s=st.floats(0, 1e6)),
)


@settings(max_examples=50)
@given(recipe=recipes)
def test_dump_is_read_back_to_an_equal_recipe(tmp_path_factory, recipe: PretrainRecipe):
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path, PretrainRecipe) == recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads(path: Path):
    if "_orl" in path.stem or path.stem.startswith("orl_"):
        assert load_recipe(path, TrainRecipe).optim.updates > 0
    else:
        assert load_recipe(path, PretrainRecipe).optim.steps > 0


@pytest.fixture
def load(tmp_path: Path):
    def load(body: str, *overrides: str) -> PretrainRecipe:
        path = tmp_path / "r.toml"
        path.write_text(body, encoding="utf-8")
        return load_recipe(path, PretrainRecipe, overrides)

    return load


def test_set_takes_toml_values_and_bare_words_and_makes_sections(load):
    recipe = load(
        "[optim]\nsteps = 5\n", "optim.steps=7", "optim.muon_lr=1e-3", "objective.kind=uniform", "run.init='a b'",
        'data.tasks=["chain_sum"]', "data.tokenizer=x=y", " run.seed = 3",
    )  # fmt: skip
    assert (recipe.optim.steps, recipe.optim.muon_lr, recipe.objective.kind) == (7, 1e-3, "uniform")
    assert (recipe.run.init, recipe.data.tasks, recipe.data.tokenizer) == ("a b", ("chain_sum",), "x=y")
    assert recipe.run.seed == 3


def test_whole_numbers_are_numbers(load):
    assert load("[optim]\nmuon_lr = 1\n").optim.muon_lr == 1.0


@pytest.mark.parametrize(
    ("body", "override", "message"),
    [
        ("[optim]\nstep = 5\n", None, "optim: unknown key 'step'; did you mean 'steps'"),
        ("[optin]\nsteps = 5\n", None, "unknown key 'optin'; did you mean 'optim'"),
        ("[optim]\nsteps = 5.0\n", None, "optim: steps is 5.0; it must be a whole number"),
        ("[optim]\nsteps = true\n", None, "steps is True; it must be a whole number"),
        ("[optim]\nmuon_lr = 'x'\n", None, "muon_lr is 'x'; it must be a number"),
        ("[data]\ntasks = 'chain_sum'\n", None, "data: tasks must be a list"),
        ("[data]\ntasks = [1]\n", None, "tasks is 1; it must be text in quotes"),
        ("[objective]\nkind = 'maks'\n", None, "kind is 'maks'; did you mean 'mask'"),
        ("optim = 3\n", None, "optim must be a section"),
        ("[optim]\nsteps = 0\n", None, "optim: steps is 0; it must be at least 1"),
        ("[optim]\nmuon_lr = nan\n", None, "muon_lr is nan; it must be at least 0"),
        ("[objective]\nself_conditioning_p = 1.5\n", None, r"it must be within \[0, 1\]"),
        ("[objective]\nkind = 'ar'\nloss_weight = 'elbo'\n", None, "loss_weight 'elbo' has no effect with kind 'ar'"),
        ("[data]\nweights = [0.0, 0.0]\n", None, "give shares of at least 0, one of them above"),
        ("[optim\n", None, "is not valid TOML"),
        ("", "optim.steps", "--set 'optim.steps' has no '='"),
        ("", "optim.steps=", "optim: steps is ''; it must be a whole number"),
        ("[optim]\nsteps = 5\n", "optim.steps.x=1", "'steps' is a value, not a section"),
        ("", "optim=1", "optim must be a section"),
        ("", "steps=1", "unknown key 'steps'"),
    ],
)
def test_wrong_recipes_are_refused_with_the_way_out(load, body: str, override: str | None, message: str):
    with pytest.raises(RecipeError, match=message):
        load(body, *([override] if override else []))


def test_absent_and_unreadable_files_are_named(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"none.toml does not exist; recipes of this project are in recipes/"):
        load_recipe(tmp_path / "none.toml", PretrainRecipe)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path, PretrainRecipe)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        load_recipe(tmp_path / "latin.toml", PretrainRecipe)


def test_differences_name_the_keys():
    old = PretrainRecipe()
    new = dataclasses.replace(old, optim=OptimSection(steps=5), run=RunSection(seed=1))
    assert differences(old, new) == ["optim.steps was 2000 and is 5", "run.seed was 0 and is 1"]
    assert differences(old, build(PretrainRecipe, {}, where="")) == []
