"""From a name to a folder, without the network: a hand-made hub cache stands in for the hub."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading

import pytest

from dlmrt.checkpoint import hub
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.errors import CheckpointError, ModelNotFoundError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def checkpoint(tmp_path, make_config, make_params):
    config = make_config()
    save_checkpoint(tmp_path / "ck", config, make_params(config))
    return tmp_path / "ck"


@pytest.fixture
def embedded(tmp_path, monkeypatch, checkpoint):
    """One embedded model, and a folder beside it that is none."""
    monkeypatch.setattr(hub, "EMBEDDED", tmp_path / "embedded")
    shutil.copytree(checkpoint, tmp_path / "embedded" / "dlmrt-tiny")
    (tmp_path / "embedded" / "__pycache__").mkdir()
    return tmp_path / "embedded" / "dlmrt-tiny"


def test_embedded_models_may_be_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "EMBEDDED", tmp_path / "none")
    assert hub.embedded_models() == []
    with pytest.raises(ModelNotFoundError, match="hub id such as"):
        hub.resolve("dlmrt-tiny")


def test_order_is_embedded_then_folder(embedded, checkpoint, tmp_path, monkeypatch):
    assert hub.embedded_models() == ["dlmrt-tiny"]
    assert hub.resolve("dlmrt-tiny") == embedded
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "dlmrt-tiny")
    assert hub.resolve("dlmrt-tiny") == embedded
    assert hub.resolve("./dlmrt-tiny").resolve() == tmp_path / "dlmrt-tiny"
    assert hub.resolve(checkpoint) == hub.resolve(str(checkpoint)) == checkpoint


@pytest.mark.parametrize(
    "name",
    [
        "dlmrt-tin", "./nowhere", "/no/such", "a/b/c", "", "user/", "https://x/y", "~/none", "~nobody-here/x",
        "x" * 300, "a\0b", "\udcff", "org/mo--del", "org/a..b",
    ],
)  # fmt: skip
def test_unknown_names_say_what_would_do(embedded, name):
    with pytest.raises(ModelNotFoundError, match="dlmrt-tiny") as caught:
        hub.resolve(name)
    assert "folder in Hugging Face layout" in str(caught.value) and isinstance(caught.value, FileNotFoundError)


def test_revision_of_something_local_is_refused(embedded, checkpoint):
    for name in ("dlmrt-tiny", str(checkpoint)):
        with pytest.raises(UsageError, match="revision 'main'"):
            hub.resolve(name, revision="main")
    with pytest.raises(UsageError, match="revision is empty"):
        hub.resolve("org/tiny", revision="")


class _Garbage(http.server.BaseHTTPRequestHandler):
    """Answers every question with 200 and something that is no JSON."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    do_HEAD = do_GET

    def log_message(self, *arguments):
        """Be quiet."""


@pytest.mark.parametrize("is_there", [True, False])
def test_a_hub_that_answers_nonsense_or_not_at_all(tmp_path, is_there):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Garbage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port if is_there else 9}"
    failed = resolve_offline(tmp_path, "org/tiny", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    server.shutdown()
    server.server_close()
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and "CheckpointError" in last and "give a folder" in last


def resolve_offline(home, *arguments, **variables):
    """Resolve in a child process, because the hub client reads its environment once."""
    script = (
        "import sys\nfrom dlmrt.checkpoint.hub import resolve\nassert 'huggingface_hub' not in sys.modules\n"
        f"print(resolve(*{arguments[:1]!r}, revision={(arguments[1:] or (None,))[0]!r}))"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_hub_id_is_found_in_the_users_cache(tmp_path, checkpoint):
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    found = resolve_offline(tmp_path / "home", "org/tiny")
    assert found.stdout.strip() == str(repository / "snapshots" / COMMIT), found.stderr
    missing = resolve_offline(tmp_path / "home", "org/tiny", "v2")
    assert missing.returncode == 1 and "CheckpointError: org/tiny at revision 'v2' is not complete" in missing.stderr


def test_offline_without_a_copy_says_how(tmp_path):
    failed = resolve_offline(tmp_path, "org/absent")
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and CheckpointError.__name__ in last
    assert "HF_HUB_OFFLINE" in last and "give a folder" in last


def test_a_description_is_fetched_without_the_weights(checkpoint, monkeypatch):
    """What a dry run asks for: no tensor file of a repository that may hold hundreds of gigabytes."""
    asked = []

    def snapshot(repo_id, revision, patterns):
        asked.append(patterns)
        return str(checkpoint)

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    assert hub.resolve("org/model", needs_weights=False) == checkpoint
    assert not [pattern for patterns in asked for pattern in patterns if pattern.endswith(".safetensors")]
    assert hub.resolve("org/model") == checkpoint
    assert any(pattern.endswith(".safetensors") for pattern in asked[-1])
