"""The loop against recorded runs of LLaDA2's official decoders and sglang's: ids, canvases of every forward, counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import EagerDenoiser

BLOCK = 8
MODELS = ("llada2_tiny", "llada2_blockroute_indel")
NVFP4 = ("llada2_nvfp4_modelopt", "llada2_nvfp4_ct")


class Penalising(EagerDenoiser):
    """sglang's `penalty_lambda`: subtracted, in each row, from the id that stands one position before."""

    penalty = 0.0

    def forward(self, canvas_L, residual_LD, where_L):
        logits_LV = super().forward(canvas_L, residual_LD, where_L).copy()
        logits_LV[np.arange(1, len(canvas_L)), canvas_L[:-1]] -= np.float32(self.penalty)
        return logits_LV


@pytest.fixture(scope="module")
def models(oracle):
    """Name -> (denoiser, config, expected tensors), loaded once."""
    loaded = {}

    def get(name):
        if name not in loaded:
            checkpoint = open_checkpoint(oracle(name, block_size=BLOCK, mask_token_id=511))
            denoiser = Penalising(load_params(checkpoint), checkpoint.config)
            loaded[name] = denoiser, checkpoint.config, read_tensors(checkpoint.folder / "expected.safetensors")
        return loaded[name]

    return get


def cases(kind, names=MODELS):
    """(model, number) of every case; the numbers are known without the files, which may be absent."""
    data = Path(__file__).parents[2] / "data"
    counts = {"decode_llada21": 23, "decode_llada20": 6, "decode_sglang": {MODELS[0]: 18, MODELS[1]: 24}}
    tiny = json.loads((data / MODELS[0] / "cases.json").read_text())
    count = counts[kind]
    assert len(tiny[kind]) == (count[MODELS[0]] if isinstance(count, dict) else count)
    return [(name, i) for name in names for i in range(count[name] if isinstance(count, dict) else count)]


def case_of(oracle, name, kind, number):
    return json.loads((oracle(name) / "cases.json").read_text())[kind][number]


def whole_blocks(prompt, gen_length):
    return -(-(len(prompt) + gen_length) // BLOCK) * BLOCK - len(prompt)


def up_to_eos(ids, eos):
    return ids[: ids.index(eos) + 1] if eos in ids else ids


@pytest.mark.parametrize(("name", "number"), cases("decode_llada21"))
def test_official_2_1(models, oracle, run_loop, name, number):
    """LLaDA2.1's `generate` is rule `joint_threshold`; an edit threshold of 1 keeps its confirming forward."""
    case = case_of(oracle, name, "decode_llada21", number)
    denoiser, config, expected = models(name)
    given, prompt = case["params"], case["prompt"]
    run = run_loop(
        denoiser, config, prompt, ignore_eos=True, commit_rule="joint_threshold", threshold=given["threshold"],
        edit_threshold=min(given["editing_threshold"], 1.0), max_post_edit_steps=given["max_post_steps"],
        min_commit=given["num_to_transfer"], max_denoising_steps=1000,
        max_tokens=whole_blocks(prompt, given["gen_length"]),
    )  # fmt: skip
    assert up_to_eos(run.answer[: given["gen_length"]], given["eos_id"]) == case["tokens"]
    num_blocks = len(case["forwards_per_block"])  # fewer than ours where the reference stopped early on EOS
    assert run.steps_per_block[:num_blocks] == case["forwards_per_block"]
    trace = expected[f"{case['key']}.trace"].raw()
    np.testing.assert_array_equal(run.trace[: len(trace)], trace)
    np.testing.assert_array_equal(
        [step.prediction.argmax_L for step in run.steps[: len(trace)]], expected[f"{case['key']}.argmax"].raw()
    )
    blocks = expected[f"{case['key']}.final_blocks"].raw()
    np.testing.assert_array_equal([block.ids_L for block in run.blocks[: len(blocks)]], blocks)
    needed = sum(
        (step.after.canvas_L != step.state.canvas_L).any()
        for step, following in zip(run.steps[: len(trace)], run.steps[1 : len(trace)], strict=False)
        if step.state.block_idx != following.state.block_idx
    )
    last = run.steps[len(trace) - 1]
    is_early = len(run.steps) > len(trace)  # the reference's last block then is not the grid's last
    needed += is_early and bool((last.after.canvas_L != last.state.canvas_L).any())
    assert needed == case["kv_commit_forwards_needed"]


@pytest.mark.parametrize(("name", "number"), cases("decode_llada20", MODELS[:1]))
def test_official_2_0(models, oracle, run_loop, name, number):
    """LLaDA2.0's `generate` is rule `threshold` with a quota that these cases round up."""
    case = case_of(oracle, name, "decode_llada20", number)
    denoiser, config, expected = models(name)
    given, prompt = case["params"], case["prompt"]
    steps = min(given["steps"], given["gen_length"] // given["minimal_topk"])
    run = run_loop(
        denoiser, config, prompt, ignore_eos=True, commit_rule="threshold", threshold=given["threshold"],
        min_commit=-(-BLOCK // steps), max_tokens=whole_blocks(prompt, given["gen_length"]),
    )  # fmt: skip
    assert up_to_eos(run.answer[: given["gen_length"]], given["eos_id"]) == case["tokens"]
    np.testing.assert_array_equal(run.trace, expected[f"{case['key']}.trace"].raw())
    assert len(run.steps) == case["forwards"]


@pytest.mark.parametrize(("name", "number"), cases("decode_sglang"))
def test_sglang(models, oracle, run_loop, name, number):
    """sglang's algorithms; it runs one more forward on every block whose last step changed ids (LowConfidence: all)."""
    case = case_of(oracle, name, "decode_sglang", number)
    denoiser, config, expected = models(name)
    options, prompt = dict(case["algorithm_config"]), case["prompt"]
    denoiser.penalty = options.pop("penalty_lambda", 0.0)
    rule = {
        "LowConfidence": {"commit_rule": "threshold"},
        "JointThreshold": {"commit_rule": "joint_threshold", "max_denoising_steps": 1000},
        "JointThresholdInDel": {"commit_rule": "joint_threshold_indel"},
    }[case["algorithm"]]
    try:
        run = run_loop(
            denoiser, config, prompt, ignore_eos=True, max_tokens=whole_blocks(prompt, case["gen_length"]),
            **(rule | options),
        )  # fmt: skip
    finally:
        denoiser.penalty = 0.0
    assert run.answer[: case["gen_length"]] == case["tokens"]
    counts, trace = run.steps_per_block, []
    for step, following in zip(run.steps, [*run.steps[1:], None], strict=True):
        trace.append(step.state.canvas_L)
        is_last = following is None or following.state.block_idx != step.state.block_idx
        if is_last and (step.after.canvas_L != step.state.canvas_L).any():
            trace.append(step.after.canvas_L)
            counts[step.state.block_idx] += 1
    assert counts == case["forwards_per_block"]
    np.testing.assert_array_equal(trace, expected[f"{case['key']}.trace"].raw())


@pytest.mark.parametrize("name", NVFP4)
def test_runs_on_dequantised_experts(models, oracle, run_loop, name):
    denoiser, config, _ = models(name)
    for case in json.loads((oracle(name) / "cases.json").read_text())["decode_llada21_w4a16"]:
        given, prompt = case["params"], case["prompt"]
        run = run_loop(
            denoiser, config, prompt, ignore_eos=True, commit_rule="joint_threshold", threshold=given["threshold"],
            edit_threshold=given["editing_threshold"], max_post_edit_steps=given["max_post_steps"],
            max_denoising_steps=1000, max_tokens=whole_blocks(prompt, given["gen_length"]),
        )  # fmt: skip
        assert up_to_eos(run.answer[: given["gen_length"]], 508) == case["tokens"]
        assert len(run.steps) == case["forwards"]
