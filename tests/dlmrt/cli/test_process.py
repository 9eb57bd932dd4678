"""What only a real process shows: pipes, a reader that leaves, Ctrl-C, and a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src"
LONG = ("--max-tokens", "8000", "--ignore-eos")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def spawn():
    """Start `dlmrt` as a child; whatever is left of it is killed at the end of the test."""
    children: list[subprocess.Popen] = []

    def start(*arguments, **streams) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "COLUMNS")}
        child = subprocess.Popen([sys.executable, "-m", "dlmrt", *map(str, arguments)], env=environment, **streams)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def _read_until(descriptor: int, wanted: str, *, timeout_s: float = 90) -> str:
    """Read a terminal until `wanted` has come, or it was closed."""
    text = ""
    while wanted not in text and select.select([descriptor], [], [], timeout_s)[0]:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux reports a closed terminal as an error
            break
        if not piece:
            break
        text += piece.decode("utf-8", "replace")
    return text


def test_echo_into_generate(tiny_model, engine):
    command = f"echo hello | '{sys.executable}' -m dlmrt generate '{tiny_model}' - | cat"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == engine.generate([{"role": "user", "content": "hello"}]).text + "\n"


@pytest.mark.parametrize(
    ("redirection", "status", "stdout", "stderr"),
    [
        (">&-", 1, "", "error: cannot write the output (Bad file descriptor); check where it goes\n"),
        ("> /dev/full", 1, "", "error: cannot write the output (No space left on device); check where it goes\n"),
        ("<&-", 0, "folder ", ""),
        ("no-such 2>&-", 2, "", ""),
    ],
)
def test_streams_that_are_closed_or_full(tiny_model, redirection, status, stdout, stderr):
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m dlmrt show '{tiny_model}' {redirection}"],
        env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, stderr)
    assert done.stdout.startswith(stdout) and bool(done.stdout) == bool(stdout)


def test_json_is_valid_in_any_encoding_and_the_same_in_any_process(tiny_model, engine):
    """A character that stdout cannot hold is escaped; neither hash seed nor thread count changes a token."""
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONHASHSEED": "7", "HF_HOME": "/tmp/\udcff"}
    options = ["--json", "--temperature", "1", "--seed", "3", "--num-threads", "2", "--max-tokens", "8"]
    options += ["--executor", "eager"]
    done = subprocess.run(
        [sys.executable, "-m", "dlmrt", "generate", tiny_model, "hello", *options],
        env={**os.environ, "PYTHONPATH": str(SRC), **variables}, stdin=subprocess.DEVNULL, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = engine.generate([{"role": "user", "content": "hello"}], temperature=1, seed=3, max_tokens=8)
    document = json.loads(done.stdout.decode("ascii"))
    assert (document["token_ids"], document["text"]) == (list(expected.token_ids), expected.text)
    assert not expected.text.isascii()


def test_sigterm_gives_the_terminal_its_cursor_back(tiny_model, spawn):
    terminal, end = pty.openpty()
    child = spawn(
        "generate", tiny_model, "hello", "--show-canvas", *LONG, stdin=end, stdout=subprocess.PIPE, stderr=end
    )
    os.close(end)
    _read_until(terminal, "block 9")
    child.send_signal(signal.SIGTERM)
    painted = _read_until(terminal, "\x1b[?25h")
    assert child.stdout.read()  # what was committed
    assert "\x1b[?25h" in painted and child.wait(timeout=90) == 128 + signal.SIGTERM
    os.close(terminal)


def test_interrupt_keeps_the_committed_text(tiny_model, engine, spawn):
    """K49: Ctrl-C ends the running request; what was committed is complete on stdout."""
    child = spawn("generate", tiny_model, "hello", *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(child.stdout.fileno(), 1)
    child.send_signal(signal.SIGINT)
    rest, stderr = child.communicate(timeout=90)
    assert (child.returncode, stderr) == (130, b"")
    text = (first + rest).decode("utf-8")
    assert text.endswith("\n")
    full = engine.generate([{"role": "user", "content": "hello"}], max_tokens=len(text) + 100, ignore_eos=True).text
    assert full.startswith(text[:-1].rstrip("\ufffd"))
    assert len(text) < 8000


def test_reader_that_leaves_is_no_error_message(tiny_model, spawn):
    child = spawn("generate", tiny_model, "hello", *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.read(child.stdout.fileno(), 1)
    child.stdout.close()
    stderr = child.stderr.read()
    assert (child.wait(timeout=90), stderr) == (1, b"")


def test_canvas_is_painted_on_the_terminal_and_text_goes_to_stdout(tiny_model, engine, spawn):
    terminal, end = pty.openpty()
    options = ("--show-canvas", "--max-tokens", "12", "--commit-rule", "steps")
    child = spawn("generate", tiny_model, "hello", *options, stdin=end, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    painted = _read_until(terminal, "\0")
    stdout = child.stdout.read().decode("utf-8")
    os.close(terminal)
    assert child.wait(timeout=90) == 0
    assert (
        stdout
        == engine.generate([{"role": "user", "content": "hello"}], max_tokens=12, commit_rule="steps").text + "\n"
    )
    plain = ESCAPE.sub("", painted)
    assert "\u2591" in plain  # positions that are not decided
    assert re.search(r"block 1  step 1  \d\.\d\d tokens/step", plain)
    assert re.search(r"block 3 ", plain)
    assert "\x1b[1;32m" in painted  # positions that a step decided


def test_chat_survives_a_cancelled_answer(tiny_model, spawn):
    terminal, end = pty.openpty()
    child = spawn("chat", tiny_model, "--plain", *LONG, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    assert "is ready" in _read_until(terminal, "> ")
    os.write(terminal, b"hello\n")
    _read_until(terminal, "hello\r\n")
    assert select.select([terminal], [], [], 90)[0]  # the answer has begun
    child.send_signal(signal.SIGINT)
    assert "cancelled" in _read_until(terminal, "> ")
    os.write(terminal, b"/stats\n")
    assert "cancelled (executor" in _read_until(terminal, "> ")
    os.write(terminal, b"\x04")
    assert child.wait(timeout=90) == 0
    os.close(terminal)


@pytest.mark.parametrize(("verb", "said", "status"), [("run", "is ready", 0), ("generate", "there is no prompt", 2)])
def test_run_without_a_prompt_talks(tiny_model, spawn, verb, said, status):
    """As Ollama's run; generate says what is missing."""
    terminal, end = pty.openpty()
    child = spawn(verb, tiny_model, "--max-tokens", "4", stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    painted = _read_until(terminal, said if status else "> ")
    if status == 0:
        os.write(terminal, b"hello\n")
        _read_until(terminal, "> ")
        os.write(terminal, b"\x04")
    assert said in painted and child.wait(timeout=90) == status
    os.close(terminal)
