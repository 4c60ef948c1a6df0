"""Pictures from worker processes to the device, in an order that a run can enter anywhere.

The order of an epoch is a function of (seed, epoch), the augmentation of a picture one of (seed,
epoch, place): a run that starts at step n sees the batches that an uninterrupted one sees from
there, with any number of workers. Workers hand over small pieces, so that the first batch comes
soon and little shared memory is held; pieces are pinned, and copied while the device computes.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ed.core.streams import generator
from ed.tasks.base import Batch, shuffled_batches
from ed.tasks.imagenet_data.sources import PictureError, Source

View = Callable[[Image.Image, torch.Generator], Tensor]
Key = tuple[int, int, int]  # picture, epoch, place in the epoch
PIECE = 64  # rows that a worker hands over at once: 10 MB at 224 x 224
IN_FLIGHT = 2  # batches that the device may still be busy with when the next one is made


def training_batches(
    source: Source,
    view: View,
    *,
    batch_size: int,
    steps: range,
    seed: int,
    device: torch.device | str,
    repeat: int = 1,
    workers: int | None = None,
) -> Iterator[Batch]:
    """{"x": uint8 (B, 3, H, W), "label": (B,)} for each step, shuffled and augmented.

    Args:
        repeat: times that each picture comes in an epoch, every time with a new augmentation.
        workers: processes that decode; None: one per core; 0: this one.
    """
    count = repeat * len(source)
    per_epoch = count // batch_size
    mine = range(batch_size)  # rows of the whole batch that this process trains on
    order = shuffled_batches(count, batch_size, steps, seed=seed, device="cpu")
    keys = (
        [(place % len(source), step // per_epoch, place) for place in piece.tolist()]
        for step, places in order
        for piece in places[mine.start : mine.stop].split(PIECE)
    )
    pieces = _pieces(_Rows(source, view, seed), keys, device=device, workers=workers)
    return _to_device(pieces, torch.device(device), group=math.ceil(len(mine) / PIECE))


def evaluation_batches(
    source: Source,
    view: View,
    *,
    device: torch.device | str,
    index: Iterable[int] | None = None,
    batch_size: int = 256,
    workers: int | None = None,
) -> Iterator[Batch]:
    """All pictures in their order, or those of `index`; the last batch may be smaller."""
    index = range(len(source)) if index is None else [int(i) for i in index]
    keys = (
        [(i, 0, i) for i in index[start : start + batch_size]]
        for start in range(0, len(index), batch_size)
    )
    pieces = _pieces(_Rows(source, view, 0), keys, device=device, workers=workers)
    return _to_device(pieces, torch.device(device))


def available_cores() -> int:
    """Cores that this process may use, which a scheduler may have cut down."""
    return len(os.sched_getaffinity(0))


class _Rows(Dataset):
    """Key -> (pixels, label); runs in the workers."""

    def __init__(self, source: Source, view: View, seed: int):
        self.source, self.view, self.seed = source, view, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        picture, epoch, place = key
        draws = generator(self.seed, f"augmentation {epoch}", place)
        return self.view(self.source.picture(picture), draws), int(self.source.labels[picture])


def _pieces(
    rows: _Rows, keys: Iterable[list[Key]], *, device, workers: int | None
) -> Iterator[list[Tensor]]:
    """[pixels, labels] for each list of keys, pinned where a GPU will fetch them."""
    workers = available_cores() if workers is None else workers
    loader = DataLoader(
        rows,
        batch_sampler=keys,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.device(device).type == "cuda",
        generator=torch.Generator(),  # it draws a seed, which must not move the run's own stream
    )
    try:
        yield from loader
    except PictureError as error:  # a worker's comes with its traceback: what it said is enough
        raise PictureError(str(error).split("PictureError: ")[-1].strip()) from None


def _to_device(
    pieces: Iterator[list[Tensor]], device: torch.device, *, group: int = 1
) -> Iterator[Batch]:
    """Batches of `group` pieces each, on the device.

    On a GPU a stream of its own copies while the device computes. The host runs ahead of the
    device, but not without bounds: copies that wait for their turn hold memory.
    """
    groups = zip(*[iter(pieces)] * group, strict=False)
    if device.type != "cuda":
        for parts in groups:
            yield _joined(parts, device)
        return
    copies, consumed = torch.cuda.Stream(device), []
    for parts in groups:
        with torch.cuda.stream(copies):
            batch = _joined(parts, device)
        compute = torch.cuda.current_stream(device)
        compute.wait_stream(copies)
        for tensor in batch.values():
            tensor.record_stream(compute)
        yield batch
        del batch, parts
        consumed.append(torch.cuda.current_stream(device).record_event())
        if len(consumed) > IN_FLIGHT:
            consumed.pop(0).synchronize()


def _joined(parts: tuple[list[Tensor], ...], device: torch.device) -> Batch:
    pixels, labels = (
        torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
        for tensors in zip(*parts, strict=True)
    )
    return {"x": pixels, "label": labels}
