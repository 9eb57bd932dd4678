"""Weight files of a hub repository, fetched so that a killed process loses nothing but the chunk in flight.

The hub client names its half-fetched files anew each time, so they are never read again. Here one lies beside the
cache's other files under the checksum that the hub tells, `<sha256>.incomplete`; the next run asks for the bytes behind
it, compares the checksum of the whole, and only then gives the file the name under which the client takes it for its
own. Where that does not apply (no network, a hub that names no SHA-256, no plain download of so large a file), nothing
is fetched here and the client goes its own way.

Source: ours; cache layout and download of huggingface_hub 2.4.0.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmrt.errors import CheckpointError
from dlmrt.models.config import read_json

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_CHUNK_BYTES = 1 << 22
_LARGEST = 50 * 10**9  # bytes that the hub serves in one plain download


def fetch_weights(repo_id: str, folder: Path) -> None:
    """Complete the weight files of snapshot `folder` in the cache's store; the client links them into it.

    Raises:
        CheckpointError: a file is not what the hub says it is; it was removed.
        Exception: what the client raises where a download fails.
    """
    for name in _missing_weights(folder):
        metadata = _metadata(repo_id, name, folder.name)
        if metadata is None:
            return
        sha256, size = metadata.etag or "", metadata.size
        if re.fullmatch(r"[0-9a-f]{64}", sha256) and size is not None and size <= _LARGEST:
            _fetch(repo_id, name, folder, sha256=sha256, size=size)


def checksum(path: Path, *, is_git: bool) -> str:
    """SHA-256 of a file in hexadecimal digits, or git's SHA-1 of it as a blob."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size) if is_git else hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _missing_weights(folder: Path) -> list[str]:
    """Names of the files that hold the tensors, as far as `folder` lacks them."""
    index = folder / "model.safetensors.index.json"
    mapping: Any = read_json(index).get("weight_map") if index.exists() else {"": "model.safetensors"}
    names = {name for name in mapping.values() if isinstance(name, str)} if isinstance(mapping, dict) else set()
    return [name for name in sorted(names) if "/" not in name and not (folder / name).exists()]


def _metadata(repo_id: str, name: str, commit: str) -> HfFileMetadata | None:
    """What the hub says of a file; None if it says nothing, for whatever reason: the client will find out and tell."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        return get_hf_file_metadata(hf_hub_url(repo_id, name, revision=commit))
    except Exception:
        return None


def _fetch(repo_id: str, name: str, folder: Path, *, sha256: str, size: int) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

    repository = folder.parents[1]
    blob = repository / "blobs" / sha256
    lock = repository.parent / ".locks" / repository.name / f"{sha256}.lock"  # the client's own
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        part = blob.with_name(f"{sha256}.incomplete")
        if part.exists() and part.stat().st_size > size:
            part.unlink()
        with part.open("ab") as file:
            http_get(
                hf_hub_url(repo_id, name, revision=folder.name), file, resume_size=file.tell(),
                headers=build_hf_headers(), expected_size=size, displayed_filename=name,
            )  # fmt: skip
        if checksum(part, is_git=False) != sha256:
            part.unlink()
            raise CheckpointError(f"{name} of {repo_id} did not have the hub's checksum and was removed; pull it again")
        part.rename(blob)
