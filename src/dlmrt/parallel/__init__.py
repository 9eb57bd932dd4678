"""One request on several GPUs or processes: which part of a model each one holds, and how they act as one."""
