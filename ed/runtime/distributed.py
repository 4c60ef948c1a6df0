"""Several processes, one GPU each, for one run: started by torchrun, or by srun on SLURM.

    torchrun --nproc-per-node 4 train.py ...            on one machine
    srun --ntasks-per-node 4 --kill-on-bad-exit=1 python train.py ...     inside a SLURM job

srun hands on every signal and the exit code 75 of a run that has saved; torchrun hands on SIGTERM
and SIGINT, and its own exit code is 1 whatever that of the run.

Every process builds the same model and the same batches, works on its part of each batch, and
averages the gradients once. No wrapper is put around the model: penalties that differentiate twice,
forwards that start from embeddings and SAM's two passes are all ordinary code.
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
    """Joins the other processes of this run, where torchrun or srun has started any."""
    place = _torchrun() or _srun()
    if place is None or processes.world_size() > 1:
        return
    os.environ.update(place)
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # CPU tensors travel by gloo also beside GPUs: a question among hosts makes no GPU wait
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        processes.join(store, rank=rank, world_size=world_size, backend=backend)
    except RuntimeError as error:
        where = f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
        raise processes.LostProcess(
            f"rank {place['RANK']} of {place['WORLD_SIZE']} could not meet the others at {where} "
            f"(MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
        ) from error
    atexit.register(dist.destroy_process_group)


def _torchrun() -> dict[str, str] | None:
    """What torchrun tells each of several processes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or any(name not in os.environ for name in names):
        return None
    return {name: os.environ[name] for name in names}


def _srun() -> dict[str, str] | None:
    """The same from SLURM's variables. A batch script itself is no step, so it stays alone."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1":
        return None
    # jobs on one node must not meet each other: the port follows from job and step
    number = int(os.environ["SLURM_JOB_ID"]) * 16 + int(os.environ["SLURM_STEP_ID"])
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(os.environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(20000 + number % 10000)),
    }


def first_host(nodes: str) -> str:
    """Of SLURM's list of nodes: gpu[07-09,12],cpu1 -> gpu07."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.match(r"(?:[^,[]|\[[^]]*\])+", nodes).group())


def local_device(name: str) -> torch.device:
    """This process's own GPU, made the current one; `name` is what the config asks for."""
    if name != "cuda":
        raise ValueError(f"system.device={name}: one GPU for several processes; set it to cuda")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local = 0  # by srun each task may be given its GPU, and sees no other
    if local >= count:
        raise ValueError(
            f"process {local} of this machine finds no GPU of its own, as there are {count}: start "
            f"{count} processes per machine, or set system.device=cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The mean over all processes in place of each gradient, in one all-reduce.

    A weight that some process has not used (a block that is left out at random) has none there: it
    counts as 0, so that all average the same list. One that nobody used stays without.
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
    """Ends the process; beside others it skips teardown, which could wait for a lost one."""
    if processes.world_size() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
