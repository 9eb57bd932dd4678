"""What processes of `together` do. Rank 0 compares with one process and asserts; the others follow."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pairs import assert_same, draw_params, make_eager, request_for, slow, with_adapter

from dlmrt.cli import main
from dlmrt.cli.session import followed
from dlmrt.decode.loop import StepEvent, decode
from dlmrt.errors import DeviceError
from dlmrt.models.config import ModelConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig
from dlmrt.parallel.denoiser import ShardedDenoiser
from dlmrt.parallel.group import Group
from dlmrt.parallel.layout import Layout
from dlmrt.parallel.lead import LeadingDenoiser, obey
from dlmrt.parallel.pulse import BEAT_S
from dlmrt.parallel.ranks import Ranks
from dlmrt.serve.load import LoadConfig, load_engine, open_source
from dlmrt.testing import tiny_config

ODD = {"vocab_size": 101, "eos_token_ids": (97,), "pad_token_id": 98}
MASK = 100
DRAWN = {"temperature": 0.7, "seed": 11}
FILTERED = {"temperature": 1.1, "seed": 12, "top_k": 30, "top_p": 0.8, "min_p": 0.02}


def _config(residual: ResidualConfig | None = None, diffusion: dict[str, Any] | None = None, **fields) -> ModelConfig:
    """A tiny model of 101 ids, which no number of ranks divides."""
    return tiny_config(residual=residual, diffusion={"mask_token_id": MASK} | (diffusion or {}), **ODD | fields)


_BLOCKS = {"context_attention": "block_causal", "block_anchor": "position_zero"}
_LLADA2 = {
    "architecture": "LLaDA2MoeModelLM", "tie_word_embeddings": False, "rope": RopeConfig(partial_rotary_factor=0.5),
    "moe": MoeConfig(
        num_experts=10, num_experts_per_token=2, intermediate_size=12, shared_intermediate_size=9, num_dense_layers=1,
        num_groups=5, num_kept_groups=2, scaling_factor=2.5,
    ),
}  # fmt: skip
_EDITS = {"delete_token_id": 95, "split_token_id": 96, "commit_rule": "joint_threshold_indel"}
# Model, settings of some requests.
CASES: dict[str, tuple[ModelConfig, list[dict[str, Any]]]] = {
    "qwen3, mask": (
        _config(num_kv_heads=1, intermediate_size=37),
        [{"threshold": 0.03}, {"threshold": 0.03, **DRAWN},
         {"commit_rule": "steps", "max_denoising_steps": 3, **FILTERED}],
    ),
    "qwen3, mask, residual": (
        _config(residual=with_adapter("masked")),
        [{"threshold": 0.03}, {"threshold": 0.03, **FILTERED}, {"threshold": 0.03, "use_residual": False}],
    ),
    "qwen3, uniform, residual": (
        _config(residual=with_adapter(), diffusion={"noise": "uniform"}, num_heads=6, num_kv_heads=3),
        [{"commit_rule": "entropy_bound", "entropy_bound": 10.0, "max_denoising_steps": 4, "stop_entropy": 4.0, **how}
         for how in ({}, DRAWN)],
    ),
    "qwen2, sub-blocks behind a shift": (
        _config(
            architecture="Fast_dLLM_QwenForCausalLM", has_qkv_bias=True,
            diffusion={**_BLOCKS, "logit_shift": 1, "commit_rule": "sub_blocks"},
        ),
        [{"threshold": 0.03, "sub_block_length": 4}],
    ),
    "next token": (
        _config(diffusion={"canvas_length": 1, "noise": "uniform", "logit_shift": 1, "in_block_attention": "causal"}),
        [{"max_tokens": 5, **DRAWN}],
    ),
    "llada2, groups of experts": (
        _config(**_LLADA2, diffusion=_BLOCKS),
        [{"commit_rule": "joint_threshold", "threshold": 0.03, "edit_threshold": 0.02, "max_post_edit_steps": 3, **how}
         for how in ({}, DRAWN)],
    ),
    "llada2, experts by block, deletions": (
        _config(**{**_LLADA2, "moe": replace(_LLADA2["moe"], expert_capacity=4)}, diffusion={**_BLOCKS, **_EDITS}),
        [{"threshold": 0.03, "edit_threshold": 0.02, "max_post_edit_steps": 3}],
    ),
    "diffusion_gemma": (
        _config(
            architecture="DiffusionGemmaForBlockDiffusion", num_heads=6, num_kv_heads=3, logit_softcap=8.0,
            moe=MoeConfig(num_experts=5, num_experts_per_token=3, intermediate_size=12),
            sliding=SlidingConfig(
                window=7, full_layers=(1,), full_head_dim=16, full_num_kv_heads=2,
                full_rope=RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25),
            ),
            diffusion={"noise": "uniform"},
            residual=ResidualConfig(kind="gated_mlp", intermediate_size=23, alpha=0.1, scale_embedding=True),
        ),
        [{"commit_rule": "entropy_bound", "entropy_bound": 10.0, "max_denoising_steps": 4, "stop_entropy": 4.0, **how}
         for how in ({}, FILTERED)],
    ),
}  # fmt: skip


def part_of(config: ModelConfig, params: dict[str, np.ndarray], group: Group) -> ShardedDenoiser:
    """This rank's part of `params`."""
    layout = Layout(config, group.rank, group.size)
    cuts = layout.cuts()
    parts = {name: cuts[name].take(values) if name in cuts else values for name, values in params.items()}
    return ShardedDenoiser({name: torch.from_numpy(values.copy()) for name, values in parts.items()}, layout, group)


def joined(timeout_s: float = 100) -> Group:
    torch.set_num_threads(1)
    group = Group(Ranks.read(), timeout_s=timeout_s)
    group.connect()
    return group


def equal() -> None:
    """Tokens, forwards and commit order of every family and rule are those of one process; so are single calls."""
    group = joined()
    for name, (config, asked) in CASES.items():
        params = draw_params(config, seed=3)
        part = part_of(config, params, group)
        if group.rank:
            obey(part, group)
            continue
        leader, alone, rng = LeadingDenoiser(part, group), make_eager(config, params), np.random.default_rng(5)
        num_steps = 0
        for settings in asked if group.size == 2 else asked[-1:]:
            prompt = rng.integers(0, 95, 11)
            request = request_for(config, prompt, **{"max_tokens": 13, **settings})
            events = slow(leader, request)
            _assert_same(events, slow(alone, request))
            num_steps += sum(isinstance(event, StepEvent) for event in events)
        assert num_steps >= 2, name
        _compare_calls(leader, alone, rng)
        if name == "qwen3, mask, residual":
            with_probs = replace(request_for(config, prompt, max_tokens=4), with_probs=True)
            _assert_same(slow(leader, with_probs), slow(alone, with_probs))
        group.command(b"")
        print(name, flush=True)
    group.close()


def lost(how: str) -> None:
    """Rank 1 of 3 dies or hangs in its third forward; the others say so, and refuse to go on."""
    config, _ = CASES["qwen3, mask"]
    group = joined(timeout_s=100 if how in ("killed", "raises") else 15)
    part = part_of(config, draw_params(config), group)
    if group.rank == 1:
        group.pulse.note("a line of its own")
        fails_in(part, 3, how)
    try:
        if group.rank:
            obeyed(part, group)
        else:
            list(decode(LeadingDenoiser(part, group), request_for(config, [1, 2, 3], max_tokens=16)))
    except DeviceError as error:
        print(error, flush=True)
        try:
            group.sum(torch.ones(1))
        except DeviceError as again:
            assert str(again) == str(error)
            return
    raise AssertionError("a rank is lost and nobody has noticed")


def obeyed(part: ShardedDenoiser, group: Group) -> None:
    try:
        obey(part, group)
    except MemoryError as error:
        group.fail(error)
        raise


def fails_in(part: ShardedDenoiser, number: int, how: str) -> None:
    """Let the `number`-th forward of `part` not end."""
    logits, calls = part._logits, []

    def fail(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) < number:
            return logits(*arguments)
        time.sleep(3 * BEAT_S)  # until the others have heard what this rank is at
        if how == "raises":
            raise MemoryError("no memory for the fourth layer")
        if how == "hangs":
            time.sleep(60)
            raise SystemExit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        raise AssertionError("gone")

    part._logits = fail


def _assert_same(found: list[Any], wanted: list[Any]) -> None:
    histories = [
        [(h.seen, h.written, h.is_original_L.tolist()) for event in events if isinstance(event, StepEvent)
         if (h := event.after.history) is not None]
        for events in (found, wanted)
    ]  # fmt: skip
    assert histories[0] == histories[1]
    assert_same(*([_without_history(event) for event in events] for events in (found, wanted)))


def _without_history(event: Any) -> Any:
    return replace(event, after=replace(event.after, history=None)) if isinstance(event, StepEvent) else event


def _compare_calls(leader: LeadingDenoiser, alone: Any, rng: np.random.Generator) -> None:
    """Logits and soft embedding (K39), 1e-5; a refused call changes nothing on any rank."""
    length = alone.diffusion.canvas_length
    canvas = rng.integers(0, 95, length).astype(np.int32)
    for each in (leader, alone):
        each.reset()
        each.extend(np.arange(2 * length, dtype=np.int32))
    for each in (leader, alone):
        try:
            each.truncate(1000)
        except ValueError:
            continue
        raise AssertionError("a context cannot grow by truncation")
    z = None
    if alone.has_residual:
        probs = rng.dirichlet(np.ones(alone.vocab_size), length).astype(np.float32)
        z = alone.soft_embedding(probs)
        np.testing.assert_allclose(leader.soft_embedding(probs), z, rtol=1e-5, atol=1e-5)
    found, wanted = leader.forward(canvas, z, None), alone.forward(canvas, z, None)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def cli(folder: str) -> None:
    """The command line, the same on every rank."""
    sys.argv = ["dlmrt", "generate", folder, "hello", "--max-tokens", "9", "--timings"]
    main()


def served(folder: str) -> None:
    """A server's engine, which is loaded in a thread and used in others; closing it sends the follower home."""
    config = LoadConfig(model=folder, max_model_len=64, executor="parallel", num_threads=1)
    if followed(lambda: open_source(config), executor="parallel", dtype="auto", num_threads=1):
        return
    with ThreadPoolExecutor(1) as loader, ThreadPoolExecutor(1) as worker:
        engine = loader.submit(load_engine, config).result()
        for _ in range(2):
            print(worker.submit(engine.generate, "hello", max_tokens=9).result().token_ids)
        engine.close()


def mismatch(folder: str, other: str) -> None:
    """Rank 1 has another checkpoint of the same shape."""
    sys.argv = ["dlmrt", "generate", folder if os.environ["RANK"] == "0" else other, "hello"]
    main()
