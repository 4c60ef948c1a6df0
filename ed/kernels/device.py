"""Runs operators on the device of their inputs."""

import functools
from collections.abc import Callable

import torch


def on_device_of_input(operator: Callable) -> Callable:
    """Makes the device of the first argument the current one, where Triton launches kernels."""

    @functools.wraps(operator)
    def run(first, *others):
        with torch.cuda.device_of(first):
            return operator(first, *others)

    return run
