"""From a model name to a folder: embedded checkpoint, folder on disk, or repository of the Hugging Face hub.

The hub client is imported only when a hub id is resolved. Its cache and settings are the user's own (`HF_HOME`,
`HF_HUB_OFFLINE`, `HF_TOKEN`): there is no second download folder. Only files that are read are fetched, from the top of
the repository: neither code nor pickles reach the disk. Those that say what the model is come first, so that a model
that cannot run is refused before its weights are on their way. Weights go on where a process was killed
(`checkpoint.download`).

Source: ours; repository layout of the Hugging Face hub, huggingface_hub 2.4.0.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlmrt.checkpoint.download import fetch_weights
from dlmrt.errors import CheckpointError, ModelNotFoundError, UsageError, nearest
from dlmrt.models.config import load_config

EMBEDDED = Path(__file__).parents[1] / "embedded"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DESCRIPTION = [
    "config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
]  # fmt: skip
_WEIGHTS = ["*.safetensors"]
_IGNORED = ["*/*", "consolidated*.safetensors"]  # folders, and second copies in another layout


def embedded_models() -> list[str]:
    """Names of the checkpoints that ship inside the package, sorted."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def resolve(name_or_path: str | Path, *, revision: str | None = None, needs_weights: bool = True) -> Path:
    """Folder of a checkpoint; a hub repository is downloaded unless the cache has it, whole or without its weights.

    A string is an embedded name first, then a folder, then a hub id; "./name" is always a folder. `revision` is a
    branch, tag or commit of a hub repository.

    Raises:
        ModelNotFoundError: nothing goes by that name.
        CheckpointError: the hub could not be reached or refused access.
        UsageError: `revision` is given for something that is not on the hub.
    """
    name = str(name_or_path)
    folder = Path(os.path.expanduser(name))  # unlike Path's, it leaves "~nobody" alone
    if isinstance(name_or_path, str) and name in embedded_models():
        folder = EMBEDDED / name
    elif not (name and os.path.isdir(folder)):  # unlike Path's, it never raises
        if isinstance(name_or_path, Path) or not _HUB_ID.fullmatch(name):
            raise _not_found(name, f"{name!r} is neither an embedded model nor a folder")
        return _download(name, revision, needs_weights=needs_weights)
    if revision is not None:
        raise UsageError(f"revision {revision!r} applies to hub repositories, and {name!r} is {folder}; leave it out")
    return folder


def is_local(name: str) -> bool:
    """Whether `resolve` finds `name` without the hub: embedded, or a folder."""
    return name in embedded_models() or os.path.isdir(os.path.expanduser(name))


def _not_found(name: str, what: str) -> ModelNotFoundError:
    known = embedded_models()
    hint = nearest(name, known) if known else ""
    return ModelNotFoundError(
        f"{what}{hint}; give a folder in Hugging Face layout or a hub id such as 'Qwen/Qwen3-0.6B'"
    )


def _download(repo_id: str, revision: str | None, *, needs_weights: bool) -> Path:
    from huggingface_hub import errors

    if revision == "":
        raise UsageError("the revision is empty; name a branch, tag or commit, or leave it out")
    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = Path(_snapshot(repo_id, revision, _DESCRIPTION))
        if (folder / "config.json").exists():
            load_config(folder)  # refuses what cannot run
        if not needs_weights:
            return folder
        fetch_weights(repo_id, folder)
        return Path(_snapshot(repo_id, revision, [*_DESCRIPTION, *_WEIGHTS]))
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{repo_id} is gated; accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(repo_id, f"{repo_id!r} is not a folder and the hub has no such (public) repository") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo_id} has no revision {revision!r}; name a branch, tag or commit") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{repo_id}{at} is not complete in the local cache and the hub was not reached; check the network and "
            "HF_HUB_OFFLINE, or give a folder"
        ) from error
    except errors.HFValidationError as error:
        raise _not_found(repo_id, f"{repo_id!r} is neither a folder nor a valid hub id ({error})") from error
    except Exception as error:  # the client hands on whatever its transport and its parsers raise
        raise CheckpointError(f"downloading {repo_id}{at} failed ({error}); try again, or give a folder") from error


def _snapshot(repo_id: str, revision: str | None, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
