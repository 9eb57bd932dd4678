"""`dlmrt serve` under torchrun: two gloo processes answer the real `openai` client as one does, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from dlmrt.decode.engine import Engine

SRC = Path(__file__).parents[3] / "src"
WAIT_S = 300  # for processes that import torch on a loaded machine
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture
def torchrun(tmp_path):
    """`dlmrt serve dlmrt-tiny` in two processes; whatever is left of them is killed at the end of the test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLMRT_")}
    environment |= {
        "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "",
        "DLMRT_RANK_TIMEOUT": "100",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dlmrt"]
    server = ["serve", "dlmrt-tiny", "--port", "0", "--dtype", "float32", "--num-threads", "1"]
    with (tmp_path / "stderr").open("w+") as log:
        child = subprocess.Popen(command + server, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        yield child
        ranks = ranks_of(child) if child.poll() is None else []
        for process in (child.pid, *ranks):
            if child.poll() is None:
                os.kill(process, signal.SIGKILL)
        child.communicate()
        log.seek(0)
        print(log.read())  # shown where the test has failed


def ranks_of(torchrun: subprocess.Popen) -> list[int]:
    """Process ids of its ranks."""
    threads = Path(f"/proc/{torchrun.pid}/task").iterdir()
    return [int(word) for thread in threads for word in (thread / "children").read_text().split()]


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


@pytest.mark.timeout(2 * WAIT_S)
def test_a_server_of_two_processes_answers_as_one_does_and_ends_both_on_sigterm(torchrun):
    """As torchrun ends its ranks: each gets the signal. Its own status is 0 if that of both is."""
    url = json.loads(torchrun.stdout.readline())["url"]
    until = time.monotonic() + WAIT_S
    while not is_ready(url):
        assert torchrun.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    answer = client.chat.completions.create(model="dlmrt-tiny", messages=MESSAGES, max_tokens=24)
    ranks = ranks_of(torchrun)
    assert len(ranks) == 2
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    assert torchrun.wait(WAIT_S) == 0
    with Engine.load("dlmrt-tiny", executor="eager", dtype="float32") as engine:
        alone = engine.generate(MESSAGES, max_tokens=24)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (alone.text, alone.finish_reason)
    assert answer.usage.completion_tokens == alone.usage.completion_tokens > 0
    assert answer.usage.diffusion["num_denoise_steps"] == alone.usage.num_denoise_steps
