"""Rule `sub_blocks` on a Qwen2 with Fast-dLLM v2's conventions, against its decoding written down without any cache.

The remote code cannot be loaded here. What is compared is its procedure, told once more over `dense_logits`: whole
blocks of the prompt are final; the first token of a block is the argmax of the last final row; within a block,
sub-blocks are filled from the left, each step taking every slot above the threshold and the best one; row i - 1 fills
slot i.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

from dlmrt.decode.engine import Engine
from dlmrt.eager.executor import EagerDenoiser, dense_logits
from dlmrt.models.config import DiffusionConfig
from dlmrt.testing import END, END_OF_TEXT, MASK, byte_codec, tiny_config

BLOCK, SUB_BLOCK = 8, 4
DIFFUSION = DiffusionConfig(
    canvas_length=BLOCK, noise="mask", mask_token_id=MASK, logit_shift=1, context_attention="block_causal",
    block_anchor="position_zero", commit_rule="sub_blocks",
)  # fmt: skip
CONFIG = dataclasses.replace(
    tiny_config(), architecture="Fast_dLLM_QwenForCausalLM", has_qkv_bias=True, diffusion=DIFFUSION
)


EXECUTORS = ["eager", "cpu"] if importlib.util.find_spec("dlmrt.cpu._native") else ["eager"]


@pytest.fixture(scope="module")
def params(make_params):
    return make_params(CONFIG, seed=5)


@pytest.fixture(scope="module", params=EXECUTORS)
def engine(request, params):
    if request.param == "eager":
        return Engine(EagerDenoiser(params, CONFIG), CONFIG, byte_codec())
    from dlmrt.cpu.executor import CpuDenoiser

    arrays = {name: values.numpy() for name, values in params.items()}
    return Engine(CpuDenoiser(arrays, CONFIG, num_threads=1), CONFIG, byte_codec())


def block_causal(length):
    rows = np.arange(length) // BLOCK
    return rows[None] <= rows[:, None]


def reference(params, prompt, num_blocks, threshold, sub_block):
    """Ids of all blocks, and the canvases that its denoising forwards see."""

    def rows(ids):
        logits = dense_logits(params, CONFIG, np.array(ids, dtype=np.int32), block_causal(len(ids)))
        logits[:, MASK] = -np.inf
        logits[:, 256 + 6 :] = -np.inf
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        return probs / probs.sum(-1, keepdims=True)

    ids, seen = list(prompt), []
    for _ in range(num_blocks):
        if len(ids) % BLOCK == 0:
            ids.append(int(rows(ids)[-1].argmax()))
        start = len(ids) // BLOCK * BLOCK
        ids += [MASK] * (start + BLOCK - len(ids))
        for begin in range(start, start + BLOCK, sub_block):
            while MASK in ids[begin : min(begin + sub_block, start + BLOCK)]:
                seen.append(ids[start:])
                shifted = rows(ids)[begin - 1 : begin + sub_block - 1] if begin else rows(ids)[: sub_block - 1]
                places = range(begin if begin else 1, min(begin + sub_block, start + BLOCK))
                best = {at: (probs.max(), int(probs.argmax())) for at, probs in zip(places, shifted, strict=False)}
                open_ = [at for at in places if ids[at] == MASK]
                top = max(open_, key=lambda at: best[at][0])
                for at in open_:
                    if best[at][0] > threshold or at == top:
                        ids[at] = best[at][1]
    return ids[len(prompt) :], seen


@pytest.mark.parametrize("num_prompt", [3, 8, 13, 16])
@pytest.mark.parametrize(("threshold", "sub_block"), [(0.9, 4), (0.2, 4), (0.0, 4), (0.3, 8), (0.3, 3), (0.5, 1)])
def test_tokens_and_forwards(engine, params, num_prompt, threshold, sub_block):
    prompt = [(7 * i + 3) % 256 for i in range(num_prompt)]
    room = (-num_prompt) % BLOCK or BLOCK
    wanted, seen = reference(params, prompt, 3, threshold, sub_block)
    result = engine.generate(
        prompt, threshold=threshold, sub_block_length=sub_block, max_tokens=room + 2 * BLOCK, ignore_eos=True,
        record=True,
    )  # fmt: skip
    assert list(result.token_ids) == wanted
    assert [state.canvas_L.tolist() for state in result.record.states] == seen
    usage = result.usage
    assert (usage.num_denoise_steps, usage.num_commit_forwards) == (len(seen), 2)
    assert sum(forward.num_finalised for forward in result.record.forwards) == len(wanted)


def test_every_token_has_a_log_probability(params):
    """Also the first one of a block, which no denoising step decides."""
    engine = Engine(EagerDenoiser(params, CONFIG), CONFIG, byte_codec())
    *events, result = engine.stream(list(range(8)), max_tokens=16, ignore_eos=True, tokens=True, num_top_logprobs=2)
    blocks = [event for event in events if hasattr(event, "logprobs")]
    assert tuple(token for block in blocks for token in block.token_ids) == result.token_ids
    for block in blocks:
        for token, logprob in zip(block.token_ids, block.logprobs, strict=True):
            assert logprob.top[0] == (token, logprob.logprob)


def test_only_where_logits_are_shifted(params):
    """Without the shift slot 0 is one of the canvas; a block of one slot is what its only step decides."""
    for fields in ({"logit_shift": 0}, {"canvas_length": 1}):
        config = dataclasses.replace(CONFIG, diffusion=dataclasses.replace(DIFFUSION, **fields))
        result = Engine(EagerDenoiser(params, config), config, byte_codec()).generate(
            list(range(8)), max_tokens=8, ignore_eos=True, record=True
        )
        first = result.record.states[0]
        assert first.is_unresolved_L.all() and (first.canvas_L == MASK).all()
        assert sum(forward.num_finalised for forward in result.record.forwards) == 8


def test_sampling_leaves_the_first_token_of_a_block_alone(params):
    engine = Engine(EagerDenoiser(params, CONFIG), CONFIG, byte_codec())
    first = [
        engine.generate(list(range(8)), max_tokens=8, temperature=1.0, seed=seed).token_ids[0] for seed in range(5)
    ]
    assert len(set(first)) == 1 and first[0] not in (END, END_OF_TEXT)
