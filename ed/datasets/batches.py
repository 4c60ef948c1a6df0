"""Batches, drawn from a data set in a seeded random order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ed.runtime.streams import generator

Batch = dict[str, Tensor]


def shuffled_batches(
    count: int, batch_size: int, steps: range, *, seed: int, device: torch.device | str
) -> Iterator[tuple[int, Tensor]]:
    """Yields (step, indices (B,)) and reshuffles every epoch.

    The order depends only on the seed and the epoch, so a run can start at any step. The last,
    incomplete batch of an epoch is dropped, so all batches have the same shape.
    """
    pinned = torch.device(device).type == "cuda"  # copying from pageable memory would block
    for step in steps:
        epoch, place = divmod(step, count // batch_size)
        if step == steps.start or place == 0:
            order = torch.randperm(count, generator=generator(seed, "order", epoch))
            order = (order.pin_memory() if pinned else order).to(device, non_blocking=True)
        yield step, order[place * batch_size : (place + 1) * batch_size]
