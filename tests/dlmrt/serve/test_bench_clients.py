"""What benchmark clients send and read, replayed with the standard library where the client is too large to install.

Source of the facts: vllm 0.33.0 `vllm bench serve` (benchmarks/serve.py, benchmarks/lib), dflash 0.1.0, lm-eval 0.4.13.
"""

from __future__ import annotations

import json

import pytest

from .conftest import echoing, user

COUNTERS = ("num_denoising_steps", "num_canvas_positions", "num_committed_tokens")


def diffusion_metrics(server) -> tuple[int, ...]:
    """As vLLM's client reads them: lines by prefix, names by substring, the last word as a number."""
    found = dict.fromkeys(COUNTERS, 0)
    for line in map(str.strip, server.request("GET", "/metrics")[2].decode().split("\n")):
        name = line.split(None, 1)[0].split("{")[0] if line else ""
        if name.startswith("vllm:diffusion") and name.endswith("_total"):
            for counter in COUNTERS:
                found[counter] += int(float(line.split()[-1])) if counter in name else 0
    return tuple(found.values())


def vllm_stream(server, path: str, payload: dict) -> tuple[str, int, int]:
    """Text, completion tokens and prompt tokens of one streamed request, read message by message."""
    status, _, data = server.request("POST", path, payload, {"x-request-id": "benchmark-serving0"})
    assert status == 200, data
    text, usage, num_chunks = "", None, 0
    for message in filter(None, (part.strip() for part in data.decode().split("\n\n"))):
        chunk = message.removeprefix("data: ")
        if chunk == "[DONE]":
            continue
        document = json.loads(chunk)
        if choices := document.get("choices"):
            num_chunks += 1
            text += (choices[0]["delta"].get("content") if "chat" in path else choices[0].get("text")) or ""
        elif found := document.get("usage"):
            usage = found
    assert num_chunks > 0 and usage is not None  # or the client counts the request as failed
    return text, usage["completion_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("chat", [True, False], ids=["openai-chat", "openai"])
def test_vllm_bench_serve(start, chat):
    """Model from the server's list, test request, warm-up, the run, and block, canvases and steps from the counters."""
    server = start(echoing)
    assert server.request("POST", "/tokenize", {"model": "tiny", "prompt": "x"})[0] == 404  # it then goes on without
    (card,) = json.loads(server.request("GET", "/v1/models")[2])["data"]
    common = {"model": card["id"], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    if chat:
        path = "/v1/chat/completions"
        parts = [{"type": "text", "text": "a prompt of some length"}]
        payload = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 64, **common}
    else:
        path = "/v1/completions"
        payload = {
            "prompt": "a prompt of some length", "repetition_penalty": 1.0, "max_tokens": 64, "logprobs": None,
            **common,
        }  # fmt: skip
    assert card["root"]
    vllm_stream(server, path, payload)
    before = diffusion_metrics(server)
    answers = [vllm_stream(server, path, payload) for _ in range(3)]
    assert {text for text, _, _ in answers} == {"A PROMPT OF SOME LENGTH"}
    assert all(completion == 24 and prompt > 20 for _, completion, prompt in answers)
    steps, positions, committed = (after - now for after, now in zip(diffusion_metrics(server), before, strict=True))
    block = positions / steps
    canvases = committed / block
    usage = server.post(path, **{key: value for key, value in payload.items() if not key.startswith("stream")})[1]
    counted = usage["usage"]["diffusion"]
    assert (block, canvases) == (8, 3 * counted["num_blocks"])
    assert steps - canvases == 3 * counted["num_denoise_steps"]


def test_vllm_bench_serve_past_the_end_of_text(start):
    """`--ignore-eos` of the random data set: as many tokens as were asked for."""
    server = start(echoing)
    payload = {
        "model": "tiny", "prompt": [65] * 30, "repetition_penalty": 1.0, "max_tokens": 50, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert vllm_stream(server, "/v1/completions", payload)[1:] == (50, 30)


def test_dflash_benchmark(start):
    """The body of its requests and what it reads of an answer."""
    server = start(echoing)
    body = {
        "model": "tiny", "messages": user("count"), "max_tokens": 64, "temperature": 0.0, "top_p": 1.0,
        "chat_template_kwargs": {}, "return_meta_info": True, "top_k": 20,
    }  # fmt: skip
    status, answer = server.post("/v1/chat/completions", **body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "COUNT"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["meta_info"]["spec_verify_ct"] == answer["usage"]["diffusion"]["num_forwards"]
    assert answer["meta_info"]["spec_accept_length"] > 1


def test_lm_eval(start):
    """Chat: seed, stops, temperature 0 and an extra `type`. Completions: its probes are 404, likelihood is refused."""
    server = start(echoing)
    message = {"role": "user", "content": "question", "type": "text"}
    body = {
        "messages": [message], "model": "tiny", "max_tokens": 256, "temperature": 0, "stop": ["QU", "</s>"],
        "seed": 1234,
    }  # fmt: skip
    assert server.post("/v1/chat/completions", **body)[1]["choices"][0]["message"]["content"] == ""
    for path in ("/tokenizer_info", "/tokenize"):
        assert server.request("GET", path)[0] == 404
    body = {"prompt": [[1, 2]], "model": "tiny", "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234}
    status, error = server.post("/v1/completions", echo=True, **body)
    assert (status, error["error"]["param"]) == (400, "echo")
