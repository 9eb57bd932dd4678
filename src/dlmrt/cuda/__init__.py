"""The cuda executor: recorded programs as Triton kernels inside one CUDA graph. Importing it needs neither."""
