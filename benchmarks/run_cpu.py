"""Every benchmark of the cpu executor and the page of results: `python benchmarks/run_cpu.py`.

About 15 minutes on two quiet cores once peers and random checkpoints exist; the first run makes them first. A part that
fails is named at the end and the others go on.

Source: ours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent

# In the order of what is lost if the run is cut short.
PARTS: dict[str, Sequence[str]] = {
    "tiny": ("cpu_step.py", "tiny", "--rounds", "9", "--max-seconds", "60"),
    "0.6b": (
        "cpu_step.py", "0.6b", "--rounds", "7", "--max-seconds", "90", "--only", "dlmrt int8", "dlmrt bfloat16",
        "dlmrt nvfp4", "torch eager", "torch compile", "llama.cpp q4_k_m",
    ),
    "kernels": ("cpu_kernels.py",),
    "accuracy": ("cpu_accuracy.py",),
    "loop": ("cpu_loop.py",),
    "cold": ("cold_start.py",),
    "memory": ("load_memory.py",),
    "layers": ("full_layer.py",),
}  # fmt: skip


def main() -> int:
    """Run the parts, write the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all without a name")
    args = parser.parse_args()
    failed = []
    for name in args.parts or PARTS:
        script, *options = PARTS[name]
        began = time.monotonic()
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / script), *options, "--save"]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(HERE / "report.py")], check=True)
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
