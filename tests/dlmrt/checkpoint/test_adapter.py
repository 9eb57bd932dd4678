"""Residual adapters of every family: laid over a base, merged into it, and refused by name where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.adapter import ADAPTER_FILE, merge_adapter, open_adapter, save_adapter, with_adapter
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.errors import CheckpointError, UsageError
from dlmrt.models.config import ResidualConfig
from dlmrt.models.families import family_of
from dlmrt.testing import byte_codec

# Base, its block and mask where its own file does not say them.
BASES = {
    "qwen3_bd_tiny": {},
    "llada2_tiny": {"block_size": 8, "mask_token_id": 511},
    "dgemma_tiny": {},
}


def residual_of(config, alpha=1.0):
    """Mask models take z where the mask stands, DiffusionGemma everywhere."""
    where = "masked" if config.diffusion.noise == "mask" else "all"
    return ResidualConfig(
        kind="gated_mlp", where=where, alpha=alpha, intermediate_size=24,
        scale_embedding=config.diffusion.residual.scale_embedding,
    )  # fmt: skip


def trained(base, alpha=1.0, seed=1):
    """Config and tensors of `base` with a random adapter."""
    diffusion = dataclasses.replace(base.config.diffusion, residual=residual_of(base.config, alpha))
    config = dataclasses.replace(base.config, diffusion=diffusion)
    generator = torch.Generator().manual_seed(seed)
    shapes = family_of(config).adapter_shapes(config)
    tensors = {
        name: 1 + torch.randn(shape, generator=generator) / (10 if len(shape) == 1 else 4)
        for name, shape in shapes.items()
    }
    return config, tensors


@pytest.fixture(scope="module", params=BASES)
def base(request, oracle):
    return open_checkpoint(oracle(request.param, **BASES[request.param]))


@pytest.fixture
def adapter(base, tmp_path):
    config, tensors = trained(base)
    save_adapter(tmp_path / "adapter", config, tensors, base=base)
    return tmp_path / "adapter"


def forward(checkpoint, *, with_z, use_residual=True):
    """Logits of one canvas behind a context, with and without a residual."""
    denoiser = EagerDenoiser(load_params(checkpoint), checkpoint.config)
    diffusion, length = checkpoint.config.diffusion, checkpoint.config.diffusion.canvas_length
    denoiser.extend(np.arange(2 * length, dtype=np.int32) % 200)
    canvas = np.arange(7, 7 + length, dtype=np.int32)
    if diffusion.noise == "mask":
        canvas[1::2] = diffusion.mask_token_id
    if not (with_z and denoiser.has_residual and use_residual):
        return denoiser.forward(canvas, None, None)
    logits = denoiser.forward(canvas, None, None)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    z = denoiser.soft_embedding((probs / probs.sum(-1, keepdims=True)).astype(np.float32))
    return denoiser.forward(canvas, z, None)


def test_laid_over_and_merged_are_the_same(base, adapter, tmp_path):
    over = with_adapter(base, open_adapter(adapter))
    merge_adapter(tmp_path / "merged", base, open_adapter(adapter))
    merged = open_checkpoint(tmp_path / "merged")
    assert merged.config == over.config and merged.config.diffusion.residual == residual_of(base.config)
    one, other = load_params(over), load_params(merged)
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
    for with_z in (False, True):
        np.testing.assert_array_equal(forward(over, with_z=with_z), forward(merged, with_z=with_z))
    # and the pathway does something
    assert np.abs(forward(over, with_z=True) - forward(over, with_z=False)).max() > 1e-2


def test_alpha_of_zero_is_the_base(base, tmp_path):
    config, tensors = trained(base, alpha=0.0)
    save_adapter(tmp_path / "adapter", config, tensors, base=base)
    over = with_adapter(base, open_adapter(tmp_path / "adapter"))
    np.testing.assert_array_equal(forward(over, with_z=True), forward(base, with_z=False))


def test_mask_models_take_the_residual_where_the_mask_stands(base, adapter):
    """LLaDA2 and Qwen3: rows of decided ids and the commit forward see none of it, DiffusionGemma's canvas rows do."""
    over = with_adapter(base, open_adapter(adapter))
    denoiser = EagerDenoiser(load_params(over), over.config)
    length = over.config.diffusion.canvas_length
    canvas = np.arange(7, 7 + length, dtype=np.int32)
    z = np.ones((length, over.config.hidden_size), dtype=np.float32)
    changed = np.abs(denoiser.forward(canvas, z, None) - denoiser.forward(canvas, None, None)).max() > 0
    assert changed == (over.config.diffusion.residual.where == "all")


def test_written_adapter_reads_back(base, adapter):
    config, tensors = trained(base)
    opened = open_adapter(adapter)
    assert opened.residual == config.diffusion.residual and set(opened.stored) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(opened.stored[name].raw(), tensor.numpy())
    document = json.loads((adapter / ADAPTER_FILE).read_text())
    assert document["base"]["architecture"] == base.config.architecture


def test_a_base_in_another_type_keeps_its_adapter(base, adapter, tmp_path):
    """The digest is of values: a float32 copy of the same table is the same base."""
    params = load_params(base, dtype="float32")
    save_checkpoint(tmp_path / "copy", dataclasses.replace(base.config, dtype="float32"), params)
    with_adapter(open_checkpoint(tmp_path / "copy"), open_adapter(adapter))
    embedding = family_of(base.config).EMBEDDING
    params[embedding] = params[embedding] + 1
    save_checkpoint(tmp_path / "other", base.config, params)
    with pytest.raises(CheckpointError, match="another base .* embedding_sha256"):
        with_adapter(open_checkpoint(tmp_path / "other"), open_adapter(adapter))


def test_adapter_of_another_family_is_refused(oracle, tmp_path):
    bases = [open_checkpoint(oracle(name, **changes)) for name, changes in BASES.items()]
    config, tensors = trained(bases[1])
    save_adapter(tmp_path / "adapter", config, tensors, base=bases[1])
    for other in (bases[0], bases[2]):
        with pytest.raises(CheckpointError, match="architecture 'LLaDA2MoeModelLM' against"):
            with_adapter(other, open_adapter(tmp_path / "adapter"))


def edited(folder, **changes):
    document = json.loads((folder / ADAPTER_FILE).read_text())
    (folder / ADAPTER_FILE).write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "version 2 is not known"),
        ({"version": True}, "version True"),
        ({"format": "peft"}, "format is 'peft'"),
        ({"format": None}, "format is None"),
        ({"rank": 8}, "unknown key 'rank'"),
        ({"base": None}, "another base"),
        ({"base": "dlmrt-tiny"}, "base is 'dlmrt-tiny'"),
        ({"residual": {"kind": "none"}}, "nothing to lay over"),
        ({"residual": {"kind": "gated_mlp", "intermediate_size": 12}}, r"has shape .* its settings ask for"),
        ({"residual": {"kind": "gated_mlp", "intermediate_size": 0}}, "intermediate_size"),
        ({"residual": {"kind": "gated_mlp", "alpha": "1"}}, r"residual\.alpha"),
        ({"residual": {"kind": "gated_mlp", "alfa": 1.0}}, "did you mean 'alpha'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(base, adapter, changes, named):
    edited(adapter, **changes)
    with pytest.raises(CheckpointError, match=named):
        with_adapter(base, open_adapter(adapter))


def test_tensors_that_do_not_fit_are_refused_by_name(base, adapter, tmp_path):
    config, tensors = trained(base)
    first, *_, last = tensors
    for broken, named in (
        ({name: tensor for name, tensor in tensors.items() if name != last}, f"{last} is missing"),
        ({**tensors, first: torch.ones(3)}, rf"{first} has shape \[3\]"),
    ):
        with pytest.raises(CheckpointError, match=named):
            save_adapter(tmp_path / "broken", config, broken, base=base)
    opened = open_adapter(adapter)
    stored = dict(opened.stored)
    stored["lm_head.weight"] = stored[first]
    with pytest.raises(CheckpointError, match="holds lm_head.weight, which is no tensor of"):
        with_adapter(base, dataclasses.replace(opened, stored=stored))
    del stored["lm_head.weight"], stored[first]
    with pytest.raises(CheckpointError, match=f"lacks {first}"):
        with_adapter(base, dataclasses.replace(opened, stored=stored))


def test_folders_that_are_no_adapter(base, tmp_path):
    with pytest.raises(CheckpointError, match="load it as the model"):
        open_adapter(base.folder)
    with pytest.raises(CheckpointError, match="give a folder"):
        open_adapter(tmp_path)
    config = dataclasses.replace(
        base.config, diffusion=dataclasses.replace(base.config.diffusion, residual=ResidualConfig())
    )
    with pytest.raises(UsageError, match="no residual pathway"):
        save_adapter(tmp_path / "none", config, {}, base=base)


def test_engine_loads_an_adapter(tmp_path, make_config, make_params):
    """From the folders to the answer: laid over and merged are the same run, on every executor that knows the model."""
    codec = byte_codec()
    config = make_config(vocab_size=codec.vocab_size, diffusion={"mask_token_id": 256, "canvas_length": 8})
    save_checkpoint(tmp_path / "base", config, make_params(config))
    codec.tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    base = open_checkpoint(tmp_path / "base")
    trained_config, tensors = trained(base)
    save_adapter(tmp_path / "adapter", trained_config, tensors, base=base)
    merge_adapter(tmp_path / "merged", base, open_adapter(tmp_path / "adapter"))
    for executor in ("eager", "auto"):
        with (
            Engine.load(tmp_path / "base", executor=executor) as plain,
            Engine.load(tmp_path / "base", executor=executor, adapter=tmp_path / "adapter") as over,
            Engine.load(tmp_path / "merged", executor=executor) as merged,
        ):
            runs = [
                engine.generate("abc", max_tokens=24, ignore_eos=True, record=True) for engine in (plain, over, merged)
            ]
        assert runs[1].token_ids == runs[2].token_ids
        entropies = [np.stack([state.entropy_L for state in run.record.states[:2]]) for run in runs]
        np.testing.assert_array_equal(entropies[1], entropies[2])
        assert np.abs(entropies[0] - entropies[1])[1].max() > 1e-3
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=ADAPTER_FILE):
        Engine.load(tmp_path / "base", adapter=tmp_path / "adapter")
