"""Dispatch, packing checks, threads and fork, the C++ checks and the sanitizer builds.

Source: ours.
"""

from __future__ import annotations

import ctypes as C
import os
import subprocess
import sys

import pytest
from native import HERE, REPOSITORY, build, library, runnable


def select(name: str) -> tuple[int, str]:
    out = C.create_string_buffer(512)
    return library().dlmrt_select(name.encode(), out, 511), out.value.decode()


def test_best_instruction_set_is_the_default() -> None:
    assert select("") == (0, runnable()[0])
    assert runnable()[-1] == "portable"


def test_each_runnable_name_can_be_forced(isa: str) -> None:
    assert select(isa) == (0, isa)


def test_unknown_name_is_refused_with_the_possible_ones() -> None:
    failed, message = select("avx3")
    assert failed
    assert "avx3" in message
    assert all(name in message for name in runnable())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names of another architecture")
def test_name_that_cannot_run_is_refused() -> None:
    missing = {"avx2", "avxvnni", "avx512", "avx512bf16"} - set(runnable())
    for name in missing:
        failed, message = select(name)
        assert failed
        assert "does not run on this machine" in message


def test_default_threads_stay_within_the_affinity_mask() -> None:
    assert 1 <= library().dlmrt_default_num_threads() <= len(os.sched_getaffinity(0))
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "import native; print(native.library().dlmrt_default_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_worker_runs_once(threads: int) -> None:
    for _ in range(20):
        assert library().dlmrt_count_workers(threads) == threads


def test_pool_works_in_a_forked_child() -> None:
    """The parent's threads do not exist in the child; it starts its own, and the parent goes on."""
    assert library().dlmrt_count_workers(3) == 3
    pid = os.fork()
    if pid == 0:
        os._exit(0 if library().dlmrt_count_workers(3) == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert library().dlmrt_count_workers(3) == 3


def test_cpp_checks() -> None:
    done = subprocess.run(
        [build(os.environ.get("DLMRT_TEST_SANITIZE", "")) / "test_kernels"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


sanitizers = pytest.mark.skipif(
    "DLMRT_TEST_SANITIZERS" not in os.environ, reason="two more builds and a second run: set DLMRT_TEST_SANITIZERS=1"
)


@sanitizers
@pytest.mark.timeout(3600)
def test_address_and_undefined_sanitizers_are_silent() -> None:
    """All tests of this folder again, on numpy buffers with red zones."""
    # the C++ runtime as well: python does not load it, and the sanitizer looks for its exceptions at start
    names = ("libasan.so", "libstdc++.so.6")
    commands = (["g++", f"-print-file-name={name}"] for name in names)
    runtimes = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in commands]
    build("address,undefined")
    env = {k: v for k, v in os.environ.items() if k != "DLMRT_TEST_SANITIZERS"}
    env |= {
        "DLMRT_TEST_SANITIZE": "address,undefined",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=600", str(HERE)]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@sanitizers
@pytest.mark.timeout(3600)
def test_thread_sanitizer_is_silent() -> None:
    done = subprocess.run([build("thread") / "test_kernels"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
