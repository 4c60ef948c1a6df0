"""Custom operators with Triton kernels, for steps that are memory-bound in plain torch."""
