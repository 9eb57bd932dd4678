"""Triton kernels of the cuda executor, one module a group of operations. Importing a module needs triton."""
