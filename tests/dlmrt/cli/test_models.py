"""`dlmrt pull` against a small server that speaks the hub's endpoints; `list` and `rm` on a cache made by hand.

The hub client reads its environment once: what needs another hub runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from safetensors.numpy import save_file

from dlmrt.checkpoint.cache import verify
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """One repository, `org/tiny`, whose files and moods the test sets."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Endpoints)
        self.files: dict[str, bytes] = {}
        self.refusal: tuple[int, str] | None = None  # status and code of every answer
        self.asked: list[tuple[str, str | None]] = []  # file and range of each download
        self.cut_at: int | None = None  # the next download of weights ends after so many bytes
        self.stalls_at: int | None = None  # the next one stops there, and waits for `goes_on`
        self.goes_on = threading.Event()
        self.num_sent = self.num_ended = 0  # bytes of weights; downloads of them that are over, one way or another


class _Endpoints(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        hub, path = self.server, unquote(urlparse(self.path).path)
        if hub.refusal is not None or not path.startswith(("/api/models/org/tiny/", f"/org/tiny/resolve/{COMMIT}/")):
            status, code = hub.refusal or (404, "RepoNotFound")
            self.answer(b"{}", status=status, headers={"X-Error-Code": code, "X-Error-Message": code})
        elif path.startswith("/api/models/org/tiny/revision/"):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                self.answer(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
                return
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith("/api/models/org/tiny/tree/"):
            self.answer(json.dumps([self.entry(name) for name in hub.files]).encode())
        else:
            self.download(path.partition(f"{COMMIT}/")[2])

    do_HEAD = do_GET

    def entry(self, name):
        data = self.server.files[name]
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(_blob(data)).hexdigest()}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def download(self, name):
        hub, data, given = self.server, self.server.files[name], self.headers.get("Range")
        entry = self.entry(name)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry.get("lfs", entry)["oid"]}"', "Accept-Ranges": "bytes"}
        start = int(given.removeprefix("bytes=").partition("-")[0]) if given else 0
        if given:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = None
        if self.command == "GET":
            hub.asked.append((name, given))
            if name.endswith(".safetensors"):
                cut, hub.cut_at = hub.cut_at, None
        self.answer(data[start:], status=206 if given else 200, headers=headers, cut=cut, is_counted="lfs" in entry)

    def answer(self, body, *, status=200, headers=None, cut=None, is_counted=False):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.send(body[:cut], is_counted=is_counted)
        if cut is not None:
            self.close_connection = True

    def send(self, body, *, is_counted):
        hub = self.server
        stop, hub.stalls_at = (hub.stalls_at, None) if is_counted else (None, hub.stalls_at)
        for begin in range(0, len(body), 1 << 20):
            if stop is not None and begin >= stop:
                hub.goes_on.wait()
            try:
                self.wfile.write(body[begin : begin + (1 << 20)])
            except OSError:  # the other side was killed
                self.close_connection = True
                break
            hub.num_sent += is_counted * len(body[begin : begin + (1 << 20)])
        hub.num_ended += is_counted

    def log_message(self, *arguments):
        """Be quiet."""


def _blob(data):
    return b"blob %d\0" % len(data) + data


@pytest.fixture
def hub(tiny_model):
    """The tiny model on a hub, with files that nobody needs beside it."""
    with Hub() as server:
        server.files = {path.name: path.read_bytes() for path in sorted(tiny_model.iterdir())}
        others = ("README.md", "modeling_tiny.py", "pytorch_model.bin", "onnx/config.json", "consolidated.safetensors")
        server.files |= dict.fromkeys(others, b"not needed")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path, hub):
    """Call `dlmrt` in a process with a cache of its own and the test's hub."""

    def environment_of(variables):
        environment = {
            **os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **variables,
        }  # fmt: skip
        environment.pop("HF_TOKEN", None)
        return environment

    def call(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "dlmrt", *map(str, arguments)], env=environment_of(variables), capture_output=True,
            text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def begin(*arguments):
        return subprocess.Popen([sys.executable, "-m", "dlmrt", *map(str, arguments)], env=environment_of({}))

    call.begin = begin
    return call


def until(condition):
    """Wait for it, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


MEBIBYTE = 1 << 20


@pytest.fixture
def large(hub, tmp_path, make_config, make_params):
    """The hub's repository with 39 MiB of weights: several chunks of the client, 10 MiB each."""
    config = make_config(vocab_size=160_000)
    save_checkpoint(tmp_path / "large", config, make_params(config))
    hub.files |= {path.name: path.read_bytes() for path in (tmp_path / "large").iterdir()}
    return hub.files["model.safetensors"]


def parts_of(tmp_path):
    return list((tmp_path / "home" / "hub" / "models--org--tiny" / "blobs").glob("*.incomplete"))


def test_a_killed_pull_fetches_only_the_rest(hub, run, tmp_path, large):
    """SIGKILL in the middle of the weights: the next run asks for what is missing, and the whole is verified."""
    hub.stalls_at = 25 * MEBIBYTE
    blobs = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs"
    part = blobs / f"{hashlib.sha256(large).hexdigest()}.incomplete"
    victim = run.begin("pull", "org/tiny")
    until(lambda: part.exists() and part.stat().st_size >= 20 * MEBIBYTE)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    hub.goes_on.set()
    assert parts_of(tmp_path) == [part]
    num_kept = part.stat().st_size
    assert part.read_bytes() == large[:num_kept] and num_kept < len(large)
    until(lambda: hub.num_ended == 1)
    hub.asked.clear()
    hub.num_sent = 0
    done = run("pull", "org/tiny", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.asked == [("model.safetensors", f"bytes={num_kept}-")]
    assert hub.num_sent == len(large) - num_kept
    assert (Path(json.loads(done.stdout)["folder"]) / "model.safetensors").read_bytes() == large
    assert parts_of(tmp_path) == []


@pytest.mark.parametrize("kept", ["other bytes", "all bytes", "too many"])
def test_what_lies_there_is_checked(hub, run, tmp_path, large, kept):
    """Half a file of something else is thrown away by name of the checksum; a whole one needs no download."""
    blobs = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(large).hexdigest()}.incomplete"
    part.write_bytes({"other bytes": bytes(MEBIBYTE), "all bytes": large, "too many": bytes(len(large) + 1)}[kept])
    done = run("pull", "org/tiny")
    if kept == "other bytes":
        assert done.returncode == 1 and "model.safetensors of org/tiny did not have the hub's checksum" in done.stderr
        assert done.stderr.count("\n") == 1 and parts_of(tmp_path) == []
        done = run("pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert [entry for entry in hub.asked if entry[0] == "model.safetensors"] == {
        "other bytes": [("model.safetensors", f"bytes={MEBIBYTE}-"), ("model.safetensors", None)],
        "all bytes": [], "too many": [("model.safetensors", None)],
    }[kept]  # fmt: skip


def test_the_shards_of_an_index_are_completed_one_by_one(hub, run, tmp_path, large):
    """Two shards, the first of which was fetched by half."""
    del hub.files["model.safetensors"]
    tensors = read_tensors(tmp_path / "large" / "model.safetensors")
    names = sorted(tensors)
    weight_map = {
        name: f"model-0000{1 + (at >= len(names) // 2)}-of-00002.safetensors" for at, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        some = {name: tensors[name].raw() for name in names if weight_map[name] == file}
        save_file(some, tmp_path / file)
        hub.files[file] = (tmp_path / file).read_bytes()
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    blobs = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    first, second = sorted(set(weight_map.values()))
    half = hub.files[first][: len(hub.files[first]) // 2]
    (blobs / f"{hashlib.sha256(hub.files[first]).hexdigest()}.incomplete").write_bytes(half)
    done = run("pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    asked = [entry for entry in hub.asked if entry[0].endswith("of-00002.safetensors")]
    assert asked == [(first, f"bytes={len(half)}-"), (second, None)]


def test_pull_fetches_what_is_needed_and_can_be_used_offline(hub, run, tmp_path, tiny_model):
    """A connection that breaks in the middle of the weights is made again; what is complete is not fetched twice."""
    hub.cut_at = 1000
    done = run("pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert done.stdout == f"{folder}\n" and "files have the hub's checksums" in done.stderr
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_model.iterdir()}
    assert [name for name, _ in hub.asked].count("model.safetensors") == 2
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in tiny_model.iterdir())
    hub.asked.clear()
    again = run("pull", "org/tiny", "--revision", COMMIT, "--json")
    assert json.loads(again.stdout)["num_verified"] == len(list(folder.iterdir())) and hub.asked == []
    hub.refusal = (500, "down")
    offline = run("generate", "org/tiny", "hello", "--json", "--max-tokens", "4", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and json.loads(offline.stdout)["model"] == "org/tiny"


def test_an_interrupted_pull_goes_on(hub, run, tmp_path, tiny_model):
    """The hub dies behind the small files; they are not fetched again."""
    weights = hub.files.pop("model.safetensors")
    failed = run("pull", "org/tiny")
    assert failed.returncode == 1 and "neither model.safetensors nor" in failed.stderr
    hub.files["model.safetensors"] = weights
    shutil.rmtree(tmp_path / "home" / "hub" / "models--org--tiny" / "trees")  # the client's note of what the hub has
    hub.asked.clear()
    assert run("pull", "org/tiny").returncode == 0
    assert [name for name, _ in hub.asked] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("refusal", "said", "status"),
    [
        ((403, "GatedRepo"), "is gated; accept its terms on the hub and set HF_TOKEN", 1),
        ((404, "RepoNotFound"), "the hub has no such (public) repository", 2),
        ((404, "RevisionNotFound"), "has no revision 'main'", 2),
        ((503, "Overloaded"), "the hub was not reached", 1),
    ],
)
def test_refusals_of_the_hub(hub, run, refusal, said, status):
    hub.refusal = refusal
    failed = run("pull", "org/tiny", "--revision", "main")
    assert failed.returncode == status and said in failed.stderr and failed.stderr.count("\n") == 1, failed.stderr


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(hub, run):
    hub.files["config.json"] = json.dumps({"architectures": ["GPT2LMHeadModel"]}).encode()
    failed = run("pull", "org/tiny")
    assert failed.returncode == 1 and "GPT2LMHeadModel" in failed.stderr
    assert all(not name.endswith(".safetensors") for name, _ in hub.asked)


def test_no_network(run):
    failed = run("pull", "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert failed.returncode == 1 and "check the network and HF_HUB_OFFLINE" in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.fixture
def cache(tmp_path, tiny_model, monkeypatch):
    """A cache that holds the tiny model as `org/tiny`, laid out as the client does."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    repository = folder / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for path in (repository / "blobs", repository / "refs", snapshot, folder / "models--org--broken"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in tiny_model.iterdir():
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        name = (hashlib.sha256(data) if is_large else hashlib.sha1(_blob(data))).hexdigest()
        (repository / "blobs" / name).write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return folder


def test_list(cli, cache):
    listed = json.loads(cli("list", "--json").out)
    assert [(model["name"], model["source"]) for model in listed] == [
        ("dlmrt-tiny", "embedded"), ("org/tiny", "cache"),
    ]  # fmt: skip
    cached = listed[1]
    assert cached["architecture"] == "Qwen3ForCausalLM" and cached["is_supported"] and cached["format"] == "float32"
    assert cached["revision"] == COMMIT and cached["refs"] == ["main"]
    assert cached["size_bytes"] == sum(path.stat().st_size for path in (cache / "models--org--tiny/blobs").iterdir())
    assert cli("list").out.splitlines()[2].split()[:3] == ["org/tiny", "Qwen3ForCausalLM", "float32"]


def test_list_says_what_it_does_not_know(cli, cache):
    """A file that is no JSON, an architecture of others, a format of others: listed, not refused."""
    config = cache / "models--org--tiny" / "snapshots" / COMMIT / "config.json"
    for text, architecture, format in (
        ("{", "unknown", "unknown"),
        ('{"architectures": ["GPT2LMHeadModel"], "quantization_config": {"quant_method": "gptq"}}',
         "GPT2LMHeadModel", "gptq"),
    ):  # fmt: skip
        config.unlink()
        config.write_text(text)
        model = json.loads(cli("list", "--json").out)[1]
        assert (model["architecture"], model["format"], model["is_supported"]) == (architecture, format, False)
    assert "GPT2LMHeadModel (not supported)" in cli("list").out


def test_verification_finds_and_removes_what_is_damaged(cache, tiny_model):
    """One bit of the weights, and of a small file; they are gone then, so that the next pull fetches them."""
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    assert verify(snapshot) == len(list(tiny_model.iterdir()))
    for name in ("model.safetensors", "config.json"):
        blob = (snapshot / name).resolve()
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{name} did not have the hub's checksum"):
            verify(snapshot)
        assert not blob.exists() and not (snapshot / name).is_symlink()
    assert verify(tiny_model) == 0  # no cache: nothing says what it should be


def test_only_what_the_cache_holds_is_removed(cli, cache, tmp_path):
    for arguments, said in (
        (["org/tiny"], "pass --yes"),
        (["org/tinny", "--yes"], "did you mean 'org/tiny'"),
        (["org/tiny", "--yes", "--revision", "v2"], COMMIT),
        (["dlmrt-tiny", "--yes"], "only models of the cache are removed"),
        ([tmp_path, "--yes"], "only models of the cache are removed"),
    ):
        refused = cli("rm", *arguments)
        assert refused.status == 2 and said in refused.err and refused.err.count("\n") == 1
    done = cli("rm", "org/tiny", "--yes")
    assert done.status == 0 and "removed org/tiny" in done.err
    assert not (cache / "models--org--tiny").exists() and (cache / "models--org--broken").exists()


def test_a_repository_that_leads_out_of_the_cache_is_not_removed(cli, cache, tmp_path):
    (cache / "models--org--tiny").rename(tmp_path / "elsewhere")
    (cache / "models--org--tiny").symlink_to(tmp_path / "elsewhere")
    refused = cli("rm", "org/tiny", "--yes")
    assert refused.status != 0 and (tmp_path / "elsewhere" / "snapshots" / COMMIT / "config.json").exists()


@pytest.mark.parametrize(("answer", "is_removed"), [(b"n\n", False), (b"y\n", True)])
def test_remove_asks_on_a_terminal(cache, answer, is_removed):
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        [sys.executable, "-m", "dlmrt", "rm", "org/tiny"], env={**os.environ, "HF_HUB_CACHE": str(cache)},
        stdin=theirs, capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == (0 if is_removed else 1) and "Remove org/tiny" in done.stderr
    assert (cache / "models--org--tiny").exists() is not is_removed
