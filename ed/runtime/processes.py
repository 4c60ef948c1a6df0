"""Communication between the processes that train one model together.

In a single process, every function returns its input, so callers need not check whether there are
other processes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=30)  # per operation; rank 0 may keep the others waiting
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": two cores; "max 100000": no limit
_store: dist.Store | None = None  # still works after a collective operation has failed


class LostProcess(RuntimeError):
    """Raised when another process has died or cannot be reached."""


def join(store, *, rank: int, world_size: int, backend: str) -> None:
    """Joins the group of `world_size` processes that share `store`."""
    global _store
    _store = dist.PrefixStore("ed", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def rank() -> int:
    """Returns the rank of this process. Only rank 0 writes files."""
    return dist.get_rank() if _joined() else 0


def world_size() -> int:
    return dist.get_world_size() if _joined() else 1


def available_cores() -> int:
    """Returns the CPU cores for this process; torchrun's local processes share the cores."""
    cores = min(len(os.sched_getaffinity(0)), _quota())
    return max(1, int(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _quota() -> float:
    """Returns the number of cores that a container's CPU limit allows (cgroup version 2)."""
    try:
        limit, period = CPU_LIMIT.read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def part(count: int) -> range:
    """Returns this process's part of range(count); together, the parts cover it exactly once."""
    ours, everyone = rank(), world_size()
    return range(count * ours // everyone, count * (ours + 1) // everyone)


def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns this process's rows of a batch that is the same on all processes."""
    if world_size() == 1:
        return batch
    rows = part(len(next(iter(batch.values()))))
    return {name: value[rows.start : rows.stop] for name, value in batch.items()}


def own_stream(name: str) -> str:
    """Returns the name of a random stream for this process only."""
    return name if rank() == 0 else f"{name} of rank {rank()}"


def total(value: Tensor) -> Tensor:
    """Returns the sum over all processes."""
    return value if world_size() == 1 else _add_up(value.clone())


def all_rows(rows: Tensor, count: int) -> Tensor:
    """Gathers `count` rows in order; each process passes the rows of its `part`."""
    if world_size() == 1:
        return rows
    ours = part(count)
    whole = rows.new_zeros(count, *rows.shape[1:])
    whole[ours.start : ours.stop] = rows
    return _add_up(whole)


def mean(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns the mean of each tensor over all processes, with one all-reduce per dtype."""
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
    """Returns, for each flag, whether any process has set it. Does not block the GPU."""
    if world_size() == 1:
        return list(flags)
    seen = torch.tensor(flags, dtype=torch.uint8)
    with _others():
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in seen]


def wait_for_all() -> None:
    anyone(False)


def gather(value) -> list:
    """Returns the values of all processes by rank; for small objects of any type."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    with _others():
        dist.all_gather_object(values, value)
    return values


def copy_from_first(tensors: Sequence[Tensor]) -> None:
    """Overwrites the tensors with those of rank 0."""
    if world_size() > 1:
        with _others():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)


def first_to_fail(error: BaseException) -> bool:
    """Returns whether this process should report its error; True for only one process."""
    if world_size() == 1:
        return True
    try:
        return _store.add("failures", 1) == 1
    except RuntimeError:  # rank 0, which hosts the store, has exited
        return isinstance(error, LostProcess)


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _add_up(value: Tensor) -> Tensor:
    with _others():
        dist.all_reduce(value)
    return value


@contextlib.contextmanager
def _others() -> Iterator[None]:
    """Raises LostProcess instead of torch's error if another process does not respond."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcess(
            f"rank {rank()} of {world_size()} lost another process: see its last output; "
            "the same command resumes from the last checkpoint"
        ) from error
