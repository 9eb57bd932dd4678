"""dlmrt: a runtime for diffusion language models that answers one request at a time with the lowest latency.

Importing the package must stay cheap (the command line pays for it on every call), so the public names are loaded on
first use; type checkers see them as ordinary imports.

Source: ours; lazy module attributes are PEP 562.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlmrt.decode.engine import Engine as Engine
    from dlmrt.types import DecodeConfig as DecodeConfig
    from dlmrt.types import GenerateResult as GenerateResult
    from dlmrt.types import Message as Message

__version__ = "0.1.0"

_HOMES = {
    "DecodeConfig": "dlmrt.types",
    "Engine": "dlmrt.decode.engine",
    "GenerateResult": "dlmrt.types",
    "Message": "dlmrt.types",
}
__all__ = ["DecodeConfig", "Engine", "GenerateResult", "Message", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
