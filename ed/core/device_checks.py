"""Checks tensor values without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 250  # maximum message length that torch's CUDA kernel can print


def readable(tensor: Tensor) -> bool:
    """Whether values can be read without a sync: on the CPU, outside torch.compile."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def assert_on_device(condition: Tensor, message: str) -> None:
    """Asserts a boolean scalar on its device; works in CUDA graphs and compiled code.

    On the CPU, a failure raises RuntimeError with the message. On a CUDA device, the kernel prints
    the message, the next sync raises "device-side assert triggered", and the process must restart,
    as after a wrong label in `cross_entropy`. On other devices, nothing is checked.
    """
    if condition.device.type in ("cpu", "cuda"):
        torch._assert_async(condition, message[:LONGEST])
