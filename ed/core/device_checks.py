"""Checks of tensor values without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 250  # characters that torch's CUDA kernel can print


def readable(tensor: Tensor) -> bool:
    """Whether values can be read for free: on the CPU, outside torch.compile."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def assert_on_device(condition: Tensor, message: str) -> None:
    """Asserts a boolean scalar on its device; works in captured and compiled steps.

    On a CPU it raises RuntimeError with the message. On a CUDA device the kernel prints the
    message, the next sync raises "device-side assert triggered", and the process must restart, as
    after a wrong label in `cross_entropy`. Other devices have no such assertion and ignore it.
    """
    if condition.device.type in ("cpu", "cuda"):
        torch._assert_async(condition, message[:LONGEST])
