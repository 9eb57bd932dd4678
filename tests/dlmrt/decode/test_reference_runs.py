"""The loop against recorded runs of public decoders on a tiny random checkpoint: ids, traces and counts.

The references let the mask id be predicted and count it in the softmax, so these runs ban nothing.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch

from dlmrt.decode.loop import BlockEvent, LoopRequest, PrefillEvent, StepEvent
from dlmrt.decode.native import run_loop
from dlmrt.decode.settings import resolve
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models.config import ModelConfig, load_config
from dlmrt.types import DecodeConfig, Denoiser, ForwardRecord, StepState

FOLDER = Path(__file__).parents[2] / "data" / "qwen3_bd_tiny"
SDAR = json.loads((FOLDER / "cases_sdar.json").read_text())
IDLM = json.loads((FOLDER / "cases.json").read_text())["decode"]
CONFIG = load_config(FOLDER)
# SDAR takes the quota's top-k over the whole block, so with fewer open slots than the quota it rewrites a decided one.
REWRITTEN = {"sdar_06": 6}
SUPPORTED = [case for case in SDAR["decode"] if case["params"]["remasking_strategy"].startswith("low_confidence")]


@pytest.fixture(scope="module")
def params() -> dict[str, torch.Tensor]:
    return load_torch(FOLDER / "model.safetensors")


def run(
    params: dict[str, torch.Tensor], config: ModelConfig, executor: str, prompt: list[int], **fields: Any
) -> tuple[list[int], list[StepState], list[ForwardRecord]]:
    """Answer ids, state of every denoising forward, forwards."""
    assert config.diffusion is not None
    denoiser: Denoiser = EagerDenoiser(params, config)
    if executor == "cpu":
        from dlmrt.cpu.executor import CpuDenoiser

        denoiser = CpuDenoiser({name: values.numpy() for name, values in params.items()}, config, num_threads=1)
    settings = resolve(DecodeConfig(**fields), config, {})
    request = LoopRequest(
        prompt_S=np.array(prompt, dtype=np.int32), settings=settings, diffusion=config.diffusion,
        banned=np.array([], dtype=np.int32), allowed=np.arange(config.vocab_size, dtype=np.int32),
    )  # fmt: skip
    answer: list[int] = []
    states: list[StepState] = []
    forwards: list[ForwardRecord] = []
    for event in run_loop(denoiser, request):
        match event:
            case StepEvent():
                states.append(event.state)
            case BlockEvent():
                answer += event.answer
                forwards += event.forwards
            case PrefillEvent():
                forwards += event.forwards
    return answer, states, forwards


def with_blocks(canvas_length: int, **fields: Any) -> ModelConfig:
    assert CONFIG.diffusion is not None
    return dataclasses.replace(
        CONFIG, diffusion=dataclasses.replace(CONFIG.diffusion, canvas_length=canvas_length, **fields)
    )


def whole_blocks(prompt: list[int], gen_length: int, block: int) -> int:
    """Answer length that fills the last block, as the references do before they cut."""
    return -(-(len(prompt) + gen_length) // block) * block - len(prompt)


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case["key"])
def test_sdar_generate(params: dict[str, torch.Tensor], executor: str, case: dict[str, Any]) -> None:
    """SDAR's dynamic strategy is rule `threshold` with min_commit = quota, its static one is rule `steps`."""
    given, prompt = case["params"], case["prompt"]
    block, steps = given["block_length"], given["denoising_steps"]
    rule: dict[str, Any] = {"commit_rule": "steps", "max_denoising_steps": steps}
    if given["remasking_strategy"] == "low_confidence_dynamic":
        rule = {"commit_rule": "threshold", "threshold": given["confidence_threshold"], "min_commit": block // steps}
    answer, states, forwards = run(
        params, with_blocks(block), executor, prompt, ignore_eos=True,
        max_tokens=whole_blocks(prompt, given["gen_length"], block), **rule,
    )  # fmt: skip
    expected = list(case["tokens"])
    if case["key"] in REWRITTEN:
        expected[REWRITTEN[case["key"]]] = answer[REWRITTEN[case["key"]]]
    assert answer[: given["gen_length"]] == expected
    np.testing.assert_array_equal(
        [state.canvas_L for state in states], load_numpy(FOLDER / "expected_sdar.safetensors")[f"{case['key']}.trace"]
    )
    kinds = [forward.kind for forward in forwards]
    assert kinds.count("denoise") == case["denoise_forwards"]
    # The reference also stores the last block, which nobody reads.
    assert kinds.count("prefill") + kinds.count("commit") + 1 == case["store_kv_forwards_incl_prefill"]
    assert sum(forward.num_finalised for forward in forwards) == len(answer)


@pytest.mark.parametrize("case", SDAR["decode_sglang"], ids=lambda case: f"{case['threshold']}-{len(case['prompt'])}")
def test_sglang_low_confidence(params: dict[str, torch.Tensor], executor: str, case: dict[str, Any]) -> None:
    """SGLang's LowConfidence is rule `threshold`; its count of a block includes the forward that finds it full."""
    prompt, block = case["prompt"], case["block"]
    answer, _, forwards = run(
        params, with_blocks(block), executor, prompt, ignore_eos=True, commit_rule="threshold",
        threshold=case["threshold"], max_tokens=whole_blocks(prompt, case["gen_length"], block),
    )  # fmt: skip
    assert answer[: case["gen_length"]] == case["tokens"]
    steps = [
        sum(f.kind == "denoise" and f.block_idx == b for f in forwards) for b in range(len(case["forwards_per_block"]))
    ]
    assert [count + 1 for count in steps] == case["forwards_per_block"]


@pytest.mark.parametrize("case", IDLM, ids=lambda case: case["key"])
def test_idlm_with_shifted_causal_logits(params: dict[str, torch.Tensor], executor: str, case: dict[str, Any]) -> None:
    """I-DLM's conventions (causal in the block, logit shift 1, grid at the prompt's end) with our rules.

    Its `threshold` commits p >= threshold besides the best one and goes on spending forwards on full blocks, so the
    canvases that are left after dropping its idle forwards are compared.
    """
    given, prompt = case["params"], case["prompt"]
    block = given["block_size"]
    config = with_blocks(
        block, context_attention="causal", in_block_attention="causal", block_anchor="prompt_end", logit_shift=1
    )
    num_blocks = given["max_new_tokens"] // block
    rule: dict[str, Any] = {"commit_rule": "steps", "max_denoising_steps": given["steps"] // num_blocks}
    if given["threshold"] is not None:
        rule = {"commit_rule": "threshold", "threshold": given["threshold"]}
    answer, states, forwards = run(
        params, config, executor, prompt, ignore_eos=True, max_tokens=given["max_new_tokens"], **rule
    )
    assert answer == case["tokens"]
    mask = config.diffusion.mask_token_id
    busy: list[
        tuple[int, ...]
    ] = []  # start of the block that has masks, and its ids; idle forwards repeat the next one
    for row in load_numpy(FOLDER / "expected.safetensors")[f"{case['key']}.trace"].tolist():
        if mask in row:
            start = len(prompt) + (row.index(mask) - len(prompt)) // block * block
            busy.append((start, *row[start : start + block]))
    seen = [(state.start, *state.canvas_L.tolist()) for state in states]
    assert seen == list(dict.fromkeys(busy))
    assert sum(forward.num_finalised for forward in forwards) == len(answer)
