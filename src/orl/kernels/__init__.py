"""Staircase attention for accelerators: FlexAttention and Triton, equal to `orl.attention` in value and gradient."""
