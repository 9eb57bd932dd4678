"""The native loop against the readable one over the eager executor: event for event, token for token (fp32)."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from pairs import (
    assert_bit_equal,
    assert_same,
    draw_params,
    fast,
    make_cpu,
    make_eager,
    request_for,
    slow,
    with_adapter,
)

from dlmrt.cpu import executor
from dlmrt.decode.loop import BlockEvent, StepEvent
from dlmrt.decode.native import run_loop
from dlmrt.errors import NonFiniteError
from dlmrt.testing import END, MASK, tiny_config

RULES = {
    "threshold": {"threshold": 0.02},
    "joint_threshold": {"threshold": 0.02, "edit_threshold": 0.012, "max_post_edit_steps": 3},
    "entropy_bound": {"entropy_bound": 10.0, "max_denoising_steps": 6, "stop_entropy": 4.9},
    "steps": {"max_denoising_steps": 3},
    "sub_blocks": {"threshold": 0.02, "sub_block_length": 3},
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "seed": 11},
    "filtered": {"temperature": 1.1, "seed": 12, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
}
MODELS = {
    "mask": {},
    "mask_panels": {"head_dim": 16, "num_heads": 6, "num_kv_heads": 3},  # heads of whole panels, for three threads
    "mask_shift": {"diffusion": {"logit_shift": 1}},
    "mask_grid_blocks": {"diffusion": {"context_attention": "block_causal", "block_anchor": "position_zero"}},
    "mask_prompt_blocks_biased": {
        "architecture": "A2DQwen2LMHeadModel", "has_qkv_bias": True, "diffusion": {"context_attention": "block_causal"},
    },
    "mask_grid_causal": {"diffusion": {"block_anchor": "position_zero", "in_block_attention": "causal"}},
    "mask_shift_causal": {"diffusion": {"logit_shift": 1, "in_block_attention": "causal"}},
    "mask_shift_causal_grid": {
        "diffusion": {"logit_shift": 1, "in_block_attention": "causal", "block_anchor": "position_zero"},
    },
    "mask_residual": {"residual": with_adapter()},
    "mask_residual_local_shift": {"residual": with_adapter("masked"), "diffusion": {"logit_shift": 1}},
    "uniform": {"diffusion": {"noise": "uniform"}},
    "uniform_shift_causal": {"diffusion": {"noise": "uniform", "logit_shift": 1, "in_block_attention": "causal"}},
    "uniform_residual_grid": {
        "residual": with_adapter(), "diffusion": {"noise": "uniform", "block_anchor": "position_zero"},
    },
    "autoregressive": {
        "diffusion": {"canvas_length": 1, "noise": "uniform", "logit_shift": 1, "in_block_attention": "causal"}
    },
}  # fmt: skip

# What a block's steps carry on beside the canvas, and requests that use it: diffusion section, settings.
STATES = {
    "decided first slot": (
        {"logit_shift": 1, "block_anchor": "position_zero"},
        {"commit_rule": "sub_blocks", "threshold": 0.02, "sub_block_length": 3},
    ),
    "known rows": ({"logit_shift": 1, "in_block_attention": "causal"}, {"threshold": 0.02}),
    "tried ids": (
        {"delete_token_id": 5, "split_token_id": 6, "context_attention": "block_causal",
         "block_anchor": "position_zero"},
        {"commit_rule": "joint_threshold_indel", "threshold": 0.5, "edit_threshold": 0.0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    """Both executors of a model, made once."""
    made = {}

    def get(name):
        if name not in made:
            config = tiny_config(**MODELS[name])
            params = draw_params(config, seed=sorted(MODELS).index(name))
            made[name] = config, make_eager(config, params), make_cpu(config, params)
        return made[name]

    return get


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_native_loop_equals_the_readable_one(models, name, rule, rng):
    config, eager, cpu = models(name)
    settings = dict(RULES[rule])
    if config.diffusion.canvas_length == 1:
        settings |= {"steps": {"max_denoising_steps": 1}, "sub_blocks": {"sub_block_length": 1}}.get(rule, {})
    for sampling in SAMPLINGS.values():
        prompt = rng.integers(0, 250, int(rng.integers(9, 40)))
        asked = {"commit_rule": rule, "max_tokens": int(rng.integers(1, 40)), **settings, **sampling}
        request = request_for(config, prompt, stop_token_ids=tuple(rng.integers(0, 250, 4).tolist()), **asked)
        assert_same(slow(eager, request), fast(cpu, request))


def test_random_requests_equal(models, rng):
    """Many small requests over all dimensions at once; every end reason occurs."""
    reasons = set()
    for _ in range(60):
        name, rule, sampling = (str(rng.choice(sorted(table))) for table in (MODELS, RULES, SAMPLINGS))
        config, eager, cpu = models(name)
        if config.diffusion.canvas_length == 1:
            continue
        prompt = rng.integers(0, 250, int(rng.integers(8, 30)))
        asked = {
            "commit_rule": rule, "max_tokens": int(rng.integers(1, 24)), **RULES[rule], **SAMPLINGS[sampling],
            "stop_token_ids": tuple(rng.integers(0, 250, int(rng.integers(0, 12))).tolist()),
            "use_residual": bool(rng.random() < 0.7), "ignore_eos": bool(rng.random() < 0.2),
        }  # fmt: skip
        request = request_for(config, prompt, **asked)
        events = slow(eager, request)
        assert_same(events, fast(cpu, request))
        reasons.add(events[-1].end_reason)
    assert {"max_tokens", "stop_token"} <= reasons


def test_eos_ends_the_answer_inside_a_block():
    """A model that is sure of EOS everywhere; the stop id counts and nothing after it does."""
    config = tiny_config()
    params = draw_params(config)
    params["model.norm.weight"][:] = 0
    params["model.norm.weight"][0] = 5
    params["model.embed_tokens.weight"][:, 0] = 0.1
    params["model.embed_tokens.weight"][END, 0] = 9
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    request = request_for(config, [1, 2, 3], commit_rule="steps", max_denoising_steps=4, max_tokens=50)
    events = slow(eager, request)
    assert_same(events, fast(cpu, request))
    assert events[-1].end_reason in ("eos", "max_tokens")


def test_the_step_loop_over_the_cpu_executor_gives_the_same_bytes(models, rng):
    """Python driving the same forwards: only who decides differs. Decisions are equal, hidden numbers too."""
    config, _, cpu = models("mask_residual")
    request = request_for(config, rng.integers(0, 250, 20), max_tokens=24, **RULES["threshold"])
    by_hand, native = slow(cpu, request), fast(cpu, request)
    assert_same(by_hand, native)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["mask_shift_causal", "mask_shift_causal_grid", "uniform_shift_causal"])
def test_rows_that_are_known_are_left_out_without_a_trace(name, dtype, monkeypatch, rng):
    """Causal slots with shifted logits: a step computes from the first id that changed, and the bytes are the same."""
    config = tiny_config(**MODELS[name])
    params = draw_params(config)
    cpu, whole = (make_cpu(config, params, dtype=dtype) for _ in range(2))
    monkeypatch.setattr(whole, "drops_rows", False)
    length, num_dropped = config.diffusion.canvas_length, 0
    for rule, sampling in itertools.product(RULES, SAMPLINGS.values()):
        asked = {"commit_rule": rule, "max_tokens": 29, "ignore_eos": True, **RULES[rule], **sampling}
        request = request_for(config, rng.integers(0, 250, int(rng.integers(1, 20))), **asked)
        events = fast(cpu, request)
        assert_bit_equal(fast(whole, request), events)
        *_, before, last = (event.state for event in events if isinstance(event, StepEvent))
        if last.step:
            is_changed = before.canvas_L[:-1] != last.canvas_L[:-1]
            first = int(np.append(np.flatnonzero(is_changed), length - 1)[0])
            *_, program = (program for key, program in cpu._store._programs.items() if key[0] == "loop")
            assert program.scalars["num_changed"][0] == length - 1 - first
            num_dropped += first
    assert num_dropped > 0


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_thread_counts_give_the_same_bytes(threads, dtype, rng):
    config = tiny_config(residual=with_adapter(), **MODELS["mask_panels"])
    params = draw_params(config)
    one, many = (make_cpu(config, params, dtype=dtype, num_threads=count) for count in (1, threads))
    for sampling in SAMPLINGS.values():
        request = request_for(config, rng.integers(0, 250, 21), max_tokens=30, **RULES["threshold"], **sampling)
        assert_bit_equal(fast(one, request), fast(many, request))


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_threads_that_share_a_layer_by_rows_give_the_same_bytes(name, dtype, rng):
    changes = MODELS[name] | {"diffusion": MODELS[name].get("diffusion", {}) | {"canvas_length": 32}}
    config = tiny_config(**changes)
    params = draw_params(config)
    one, two = (make_cpu(config, params, dtype=dtype, num_threads=count) for count in (1, 2))
    for sampling in SAMPLINGS.values():
        request = request_for(config, rng.integers(0, 250, 21), max_tokens=90, **RULES["threshold"], **sampling)
        for _ in range(3):  # threads are apart in other ways each time
            assert_bit_equal(fast(one, request), fast(two, request))


def test_a_request_does_not_see_the_one_before(rng):
    """K05: 200 pairs; the second, shorter request gives the bytes of a fresh engine."""
    config = tiny_config(num_layers=1, residual=with_adapter(), diffusion={"logit_shift": 1})
    params = draw_params(config)
    used = make_cpu(config, params)
    for _ in range(200):
        first, second = rng.integers(0, 250, int(rng.integers(60, 101))), rng.integers(0, 250, int(rng.integers(1, 41)))
        settings = {"max_tokens": 10, **RULES["threshold"]}
        fast(used, request_for(config, first, **settings))
        request = request_for(config, second, **settings)
        events = fast(used, request)
        fresh = make_cpu(config, params)
        assert_bit_equal(events, fast(fresh, request))
        logits = []
        for denoiser in (used, fresh):
            denoiser.reset()
            denoiser.extend(second.astype(np.int32))
            logits.append(denoiser.forward(events[1].state.canvas_L, None, None))
        np.testing.assert_array_equal(*logits)


def test_a_stop_string_ends_the_answer_where_the_readable_loop_ends_it(models, rng):
    """The watch decides how many of the settled ids count; what the loop did further ahead is dropped."""
    for name, target in itertools.product(("mask", "mask_residual", "uniform"), (1, 5, 11, 17)):
        config, eager, cpu = models(name)
        prompt = rng.integers(0, 250, 14)
        results = []
        for run, denoiser in ((slow, eager), (fast, cpu)):
            request = request_for(
                config, prompt, watch=watch_for(target), stop=("x",), max_tokens=40, **RULES["threshold"]
            )
            results.append(run(denoiser, request))
        assert_same(*results)
        assert results[1][-1].end_reason == "stop_string"
        assert sum(len(e.answer) for e in results[1] if isinstance(e, BlockEvent)) == target


def watch_for(target):
    """A watch that lets the text end after `target` ids."""
    seen = []

    def watch(ids):
        count = min(len(ids), target - len(seen))
        seen.extend(ids)
        return count if len(seen) >= target else None

    return watch


def test_cancel_before_the_start_runs_no_forward(models):
    config, eager, cpu = models("mask")
    cancel = threading.Event()
    cancel.set()
    request = request_for(config, range(30), cancel=cancel, max_tokens=20)
    events = fast(cpu, request)
    assert_same(slow(eager, request), events)
    assert events[-1].end_reason == "cancelled" and events[0].forwards == ()


def test_cancel_between_two_events_ends_there(models, rng):
    """As in the readable loop: steps that ran ahead of the reader are not part of the answer."""
    from dlmrt.decode.loop import decode
    from dlmrt.decode.native import run_loop

    config, eager, cpu = models("mask")
    prompt, results = rng.integers(0, 250, 10), []
    for loop, denoiser in ((decode, eager), (run_loop, cpu)):
        cancel = threading.Event()
        request = request_for(config, prompt, cancel=cancel, max_tokens=60, **RULES["threshold"])
        events = []
        for event in loop(denoiser, request):
            events.append(event)
            if len(events) == 6:
                cancel.set()
        results.append(events)
    assert_same(*results)
    assert results[1][-1].end_reason == "cancelled"


def test_cancel_from_another_thread_ends_a_long_answer(models):
    config, _, cpu = models("mask")
    cancel = threading.Event()
    request = request_for(config, range(10), cancel=cancel, max_tokens=400, ignore_eos=True, threshold=1.0)
    timer = threading.Timer(0.02, cancel.set)
    timer.start()
    events = fast(cpu, request)
    timer.join()
    assert events[-1].end_reason in ("cancelled", "max_tokens")
    assert fast(cpu, request_for(config, range(10), max_tokens=3))[-1].end_reason == "max_tokens"


def test_cancel_within_a_long_prefill_ends_at_a_chunk():
    """The flag is set while some chunk runs: later ones do not, nothing is answered, and the engine goes on as new."""
    from dlmrt.decode.native import run_loop

    config = tiny_config(max_position_embeddings=1 << 16, diffusion={"canvas_length": 8})
    params = draw_params(config)
    cpu, fresh = make_cpu(config, params), make_cpu(config, params)
    num_chunks, chunk = 64, 512
    prompt = np.arange(num_chunks * chunk) % 250
    whole = list(fast(fresh, request_for(config, prompt[: 3 * chunk], max_tokens=8)))
    cancel, seen = threading.Event(), []
    cancel.set()
    request = request_for(config, prompt, cancel=cancel, max_tokens=8)
    fast(cpu, request)  # binds the program
    (program,) = [program for key, program in cpu._store._programs.items() if key[0] == "loop"]
    cancel.clear()
    reader = threading.Thread(target=lambda: seen.extend(run_loop(cpu, request)))
    reader.start()
    while reader.is_alive() and not program.scalars["num_prefill_forwards"][0]:
        time.sleep(0.001)
    cancel.set()
    reader.join()
    prefill, end = seen
    assert 0 < len(prefill.forwards) < num_chunks and end.end_reason == "cancelled" and not end.answer
    assert program.scalars["context"][0] == chunk * len(prefill.forwards)
    assert_bit_equal(whole, fast(cpu, request_for(config, prompt[: 3 * chunk], max_tokens=8)))


def test_more_threads_than_cores_give_the_same_bytes(monkeypatch, rng):
    config = tiny_config(residual=with_adapter())
    params = draw_params(config)
    request = request_for(config, rng.integers(0, 250, 40), max_tokens=24, **RULES["threshold"])
    expected = fast(make_cpu(config, params), request)
    num_threads = 4 * len(os.sched_getaffinity(0))
    monkeypatch.setenv("DLMRT_NUM_THREADS", str(num_threads))
    many = make_cpu(config, params, num_threads=None)
    assert many._store._pool.size == num_threads
    for _ in range(3):
        assert_bit_equal(expected, fast(many, request))


def test_a_reader_that_leaves_stops_the_loop(models):
    config, _, cpu = models("mask")
    stream = run_loop(cpu, request_for(config, range(10), max_tokens=400, threshold=1.0))
    for _ in range(3):
        next(stream)
    stream.close()
    assert fast(cpu, request_for(config, range(10), max_tokens=3))[-1].end_reason == "max_tokens"


def test_a_slow_reader_loses_nothing(models, rng):
    """The ring is shorter than this answer: the loop waits for the reader."""
    config, eager, cpu = models("mask")
    request = request_for(config, rng.integers(0, 250, 10), max_tokens=160, ignore_eos=True, threshold=1.0)
    events = fast(cpu, request)
    assert sum(isinstance(event, StepEvent) for event in events) == 160
    assert_same(slow(eager, request), events)


def test_nan_fails_the_request_and_not_the_next_one(rng):
    """K11: NaN in one embedding row poisons the requests that contain it, with block, step and slots, and no other."""
    config = tiny_config()
    params = draw_params(config)
    params["model.embed_tokens.weight"][77] = np.nan
    params["lm_head.weight"] = draw_params(config, seed=9)["model.embed_tokens.weight"]
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    for dtype in ("float32", "bfloat16", "int8"):
        cpu = make_cpu(untied, params, dtype=dtype)
        with pytest.raises(NonFiniteError, match=r"block 0, step 0, slots \[0, 1, 2, 3, 4, 5, 6, 7\]"):
            fast(cpu, request_for(untied, [5, 77, 6], max_tokens=8))
        good = request_for(untied, [5, 78, 6], max_tokens=8)
        fresh = make_cpu(untied, params, dtype=dtype)
        assert_bit_equal(fast(cpu, good), fast(fresh, good))


def test_the_first_slot_of_a_shifted_block_is_decided_before_the_first_step(rng):
    """Rule sub_blocks: not where the prompt holds it, nor in a request that was cancelled; its row may be NaN alone."""
    config = tiny_config(diffusion={"logit_shift": 1, "block_anchor": "position_zero"}, tie_word_embeddings=False)
    params = draw_params(config)
    params["model.embed_tokens.weight"][77] = np.nan
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    asked = {"commit_rule": "sub_blocks", "threshold": 0.02, "max_tokens": 20}
    for length, is_open in ((8, False), (16, False), (13, False), (3, False)):
        events = fast(cpu, request_for(config, rng.integers(0, 70, length), **asked))
        first = next(event for event in events if isinstance(event, StepEvent))
        assert first.state.is_unresolved_L[0] == is_open
        assert first.state.committed_L[0] == (length % 8 == 0)
    cancel = threading.Event()
    cancel.set()
    request = request_for(config, range(8), cancel=cancel, **asked)
    assert_same(slow(eager, request), fast(cpu, request))
    poisoned = request_for(config, [1, 2, 3, 4, 5, 6, 7, 77], **asked)
    for run, denoiser in ((slow, eager), (fast, cpu)):
        with pytest.raises(NonFiniteError, match=r"block 0, step 0, slots \[0\]"):
            run(denoiser, poisoned)
    good = request_for(config, range(8), **asked)
    assert_bit_equal(fast(cpu, good), fast(make_cpu(config, params), good))


def test_flat_logits_cannot_spin():
    """K09: no confidence ever passes 1, no EOS comes: one position a step, and the length limit ends it."""
    config = tiny_config(diffusion={"canvas_length": 32})
    params = {name: np.zeros_like(values) for name, values in draw_params(config).items()}
    request = request_for(config, [1, 2, 3], threshold=0.99, max_tokens=96, ignore_eos=True)
    events = fast(make_cpu(config, params), request)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert len(steps) <= 96 and all(step.state.committed_L.any() for step in steps)
    assert events[-1].end_reason == "max_tokens"
    assert_same(slow(make_eager(config, params), request), events)


def test_shifted_logits_of_a_prompt_shorter_than_a_block(rng):
    """A grid at zero leaves nothing before slot 0, which is the prompt's."""
    config = tiny_config(diffusion={"logit_shift": 1, "block_anchor": "position_zero"})
    params = draw_params(config)
    request = request_for(config, [1, 2, 3], max_tokens=12)
    assert_same(slow(make_eager(config, params), request), fast(make_cpu(config, params), request))


def constant_params(config, embedding):
    """Layers that add nothing to an embedding of equal numbers; the head alone is random."""
    params = {name: np.zeros_like(values) for name, values in draw_params(config).items()}
    for values in params.values():
        if values.ndim == 1:
            values[...] = 1
    params["model.embed_tokens.weight"][...] = embedding
    params["lm_head.weight"] = draw_params(config)["lm_head.weight"]
    return params


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("is_banned", [False, True])
def test_one_logit_that_is_not_finite_is_judged_alike_by_both_loops(value, is_banned):
    """K11: it fails the request, also -inf, which no sum shows; of a banned id it is nobody's."""
    config = tiny_config(tie_word_embeddings=False)
    params = constant_params(config, 1.0)
    params["lm_head.weight"][MASK if is_banned else 30, 3] = value
    request = request_for(config, range(3, 13), max_tokens=8, threshold=0.02)
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    if is_banned:
        assert_same(slow(eager, request), fast(cpu, request))
        return
    for run, denoiser in ((slow, eager), (fast, cpu)):
        with pytest.raises(NonFiniteError, match=r"block 0, step 0, slots \[0, 1, 2, 3, 4, 5, 6, 7\]"):
            run(denoiser, request)


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_cancelled_run_leaves_nothing_to_the_next_one(name, rng):
    """What blocks and steps carry on (decided first slots, rows that are known, ids that were tried) begins anew."""
    diffusion, asked = STATES[name]
    config = tiny_config(diffusion=diffusion)
    params = draw_params(config)
    used = make_cpu(config, params)
    for num_steps in (0, 1, 2, 5):
        cancel = threading.Event()
        request = request_for(config, rng.integers(10, 250, 8), cancel=cancel, max_tokens=60, ignore_eos=True, **asked)
        stream = run_loop(used, request, wants_steps=True)
        for _ in range(1 + num_steps):
            next(stream)
        cancel.set()
        assert [event for event in stream if isinstance(event, BlockEvent)][-1].end_reason == "cancelled"
        good = request_for(config, rng.integers(10, 250, int(rng.integers(1, 17))), max_tokens=20, **asked)
        assert_bit_equal(fast(used, good), fast(make_cpu(config, params), good))


def test_a_step_in_which_no_row_has_changed(rng):
    """The step before decided the last slot, whose row predicts nothing: no row goes through any part of a layer."""
    config = tiny_config(diffusion=STATES["known rows"][0])
    params = draw_params(config)
    cpu = make_cpu(config, params, num_threads=2)
    request = request_for(config, rng.integers(10, 250, 9), max_tokens=64, ignore_eos=True, threshold=1.0)
    events = fast(cpu, request)
    steps = [event.state for event in events if isinstance(event, StepEvent)]
    assert any(
        one.block_idx == next_one.block_idx and (one.canvas_L[:-1] == next_one.canvas_L[:-1]).all()
        for one, next_one in itertools.pairwise(steps)
    )
    assert_same(slow(make_eager(config, params), request), events)


def test_two_threads_may_end_one_run(rng):
    config = tiny_config()
    cpu = make_cpu(config, draw_params(config))
    for _ in range(5):
        request = request_for(config, rng.integers(0, 250, 10), max_tokens=400, threshold=1.0, ignore_eos=True)
        stream = run_loop(cpu, request, wants_steps=True)
        next(stream)
        (run,) = executor._running
        threads = [threading.Thread(target=run.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        stream.close()
        assert not executor._running


def test_a_child_of_a_fork_ends_and_begins_loops_of_its_own(rng):
    """While the parent's loop runs: nothing that its threads hold is waited for."""
    config = tiny_config()
    cpu = make_cpu(config, draw_params(config), num_threads=2)
    short = request_for(config, rng.integers(0, 250, 10), max_tokens=8)
    expected = fast(cpu, short)
    stream = run_loop(cpu, request_for(config, range(10), max_tokens=400, threshold=1.0, ignore_eos=True))
    next(stream)
    child = os.fork()
    if not child:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked off"):
                list(stream)
            executor._close_all()
            assert_bit_equal(fast(cpu, short), expected)
            status = 0
        finally:
            os._exit(status)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
    assert (ended, status) == (child, 0)
    stream.close()
    assert_bit_equal(fast(cpu, short), expected)


def test_the_floating_point_mode_of_the_caller_changes_nothing(rng):
    """A thread that takes denormals for zero computes its share of the work as the pool's other threads do."""
    import torch

    config = tiny_config(tie_word_embeddings=False)
    params = constant_params(config, 1e-39)
    canvas = rng.integers(0, 250, 8).astype(np.int32)
    expected = make_cpu(config, params).forward(canvas, None, None)
    assert (expected != 0).all()
    try:
        torch.set_flush_denormal(True)  # False where the processor has no such mode: then there is nothing to change
        found = make_cpu(config, params, num_threads=2).forward(canvas, None, None)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(found, expected)
