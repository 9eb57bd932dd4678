"""Queue, cancellation, limits, shutdown: what the server does when clients misbehave. Ids in names: known faults."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlmrt.serve.body import BodyLimits

from .conftest import WAIT_S, echoing, endless, events, user, wait_until

CHAT = "/v1/chat/completions"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Gate:
    """A script that stops before each forward until it is let through; then it is `endless`."""

    def __init__(self):
        self.permits = threading.Semaphore(0)
        self.num_waiting = 0
        self.is_open = False

    def __call__(self, *arguments):
        self.num_waiting += 1
        assert self.is_open or self.permits.acquire(timeout=WAIT_S)
        self.num_waiting -= 1
        return endless(*arguments)

    def open(self):
        self.is_open = True
        self.permits.release(1000)


def connect(server, body: dict, *, is_whole: bool = True) -> socket.socket:
    """A raw request, left to the caller to read or to drop."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    connection.sendall(head.encode() + (data if is_whole else data[:5]))
    return connection


def is_idle(server) -> bool:
    return server.service.slot.running is None and server.service.slot.num_waiting == 0


def test_k06_concurrent_clients_get_their_own_answers(start):
    """8 clients, each with its own word, plain and streamed; one in ten leaves in the middle. None mixed, none lost."""
    server = start(echoing)
    rounds, clients = 6, 8
    alone = {n: server.chat(f"word{n} " * 5)["choices"][0]["message"]["content"] for n in range(clients)}

    def client(number: int) -> int:
        draw, num_answers = random.Random(number), 0
        for _ in range(rounds):
            body = {"messages": user(f"word{number} " * 5)}
            kind = draw.random()
            if kind < 0.1:
                connection = connect(server, {**body, "stream": True})
                connection.recv(200)
                connection.close()
            elif kind < 0.55:
                chunks = server.stream(CHAT, **body)[:-1]
                text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
                num_answers += text == alone[number]
            else:
                text = server.chat(body["messages"][0]["content"])["choices"][0]["message"]["content"]
                num_answers += text == alone[number]
            num_answers += kind < 0.1
        return num_answers

    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(client, range(clients))) == [rounds] * clients
    wait_until(lambda: is_idle(server))
    assert server.denoiser.num_requests >= clients


def test_a_full_queue_answers_429_and_the_others_come_in_turn(start):
    gate = Gate()
    server = start(gate, max_queue=2)
    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=server.chat, args=(f"{number}",), kwargs={"max_tokens": 8}))
        threads[-1].start()
        wait_until(lambda n=number: server.service.slot.num_waiting == n and gate.num_waiting == 1)
    assert (server.metric("dlmrt:num_requests_running"), server.metric("dlmrt:num_requests_waiting")) == (1, 2)
    assert 0 < server.metric("dlmrt:kv_cache_usage_perc") <= 1
    status, headers, data = server.request("POST", CHAT, {"messages": user("x")})
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(data)["error"]["code"] == "queue_full"
    gate.open()
    for thread in threads:
        thread.join(WAIT_S)
    prompts = [bytes(token for token in ids.tolist() if token < 256) for ids in server.denoiser.extended]
    assert prompts == [b"user\n%d\nassistant\n" % number for number in range(3)]
    assert server.metric("dlmrt:num_requests_waiting") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_k49_a_client_that_leaves_frees_the_slot_within_a_block(start, stream):
    gate = Gate()
    server = start(gate)
    connection = connect(server, {"messages": user("x"), "max_tokens": 10_000, "stream": stream})
    gate.permits.release(2)
    wait_until(lambda: len(server.denoiser.forwarded) == 3 and gate.num_waiting == 1)
    job = server.service.slot.running
    connection.close()
    wait_until(job.cancel.is_set)
    gate.permits.release(1)  # the forward that was running; no other one follows
    wait_until(lambda: is_idle(server))
    assert len(server.denoiser.forwarded) == 3 and gate.num_waiting == 0
    gate.open()
    assert server.chat("y", max_tokens=3)["choices"][0]["message"]["content"] == "abc"
    assert server.metric("dlmrt:request_success_total") == 2


def test_k49_a_client_that_leaves_the_queue_is_never_run(start):
    gate = Gate()
    server = start(gate)
    running = connect(server, {"messages": user("x"), "max_tokens": 8})
    wait_until(lambda: gate.num_waiting == 1)
    waiting = connect(server, {"messages": user("x"), "max_tokens": 8})
    wait_until(lambda: server.service.slot.num_waiting == 1)
    waiting.close()
    wait_until(lambda: server.service.slot.num_waiting == 0)
    gate.open()
    assert b"200 OK" in running.recv(100)
    wait_until(lambda: is_idle(server))
    assert server.denoiser.num_requests == 1
    running.close()


def test_a_client_that_does_not_read_does_not_hold_the_engine(start):
    """The answer waits in memory; the next request is served meanwhile."""
    server = start(endless)
    body = {"messages": user("x"), "max_tokens": 800, "stream": True, "logprobs": 20}  # a megabyte
    connection = connect(server, body)
    assert b"200 OK" in connection.recv(100)
    assert server.chat("y", max_tokens=3)["choices"][0]["message"]["content"] == "abc"
    data = b""
    while piece := connection.recv(1 << 20):
        data += piece
    payload = b"".join(line for line in data.split(b"\r\n") if b"data: " in line)
    texts = [c["choices"][0]["delta"].get("content", "") for c in events(payload) if c != "[DONE]"]
    assert len(data) > 800_000 and "".join(texts) == (ALPHABET * 31)[:800]
    connection.close()


def test_a_request_that_waits_too_long_is_refused(start):
    gate = Gate()
    server = start(gate)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, "x", max_tokens=8)
        wait_until(lambda: gate.num_waiting == 1)
        server.service.config = dataclasses.replace(server.service.config, request_timeout_s=0.2)
        status, headers, data = server.request("POST", CHAT, {"messages": user("x")})
        assert status == 503 and json.loads(data)["error"]["code"] == "timeout" and "retry-after" in headers
        gate.open()
        assert running.result(WAIT_S)["choices"][0]["message"]["content"] == "abcdefgh"


def cut_answer(start, timeout_s: float, **fields) -> bytes | None:
    """Body of an answer that its deadline cut after the first forward; None if the time was up before the engine."""
    gate = Gate()
    server = start(gate, request_timeout_s=timeout_s)
    body = {"messages": user("x"), "max_tokens": 99, **fields}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.request, "POST", CHAT, body)
        wait_until(lambda: gate.num_waiting == 1 or asked.done())
        if asked.done():
            return None
        wait_until(lambda: server.service.slot.running.cut == "deadline")
        gate.open()
        return asked.result(WAIT_S)[2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_answer_is_cut_at_its_deadline(start, stream):
    """What is final is returned, with a finish reason. A busy machine needs a later deadline."""
    data = next(filter(None, (cut_answer(start, timeout_s, stream=stream) for timeout_s in (0.3, 3, 20))))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(data)[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcdefgh"
        assert choices[-1]["finish_reason"] == "length"
    else:
        answer = json.loads(data)
        assert answer["choices"][0]["message"]["content"] == "abcdefgh"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["diffusion"]["end_reason"] == "deadline"


def test_k51_slow_large_and_deep_bodies(start):
    server = start(echoing, body=BodyLimits(max_bytes=1 << 20, timeout_s=3))
    slow = connect(server, {"messages": user("x" * 100)}, is_whole=False)
    assert server.request("POST", CHAT, b'{"a":' * 100_000)[0] == 400
    status, _, data = server.request("POST", CHAT, b'"' + b"x" * 50_000_000 + b'"')
    assert status == 413 and json.loads(data)["error"]["code"] == "body_too_large"
    answer = slow.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer
    slow.close()
    for body, status in ((b"", 400), (b"[]", 400), (b"\xff", 400), (b'{"messages": NaN}', 400)):
        assert server.request("POST", CHAT, body)[0] == status
    assert server.chat("still here")["choices"][0]["message"]["content"] == "STILL HERE"


def test_k51_heads_that_do_not_come_are_not_waited_for(start):
    """A silent connection, half a head, and half a head after an answer."""
    server = start(echoing, body=BodyLimits(timeout_s=0.5))
    half = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x"
    for first in (b"", half, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        connection.sendall(first)
        if first.startswith(b"GET"):
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(half)
        while connection.recv(4096):
            pass  # until the server closes it
        connection.close()
    assert server.chat("still here")["choices"][0]["message"]["content"] == "STILL HERE"


def test_expect_continue_is_not_asked_for_a_body_that_is_too_large(start):
    server = start(echoing, body=BodyLimits(max_bytes=1000))
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\nexpect: 100-continue\r\n\r\n".encode()
    )
    assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    connection.close()


def test_k50_health_and_calls_while_loading(start):
    server = start(None)
    status, headers, data = server.request("GET", "/health")
    assert (status, json.loads(data)["phase"]) == (503, "starting") and "retry-after" in headers
    for path, body in ((CHAT, {"messages": user("x")}), ("/v1/completions", {"prompt": "x"})):
        status, headers, data = server.request("POST", path, body)
        assert status == 503 and "retry-after" in headers and json.loads(data)["error"]["code"] == "starting"
    assert server.request("GET", "/v1/models")[0] == server.request("GET", "/metrics")[0] == 200


def test_shutdown_refuses_the_queue_and_lets_the_running_answer_end(start):
    gate = Gate()
    server = start(gate, grace_s=WAIT_S)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(server.post, CHAT, messages=user("x"), max_tokens=16)
        wait_until(lambda: gate.num_waiting == 1)
        waiting = pool.submit(server.post, CHAT, messages=user("x"))
        wait_until(lambda: server.service.slot.num_waiting == 1)
        stopping = pool.submit(server.stop)
        status, refusal = waiting.result(WAIT_S)
        assert (status, refusal["error"]["code"]) == (503, "stopping")
        gate.open()
        status, answer = running.result(WAIT_S)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "abcdefghijklmnop"
        stopping.result(WAIT_S)
    with pytest.raises(OSError):
        server.request("GET", "/health")


def test_shutdown_cuts_an_answer_that_outlives_the_grace_time(start):
    gate = Gate()
    server = start(gate, grace_s=0.2)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.stream, CHAT, messages=user("x"), max_tokens=10_000)
        gate.permits.release(3)
        wait_until(lambda: gate.num_waiting == 1 and len(server.denoiser.forwarded) == 4)
        stopping = pool.submit(server.stop)
        wait_until(lambda: server.service.slot.running.cut == "shutdown")
        gate.permits.release(1)
        *chunks, last = running.result(WAIT_S)
        stopping.result(WAIT_S)
    assert last == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_long_silence_is_bridged_by_empty_lines(start):
    gate = Gate()
    server = start(gate, keep_alive_s=0.05)
    connection = connect(server, {"messages": user("x"), "max_tokens": 3, "stream": True})
    data = b""
    while data.count(b"2\r\n\n\n\r\n") < 2:  # chunks of two line breaks
        data += connection.recv(4096)
    gate.open()
    while b"[DONE]" not in data:
        data += connection.recv(4096)
    assert b'"content":"abc"' in data
    connection.close()


def test_the_key_guards_v1_alone(start):
    server = start(echoing, api_key="sesame")
    for headers in ({}, {"authorization": "Bearer sesam"}, {"authorization": "Basic sesame"}, {"authorization": "é"}):
        for method, path in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
        ):
            status, answer_headers, data = server.request(method, path, {} if method == "POST" else None, headers)
            assert status == 401 and answer_headers["www-authenticate"] == "Bearer"
            assert json.loads(data)["error"]["type"] == "authentication_error"
    for path in ("/", "/health", "/metrics", "/version", "/docs", "/openapi.json", "/page/app.js"):
        assert server.request("GET", path)[0] == 200
    key = {"authorization": "Bearer sesame"}
    assert server.request("POST", CHAT, {"messages": user("x")}, key)[0] == 200


def test_request_ids_and_unknown_routes(start):
    server = start(echoing)
    assert server.request("GET", "/version", headers={"x-request-id": "abc-1"})[1]["x-request-id"] == "abc-1"
    assert server.request("GET", "/version", headers={"x-request-id": "a b"})[1]["x-request-id"].startswith("req-")
    for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        got, _, data = server.request(method, path)
        assert got == status and json.loads(data)["error"]["message"].endswith("see /docs")


def test_pages_of_other_origins_may_call_only_when_allowed(start):
    preflight = {"origin": "http://a.example", "access-control-request-method": "POST"}
    closed, opened = start(echoing), start(echoing, cors_origins=("http://a.example",))
    assert "access-control-allow-origin" not in closed.request("OPTIONS", CHAT, headers=preflight)[1]
    status, headers, _ = opened.request("OPTIONS", CHAT, headers=preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, "http://a.example")
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
    ):
        headers = {"origin": "http://b.example", "content-type": kind}  # what needs no preflight is refused
        assert closed.request("POST", CHAT, {"messages": user("x")}, headers)[0] == status
    stranger = {**preflight, "origin": "http://b.example"}
    assert "access-control-allow-origin" not in opened.request("OPTIONS", CHAT, headers=stranger)[1]


def test_metrics_count_what_happened_and_vllms_client_derives_the_right_numbers(start):
    server = start(echoing)
    usages = [server.chat(text)["usage"] for text in ("hello", "a longer sentence than that", "x")]
    diffusion = [usage["diffusion"] for usage in usages]
    total = {name: sum(d[name] for d in diffusion) for name in ("num_denoise_steps", "num_blocks", "num_forwards")}
    assert server.metric("dlmrt:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert server.metric("dlmrt:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert server.metric("dlmrt:blocks_total") == total["num_blocks"]
    assert server.metric("dlmrt:request_success_total") == server.metric("dlmrt:tokens_per_forward_count") == 3
    forwards = sum(d["num_prefill_forwards"] for d in diffusion) + total["num_forwards"]
    assert server.metric("dlmrt:forwards_total") == forwards
    steps, positions, committed = (
        server.metric(f"vllm:diffusion_{name}_total")
        for name in ("num_denoising_steps", "num_canvas_positions", "num_committed_tokens")
    )
    block = positions / steps
    canvases = committed / block
    assert (block, canvases, steps - canvases) == (8, total["num_blocks"], total["num_denoise_steps"])


def test_k38_waiting_needs_no_processor(start):
    """An idle server sleeps."""
    server = start(echoing)
    server.chat("x")
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
