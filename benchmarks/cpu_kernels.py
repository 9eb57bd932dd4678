"""Kernels as shares of what the machine can do: `python benchmarks/cpu_kernels.py`, on one thread and on all of them.

Builds and runs `cpu_kernels.cpp`, which measures the instruction peak and the read bandwidth beside each kernel.

Source: ours; targets from docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from child import ROOT, environment
from conditions import conditions, num_cpus
from measure import Check, Row, Turn, check, document, publish, row

SOURCE = ROOT / "tests" / "dlmrt" / "cpu" / "kernels"
BUILD = ROOT / "build" / "cpu-kernels"
# Least share of the peak or of the bandwidth on all threads, and greatest ratios of times.
FLOORS = {
    "int8 M=32 K=1024 of peak": 0.80, "int8 M=32 K=2048 of peak": 0.85, "int8 M=32 K=3072 of peak": 0.85,
    "int8 M=1 K=1024 of bandwidth": 0.90,
}  # fmt: skip
LIMITS = {"nvfp4 / int8 time M=32": 1.3}


def build() -> None:
    """Bring the benchmark program up to date."""
    for command in (["cmake", "-G", "Ninja", "-S", str(SOURCE), "-B", str(BUILD)],
                    ["cmake", "--build", str(BUILD), "--target", "bench_kernels"]):  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def run(num_threads: int, *, pairs: int, only: str) -> dict[str, Any]:
    """What the program says, on `num_threads` threads."""
    command = [str(BUILD / "bench_kernels"), "--threads", str(num_threads), "--pairs", str(pairs), "--only", only]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(num_threads))
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def checks_of(told: dict[str, Any], *, has_targets: bool) -> list[Check]:
    """Ratios of one run."""
    limits = FLOORS | LIMITS if has_targets else {}
    return [
        check(group_of(told), item["name"], item["ratios"], limit=limits.get(item["name"]),
              is_floor=item["name"] in FLOORS)
        for item in told["results"]
    ]  # fmt: skip


def rows_of(told: dict[str, Any]) -> list[Row]:
    """Rates and times of one run."""
    return [
        row(group_of(told), item["name"], [Turn(value=value, others=0.0, wall_s=1.0) for value in item["values"]],
            unit=item["unit"])
        for item in told["results"]
    ]  # fmt: skip


def group_of(told: dict[str, Any]) -> str:
    """What the numbers of one run are comparable within."""
    return "1 thread" if told["num_threads"] == 1 else f"{told['num_threads']} threads"


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    build()
    circumstances = conditions(num_threads=args.threads)
    runs = [run(count, pairs=args.pairs, only=args.only) for count in dict.fromkeys((1, args.threads))]
    checks = [item for told in runs for item in checks_of(told, has_targets=told["num_threads"] == args.threads)]
    rows = [item for told in runs for item in rows_of(told)]
    circumstances["isa"] = runs[0]["isa"]
    publish(document("cpu_kernels", conditions=circumstances, rows=rows, checks=checks), save=args.save)


if __name__ == "__main__":
    main()
