"""What each rank holds: together everything, heads with their readers, and of a file only what is its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.checkpoint import tensorfile
from dlmrt.checkpoint.cut import Cut
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.errors import UsageError
from dlmrt.models.config import MoeConfig, ResidualConfig, RopeConfig, SlidingConfig
from dlmrt.models.families import family_of
from dlmrt.parallel.layout import Layout, share_heads
from dlmrt.parallel.ranks import Ranks, chosen_executor
from dlmrt.testing import tiny_config

LLADA2 = {
    "architecture": "LLaDA2MoeModelLM", "tie_word_embeddings": False,
    "moe": MoeConfig(num_experts=5, num_experts_per_token=2, intermediate_size=12, shared_intermediate_size=9),
    "diffusion": {"mask_token_id": 100, "context_attention": "block_causal", "block_anchor": "position_zero"},
}  # fmt: skip
GEMMA = {
    "architecture": "DiffusionGemmaForBlockDiffusion", "num_heads": 6, "num_kv_heads": 3, "logit_softcap": 8.0,
    "moe": MoeConfig(num_experts=5, num_experts_per_token=3, intermediate_size=12),
    "sliding": SlidingConfig(
        window=7, full_layers=(1,), full_head_dim=16, full_num_kv_heads=2,
        full_rope=RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25),
    ),
    "diffusion": {"noise": "uniform"},
    "residual": ResidualConfig(kind="gated_mlp", intermediate_size=23, scale_embedding=True),
}  # fmt: skip
ODD = {"vocab_size": 101, "eos_token_ids": (97,), "pad_token_id": 98}


@given(num_kv_heads=st.integers(1, 6), readers=st.integers(1, 6), data=st.data())
def test_every_query_head_is_on_one_rank_beside_its_keys(num_kv_heads, readers, data):
    num_heads = num_kv_heads * readers
    size = data.draw(st.integers(1, num_heads))
    parts = [share_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]
    assert [head for part in parts for head in part.queries] == list(range(num_heads))
    assert {head for part in parts for head in part.keys} == set(range(num_kv_heads))
    for part in parts:
        assert len(part.queries) % len(part.keys) == 0
        of_each = len(part.queries) // len(part.keys)
        for local, head in enumerate(part.queries):
            assert part.keys[local // of_each] == head // readers


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(UsageError, match="4 attention heads, which 5 processes cannot share; start at most 4"):
        Layout(tiny_config(), 0, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint folder of each family: experts in one tensor each, one by one, and none."""
    generator = torch.Generator().manual_seed(0)
    folders = {}
    for name, fields in {"qwen3": {}, "llada2, experts one by one": LLADA2, "gemma, experts joined": GEMMA}.items():
        config = tiny_config(**{"diffusion": {"mask_token_id": 100}, **ODD, **fields})
        shapes = family_of(config).tensor_shapes(config)
        folders[name] = tmp_path_factory.mktemp("models") / "one"
        params = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_checkpoint(folders[name], config, params, dtype="bfloat16" if name == "qwen3" else "float32")
    return folders


@pytest.mark.parametrize("name", ["qwen3", "llada2, experts one by one", "gemma, experts joined"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_read_a_checkpoint_once(saved, name, size, monkeypatch):
    """Cut tensors are those of the whole, and no byte of them is read by two ranks, but shared keys and values."""
    read = []
    original = tensorfile.OpenFile.read

    def counting(self, begin, num_bytes):
        read.append(num_bytes)
        return original(self, begin, num_bytes)

    checkpoint = open_checkpoint(saved[name])
    whole = load_params(checkpoint)
    monkeypatch.setattr(tensorfile.OpenFile, "read", counting)
    total = 0
    for rank in range(size):
        layout = Layout(checkpoint.config, rank, size)
        cuts = layout.cuts()
        read.clear()
        parts = load_params(checkpoint, cuts=cuts)
        assert sum(read) == sum(part.nbytes for part in parts.values())
        for key, values in whole.items():
            if key not in cuts:
                assert torch.equal(parts[key], values)
                assert values.ndim == 1 or "router" in key or key.endswith(".mlp.gate.weight")
                continue
            expected = cuts[key].take(values.float().numpy())
            np.testing.assert_array_equal(parts[key].float().numpy(), expected, key)
        total += sum(part.nbytes for key, part in parts.items() if key in cuts)
        assert {len(layout.vocab), len(layout.experts)} >= {len(parts[family_of(layout.whole).EMBEDDING])}
    num_kv_heads = min(layer.num_kv_heads for layer in map(checkpoint.config.attention, range(2)))
    if size <= num_kv_heads:
        assert total == sum(values.nbytes for key, values in whole.items() if key in cuts)


def test_a_cut_reads_runs_of_rows_and_of_columns(saved):
    checkpoint = open_checkpoint(saved["qwen3"])
    name = "model.layers.0.mlp.up_proj.weight"
    stored, weight = checkpoint.stored[name], checkpoint.weights()[name]
    for cut in (
        Cut(axis=0, runs=((3, 9),)), Cut(axis=0, runs=((0, 2), (5, 6))), Cut(axis=1, runs=((1, 4), (10, 12))),
        Cut(axis=0, runs=()), Cut(axis=1, runs=((2, 2),)),
    ):  # fmt: skip
        np.testing.assert_array_equal(stored.cut(cut).raw(), cut.take(stored.raw()))
        part = weight.to_torch(torch.float32, cut)
        assert part.shape == cut.shape_of(weight.shape) == (part.shape[0], part.shape[1])
        whole = weight.to_torch(torch.float32)
        assert torch.equal(part, torch.from_numpy(cut.take(whole.numpy())))


def test_the_local_configuration_counts_its_own_heads():
    config = tiny_config(num_heads=6, num_kv_heads=3)
    assert [(Layout(config, rank, 2).config.num_heads, Layout(config, rank, 2).config.num_kv_heads)
            for rank in range(2)] == [(2, 1), (4, 2)]  # fmt: skip
    assert Layout(config, 0, 2).config == dataclasses.replace(config, num_heads=2, num_kv_heads=1)


def test_a_process_knows_its_place_from_torchrun():
    assert Ranks.read({}) == Ranks(rank=0, size=1)
    found = Ranks.read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (found, found.is_follower) == (Ranks(rank=3, size=4, local_rank=1), True)
    for wrong in ({"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(UsageError, match="torchrun"):
            Ranks.read(wrong)


def test_the_executor_of_several_processes_is_chosen_by_their_number():
    several = Ranks(rank=0, size=2)
    assert chosen_executor("auto", Ranks()) == "auto"
    assert chosen_executor("auto", several) == chosen_executor("parallel", several) == "parallel"
    with pytest.raises(UsageError, match="'cpu' runs in one process and there are 2"):
        chosen_executor("cpu", several)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        chosen_executor("parallel", Ranks())
