"""Images from worker processes to the device, in an order that a run can enter anywhere.

The order of an epoch is a function of (seed, epoch), the augmentation of a picture one of (seed,
epoch, place): a run that starts at step n sees the batches that an uninterrupted one sees from
there, with any number of workers. Workers hand over small pieces, so that the first batch comes
soon and little shared memory is held; pieces are pinned, and copied while the device computes.
"""

import math
import signal
from collections.abc import Callable, Generator, Iterable, Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ed.core.validate import count
from ed.datasets.batches import Batch, shuffled_batches
from ed.datasets.imagenet.sources import ImageError, Source
from ed.runtime import processes
from ed.runtime.streams import generator

View = Callable[[Image.Image, torch.Generator], Tensor]
Key = tuple[int, int, int]  # picture, epoch, place in the epoch
PIECE = 64  # rows that a worker hands over at once: 10 MB at 224 x 224
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # to stop
GRACE_SECONDS = 60  # for a run that was asked to stop to save
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
) -> Generator[Batch]:
    """{"x": uint8 (B, 3, H, W), "label": (B,)} for each step, shuffled and augmented.

    Of several processes each gets its own rows, so that no picture is decoded twice.

    Args:
        repeat: times that each picture comes in an epoch, every time with a new augmentation.
        workers: processes that decode; None: one per core; 0: this one.
    """
    count = repeat * len(source)
    per_epoch = count // batch_size
    mine = processes.part(batch_size)  # rows of the whole batch that this process trains on
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
) -> Generator[Batch]:
    """All pictures in their order, or those of `index`; the last batch may be smaller."""
    index = range(len(source)) if index is None else [int(i) for i in index]
    keys = (
        [(i, 0, i) for i in index[start : start + batch_size]]
        for start in range(0, len(index), batch_size)
    )
    pieces = _pieces(_Rows(source, view, 0), keys, device=device, workers=workers)
    return _to_device(pieces, torch.device(device))


class _Rows(Dataset):
    """Keys -> [pixels, labels], or what is wrong with one of them; runs in the workers."""

    def __init__(self, source: Source, view: View, seed: int):
        self.source, self.view, self.seed = source, view, seed

    def __getitems__(self, keys: list[Key]) -> list[Tensor] | str:
        try:
            return default_collate([self._row(*key) for key in keys])
        except ImageError as error:
            # said, not raised: what a worker raises comes as a traceback that keeps workers alive
            return str(error)

    def _row(self, picture: int, epoch: int, place: int) -> tuple[Tensor, int]:
        draws = generator(self.seed, f"augmentation {epoch}", place)
        return self.view(self.source.picture(picture), draws), int(self.source.labels[picture])


def _pieces(
    rows: _Rows, keys: Iterable[list[Key]], *, device, workers: int | None
) -> Generator[list[Tensor]]:
    """[pixels, labels] for each list of keys, pinned where a GPU will fetch them."""
    workers = processes.available_cores() if workers is None else workers
    count("system.workers", workers, least=0)
    loader = DataLoader(
        rows,
        batch_sampler=keys,
        collate_fn=_as_is,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.device(device).type == "cuda",
        worker_init_fn=_outlive_requests,
        generator=torch.Generator(),  # it draws a seed, which must not move the run's own stream
    )
    for piece in _begun(loader):
        if isinstance(piece, str):
            raise ImageError(piece)
        yield piece


def _as_is(piece: list[Tensor] | str) -> list[Tensor] | str:
    return piece


def _outlive_requests(_worker: int) -> None:
    """What asks a run to stop often reaches its workers too; it needs them until it has saved.

    SIGTERM is also how they are told to go if nothing else helps, so it is heeded after a while.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def _begun(loader: DataLoader) -> Iterator:
    """Starts the workers, with requests held back until each knows what to do with them.

    A function, as a name for the iterator would keep workers alive in the traceback of an error.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _to_device(
    pieces: Generator[list[Tensor]], device: torch.device, *, group: int = 1
) -> Generator[Batch]:
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
