"""Whether an NVIDIA GPU is there, asked of the driver itself: neither torch nor triton is imported for it.

Source: CUDA driver API.
"""

from __future__ import annotations

import ctypes


def num_devices(library: str = "libcuda.so.1") -> int:
    """Devices that the driver offers to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
