"""The terminal chat as a client of a running server: the same text, the same canvas, the same errors."""

from __future__ import annotations

import io
import sys
import threading

import numpy as np
import pytest

from dlmrt.errors import DeviceError, ModelNotFoundError, UsageError
from dlmrt.serve.client import RemoteEngine
from dlmrt.testing import scripted_engine, tiny_config
from dlmrt.types import CanvasEvent, DecodeConfig, TextEvent

from .conftest import echoing, endless, user, wait_until


def test_events_equal_the_engines_own(start):
    engine, _ = scripted_engine(echoing, config=tiny_config(max_position_embeddings=1024))
    server = start(engine)
    remote = RemoteEngine(server.url)
    config = DecodeConfig(threshold=0.8, max_tokens=30, stop=("Z",), seed=4)
    for prompt in (user("hello, canvas"), "hello"):
        *near, near_result = engine.stream(prompt, config, canvas=True)
        *far, result = remote.stream(prompt, config, canvas=True)
        texts = [[event.text for event in events if isinstance(event, TextEvent)] for events in (near, far)]
        assert "".join(texts[0]) == "".join(texts[1]) == result.text == near_result.text
        frames = [[event for event in events if isinstance(event, CanvasEvent)] for events in (near, far)]
        for left, right in zip(*frames, strict=True):
            assert (left.block_idx, left.step, left.text) == (right.block_idx, right.step, right.text)
            assert np.array_equal(left.canvas_L, right.canvas_L)
            assert np.array_equal(left.is_unresolved_L, right.is_unresolved_L)
            assert np.array_equal(left.changed_L, right.changed_L)
        assert remote.decode([72]) == "H"
        same = ("finish_reason",)
        assert [getattr(result, n) for n in same] == [getattr(near_result, n) for n in same]
        counted = ("prompt_tokens", "completion_tokens", "num_denoise_steps", "num_commit_forwards", "tpf_total")
        assert [getattr(result.usage, n) for n in counted] == [getattr(near_result.usage, n) for n in counted]
        recorded = ("seed", "executor", "end_reason", "commit_rule", "num_blocks")
        assert [getattr(result.record, n) for n in recorded] == [getattr(near_result.record, n) for n in recorded]


def test_a_cancelled_request_returns_what_had_arrived(start):
    server = start(endless)
    cancel = threading.Event()
    stream = RemoteEngine(server.url).stream(user("x"), DecodeConfig(max_tokens=10_000), cancel=cancel)
    first = next(stream)
    job = server.service.slot.running
    cancel.set()
    *events, result = stream
    assert result.finish_reason == "cancelled"
    assert result.text == "".join(event.text for event in (first, *events)) and result.text.startswith("abcdefgh")
    wait_until(lambda: server.service.slot.running is None)
    assert job.cut == "disconnect"


def test_errors(start):
    server = start(echoing, api_key="sesame")
    with pytest.raises(UsageError, match="key"):
        RemoteEngine(server.url)
    remote = RemoteEngine(f"{server.url}/v1/", model="other", api_key="sesame")
    with pytest.raises(ModelNotFoundError):
        remote.stream(user("x"), DecodeConfig())
    with pytest.raises(UsageError, match="top_p"):
        RemoteEngine(server.url, api_key="sesame").stream(user("x"), DecodeConfig(top_p=7.0))
    for url in ("ftp://x", "http://"):
        with pytest.raises(UsageError, match="base URL"):
            RemoteEngine(url)
    server.stop()
    with pytest.raises(DeviceError, match="cannot be reached"):
        RemoteEngine(server.url)


def test_dlmrt_chat_talks_to_a_server(start, monkeypatch, capsys):
    from dlmrt.cli import main

    server = start(echoing, api_key="sesame")
    monkeypatch.setenv("DLMRT_API_KEY", "sesame")

    def chat(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dlmrt", "chat", "--base-url", server.url, *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    status, out, err = chat("hello\n/set max_tokens 2\nworld\n/stats\n")
    assert (status, out) == (0, "HELLO\nWO\n")
    assert "max_tokens (executor scripted, float32)" in err and "2 tokens" in err
    assert chat("", "--executor", "eager")[0] == 2
    assert chat("hello\n", "gpt-9")[2].startswith("error: the server refuses: the model 'gpt-9' is not served")
