"""Batches, and the seeded order in which training reads a data set."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ed.runtime.streams import generator

Batch = dict[str, Tensor]


def shuffled_batches(
    count: int, batch_size: int, steps: range, *, seed: int, device: torch.device | str
) -> Iterator[tuple[int, Tensor]]:
    """(step, indices (B,)) of a data set that is shuffled anew every epoch.

    The order of an epoch is a function of the seed and the epoch, so a run may start anywhere; it
    moves to the device once an epoch. The last incomplete batch is dropped: all steps have one
    shape.
    """
    pinned = torch.device(device).type == "cuda"  # a copy from other memory waits for the device
    for step in steps:
        epoch, place = divmod(step, count // batch_size)
        if step == steps.start or place == 0:
            order = torch.randperm(count, generator=generator(seed, "order", epoch))
            order = (order.pin_memory() if pinned else order).to(device, non_blocking=True)
        yield step, order[place * batch_size : (place + 1) * batch_size]
