"""Training with several processes, one per GPU, started by torchrun or by srun on SLURM.

    torchrun --nproc-per-node 4 train.py ...            on one machine
    srun --ntasks-per-node 4 --kill-on-bad-exit=1 python train.py ...     inside a SLURM job

srun forwards all signals, and returns exit code 75 for an interrupted run. torchrun forwards only
SIGTERM and SIGINT, and returns 1 for any exit code but 0.

Every process builds the same model and batches, computes gradients on its part of each batch, and
then averages them. The model is not wrapped, so double differentiation, forward passes that start
from embeddings, and SAM's two passes need no special code.
"""

import atexit
import os
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ed.runtime import processes


def join() -> None:
    """Joins the other processes of this run if torchrun or srun started several."""
    place = _torchrun() or _srun()
    if place is None or processes.world_size() > 1:
        return
    os.environ.update(place)
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # gloo for CPU tensors, so that exchanging flags does not block the GPU
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        processes.join(store, rank=rank, world_size=world_size, backend=backend)
    except RuntimeError as error:
        where = f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
        raise processes.LostProcess(
            f"rank {place['RANK']} of {place['WORLD_SIZE']} could not join the others at {where} "
            f"(MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
        ) from error
    atexit.register(dist.destroy_process_group)


def _torchrun() -> dict[str, str] | None:
    """Returns the variables that torchrun sets, or None for a single process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or any(name not in os.environ for name in names):
        return None
    return {name: os.environ[name] for name in names}


def _srun() -> dict[str, str] | None:
    """Returns the same variables for srun, or None for a single task or a batch script."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1":
        return None
    # the port depends on the job and step, so that jobs on one node do not conflict
    number = int(os.environ["SLURM_JOB_ID"]) * 16 + int(os.environ["SLURM_STEP_ID"])
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(os.environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(20000 + number % 10000)),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: gpu[07-09,12],cpu1 -> gpu07."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.match(r"(?:[^,[]|\[[^]]*\])+", nodes).group())


def local_device(name: str) -> torch.device:
    """Selects the GPU of this process; `name` is system.device."""
    if name != "cuda":
        raise ValueError(f"system.device={name}: processes cannot share a GPU; use cuda")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local = 0  # srun can make only one GPU visible to each task
    if local >= count:
        raise ValueError(
            f"local process {local} has no GPU: this machine has only {count}; start {count} "
            "processes per machine, or set system.device=cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces each gradient with its mean over all processes, with one all-reduce per dtype.

    A missing gradient (e.g. of a randomly dropped block) counts as 0 if any other process has one,
    so that all processes average the same gradients.
    """
    if processes.world_size() == 1:
        return
    weights = [weight for weight in parameters if weight.requires_grad]
    used = processes.anyone(*(weight.grad is not None for weight in weights))
    weights = [weight for weight, yes in zip(weights, used, strict=True) if yes]
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights]
    torch._foreach_copy_(gradients, processes.mean(gradients))


def leave(code: int) -> NoReturn:
    """Exits; with several processes, skips process-group teardown, which could hang."""
    if processes.world_size() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
