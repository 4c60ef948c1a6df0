"""The processes that train one model together: which of them we are, and what they tell each other.

`join` is called once, by whoever starts training. Before it, and in a process alone, every function
here answers at once with what it was given: no caller needs to ask whether there are others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=30)  # for one answer; rank 0 may evaluate alone for a while
_store: dist.Store | None = None  # reaches the others even where a collective no longer does


class LostProcess(RuntimeError):
    """Another process has ended, or cannot be reached any more."""


def join(store, *, rank: int, world_size: int, backend: str) -> None:
    """Makes this process one of `world_size`, who find each other through `store`."""
    global _store
    _store = dist.PrefixStore("ed", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def rank() -> int:
    """Our number, from 0 on. Rank 0 alone writes files."""
    return dist.get_rank() if _joined() else 0


def world_size() -> int:
    return dist.get_world_size() if _joined() else 1


def available_cores() -> int:
    """Cores for this process: what a scheduler grants, shared with those torchrun put beside it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def part(count: int) -> range:
    """Our part of `count` things. The parts of all processes hold each of them exactly once."""
    ours, everyone = rank(), world_size()
    return range(count * ours // everyone, count * (ours + 1) // everyone)


def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our rows of a batch that all processes hold alike."""
    if world_size() == 1:
        return batch
    rows = part(len(next(iter(batch.values()))))
    return {name: value[rows.start : rows.stop] for name, value in batch.items()}


def own_stream(name: str) -> str:
    """The name of a random stream that is another one in each process."""
    return name if rank() == 0 else f"{name} of rank {rank()}"


def total(value: Tensor) -> Tensor:
    """The sum over all processes."""
    return value if world_size() == 1 else _add_up(value.clone())


def all_rows(rows: Tensor, count: int) -> Tensor:
    """`count` rows, of which each process brings those of its `part`: exactly these, in order."""
    if world_size() == 1:
        return rows
    ours = part(count)
    whole = rows.new_zeros(count, *rows.shape[1:])
    whole[ours.start : ours.stop] = rows
    return _add_up(whole)


def mean(values: Sequence[Tensor]) -> list[Tensor]:
    """The mean over all processes of each tensor; they travel together, once per dtype."""
    if world_size() == 1:
        return list(values)
    result = list(values)
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [i for i, value in enumerate(values) if value.dtype == dtype]
        flat = _add_up(torch.cat([values[i].reshape(-1) for i in places]))
        pieces = flat.div_(world_size()).split([values[i].numel() for i in places])
        for i, piece in zip(places, pieces, strict=True):
            result[i] = piece.view(values[i].shape)
    return result


def anyone(*flags: bool) -> list[bool]:
    """Which flags are set in at least one process. Asks on the CPU: no GPU waits for it."""
    if world_size() == 1:
        return list(flags)
    seen = torch.tensor(flags, dtype=torch.uint8)
    with _others():
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in seen]


def wait_for_all() -> None:
    anyone(False)


def gather(value) -> list:
    """What each process has, by rank; any small object."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    with _others():
        dist.all_gather_object(values, value)
    return values


def copy_from_first(tensors: Sequence[Tensor]) -> None:
    """Overwrites the tensors with those of rank 0, bit for bit."""
    if world_size() > 1:
        with _others():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)


def first_to_fail(error: BaseException) -> bool:
    """True for one process only: of many that fail alike, or by another's failure, one speaks."""
    if world_size() == 1:
        return True
    try:
        return _store.add("failures", 1) == 1
    except RuntimeError:  # rank 0 kept the store and is gone: it failed like us, or it is lost
        return isinstance(error, LostProcess)


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _add_up(value: Tensor) -> Tensor:
    with _others():
        dist.all_reduce(value)
    return value


@contextlib.contextmanager
def _others() -> Iterator[None]:
    """Where we depend on other processes: torch raises when one is gone, or after the timeout."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcess(
            f"rank {rank()} of {world_size()} lost another process: see what that one printed "
            "last. All end here; the same command resumes from the last checkpoint"
        ) from error
