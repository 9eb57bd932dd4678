"""Load and soak test of a running server: misbehaving clients, equal answers, flat memory, prompt cancellation.

    python benchmarks/soak.py [MODEL] [--base-url URL] [--clients 8] [--rounds 50] [--requests 2000]

Without --base-url it starts `dlmrt serve MODEL` on a free loopback port. Three phases:

1. load    each client sends its own prompt, plain or streamed; one in ten leaves in the middle, others read slowly or
           send oversize or malformed bodies. Every complete answer must equal the one asked for alone.
2. memory  sequential requests; the memory of the server over the second half of them.
3. cancel  a long answer whose client leaves; seconds until the engine is idle, beside the time of a block.

The last line on stdout is one JSON document; the exit status is 1 when a promise was broken. Standard library only: it
knows nothing of the server but its HTTP surface. Left out: speed under load, which one slot makes a matter of queueing.

Source: ours.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
TIMEOUT_S = 600


class Server:
    """The HTTP surface, as far as this script needs it."""

    def __init__(self, base_url: str, pid: int | None = None) -> None:
        self.pid = pid  # when this script started it
        parts = urlsplit(base_url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def document(self, path: str) -> Any:
        """The JSON of a GET."""
        return json.loads(self.request("GET", path)[2])

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a metric over its labels, or over those that contain `label`."""
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        mine = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line)
        return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

    def memory_bytes(self) -> float:
        """Memory of the server's own; pages of files come and go with the machine's cache. Elsewhere its metric."""
        status = Path(f"/proc/{self.pid}/status")
        if self.pid is None or not status.exists():
            return self.metric("process_resident_memory_bytes")
        (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", status.read_text(encoding="ascii"))
        return float(kilobytes) * 1024

    def open(self, body: dict[str, Any], *, receive_bytes: int | None = None) -> socket.socket:
        """Send a request and leave the rest to the caller."""
        data = json.dumps(body).encode()
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(TIMEOUT_S)
        connection.connect((self.host, self.port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {self.host}\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def wait_idle(self) -> None:
        """Wait until nothing runs and nobody waits."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.metric("dlmrt:num_requests_running") or self.metric("dlmrt:num_requests_waiting"):
            if time.monotonic() > deadline:
                raise SystemExit("error: the server does not become idle")
            time.sleep(0.02)


class Load:
    """Phase 1."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        self.server, self.max_tokens = server, max_tokens
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def body(self, client: int, *, stream: bool) -> dict[str, Any]:
        """The request of a client: its own words, temperature 0."""
        content = f"client {client} says {'abcdefghijkl'[client % 12] * (3 + client)}"
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "max_tokens": self.max_tokens, "temperature": 0, "stream": stream}

    def document(self, client: int) -> Any:
        """The whole answer of one plain request."""
        status, _, data = self.server.request("POST", CHAT, json.dumps(self.body(client, stream=False)).encode())
        assert status == 200, data
        return json.loads(data)

    def alone(self, client: int) -> str:
        """The answer that the client gets when nobody else is there."""
        return str(self.document(client)["choices"][0]["message"]["content"])

    def run(self, *, clients: int, rounds: int, seed: int) -> None:
        """All clients at once."""
        answers = {client: self.alone(client) for client in range(clients)}
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda client: self._client(client, rounds, seed, answers[client]), range(clients)))
        self.server.wait_idle()

    def _client(self, client: int, rounds: int, seed: int, expected: str) -> None:
        draw = random.Random(seed * 1000 + client)
        for _ in range(rounds):
            kinds = {"plain": 40, "stream": 35, "leave": 10, "slow": 5, "oversize": 5, "malformed": 5}
            (kind,) = draw.choices(list(kinds), list(kinds.values()))
            outcome = getattr(self, f"_{kind}")(client, draw, expected)
            with self._lock:
                self.counts[f"{kind}_{outcome}"] += 1

    def _verdict(self, status: int, text: str, expected: str) -> str:
        if status in (429, 503):
            return "busy"
        if status != 200:
            return f"status_{status}"
        return "equal" if text == expected else "MIXED"

    def _plain(self, client: int, draw: random.Random, expected: str) -> str:
        status, _, data = self.server.request("POST", CHAT, json.dumps(self.body(client, stream=False)).encode())
        text = json.loads(data)["choices"][0]["message"]["content"] if status == 200 else ""
        return self._verdict(status, text, expected)

    def _stream(self, client: int, draw: random.Random, expected: str) -> str:
        status, _, data = self.server.request("POST", CHAT, json.dumps(self.body(client, stream=True)).encode())
        return self._verdict(status, stream_text(data), expected)

    def _slow(self, client: int, draw: random.Random, expected: str) -> str:
        connection = self.server.open(self.body(client, stream=True), receive_bytes=4096)
        data = b""
        while piece := connection.recv(512):
            data += piece
            time.sleep(0.002)
        connection.close()
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = b"\n\n".join(line for line in rest.split(b"\r\n") if line.startswith(b"data: "))
        return self._verdict(int(head.split()[1]), stream_text(lines), expected)

    def _leave(self, client: int, draw: random.Random, expected: str) -> str:
        """Some while they wait or are prepared, some when their stream has begun."""
        connection = self.server.open(self.body(client, stream=draw.random() < 0.7))
        if draw.random() < 0.5:
            time.sleep(draw.random() * 0.2)
        else:
            connection.recv(256)
        connection.close()
        return "done"

    def _oversize(self, client: int, draw: random.Random, expected: str) -> str:
        status, _, _ = self.server.request("POST", CHAT, b'{"messages": "' + b"x" * (8 << 20) + b'"}')
        return "refused" if status == 413 else f"status_{status}"

    def _malformed(self, client: int, draw: random.Random, expected: str) -> str:
        body = draw.choice([b"", b"{", b"[" * 50_000, b'{"messages": 5}', b"\xff\xfe", b'{"messagse": []}'])
        status, _, _ = self.server.request("POST", CHAT, body)
        return "refused" if status == 400 else f"status_{status}"

    @property
    def is_right(self) -> bool:
        """Nothing but right answers, refusals of what is wrong, and a full queue."""
        return all(name.rsplit("_", 1)[1] in ("equal", "busy", "done", "refused") for name in self.counts)


def stream_text(data: bytes) -> str:
    """The content of a stream."""
    text = ""
    for block in data.split(b"\n\n"):
        if block.startswith(b"data: ") and block != b"data: [DONE]":
            for choice in json.loads(block[6:]).get("choices", []):
                text += choice["delta"].get("content") or ""
    return text


def measure_memory(load: Load, num_requests: int) -> dict[str, Any]:
    """Phase 2: bytes after every eighth of the requests, and the growth over their second half."""
    marks = [load.server.memory_bytes()]
    for part in range(1, 9):
        for number in range(num_requests * (part - 1) // 8, num_requests * part // 8):
            load.alone(number % 8)
        marks.append(load.server.memory_bytes())
    growth = (marks[8] - marks[4]) / max(1, num_requests - num_requests // 2)
    return {"requests": num_requests, "marks_bytes": marks, "growth_bytes_per_request": growth}


def measure_cancel(load: Load, max_tokens: int) -> dict[str, float]:
    """Phase 3: leave a long answer after its second block."""
    usage = load.document(0)["usage"]["diffusion"]
    block_s = usage["total_s"] / usage["num_blocks"]
    body = load.body(0, stream=True) | {"max_tokens": max_tokens, "ignore_eos": True}
    connection = load.server.open(body | {"diffusion": {"return_canvas": True}})
    data = b""
    while b'"block":1,' not in data:
        data += connection.recv(1 << 16)
    connection.close()
    left = time.monotonic()
    load.server.wait_idle()
    return {"max_tokens": max_tokens, "idle_after_s": time.monotonic() - left, "block_s": block_s}


def start_server(model: str, arguments: list[str]) -> tuple[subprocess.Popen[str], Server]:
    """`dlmrt serve` on a free port, ready."""
    command = [sys.executable, "-m", "dlmrt", "serve", model, "--port", "0", "--quiet", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"error: the server ended with status {child.wait()}")
    server = Server(json.loads(line)["url"], child.pid)
    while server.request("GET", "/health")[0] != 200:
        if child.poll() is not None:
            raise SystemExit(f"error: the server ended with status {child.returncode}")
        time.sleep(0.1)
    return child, server


def main() -> int:
    """Run all phases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="dlmrt-tiny")
    parser.add_argument("--base-url", help="a server that runs already")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--requests", type=int, default=2000, help="of the memory phase; 0 leaves it out")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    child, server = (None, Server(options.base_url)) if options.base_url else start_server(options.model, [])
    try:
        card = server.document("/v1/models")["data"][0]
        load = Load(server, options.max_tokens)
        began = time.monotonic()
        load.run(clients=options.clients, rounds=options.rounds, seed=options.seed)
        load_s = time.monotonic() - began
        num_cut = server.metric("dlmrt:request_success_total", 'finished_reason="abort"')
        print(f"load    {dict(sorted(load.counts.items()))} in {load_s:.1f} s", file=sys.stderr)
        memory = measure_memory(load, options.requests) if options.requests else None
        print(f"memory  {memory}", file=sys.stderr)
        cancel = measure_cancel(load, min(10_000, card["max_model_len"] // 2))
        print(f"cancel  {cancel}", file=sys.stderr)
    finally:
        if child is not None:
            child.terminate()
            child.wait(120)
    is_flat = memory is None or memory["growth_bytes_per_request"] < 1024
    is_prompt = cancel["idle_after_s"] < cancel["block_s"] + 0.5
    document = {
        "schema_version": 1,
        "benchmark": "soak",
        "model": card["id"],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "clients": options.clients,
        "rounds": options.rounds,
        "seed": options.seed,
        "load": dict(sorted(load.counts.items())),
        "load_s": load_s,
        "cut_while_running": num_cut,
        "memory": memory,
        "cancel": cancel,
        "ok": load.is_right and is_flat and is_prompt,
    }
    print(json.dumps(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
