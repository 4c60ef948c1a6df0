"""Checks of tensor values that never make the host wait for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 250  # characters of a message that torch's CUDA kernel can carry


def readable(tensor: Tensor) -> bool:
    """Whether its values can be checked at no cost: on the CPU, outside torch.compile."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def assert_on_device(condition: Tensor, message: str) -> None:
    """Asserts a boolean scalar where it is computed; captured and compiled steps keep the check.

    On a CPU it raises RuntimeError with the message. On a CUDA device the kernel prints the
    message, the next call that waits for the device raises "device-side assert triggered", and the
    process has to start again, as after a wrong label in `cross_entropy`. Other devices have no
    such assertion and ignore it.
    """
    if condition.device.type in ("cpu", "cuda"):
        torch._assert_async(condition, message[:LONGEST])
