"""A tiny random checkpoint with a tokenizer, and the command line called in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.cli import main
from dlmrt.testing import CHAT_TEMPLATE, byte_codec, tiny_config


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, make_params) -> Path:
    """Folder of a random model over bytes with a chat template and answers of 20 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    text_files = tmp_path_factory.mktemp("tokenizer")
    byte_codec().tokenizer.save(str(text_files / "tokenizer.json"))
    (text_files / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = tiny_config(diffusion={"canvas_length": 4}, max_position_embeddings=8192, tie_word_embeddings=False)
    save_checkpoint(folder, config, make_params(config), generation={"max_new_tokens": 20}, tokenizer_files=text_files)
    return folder


@pytest.fixture(scope="session")
def engine(tiny_model):
    """The same model through the Python API: what the command line has to agree with."""
    from dlmrt import Engine

    return Engine.load(tiny_model)


@pytest.fixture
def cli(monkeypatch, capsys) -> Cli:
    """Call `dlmrt` in this process with `stdin` as a pipe."""
    for name in ("DLMRT_EXECUTOR", "DLMRT_DTYPE", "DLMRT_NUM_THREADS", "DLMRT_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dlmrt", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(status=ended.value.code, out=captured.out, err=captured.err)

    return call
