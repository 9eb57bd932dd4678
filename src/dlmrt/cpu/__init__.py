"""The cpu executor: programs lowered to native kernels and run, loop included, without Python and without torch."""
