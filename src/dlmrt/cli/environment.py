"""`dlmrt env`: what is installed, what the machine is, which executors can run here and why others cannot.

Nothing heavy is imported: versions come from package metadata, so the report works, and is quick, when torch is broken.

Source: ours; /proc as in proc(5).
"""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import dlmrt
from dlmrt.cli.report import print_json
from dlmrt.env import HONOURED, PREFIX, Environment

PACKAGES = ("numpy", "tokenizers", "safetensors", "huggingface-hub", "torch", "transformers")
CPU_FLAGS = (
    "avx2",
    "f16c",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "sve",
)


def env(json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Versions, machine, executors and environment variables (alias: doctor)."""
    report = environment_report()
    if json_output:
        print_json(report, indent=2)
        return
    for section, values in report.items():
        if not isinstance(values, dict):
            typer.echo(f"{section:<24}{values}")
            continue
        typer.echo(section)
        for name, value in values.items():
            typer.echo(f"  {name:<22}{' '.join(map(str, value)) if isinstance(value, list) else value}")


def version_line() -> str:
    """The versions that a report needs, on one line."""
    torch = package_version("torch") or "not installed"
    return f"dlmrt {dlmrt.__version__} (python {platform.python_version()}, torch {torch}, {platform.machine()})"


def package_version(name: str) -> str | None:
    """Installed version of a distribution, None when it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment_report() -> dict[str, Any]:
    """What `dlmrt env` prints, as JSON values.

    Raises:
        UsageError: a `DLMRT_*` variable does not exist or does not parse.
    """
    settings = dataclasses.asdict(Environment.read())
    settings["api_key"] = "not set" if settings["api_key"] is None else "set"  # a report is made to be shown
    in_effect = {f"{PREFIX}{name.upper()}": "auto" if value is None else value for name, value in settings.items()}
    return {
        "dlmrt": dlmrt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) or "not installed" for name in PACKAGES},
        "cpu": _cpu(),
        "memory": _memory(),
        "executors": _executors(),
        "environment": in_effect | {name: os.environ[name] for name in HONOURED if name in os.environ},
    }


def _executors() -> dict[str, str]:
    from dlmrt.cuda.device import num_devices
    from dlmrt.decode.engine import EXECUTORS

    states = {
        name: "available" if find_spec(package) else f"not available: {package} is not installed; {way}"
        for name, (_, package, way) in EXECUTORS.items()
    }
    if not num_devices():
        states["cuda"] = "not available: the driver reports no NVIDIA device"
    return states


def _cpu() -> dict[str, Any]:
    info = _proc_fields("/proc/cpuinfo")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": info.get("model name") or platform.processor() or "unknown",
        "num_cpus": os.cpu_count(),
        "num_cpus_allowed": affinity,  # what this process may use
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _memory() -> dict[str, Any]:
    info = _proc_fields("/proc/meminfo")
    values = {"total": info.get("MemTotal"), "available": info.get("MemAvailable")}
    return {f"{name}_bytes": int(text.split()[0]) * 1024 if text else "unknown" for name, text in values.items()}


def _proc_fields(path: str) -> dict[str, str]:
    """The first value of each "name : value" line; empty where there is no /proc."""
    fields: dict[str, str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields
