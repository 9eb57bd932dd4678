"""Load a checkpoint once: `load.py MODEL THREADS`, then the request `load EXECUTOR DTYPE` (benchmarks/child.py).

Everything is imported before, so that what is measured is the model.

Source: ours.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from child import Channel
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.decode.engine import EXECUTORS, make_denoiser


def main() -> None:
    """Import, serve."""
    channel = Channel()
    folder, num_threads = sys.argv[1:]
    for name in ("cpu", "eager"):
        importlib.import_module(EXECUTORS[name][0])
    kept: list[Any] = []

    def load(executor: str, dtype: str) -> dict[str, float]:
        began = time.perf_counter()
        checkpoint = open_checkpoint(Path(folder))
        kept.append(make_denoiser(checkpoint, executor=executor, dtype=dtype, num_threads=int(num_threads)))
        return {"value": time.perf_counter() - began}

    channel.serve({"load": load})


if __name__ == "__main__":
    main()
