"""What a benchmark result must say of its circumstances: machine, load, threads, versions, commit.

Paths and names of the machine stay out: results are published.

Source: ours; the list follows docs/benchmarks.md.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from child import ROOT
from dlmrt.cli.environment import environment_report, package_version

PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "gguf")


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def conditions(*, num_threads: int, **settings: Any) -> dict[str, Any]:
    """Circumstances of a run that begins now.

    Args:
        settings: of this benchmark: sizes, rounds, versions of peers.
    """
    report = environment_report()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")),
        "cpu": report["cpu"],
        "memory_bytes": report["memory"]["total_bytes"],
        "num_threads": num_threads,
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
        "dlmrt": report["dlmrt"],
        "python": report["python"],
        "packages": {name: package_version(name) for name in PACKAGES},
        **settings,
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
