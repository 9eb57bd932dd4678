"""`dlmrt serve` as a process: the line on stdout, phases, signals, exit statuses. Ids in test names: known faults."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.testing import CHAT_TEMPLATE, byte_codec, tiny_config

from .conftest import WAIT_S, user, wait_until

SRC = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, make_params) -> Path:
    """Folder of a random model over bytes that does not stop by itself."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    text_files = tmp_path_factory.mktemp("tokenizer")
    byte_codec().tokenizer.save(str(text_files / "tokenizer.json"))
    (text_files / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = tiny_config(diffusion={"canvas_length": 4}, max_position_embeddings=8192, tie_word_embeddings=False)
    save_checkpoint(folder, config, make_params(config), generation={"max_new_tokens": 20}, tokenizer_files=text_files)
    return folder


@pytest.fixture
def spawn():
    """Start `dlmrt serve` as a child; whatever is left of it is killed at the end of the test."""
    children: list[subprocess.Popen] = []

    def start(*arguments, **variables) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **variables}
        child = subprocess.Popen(
            [sys.executable, "-m", "dlmrt", "serve", *map(str, arguments)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def get(port: int, path: str) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path)
    response = connection.getresponse()
    status, document = response.status, json.loads(response.read())
    connection.close()
    return status, document


def test_k50_a_server_from_its_first_line_to_sigterm(tiny_model, spawn):
    """503 with the phase while loading, then answers; SIGTERM cuts the running one with a finish reason, status 0."""
    client = openai.OpenAI(base_url="http://later", api_key="sesame", max_retries=0)  # takes a while to make
    child = spawn(
        tiny_model, "--port", 0, "--grace", 0.2, "--num-threads", 1, "--dllm-algorithm", "low_confidence_static",
        DLMRT_TESTING="1", DLMRT_FAULT="slow_load=3,slow_step=0.01", DLMRT_API_KEY="sesame",
    )  # fmt: skip
    line = json.loads(child.stdout.readline())
    assert (line["event"], line["model"]) == ("listening", "tiny") and line["url"] == f"http://127.0.0.1:{line['port']}"
    port = line["port"]
    assert get(port, "/health") == (503, {"status": "unavailable", "phase": "loading", "model": "tiny"})
    client = client.with_options(base_url=f"{line['url']}/v1")
    with pytest.raises(openai.InternalServerError, match="loading"):
        client.chat.completions.create(model="tiny", messages=user("x"))
    wait_until(lambda: get(port, "/health")[0] == 200)
    answer = client.chat.completions.create(model="tiny", messages=user("x"), extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 20
    assert answer.usage.diffusion["settings"]["commit_rule"] == "steps"
    assert client.models.list().data[0].diffusion["settings"]["max_tokens"] == 20

    stream = client.chat.completions.create(
        model="tiny", messages=user("x"), stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    reasons = []
    for number, chunk in enumerate(stream):
        if number == 1:
            child.send_signal(signal.SIGTERM)
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    stdout, stderr = child.communicate(timeout=WAIT_S)
    assert (child.returncode, stdout) == (0, "")
    requests = [line for line in stderr.splitlines() if "dlmrt.serve.endpoint: chat: " in line]
    assert re.search(
        r"0 cached \+ \d+ new prompt tokens .* 20 completion tokens, \d+ forwards, .*, max_tokens$", requests[0]
    )
    assert requests[1].endswith("shutdown")
    assert re.search(r"a request that says nothing else runs with commit_rule steps, .*max_tokens 20", stderr)  # K23
    assert "Traceback" not in stderr


def test_k50_a_load_that_fails_ends_the_process(tiny_model, spawn):
    child = spawn(tiny_model, "--port", 0, DLMRT_TESTING="1", DLMRT_FAULT="failed_load")
    _, stderr = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert stderr == "error: loading failed because DLMRT_FAULT asks for it; unset it\n"


def test_k38_a_step_that_hangs_ends_the_process(tiny_model, spawn):
    """The client gets an error, whoever waits is refused, and a supervisor sees status 1."""
    child = spawn(
        tiny_model, "--port", 0, "--request-timeout", 0.5, "--step-timeout", 0.5, "--no-graphs",
        DLMRT_TESTING="1", DLMRT_FAULT="slow_step=1000",
    )  # fmt: skip
    port = json.loads(child.stdout.readline())["port"]
    wait_until(lambda: get(port, "/health")[0] == 200)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": user("x")}))
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "stuck")
    _, stderr = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert stderr.endswith("error: a step of the model does not end after 0.5 s; check the device\n")


def test_interrupt_while_loading(tiny_model, spawn):
    child = spawn(tiny_model, "--port", 0, "--host", "127.0.0.1", DLMRT_TESTING="1", DLMRT_FAULT="slow_load=1000")
    assert json.loads(child.stdout.readline())["event"] == "listening"
    timer = threading.Timer(0.2, child.send_signal, [signal.SIGINT])  # into the running loop, or just before it
    timer.start()
    _, stderr = child.communicate(timeout=WAIT_S)
    assert (child.returncode, stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--max-num-seqs", "4"], {}, "'--max-num-seqs'"),
        (["--tp", "2"], {}, "torchrun --nproc-per-node 2 -m dlmrt serve"),
        ([], {"DLMRT_FAULT": "nan=0"}, "DLMRT_TESTING=1"),
        ([], {"DLMRT_PORT": "99999"}, "DLMRT_PORT=99999"),
        (["--diffusion-config", "{'a': 1}"], {}, "not valid JSON"),
        (["--diffusion-config", '{"treshold": 1}'], {}, "did you mean"),
        (["--dllm-algorithm", "LowConfidence", "--commit-rule", "steps"], {}, "disagree"),
        (["--root-path", "x"], {}, "slash"),
        (["--max-model-len", "1000000"], {}, "--max-model-len 1000000 does not fit this model; it can be 32"),
        (["--generation-config", "vllm"], {}, "--max-tokens"),
        (["--generation-config", "no-such-file"], {}, "nor a folder"),
        (["--quantization", "fp8"], {}, "this checkpoint's is none; leave the option out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors(monkeypatch, capsys, arguments, variables, said):
    from dlmrt.cli import main

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["dlmrt", "serve", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, said in capsys.readouterr().err) == (2, True)
