"""Triton kernels for steps that small torch operators leave memory-bound, as custom operators."""
