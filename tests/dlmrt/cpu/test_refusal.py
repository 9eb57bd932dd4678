"""Corrupted programs: refused by name where they are made (every build) or run (builds that verify), never a crash."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import assert_bit_equal, draw_params, fast, make_cpu, request_for, with_adapter
from test_lower import two_layers_of_gemma, two_layers_of_llada2

from dlmrt.cpu import _native, programs
from dlmrt.decode.loop import GivenDraws
from dlmrt.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent / "kernels"))  # for the build

pytestmark = pytest.mark.timeout(900)  # the test build may be made here, minutes of a loaded machine

PATIENCE_S = 1.0  # of a program that may have no end
PROMPT = np.arange(3, 24, dtype=np.int32)
GRID = {"context_attention": "block_causal", "block_anchor": "position_zero"}
CONFIGS = {
    "mask_residual": lambda: tiny_config(residual=with_adapter()),
    "uniform_shift": lambda: tiny_config(
        diffusion={"noise": "uniform", "logit_shift": 1, "in_block_attention": "causal"}
    ),
    "sub_blocks_shift": lambda: tiny_config(diffusion=GRID | {"logit_shift": 1}),
    "edits": lambda: tiny_config(diffusion=GRID | {"delete_token_id": 5, "split_token_id": 6}),
    "given": lambda: tiny_config(diffusion={"noise": "uniform"}),
    "spanned": lambda: tiny_config(diffusion={"canvas_length": 32}),
    "llada2": two_layers_of_llada2,
    "gemma": two_layers_of_gemma,
}
ASKED = {
    "mask_residual": {"threshold": 0.02},
    "uniform_shift": {"commit_rule": "entropy_bound", "max_denoising_steps": 4, "temperature": 0.9, "top_k": 20},
    "sub_blocks_shift": {"commit_rule": "sub_blocks", "threshold": 0.02, "sub_block_length": 3},
    "edits": {
        "commit_rule": "joint_threshold_indel",
        "threshold": 0.02,
        "edit_threshold": 0.0,
        "max_post_edit_steps": 9,
    },
    "given": {"commit_rule": "entropy_bound", "max_denoising_steps": 4, "temperature": 0.9},
    "spanned": {"threshold": 0.02},
    "llada2": {"threshold": 0.02, "edit_threshold": 0.5},
    "gemma": {"max_denoising_steps": 4},
}
# Operands whose size says how much there is of something, instead of having to reach a size.
OPEN = {"prompt", "table", "cos", "sin", "cache", "eos", "stop", "allowed", "run_cells", "runs", "x", "y", "gate_up",
        "seen", "given"}  # fmt: skip
NUMBERS = st.sampled_from(
    [-1e300, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 16.0, 64.0, 2.0**20, 2.0**28, 2.0**40, math.inf, math.nan]
)
WORDS = st.sampled_from([-(2**31), -1000, -1, 0, 1, 2, 7, 8, 255, 256, 1024, 1025, 100_000, 2**28, 2**31 - 1])


@pytest.fixture(scope="module")
def checked():
    """The module of the test build, which verifies operands, beside the installed one."""
    from native import build

    (path,) = build().glob("_native*.so")
    spec = importlib.util.spec_from_file_location("_native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.IS_CHECKED
    return module


class Recorder:
    """A runner that also keeps what it was made of."""

    made: list[Recorder] = []  # noqa: RUF012

    def __init__(self, native, pool, isa):
        self.pool, self.isa, self.calls, self.runner = pool, isa, [], native.Runner(pool, isa)
        self.made.append(self)

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def add(self, op, operands, attributes, *span):
        self.calls.append(("add", op, operands, attributes, *span))
        self.runner.add(op, operands, attributes, *span)

    def begin_while(self, flag):
        self.calls.append(("begin_while", flag))
        self.runner.begin_while(flag)

    def begin_if(self, flag):
        self.calls.append(("begin_if", flag))
        self.runner.begin_if(flag)

    def end(self):
        self.calls.append(("end",))
        self.runner.end()


def asked(name, config):
    request = request_for(config, PROMPT, max_tokens=20, **ASKED[name])
    if name != "given":
        return request
    rng = np.random.default_rng(0)
    drawn = (rng.integers(0, 250, (3, 4, config.diffusion.canvas_length)).astype(np.int32) for _ in range(2))
    return replace(request, given=GivenDraws(**dict(zip(("token_NSL", "noise_NSL"), drawn, strict=True))))


class Subject:
    """One model on the verifying build, and the loop program of one request, in pieces."""

    def __init__(self, native, name):
        self.native, self.name, self.config = native, name, CONFIGS[name]()
        params = draw_params(self.config)
        module = SimpleNamespace(**vars(native) | {"Runner": lambda pool, isa: Recorder(native, pool, isa)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "_native", module)
            self.cpu = make_cpu(self.config, params, num_threads=2 if name == "spanned" else 1)
            self.request = asked(name, self.config)
            self.events = fast(self.cpu, self.request)
        plain = make_cpu(self.config, params)
        assert_bit_equal(self.events, fast(plain, self.request))  # verifying changes nothing
        self.recorder = Recorder.made[-1]
        ((_, self.program),) = [item for item in self.cpu._store._programs.items() if item[0][0] == "loop"]
        # What the run left is what the next one starts from.
        self.kept = {key: values.copy() for key, values in self.memory().items()}

    def memory(self):
        return dict(self.program.states) | dict(self.program.scalars)

    def restore(self):
        for key, values in self.memory().items():
            values[...] = self.kept[key]
        self.program.set(cancel=0)

    def runner(self, calls):
        made = self.native.Runner(self.recorder.pool, self.recorder.isa)
        for name, *arguments in calls:
            getattr(made, name)(*arguments)
        return made

    def run(self, runner):
        """From start to end; nobody reads the records. Whoever counts in another's memory may never end by itself."""
        self.program.ring.reset()
        self.program.ring.abandon()
        canceller = threading.Timer(PATIENCE_S, self.program.set, kwargs={"cancel": 1})
        canceller.start()
        try:
            runner.run()
        finally:
            canceller.cancel()
            canceller.join()

    def fails(self, calls):
        """What refuses `calls`, when they are made or when they run; None: they ran."""
        self.restore()
        try:
            self.run(self.runner(calls))
        except (ValueError, IndexError, RuntimeError) as error:
            return str(error)
        return None


@pytest.fixture(scope="module")
def subjects(checked):
    """For programs that may write anywhere, into weights too."""
    return {name: Subject(checked, name) for name in CONFIGS}


@pytest.fixture(scope="module")
def sound(checked):
    """For programs that are refused before they write."""
    return Subject(checked, "mask_residual")


def nodes(calls):
    return [at for at, call in enumerate(calls) if call[0] == "add"]


def changed(calls, at, *, operands=None, attributes=None):
    """`calls` with another node at `at`."""
    name, op, old_operands, old_attributes, *span = calls[at]
    node = (name, op, old_operands if operands is None else operands, attributes or old_attributes, *span)
    return [*calls[:at], node, *calls[at + 1 :]]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_programs_in_order_are_not_refused(subjects, name):
    subject = subjects[name]
    assert subject.fails(subject.recorder.calls) is None


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_operand_that_is_too_small_is_refused_by_every_build(subjects, name):
    """Each operand of each node in turn, half of it, on the installed build: no memory is touched."""
    calls = subjects[name].recorder.calls
    pool, count = _native.Pool(1), 0
    for at in nodes(calls):
        _, op, operands, attributes, *_ = calls[at]
        if any(not isinstance(place, tuple) for place in operands.values()) or op == "publish":
            continue  # objects of the other module
        runner = _native.Runner(pool, "")
        runner.add(op, operands, attributes)
        for role, (address, size) in operands.items():
            if role in OPEN:
                continue
            with pytest.raises(ValueError, match=f"^{op}: operand '{role}' has {size // 2} bytes, [0-9]+ are needed"):
                runner.add(op, operands | {role: (address, size // 2)}, attributes)
            with pytest.raises(ValueError, match=f"^{op}: operand '{role}' does not begin on a multiple"):
                runner.add(op, operands | {role: (0, size)}, attributes)
            count += 1
    assert count > 50


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_missing_and_short_operands_and_odd_attributes(subjects, data):
    """One node is not what lowering made: refused by its name, or something that memory allows."""
    subject = subjects[data.draw(st.sampled_from(sorted(CONFIGS)))]
    calls = subject.recorder.calls
    at = data.draw(st.sampled_from(nodes(calls)))
    _, _, operands, attributes, *_ = calls[at]
    kind = data.draw(st.sampled_from(["drop", "short", "attribute", "no attribute"]))
    if kind in ("drop", "short"):
        role = data.draw(st.sampled_from(sorted(operands)))
        others = {key: place for key, place in operands.items() if key != role}
        if kind == "short" and isinstance(operands[role], tuple):
            address, size = operands[role]
            others = operands | {role: (address, data.draw(st.integers(-1, size - 1)))}
        corrupt = changed(calls, at, operands=others)
    elif attributes:
        role = data.draw(st.sampled_from(sorted(attributes)))
        others = {key: value for key, value in attributes.items() if key != role}
        corrupt = changed(
            calls, at, attributes=others if kind == "no attribute" else others | {role: data.draw(NUMBERS)}
        )
    else:
        return
    error = subject.fails(corrupt)
    assert error is None or ": " in error


# Nodes whose flags end the loops: with another flag in place of theirs a program may run on for good.
CONTROL = {"start_request", "finish_chunk", "start_block", "settle", "finish_step", "close_block", "next_block"}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_swapped_buffers(subjects, data):
    """Two nodes name each other's memory: refused for its size, for what it holds, or the result is just wrong."""
    subject = subjects[data.draw(st.sampled_from(sorted(CONFIGS)))]
    calls = list(subject.recorder.calls)
    places = [
        (at, role) for at in nodes(calls) if calls[at][1] not in CONTROL and not calls[at][1].startswith("commit_")
        for role, place in calls[at][2].items() if isinstance(place, tuple)
    ]  # fmt: skip
    (at, role), (other, other_role) = (data.draw(st.sampled_from(places)) for _ in range(2))
    one, two = calls[at][2][role], calls[other][2][other_role]
    calls = changed(calls, at, operands=calls[at][2] | {role: two})
    calls = changed(calls, other, operands=calls[other][2] | {other_role: one})
    error = subject.fails(calls)
    assert error is None or ": " in error


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_numbers_out_of_bounds_in_memory(subjects, data):
    """What the host fills, or the run before left, is not what the program may read."""
    subject = subjects[data.draw(st.sampled_from(sorted(CONFIGS)))]
    subject.restore()
    memory = subject.memory()
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(set(memory) - {"max_steps"})))  # a number of turns is no danger but time
        values = memory[key].reshape(-1)
        if values.dtype.kind in "iub":
            at, integer = data.draw(st.integers(0, min(len(values), 40) - 1)), data.draw(WORDS)
            kind = np.dtype(np.uint8) if values.dtype == bool else values.dtype
            values.view(kind)[at] = np.int64(integer).astype(kind)
        else:
            values[0] = data.draw(st.sampled_from([-1.0, 0.0, 1e-30, 1e30, math.inf, math.nan]))
    try:
        subject.run(subject.recorder.runner)
    except IndexError as error:
        assert "operand '" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_prompt", -1, "start_request: operand 'num_prompt' holds -1"),
        ("num_prompt", 2**30, "start_block: operand 'num_prompt' holds 1073741824"),
        ("num_prefill", 500, "start_request: operand 'num_prefill' holds 500 at 0; it must lie within 0..21"),
        ("prompt", -2, "embed: operand 'ids' holds -2"),
        ("prompt", 5000, "embed: operand 'ids' holds 5000"),
        ("max_steps", 0, "operand 'max_steps' holds 0"),
        ("min_commit", 0, "operand 'min_commit' holds 0"),
    ],
)
def test_a_request_out_of_bounds_is_refused_by_name(sound, name, value, message):
    """The loop's own thread refuses; whoever reads the records gets the reason, and the next request is answered."""
    sound.restore()
    sound.memory()[name][0] = value
    with pytest.raises(IndexError) as refused:
        sound.run(sound.recorder.runner)
    assert message in str(refused.value)
    assert_bit_equal(sound.events, fast(sound.cpu, sound.request))


def test_the_reader_of_a_loop_gets_the_reason(sound):
    request = request_for(sound.config, PROMPT, max_tokens=20, **ASKED["mask_residual"])
    object.__setattr__(request.settings, "min_commit", 0)
    with pytest.raises(RuntimeError, match="loop ended early: commit_threshold: operand 'min_commit' holds 0"):
        fast(sound.cpu, request)
    assert_bit_equal(sound.events, fast(sound.cpu, sound.request))


def test_more_steps_than_were_given_end_the_request():
    """In every build, by the loop or by the reader of its records, whoever gets there first."""
    config = CONFIGS["given"]()
    cpu, request = make_cpu(config, draw_params(config)), asked("given", config)
    events = fast(cpu, request)
    for part in (np.s_[:1], np.s_[:, :1]):
        short = GivenDraws(token_NSL=request.given.token_NSL[part], noise_NSL=request.given.noise_NSL[part])
        with pytest.raises((IndexError, RuntimeError), match="out of bounds|the given draws have no step"):
            fast(cpu, replace(request, given=short))
    assert_bit_equal(events, fast(cpu, request))


def test_a_forward_of_too_many_rows_is_refused(checked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_native", checked)
        cpu = make_cpu(tiny_config(), draw_params(tiny_config()))
        cpu.extend(PROMPT)
        program = cpu._extension()
        for rows in (-1, 513, 2**31 - 1):
            program.set(rows=rows)
            with pytest.raises(IndexError, match=f"embed: operand 'rows' holds {rows} at 0; it must lie within 0..512"):
                program.runner.run()
        program.set(rows=1)
        for name, value in (("positions", 1 << 20), ("visible", -3)):
            kept = program.states[name][0].copy()
            program.states[name][0] = value
            with pytest.raises(IndexError, match=f"operand '{name}' holds {value}"):
                program.runner.run()
            program.states[name][0] = kept
        program.runner.run()


def test_what_is_of_no_span_is_refused():
    """A span takes operations over the same rows, and only they wait."""
    memory = np.full(32 * 16 + 16, 2, dtype=np.float32)  # 32 rows of x, and a factor
    place = (memory.ctypes.data, 32 * 16 * 4)
    factor = (memory[32 * 16 :].ctypes.data, 4)
    scaled = ("scale", {"x": place, "factor": factor}, {"width": 16.0, "rows": 32.0})
    few = ("scale", {"x": place, "factor": factor}, {"width": 16.0, "rows": 16.0})
    shift = ("shift", {"cache": place, "context": place, "y": place}, {"width": 16.0, "rows": 8.0})
    runner = _native.Runner(_native.Pool(2), "")
    with pytest.raises(ValueError, match="scale: only operations of a span wait"):
        runner.add(*scaled, None, True)
    with pytest.raises(ValueError, match="shift: .* of no span"):
        runner.add(*shift, 0)
    runner.add(*scaled, 0)
    runner.add(*scaled, 0, True)
    with pytest.raises(ValueError, match="operations of a span have different rows"):
        runner.add(*few, 0)
    runner.add(*few, 1)
    runner.run()
    assert (memory[: 16 * 16] == 16).all() and (memory[16 * 16 : 32 * 16] == 8).all()
