"""Models in the hub's cache: what is there, whether it is undamaged, and how to remove it.

The cache is the one of the Hugging Face client and is shared with other programs, so it is listed and changed through
that client only. Its files are named by their checksums, which the hub has told: they can be verified at any time,
without the network.

Source: cache layout of huggingface_hub 2.4.0; git's blob hashes for files that are not in large file storage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmrt.checkpoint.download import checksum
from dlmrt.checkpoint.hub import EMBEDDED, embedded_models
from dlmrt.errors import CheckpointError, ModelNotFoundError, UsageError, nearest
from dlmrt.models.config import read_json
from dlmrt.models.families import ARCHITECTURES

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo


@dataclass(frozen=True, kw_only=True)
class InstalledModel:
    """One model that is on this machine."""

    name: str  # as commands take it
    source: str  # "embedded" or "cache"
    architecture: str
    is_supported: bool
    format: str  # of its weights, as config.json declares it
    size_bytes: int  # of its files
    revision: str | None  # commit, of a cached one
    refs: tuple[str, ...]  # branches and tags that point to it
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What removing a cached model would delete."""

    paths: tuple[Path, ...]
    freed_bytes: int
    strategy: Any  # the client's own plan

    def execute(self) -> None:
        """Delete it."""
        self.strategy.execute()


def installed_models() -> list[InstalledModel]:
    """Embedded models, then those of the cache, sorted by name."""
    models = [_describe(name, EMBEDDED / name, "embedded") for name in embedded_models()]
    info = _scan()
    for repo in sorted(info.repos, key=lambda repo: repo.repo_id) if info else ():
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            models.append(
                _describe(
                    repo.repo_id, revision.snapshot_path, "cache", revision=revision.commit_hash, refs=revision.refs,
                    size_bytes=revision.size_on_disk,
                )
            )  # fmt: skip
    return models


def removal(name: str, revision: str | None = None) -> Removal:
    """How to remove a model of the cache; nothing is deleted yet.

    Args:
        revision: commit, branch or tag; None: all that are cached.

    Raises:
        ModelNotFoundError: the cache has no such model or revision.
        CheckpointError: the model's folder lies outside the cache, behind a link.
    """
    info = _scan()
    repos = {repo.repo_id: repo for repo in info.repos if repo.repo_type == "model"} if info else {}
    if info is None or name not in repos:
        raise ModelNotFoundError(f"{name!r} is not in the cache{nearest(name, repos) if repos else '; it is empty'}")
    repo = repos[name]
    chosen = [item.commit_hash for item in repo.revisions if revision in (None, item.commit_hash, *item.refs)]
    if not chosen:
        known = ", ".join(sorted(item.commit_hash for item in repo.revisions))
        raise ModelNotFoundError(f"{name} has no revision {revision!r} in the cache; known: {known}")
    if not repo.repo_path.resolve().is_relative_to(_cache_folder().resolve()):
        raise CheckpointError(
            f"{repo.repo_path} leads out of the cache, to {repo.repo_path.resolve()}; remove it yourself"
        )
    strategy = info.delete_revisions(*chosen)
    paths = (*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs)
    return Removal(paths=tuple(sorted(paths)), freed_bytes=strategy.expected_freed_size, strategy=strategy)


def verify(folder: Path) -> int:
    """Compare each file of a cached snapshot with its checksum, and return how many could be compared.

    Damaged files are deleted, so that the next download fetches them again.

    Raises:
        CheckpointError: a file is not what the hub has; the message names it.
    """
    damaged, count = [], 0
    for path in sorted(folder.iterdir()):
        wanted = Path(os.readlink(path)).name if path.is_symlink() else ""
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", wanted):
            continue  # a cache without links keeps no checksums
        count += 1
        if not path.exists() or checksum(path, is_git=len(wanted) == 40) != wanted:
            damaged.append(path)
    for path in damaged:
        blob = path.parent / os.readlink(path)
        blob.unlink(missing_ok=True)
        path.unlink()
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(f"{folder}: {names} did not have the hub's checksum and was removed; pull it again")
    return count


def _describe(
    name: str, folder: Path, source: str, *, revision: str | None = None, refs: frozenset[str] = frozenset(),
    size_bytes: int | None = None,
) -> InstalledModel:  # fmt: skip
    config = _read(folder / "config.json")
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"
    if size_bytes is None:
        size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return InstalledModel(
        name=name, source=source, architecture=architecture, is_supported=architecture in ARCHITECTURES,
        format=_declared_format(config, _read(folder / "hf_quant_config.json")), size_bytes=size_bytes,
        revision=revision, refs=tuple(sorted(refs)), folder=folder,
    )  # fmt: skip


def _declared_format(config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> str:
    section, quantization = config.get("quantization_config"), hf_quant.get("quantization")
    if isinstance(section, dict) and section:
        detail = section.get("quant_algo") or section.get("format")
        return " ".join(str(word) for word in (section.get("quant_method"), detail) if word)
    if isinstance(quantization, dict) and quantization.get("quant_algo"):
        return f"modelopt {quantization['quant_algo']}"
    return str(config.get("dtype") or config.get("torch_dtype") or "unknown")


def _read(path: Path) -> dict[str, Any]:
    """A JSON file for a listing: what cannot be read is listed as unknown."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _scan() -> HFCacheInfo | None:
    """Contents of the cache; None when there is none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(_cache_folder())
    except CacheNotFound:
        return None
    except ValueError as error:
        raise UsageError(f"the cache cannot be read ({error}); check HF_HOME") from error
