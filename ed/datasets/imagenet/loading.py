"""Loads images with worker processes, in an order that can be resumed at any step.

The order depends only on (seed, epoch) and the augmentation on (seed, epoch, position), so neither
the start step nor the number of workers changes a batch. Workers return batches in small pieces,
so that the first batch arrives early and little shared memory is used. On a GPU, pieces are pinned
and copied while the device computes.
"""

import math
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ed.core.validate import count
from ed.datasets.batches import Batch, shuffled_batches
from ed.datasets.imagenet.sources import ImageError, Source
from ed.runtime import processes
from ed.runtime.signals import STOP_SIGNALS
from ed.runtime.streams import generator

View = Callable[[Image.Image, torch.Generator], Tensor]
Key = tuple[int, int, int]  # image, epoch, position in the epoch
PIECE = 64  # images that a worker returns at once: 10 MB at 224 x 224
GRACE_SECONDS = 60  # time for the run to save before its workers exit
IN_FLIGHT = 2  # batches by which the host may run ahead of the device
FULL_MEMORY = (
    "shared memory (/dev/shm) is full; use fewer workers or enlarge it, e.g. docker run --shm-size"
)


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
    """Yields {"x": uint8 (B, 3, H, W), "label": (B,)} for each step, shuffled and augmented.

    With several processes, each yields only its part of the batch.

    Args:
        repeat: how often each image is used in an epoch, with a new augmentation each time.
        workers: number of worker processes; None: one per core; 0: decode in this process.
    """
    count = repeat * len(source)
    per_epoch = count // batch_size
    mine = processes.part(batch_size)
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
    """Yields the images in order, or only those in `index`; the last batch may be smaller."""
    index = range(len(source)) if index is None else [int(i) for i in index]
    keys = [
        [(i, 0, i) for i in piece]
        for batch in _slices(index, batch_size)
        for piece in _slices(batch, PIECE)
    ]
    most = len(keys) if len(keys) > 1 else 0  # reading one piece is faster than starting a worker
    pieces = _pieces(_Rows(source, view, 0), keys, device=device, workers=workers, most=most)
    return _to_device(pieces, torch.device(device), group=math.ceil(batch_size / PIECE))


def _slices(index: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (index[start : start + size] for start in range(0, len(index), size))


class _Rows(Dataset):
    """Maps keys to [pixels, labels] or to an error message; runs in the worker processes."""

    def __init__(self, source: Source, view: View, seed: int):
        self.source, self.view, self.seed = source, view, seed

    def __getitems__(self, keys: list[Key]) -> list[Tensor] | str:
        try:
            return default_collate([self._row(*key) for key in keys])
        # errors are not raised here, because the traceback would keep the workers alive
        except ImageError as error:
            return str(error)
        except RuntimeError as error:
            if "shared memory" not in str(error):
                raise
            return f"system.workers={get_worker_info().num_workers}: {FULL_MEMORY}"

    def _row(self, image: int, epoch: int, place: int) -> tuple[Tensor, int]:
        draws = generator(self.seed, f"augmentation {epoch}", place)
        return self.view(self.source.image(image), draws), int(self.source.labels[image])


def _pieces(
    rows: _Rows, keys: Iterable[list[Key]], *, device, workers: int | None, most: int | None = None
) -> Generator[list[Tensor]]:
    """Yields [pixels, labels] for each list of keys, in pinned memory if the device is a GPU.

    Args:
        most: maximum number of worker processes.
    """
    workers = processes.available_cores() if workers is None else workers
    count("system.workers", workers, least=0)
    workers = workers if most is None else min(workers, most)
    loader = DataLoader(
        rows,
        batch_sampler=keys,
        collate_fn=_identity,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.device(device).type == "cuda",
        # Python 3.14 would start workers that import torch and copy the list of files
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_delay_stop_signals,
        generator=torch.Generator(),  # the loader draws a seed; keep the global state unchanged
    )
    for piece in _started(loader):
        if isinstance(piece, str):
            raise ImageError(piece)
        yield piece


def _identity(piece: list[Tensor] | str) -> list[Tensor] | str:
    return piece


def _delay_stop_signals(_worker: int) -> None:
    """Keeps a worker alive when a stop signal reaches the whole process group.

    The run needs its workers until it has saved. SIGTERM stops them after GRACE_SECONDS.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _started(loader: DataLoader) -> Iterator:
    """Starts the workers, with stop signals blocked until their handlers are set.

    Do not assign the result to a variable: a traceback would then keep the workers alive.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _to_device(
    pieces: Generator[list[Tensor]], device: torch.device, *, group: int = 1
) -> Generator[Batch]:
    """Yields batches of `group` pieces each, on the device; the last may have fewer.

    On a GPU, a separate stream copies while the device computes. The host may run at most a few
    batches ahead of the device, because pending copies use memory.
    """
    groups = iter(lambda: list(islice(pieces, group)), [])
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


def _joined(parts: list[list[Tensor]], device: torch.device) -> Batch:
    pixels, labels = (
        torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
        for tensors in zip(*parts, strict=True)
    )
    return {"x": pixels, "label": labels}
