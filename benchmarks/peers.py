"""llama.cpp on demand: library and driver built from the source package on PyPI, models written and quantised.

Everything lies under build/peers and build/benchmarks, is made at the first call and kept. The library alone is built:
78 steps, about four minutes of one core. It is built for this machine (GGML_NATIVE), as its users build it.

Needs cmake, ninja, a C++ compiler and the package `gguf`; the source package (76 MB) comes from the package index that
pip is set up for.

Source: build options of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from child import ROOT, RUNTIMES
from gguf_file import write_gguf

VERSION = "0.3.36"
FOLDER = ROOT / "build" / "peers"
SOURCE = FOLDER / f"llama_cpp_python-{VERSION}"
LLAMA = SOURCE / "vendor" / "llama.cpp"
LIBRARY = SOURCE / "build" / "bin"
DRIVER = FOLDER / "llama_driver"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON", "GGML_NATIVE": "ON", "LLAMA_BUILD_COMMON": "OFF",
    "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_TOOLS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}  # fmt: skip


def llama_version() -> str:
    """What a result states: the package, and the version of its ggml."""
    text = (LLAMA / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
    ggml = ".".join(re.findall(r"GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))
    return f"llama-cpp-python {VERSION} (ggml {ggml})"


def llama_driver() -> Path:
    """The driver program, built if it is absent or older than its source."""
    source = RUNTIMES / "llama_driver.cpp"
    if not LLAMA.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        package = f"llama-cpp-python=={VERSION}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        _run([*pip, "--no-binary", "llama-cpp-python", "--dest", str(FOLDER), package])
        with tarfile.open(FOLDER / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    if not (LIBRARY / "libllama.so").exists():
        build = str(SOURCE / "build")
        _run(["cmake", "-S", str(LLAMA), "-B", build, "-G", "Ninja", *(f"-D{k}={v}" for k, v in OPTIONS.items())])
        _run(["cmake", "--build", build, "--target", "llama", "--parallel", os.environ.get("MAKE_JOBS", "1")])
    if not DRIVER.exists() or DRIVER.stat().st_mtime < source.stat().st_mtime:
        headers = [f"-I{LLAMA / 'include'}", f"-I{LLAMA / 'ggml' / 'include'}"]
        libraries = [f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}", "-lllama", "-lggml", "-lggml-base"]
        _run(["g++", "-std=c++17", "-O2", "-Wall", *headers, str(source), "-o", str(DRIVER), *libraries])
    return DRIVER


def gguf_model(checkpoint: Path, cache: Path, kind: str, *, num_threads: int) -> Path:
    """The model of `checkpoint` in a format of llama.cpp (q4_k_m, q4_0, q8_0, bf16), made in `cache` when absent."""
    full, target = cache / "bf16.gguf", cache / f"{kind}.gguf"
    weights = max(file.stat().st_mtime for file in checkpoint.glob("*.safetensors"))
    if not full.exists() or full.stat().st_mtime < weights:
        cache.mkdir(parents=True, exist_ok=True)
        write_gguf(checkpoint, full)
    if not target.exists() or target.stat().st_mtime < full.stat().st_mtime:
        draft = target.with_suffix(".tmp")
        _run([str(llama_driver()), "quantize", str(full), str(draft), kind, str(num_threads)])
        draft.rename(target)
    return target


def llama_command(model: Path, *, num_threads: int, positions: int) -> list[str]:
    """Command of a `child.Child` that runs `model`."""
    return [str(llama_driver()), "run", str(model), str(num_threads), str(positions)]


def _run(command: Sequence[str]) -> None:
    print(f"running {Path(command[0]).name} {command[1]}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{tail}")
