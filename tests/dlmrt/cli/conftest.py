"""A tiny random checkpoint with a tokenizer, and the command line called in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.cli import main

SPECIAL = ("<pad>", "<eos>", "<mask>")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, make_config, make_params) -> Path:
    """Folder of a random model over bytes; it never stops by itself within a few hundred tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    (tokenizer_folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = make_config(
        vocab_size=len(vocabulary), eos_token_ids=(1,), pad_token_id=0, max_position_embeddings=8192,
        diffusion={"mask_token_id": 2},
    )  # fmt: skip
    save_checkpoint(
        folder, config, make_params(config), generation={"max_new_tokens": 20}, tokenizer_files=tokenizer_folder
    )
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
