"""Opening a checkpoint folder: everything needed is there and fits, or the error names what is not."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from dlmrt.checkpoint.load import INDEX_FILE, SINGLE_FILE, load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.errors import CheckpointError, UnsupportedModelError, UsageError
from dlmrt.models import qwen3
from dlmrt.models.config import MoeConfig
from dlmrt.models.families import family_of
from dlmrt.models.upstream import READERS

NORM = "model.norm.weight"


@pytest.fixture
def saved(tmp_path, make_config, make_params):
    """Folder of a tiny untied checkpoint in one file, its config and weights."""
    config = make_config()
    params = make_params(config)
    save_checkpoint(tmp_path / "ck", config, params)
    return tmp_path / "ck", config, params


@pytest.fixture
def sharded(tmp_path, make_config, make_params):
    config = make_config()
    save_checkpoint(tmp_path / "shards", config, make_params(config), max_shard_bytes=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    return tmp_path / "shards"


def rewrite(folder, change):
    """Change the tensors of a single-file checkpoint in place."""
    tensors = safetensors.torch.load_file(folder / SINGLE_FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE_FILE)


def change_json(path, **changes):
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **changes}))


def load(folder):
    return load_params(open_checkpoint(folder))


README = Path(__file__).parents[3] / "README.md"
ROWS = re.findall(r"^\| (`.*`) \|", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
LISTED = [name for row in ROWS for name in re.findall(r"`(\w+)`", row)]


def test_k34_an_architecture_is_listed():
    assert "Qwen3ForCausalLM" in LISTED and set(LISTED) <= set(READERS)


@pytest.mark.parametrize("architecture", LISTED)
def test_k34_each_architecture_that_the_readme_lists_loads(data, tmp_path, make_config, architecture):
    folders = [path.parent for path in data.glob("*/config.json") if architecture in path.read_text()]
    if not folders or architecture == "LLaDA2MoeModelLM":  # whose reference file is smaller than its own mask id
        fields = {"architecture": architecture, "has_qkv_bias": "wen2" in architecture or "Fast" in architecture}
        if "Moe" in architecture:
            fields |= {"moe": MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)}
        config = make_config(**fields)
        params = {name: torch.ones(shape) for name, shape in family_of(config).tensor_shapes(config).items()}
        save_checkpoint(tmp_path / "ck", config, params)
        folders = [tmp_path / "ck"]
    assert open_checkpoint(folders[0]).config.architecture == architecture
    assert load(folders[0])


def test_load_gives_what_was_saved(saved):
    folder, config, params = saved
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == config and checkpoint.generation == {} and checkpoint.folder == folder
    loaded = load_params(checkpoint)
    assert list(loaded) == list(params)
    for name, values in params.items():
        assert torch.equal(loaded[name], values)
    for name, tensor in checkpoint.tensors(qwen3.tensor_shapes(config)):
        np.testing.assert_array_equal(to_float32(tensor), params[name].numpy())


def test_loaded_weights_are_the_callers_own(saved):
    folder, _, params = saved
    load(folder)[NORM].fill_(7)
    assert torch.equal(load(folder)[NORM], params[NORM])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_converts(saved, dtype):
    folder, _, params = saved
    loaded = load_params(open_checkpoint(folder), dtype=dtype)
    assert all(torch.equal(loaded[name], params[name].to(getattr(torch, dtype))) for name in params)


def test_auto_is_what_config_declares(saved):
    folder, _, _ = saved
    change_json(folder / "config.json", dtype="bfloat16")
    assert load(folder)[NORM].dtype == torch.bfloat16
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        load_params(open_checkpoint(folder), dtype="bfloat61")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(NORM), "lacks 1 of 25 tensors, first model.norm.weight"),
        (lambda t: t.update({"model.norm.wieght": torch.ones(3)}), "model.norm.wieght is not a tensor"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3)}), "layers.2.mlp.up_proj"),
        (lambda t: t.update({NORM: torch.ones(33)}), r"norm.weight has shape \[33\], config.json asks for \[32\]"),
        (lambda t: t.update({NORM: torch.ones(1, 32)}), r"shape \[1, 32\]"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int32)}), "model.norm.weight has dtype int32"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.float64)}), "model.norm.weight has dtype float64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, change, named):
    """K30: missing, left over, wrong shape, wrong type; before the first tensor is handed out."""
    folder, config, _ = saved
    rewrite(folder, change)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=named):
        checkpoint.tensors(qwen3.tensor_shapes(config))


def test_missing_shard_is_named(sharded):
    """K30"""
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(sharded)


@pytest.mark.parametrize("executor", ["eager", "cpu"])
def test_a_shard_cut_short_while_it_is_loaded_is_named(sharded, executor):
    """K30: behind the checks of `open_checkpoint`; a mapped file would end the process (SIGBUS)."""
    load_denoiser = importlib.import_module(f"dlmrt.{executor}.executor").load_denoiser
    checkpoint = open_checkpoint(sharded)
    last = sorted(sharded.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=f"{last.name} was changed while it was read"):
        load_denoiser(checkpoint)


def test_tensor_missing_inside_a_shard_is_named(sharded):
    """K30"""
    index = json.loads((sharded / INDEX_FILE).read_text())
    shard = sharded / index["weight_map"][NORM]
    tensors = safetensors.torch.load_file(shard)
    del tensors[NORM]
    safetensors.torch.save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=rf"{shard.name} lacks {NORM}"):
        open_checkpoint(sharded)


def test_tensor_missing_in_the_index_is_named(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    del index["weight_map"][NORM]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=NORM):
        open_checkpoint(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.bin", 3, None, ""])
def test_index_cannot_point_elsewhere(sharded, file):
    change_json(sharded / INDEX_FILE, weight_map={NORM: file})
    with pytest.raises(CheckpointError, match=r"index\.json puts model\.norm\.weight into"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_weight_map(sharded, weight_map):
    change_json(sharded / INDEX_FILE, weight_map=weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(sharded)


def test_index_and_single_file_are_ambiguous(sharded, saved):
    shutil.copy(saved[0] / SINGLE_FILE, sharded)
    with pytest.raises(CheckpointError, match="remove one of them"):
        open_checkpoint(sharded)


def test_index_may_name_the_single_file(saved):
    folder, _, params = saved
    change_json(folder / INDEX_FILE, weight_map=dict.fromkeys(params, SINGLE_FILE))
    assert len(load(folder)) == len(params)


def test_empty_folder_no_folder_and_lone_shards(tmp_path, sharded, saved):
    """K30"""
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path / "empty")
    (saved[0] / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        open_checkpoint(saved[0])
    (sharded / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match="get the index too"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(saved, name):
    folder = saved[0]
    (folder / SINGLE_FILE).unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=rf"{name}.*convert"):
        open_checkpoint(folder)


@pytest.fixture
def tied(tmp_path, make_config, make_params):
    config = make_config(tie_word_embeddings=True)
    save_checkpoint(tmp_path / "tied", config, make_params(config))
    return tmp_path / "tied"


def test_tied_checkpoint_may_store_the_same_head(tied):
    """K29"""
    rewrite(tied, lambda t: t.update({qwen3.HEAD: t[qwen3.EMBEDDING].clone()}))
    assert qwen3.HEAD not in load(tied)


@pytest.mark.parametrize("other", [lambda e: e * 2, lambda e: e[:-1], lambda e: e.double(), lambda e: e.flip(0)])
def test_tied_checkpoint_with_another_head_is_refused(tied, other):
    """K29"""
    rewrite(tied, lambda t: t.update({qwen3.HEAD: other(t[qwen3.EMBEDDING]).clone()}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, yet lm_head\.weight differs"):
        load(tied)


def test_untied_checkpoint_without_head_is_refused(saved):
    """K29: the embedding does not stand in for a head that is not there."""
    rewrite(saved[0], lambda t: t.pop(qwen3.HEAD))
    with pytest.raises(CheckpointError, match=r"first lm_head\.weight"):
        load(saved[0])


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({}, [1, 3], (1, 3)), ({"eos_token_id": 5}, 1, (5, 1)), ({"eos_token_id": [5, 1]}, [1, 6], (5, 1, 6)),
        ({"eos_token_id": None}, None, ()),
    ],
)  # fmt: skip
def test_eos_ids_are_the_union_generation_config_first(saved, generation, config, wanted):
    change_json(saved[0] / "config.json", eos_token_id=config)
    change_json(saved[0] / "generation_config.json", **generation)
    checkpoint = open_checkpoint(saved[0])
    assert checkpoint.config.eos_token_ids == wanted and checkpoint.generation == generation


def test_mask_id_that_generation_config_calls_eos_is_refused(saved):
    """K56 across files"""
    change_json(saved[0] / "generation_config.json", eos_token_id=[1, 60])
    with pytest.raises(CheckpointError, match="mask_token_id 60 equals eos_token_id"):
        open_checkpoint(saved[0])


@pytest.mark.parametrize("value", ["1", [1, "2"], [True], 1.5])
def test_eos_of_another_type_is_refused(saved, value):
    change_json(saved[0] / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*eos_token_id"):
        open_checkpoint(saved[0])


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 61}}},
        {"model": {"vocab": [["a", -1.0]] * 62}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 61, "content": "<x>"}]},
    ],
)
def test_tokenizer_larger_than_the_table_is_refused(saved, tokenizer):
    (saved[0] / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="vocabulary mismatch"):
        open_checkpoint(saved[0])


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": []}, {"model": {"vocab": "abc"}}, {"model": {"vocab": {"a": "0"}}}, {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": None}}}, {"added_tokens": {"id": 1}}, {"added_tokens": ["<x>"]},
        {"added_tokens": [{}]},
    ],
)  # fmt: skip
def test_a_tokenizer_file_of_another_shape_is_refused(saved, tokenizer):
    (saved[0] / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_checkpoint(saved[0])


def test_weights_may_lie_behind_links(saved, tmp_path):
    """The hub's cache is made of them."""
    (tmp_path / "blob").write_bytes((saved[0] / SINGLE_FILE).read_bytes())
    (saved[0] / SINGLE_FILE).unlink()
    (saved[0] / SINGLE_FILE).symlink_to("../blob")
    assert NORM in load(saved[0])


def test_tokenizer_smaller_than_the_table_is_accepted(saved):
    (saved[0] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 60}}}))
    assert open_checkpoint(saved[0]).config.vocab_size == 61


def test_unknown_quantization_is_refused_by_name(saved):
    change_json(saved[0] / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="gptq"):
        open_checkpoint(saved[0])


PEAK = """
import resource, sys
from pathlib import Path
from dlmrt.checkpoint.load import load_params, open_checkpoint
import torch
checkpoint = open_checkpoint(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = load_params(checkpoint)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_loading_takes_the_memory_of_the_weights(tmp_path, make_config):
    """The file is mapped, and mapped pages are given back once they are copied: it is never in memory twice."""
    config = make_config(vocab_size=40_000, hidden_size=256, diffusion=None)
    shapes = qwen3.tensor_shapes(config)
    weights = {name: np.broadcast_to(np.float32(0.5), shape) for name, shape in shapes.items()}
    save_checkpoint(tmp_path / "ck", config, weights, max_shard_bytes=45_000_000)
    size = sum(path.stat().st_size for path in (tmp_path / "ck").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "ck")], env=os.environ, check=True, capture_output=True, text=True
    )
    assert size > 80e6
    assert int(done.stdout) <= 1.15 * size
