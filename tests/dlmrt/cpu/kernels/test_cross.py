"""The kernels of another architecture: built by a cross compiler, run under user-mode emulation.

Debian: g++-aarch64-linux-gnu, qemu-user. The C++ checks compare NEON, NEON with dot products and portable code bit for
bit; what the emulated machine computes is compared with nothing outside of it.

Source: ours.
"""

from __future__ import annotations

import platform
import shutil
import subprocess

import pytest
from native import HERE, REPOSITORY

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this machine is one: the other tests run its kernels")
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER} (Debian: g++-aarch64-linux-gnu)")
@pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"needs {EMULATOR} (Debian: qemu-user)")
@pytest.mark.timeout(900)
def test_aarch64_kernels_agree_under_emulation() -> None:
    folder = REPOSITORY / "build" / "cpu-kernels-aarch64"
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    for command in (
        ["cmake", "-G", "Ninja", "-S", HERE, "-B", folder, "-DDLMRT_WERROR=ON", *target],
        ["cmake", "--build", folder, "--target", "test_kernels"],
        [EMULATOR, "-L", SYSROOT, folder / "test_kernels"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout == "ok\n"
