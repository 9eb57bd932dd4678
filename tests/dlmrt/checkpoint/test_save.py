"""Saving a checkpoint: same bytes from the same model, whole or not at all, readable by transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from dlmrt.checkpoint.load import INDEX_FILE, SINGLE_FILE, load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.eager.executor import dense_logits
from dlmrt.errors import CheckpointError, UsageError
from dlmrt.models import qwen3
from dlmrt.models.config import ResidualConfig, RopeConfig

RESIDUAL = ResidualConfig(kind="gated_mlp", alpha=0.5, intermediate_size=24)


def content(folder):
    """Name -> bytes of every file, hidden ones included."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(
    heads=st.integers(1, 3), groups=st.integers(1, 2), tied=st.booleans(), residual=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]), limit=st.sampled_from([1, 5000, 10**9]),
)  # fmt: skip
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_save_load_save_gives_the_same_bytes(
    tmp_path_factory, make_config, make_params, heads, groups, tied, residual, dtype, limit
):
    tmp_path = tmp_path_factory.mktemp("save")
    config = make_config(
        num_heads=heads * groups, num_kv_heads=groups, num_layers=1, tie_word_embeddings=tied, dtype=dtype,
        diffusion={"residual": RESIDUAL} if residual else {},
    )  # fmt: skip
    params = make_params(config)
    generation = {"eos_token_id": [1], "temperature": 0.6}
    save_checkpoint(tmp_path / "a", config, params, generation=generation, max_shard_bytes=limit)
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.config == config and checkpoint.generation == generation
    loaded = load_params(checkpoint)
    assert all(loaded[name].dtype == params[name].dtype and torch.equal(loaded[name], params[name]) for name in params)
    stored = dict(checkpoint.tensors(qwen3.tensor_shapes(config)))
    for tensors in (loaded, stored, {name: values.float().numpy() for name, values in loaded.items()}):
        save_checkpoint(tmp_path / "b", checkpoint.config, tensors, generation=generation, max_shard_bytes=limit)
        assert content(tmp_path / "b") == content(tmp_path / "a")


def test_sharded_equals_single(tmp_path, make_config, make_params):
    config = make_config()
    params = make_params(config)
    save_checkpoint(tmp_path / "single", config, params)
    save_checkpoint(tmp_path / "sharded", config, params, max_shard_bytes=10_000)
    single, sharded = (load_params(open_checkpoint(tmp_path / name)) for name in ("single", "sharded"))
    assert list(single) == list(sharded) and all(torch.equal(single[name], sharded[name]) for name in single)
    index = json.loads((tmp_path / "sharded" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in params.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


@pytest.mark.parametrize("limit", [10_000, 10**9])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"rope": RopeConfig(theta=1e4, kind="linear", factor=4.0)}]
)
@torch.inference_mode()
def test_transformers_opens_the_backbone(tmp_path, make_config, make_params, changes, limit):
    """The adapter's tensors are extra to transformers; the rest is a Qwen3 model with our logits."""
    config = make_config(diffusion={"residual": RESIDUAL}, **changes)
    save_checkpoint(tmp_path / "ck", config, make_params(config), max_shard_bytes=limit)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "ck", attn_implementation="eager")
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    ids = np.arange(20, dtype=np.int32)
    wanted = model(torch.from_numpy(ids)[None].long()).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path / "ck")
    got = dense_logits(load_params(checkpoint), checkpoint.config, ids, np.tril(np.ones((20, 20), bool)))
    assert np.abs(got - wanted).max() <= 1e-4


def test_rounding_to_bf16_is_declared(tmp_path, make_config, make_params):
    config = make_config()
    params = make_params(config)
    save_checkpoint(tmp_path / "ck", config, params, dtype="bfloat16")
    checkpoint = open_checkpoint(tmp_path / "ck")
    assert checkpoint.config == dataclasses.replace(config, dtype="bfloat16")
    loaded = load_params(checkpoint)
    assert all(torch.equal(loaded[name], params[name].bfloat16()) for name in params)


def test_tokenizer_files_are_copied(tmp_path, make_config, make_params):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja", "train.log"):
        (source / name).write_text(name)
    config = make_config()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        save_checkpoint(tmp_path / "ck", config, make_params(config), tokenizer_files=source)
    (source / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path / "ck", config, make_params(config), tokenizer_files=source)
    save_checkpoint(tmp_path / "ck", config, make_params(config), tokenizer_files=tmp_path / "ck")
    assert {path.name for path in (tmp_path / "ck").iterdir()} == {
        "config.json", SINGLE_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    with pytest.raises(UsageError, match="tokenizer_files="):
        save_checkpoint(tmp_path / "ck", config, make_params(config))


def test_saving_replaces_old_shards(tmp_path, make_config, make_params):
    config = make_config()
    save_checkpoint(tmp_path / "ck", config, make_params(config), max_shard_bytes=10_000, generation={"top_k": 2})
    save_checkpoint(tmp_path / "ck", config, make_params(config, seed=1))
    assert set(content(tmp_path / "ck")) == {"config.json", SINGLE_FILE}
    saved = load_params(open_checkpoint(tmp_path / "ck"))
    assert torch.equal(saved[qwen3.FINAL_NORM], make_params(config, seed=1)[qwen3.FINAL_NORM])
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_foreign_files_are_not_deleted(tmp_path, make_config, make_params):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "metrics.jsonl").write_text("mine")
    config = make_config()
    with pytest.raises(UsageError, match=r"metrics\.jsonl"):
        save_checkpoint(tmp_path / "ck", config, make_params(config))
    assert content(tmp_path / "ck") == {"metrics.jsonl": b"mine"} and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UsageError, match="is a file"):
        save_checkpoint(tmp_path / "ck" / "metrics.jsonl", config, make_params(config))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(qwen3.HEAD), r"lm_head\.weight is missing"),
        (lambda t: t.update({"lm_hed.weight": torch.ones(2)}), "did you mean 'lm_head.weight'"),
        (lambda t: t.update({qwen3.FINAL_NORM: torch.ones(2)}), r"has shape \[2\], the config asks for \[32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, make_config, make_params, change, named):
    config = make_config()
    params = make_params(config)
    change(params)
    with pytest.raises(CheckpointError, match=named):
        save_checkpoint(tmp_path / "ck", config, params)
    assert list(tmp_path.iterdir()) == []


def test_error_in_the_middle_leaves_the_old_checkpoint(tmp_path, make_config, make_params):
    config = make_config()
    save_checkpoint(tmp_path / "ck", config, make_params(config))
    before = content(tmp_path / "ck")

    class Broken(dict):
        def __getitem__(self, name):
            if name == "model.layers.1.mlp.down_proj.weight" and sys._getframe(1).f_code.co_name == "values":
                raise RuntimeError("device lost")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="device lost"):
        save_checkpoint(tmp_path / "ck", config, Broken(make_params(config, seed=1)))
    assert content(tmp_path / "ck") == before and len(list(tmp_path.iterdir())) == 1


def test_full_disk_leaves_the_old_checkpoint(tmp_path, make_config, make_params):
    """A limit on file size stands in for the full disk: the same write fails in the middle of the weights."""
    import signal

    config = make_config()
    save_checkpoint(tmp_path / "ck", config, make_params(config))
    before = content(tmp_path / "ck")
    old_limit, old_handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old_limit[1]))
    try:
        with pytest.raises(CheckpointError, match="previous checkpoint is unchanged"):
            save_checkpoint(tmp_path / "ck", config, make_params(config, seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert content(tmp_path / "ck") == before and len(list(tmp_path.iterdir())) == 1


def test_kill_in_the_middle_leaves_the_old_checkpoint(tmp_path, make_config, make_params):
    """The process dies while it writes weights, without any clean-up."""
    config = make_config()
    save_checkpoint(tmp_path / "ck", config, make_params(config))
    before = content(tmp_path / "ck")
    script = f"""
import os, numpy as np
from pathlib import Path
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.checkpoint import save, tensorfile
from dlmrt.models import qwen3
folder = Path({str(tmp_path / "ck")!r})
checkpoint = open_checkpoint(folder)
class Dying(dict):
    def __getitem__(self, name):
        if any(Path(folder.parent).glob(".ck.*/model.safetensors")):
            os._exit(9)
        return super().__getitem__(name)
save_checkpoint(folder, checkpoint.config, Dying(checkpoint.tensors(qwen3.tensor_shapes(checkpoint.config))))
"""
    assert subprocess.run([sys.executable, "-c", script], env=os.environ, check=False).returncode == 9
    assert content(tmp_path / "ck") == before
    assert open_checkpoint(tmp_path / "ck").config == config


def test_symlinked_folder_keeps_its_link(tmp_path, make_config, make_params):
    config = make_config()
    save_checkpoint(tmp_path / "disk" / "ck", config, make_params(config))
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "ck")
    save_checkpoint(tmp_path / "link", config, make_params(config, seed=1))
    assert (tmp_path / "link").is_symlink()
    saved = load_params(open_checkpoint(tmp_path / "disk" / "ck"))
    assert torch.equal(saved[qwen3.FINAL_NORM], make_params(config, seed=1)[qwen3.FINAL_NORM])


def test_unknown_dtype(tmp_path, make_config, make_params):
    config = make_config()
    with pytest.raises(UsageError, match="did you mean 'float16'"):
        save_checkpoint(tmp_path / "ck", config, make_params(config), dtype="flota16")
