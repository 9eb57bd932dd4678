"""Recorded runs of LLaDA2 references through the native loop: ids, canvases of every forward, counts.

Runs with a penalty go step by step with native forwards. Those of DiffusionGemma are in tests/dlmrt/decode.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.cpu.executor import load_denoiser
from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent
from dlmrt.decode.native import run_loop
from dlmrt.decode.settings import resolve
from dlmrt.types import DecodeConfig

BLOCK = 8
MODELS = ("llada2_tiny", "llada2_blockroute_indel")
COUNTS = {"decode_llada21": (23, 23), "decode_llada20": (6, 0), "decode_sglang": (18, 24)}


class Run:
    """Events of one request, sorted."""

    def __init__(self, stream):
        events = list(stream)
        self.steps = [event for event in events if isinstance(event, StepEvent)]
        self.blocks = [event for event in events if isinstance(event, BlockEvent)]
        self.answer = [token for block in self.blocks for token in block.answer]
        self.trace = [step.state.canvas_L.tolist() for step in self.steps]
        self.steps_per_block = [
            sum(step.state.block_idx == block.block_idx for step in self.steps) for block in self.blocks
        ]


class Penalising:
    """sglang's `penalty_lambda`: subtracted, in each row, from the id that stands one position before; step by step."""

    def __init__(self, denoiser, penalty):
        self.denoiser, self.penalty = denoiser, np.float32(penalty)
        self.reset, self.extend, self.has_residual = denoiser.reset, denoiser.extend, denoiser.has_residual

    def forward(self, canvas_L, residual_LD, where_L):
        logits_LV = self.denoiser.forward(canvas_L, residual_LD, where_L)
        logits_LV[np.arange(1, len(canvas_L)), canvas_L[:-1]] -= self.penalty
        return logits_LV


@pytest.fixture(scope="module")
def models(oracle):
    """Name -> (denoiser, config, cases, expected tensors), loaded once."""
    loaded = {}

    def get(name):
        if name not in loaded:
            checkpoint = open_checkpoint(oracle(name, block_size=BLOCK, mask_token_id=511))
            loaded[name] = (
                load_denoiser(checkpoint, dtype="float32", num_threads=1), checkpoint.config,
                json.loads((checkpoint.folder / "cases.json").read_text()),
                read_tensors(checkpoint.folder / "expected.safetensors"),
            )  # fmt: skip
        return loaded[name]

    return get


def request_of(config, prompt, **fields):
    return LoopRequest(
        prompt_S=np.array(prompt, dtype=np.int32), settings=resolve(DecodeConfig(**fields), config, {}),
        diffusion=config.diffusion, banned=np.array([], dtype=np.int32),
        allowed=np.arange(config.vocab_size, dtype=np.int32),
    )  # fmt: skip


def run(denoiser, config, prompt, **fields):
    request = request_of(config, prompt, ignore_eos=True, **fields)
    return Run(run_loop(denoiser, request))


def cases(kind):
    return [(name, i) for name, count in zip(MODELS, COUNTS[kind], strict=True) for i in range(count)]


def whole_blocks(prompt, gen_length):
    return -(-(len(prompt) + gen_length) // BLOCK) * BLOCK - len(prompt)


def up_to_eos(ids, eos):
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def test_every_case_of_the_files_is_run():
    data = json.loads((Path(__file__).parents[2] / "data" / MODELS[0] / "cases.json").read_text())
    assert {kind: len(data[kind]) for kind in COUNTS} == {kind: counts[0] for kind, counts in COUNTS.items()}


@pytest.mark.parametrize(("name", "number"), cases("decode_llada21"))
def test_official_2_1(models, name, number):
    denoiser, config, data, expected = models(name)
    case = data["decode_llada21"][number]
    given, prompt = case["params"], case["prompt"]
    done = run(
        denoiser, config, prompt, commit_rule="joint_threshold", threshold=given["threshold"],
        edit_threshold=min(given["editing_threshold"], 1.0), max_post_edit_steps=given["max_post_steps"],
        min_commit=given["num_to_transfer"], max_denoising_steps=1000,
        max_tokens=whole_blocks(prompt, given["gen_length"]),
    )  # fmt: skip
    assert up_to_eos(done.answer[: given["gen_length"]], given["eos_id"]) == case["tokens"]
    num_blocks = len(case["forwards_per_block"])  # fewer than ours where the reference stopped early on EOS
    assert done.steps_per_block[:num_blocks] == case["forwards_per_block"]
    trace = expected[f"{case['key']}.trace"].raw()
    np.testing.assert_array_equal(done.trace[: len(trace)], trace)
    argmax = [step.prediction.argmax_L for step in done.steps[: len(trace)]]
    np.testing.assert_array_equal(argmax, expected[f"{case['key']}.argmax"].raw())
    blocks = expected[f"{case['key']}.final_blocks"].raw()
    np.testing.assert_array_equal([block.ids_L for block in done.blocks[: len(blocks)]], blocks)


@pytest.mark.parametrize(("name", "number"), cases("decode_llada20"))
def test_official_2_0(models, name, number):
    denoiser, config, data, expected = models(name)
    case = data["decode_llada20"][number]
    given, prompt = case["params"], case["prompt"]
    steps = min(given["steps"], given["gen_length"] // given["minimal_topk"])
    done = run(
        denoiser, config, prompt, commit_rule="threshold", threshold=given["threshold"], min_commit=-(-BLOCK // steps),
        max_tokens=whole_blocks(prompt, given["gen_length"]),
    )  # fmt: skip
    assert up_to_eos(done.answer[: given["gen_length"]], given["eos_id"]) == case["tokens"]
    np.testing.assert_array_equal(done.trace, expected[f"{case['key']}.trace"].raw())
    assert len(done.steps) == case["forwards"]


@pytest.mark.parametrize(("name", "number"), cases("decode_sglang"))
def test_sglang(models, name, number):
    """sglang runs one more forward on every block whose last step changed ids."""
    denoiser, config, data, expected = models(name)
    case = data["decode_sglang"][number]
    options, prompt = dict(case["algorithm_config"]), case["prompt"]
    if penalty := options.pop("penalty_lambda", 0.0):
        denoiser = Penalising(denoiser, penalty)
    rule = {
        "LowConfidence": {"commit_rule": "threshold"},
        "JointThreshold": {"commit_rule": "joint_threshold", "max_denoising_steps": 1000},
        "JointThresholdInDel": {"commit_rule": "joint_threshold_indel"},
    }[case["algorithm"]]
    done = run(denoiser, config, prompt, max_tokens=whole_blocks(prompt, case["gen_length"]), **(rule | options))
    assert done.answer[: case["gen_length"]] == case["tokens"]
    counts, trace = done.steps_per_block, []
    for step, following in zip(done.steps, [*done.steps[1:], None], strict=True):
        trace.append(step.state.canvas_L)
        is_last = following is None or following.state.block_idx != step.state.block_idx
        if is_last and (step.after.canvas_L != step.state.canvas_L).any():
            trace.append(step.after.canvas_L)
            counts[step.state.block_idx] += 1
    assert counts == case["forwards_per_block"]
    np.testing.assert_array_equal(trace, expected[f"{case['key']}.trace"].raw())


@pytest.mark.parametrize("name", ["llada2_nvfp4_modelopt", "llada2_nvfp4_ct"])
def test_runs_on_dequantised_experts(models, name):
    denoiser, config, data, _ = models(name)
    for case in data["decode_llada21_w4a16"]:
        given, prompt = case["params"], case["prompt"]
        done = run(
            denoiser, config, prompt, commit_rule="joint_threshold", threshold=given["threshold"],
            edit_threshold=given["editing_threshold"], max_post_edit_steps=given["max_post_steps"],
            max_denoising_steps=1000, max_tokens=whole_blocks(prompt, given["gen_length"]),
        )  # fmt: skip
        assert up_to_eos(done.answer[: given["gen_length"]], 508) == case["tokens"]
        assert len(done.steps) == case["forwards"]
