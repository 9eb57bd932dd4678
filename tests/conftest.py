"""Triton reads once, when it is first imported, whether kernels run in its interpreter: before any test module is."""

import importlib.util

from dlmrt.testing import interpret_kernels

if importlib.util.find_spec("triton") is not None:
    interpret_kernels()
