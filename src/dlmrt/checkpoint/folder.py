"""A checkpoint folder that is replaced as a whole or not at all.

Everything is written and synced under a temporary name beside the target and exchanged with it in one rename, so that a
crash or a full disk leaves the previous checkpoint as it was. Whether the disk has room is checked before anything is
written. A killed process leaves its hidden ".tmp" folder there, which has no config.json: that is written last.

Source: ours; shard names of the Hugging Face hub.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlmrt.checkpoint.load import INDEX_FILE, SINGLE_FILE
from dlmrt.checkpoint.tensorfile import FileTensor, write_tensors
from dlmrt.errors import CheckpointError, UsageError

MAX_SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt",
)  # fmt: skip
Progress = Callable[[int, int], None]  # (bytes just written, bytes in all)
_JSON_FILES = ("generation_config.json", "hf_quant_config.json")


def write_folder(
    folder: Path, documents: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, FileTensor],
    *, tokenizer_files: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Write `folder`, replacing the checkpoint that it may hold.

    Args:
        documents: JSON files by name, written behind the weights in this order.
        tensors: by their names in the files; each one's bits are asked for once, in this order.
        tokenizer_files: folder whose tokenizer files are copied; None copies none.
        max_shard_bytes: size above which weights are split into shards with an index.
        progress: called behind the writing of each tensor with its bytes and those of all tensors.

    Raises:
        UsageError: `folder` holds files that the new checkpoint would not replace.
        CheckpointError: the disk has no room or refused; the previous checkpoint is unchanged.
    """
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        total = sum(tensor.num_bytes for tensor in tensors.values())
        _check_room(folder.parent, total)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            draft.chmod(0o777 & ~_umask())
            written = None if progress is None else functools.partial(_report, progress, total)
            _write_weights(draft, tensors, max_shard_bytes, written)
            if tokenizer_files is not None:
                _copy_tokenizer(tokenizer_files, draft)
            for name, value in documents.items():
                _write_json(draft / name, value)
            _sync(draft)
            _refuse_strangers(folder, draft)
            _exchange(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; the previous checkpoint is unchanged, free space or pick another folder"
        ) from error


def _report(progress: Progress, total: int, num_bytes: int) -> None:
    progress(num_bytes, total)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"the weights need {num_bytes:,} bytes ({num_bytes / 2**30:.2f} GiB), the disk of {folder} has {free:,} "
            f"({free / 2**30:.2f} GiB) free; free space or pick another folder"
        )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _copy_tokenizer(source: Path, draft: Path) -> None:
    if not (source / "tokenizer.json").exists():
        raise CheckpointError(f"{source} has no tokenizer.json; pass a folder that has one, or none at all")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, draft / name)
            _sync(draft / name)


def _write_weights(
    draft: Path, tensors: Mapping[str, FileTensor], max_shard_bytes: int, written: Callable[[int], None] | None
) -> None:
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(draft / SINGLE_FILE, shards[0], written)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(draft / file, shard, written)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    _write_json(draft / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(tensors: Mapping[str, FileTensor], limit: int) -> list[dict[str, FileTensor]]:
    """Greedy split in order; a tensor above the limit gets a shard of its own."""
    shards: list[dict[str, FileTensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.num_bytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.num_bytes
    return shards


def _refuse_strangers(folder: Path, draft: Path) -> None:
    """Replacing the folder would delete what the new checkpoint does not bring; only old weights may go."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; pick a folder")
    new = {entry.name for entry in draft.iterdir()} | {INDEX_FILE, *_JSON_FILES}
    for entry in sorted(folder.iterdir()):
        is_weights = entry.name.startswith("model") and entry.name.endswith(".safetensors")
        if entry.name not in new and not is_weights:
            raise UsageError(
                f"{folder} holds {entry.name}, which saving a checkpoint there would delete; pick a folder of its own"
                + (f", or pass tokenizer_files={str(folder)!r} to keep it" if entry.name in TOKENIZER_FILES else "")
            )


def _exchange(draft: Path, folder: Path) -> None:
    """Put `draft` at `folder`; what was there ends up at `draft`."""
    if not folder.exists():
        draft.rename(folder)
    elif not _rename_exchange(draft, folder):
        # Without an exchange the path is absent for a moment: a crash in between leaves the old one under `old`.
        old = draft.with_suffix(".old")
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old)
    _sync(folder.parent)


def _rename_exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically; False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
