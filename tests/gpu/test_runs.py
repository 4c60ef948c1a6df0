"""GPU tests of runs, loaded batches and groups of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from ed.datasets.imagenet.loading import IN_FLIGHT
from ed.engine.compose import compose_config
from ed.runtime import processes
from ed.runtime.files import read_rows
from tests.helpers.gpu import IMAGENET, STAND_IN

pytestmark = pytest.mark.gpu


def test_clip_stand_in_can_be_compiled_and_captured(tmp_path):
    """Runs both stages in bf16; the two ends of the ensemble equal the two models."""
    from ed.engine.main import run

    stand_in = [*STAND_IN, "task.epochs=2", "task.warmup_epochs=0", "optimizer.max_grad_norm=1"]
    first = ["task=clip_standin_pretrain", "model=clip_small_pretrain", "task.part=1"]
    run(compose_config([*first, *stand_in, f"system.run_dir={tmp_path}/first"]), ["clip"])
    second = ["task=clip_standin", "model=clip_small", f"model.weights={tmp_path}/first/last.pt"]
    second += ["regularizer=ed", "regularizer.components=3", "measures=ensembling"]
    done = run(compose_config([*second, *stand_in, f"system.run_dir={tmp_path}/second"]), ["clip"])
    for name in ("acc", "acc_ood"):
        assert done["last"][f"measure/ensembling/alpha1/{name}"] == done["last"][f"eval/{name}"]
    zero_shot = read_rows(tmp_path / "first" / "metrics.jsonl")[-1]["eval/acc"]
    assert done["last"]["measure/ensembling/alpha0/acc"] == zero_shot


def test_clip_on_the_cpu_does_not_use_the_gpu(tmp_path):
    from ed.engine.main import build_model, run

    first = ["task=clip_standin_pretrain", "model=clip_small_pretrain", "system.device=cpu"]
    first += [*STAND_IN, "task.epochs=1", "task.warmup_epochs=0", "task.part=0.1"]
    run(compose_config([*first, f"system.run_dir={tmp_path}/first"]), ["clip"])
    second = ["task=clip_standin", "model=clip_small", f"model.weights={tmp_path}/first/last.pt"]
    cfg = compose_config([*second, *STAND_IN])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    on_cpu = build_model(cfg, torch.device("cpu"))
    assert torch.cuda.max_memory_allocated() == before
    on_gpu = build_model(cfg, torch.device("cuda"))
    assert torch.cuda.max_memory_allocated() > before
    torch.testing.assert_close(on_gpu.head.weight.cpu(), on_cpu.head.weight, rtol=1e-3, atol=5e-2)


def test_loaded_batches_are_correct_while_the_device_is_busy():
    """Slow work on the device would reveal a late or overwritten copy."""
    task = instantiate(compose_config([*IMAGENET, "task.epochs=1", "task.warmup_epochs=0"]).task)
    task.prepare(torch.device("cpu"), seed=0)
    expected = [batch["x"].double().mean((1, 2, 3)) for batch in task.batches(None, 0)]
    task.prepare(torch.device("cuda"), seed=0)
    seen, busy = [], torch.randn(4000, 4000, device="cuda")
    for batch in task.batches(None, 0):
        busy = (busy @ busy).tanh()
        seen.append(batch["x"].double().mean((1, 2, 3)))
        assert batch["x"].dtype == torch.uint8
    assert len(seen) == len(expected) == 20
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=0)


def test_the_host_does_not_run_far_ahead_of_the_device():
    """Too many queued batches would fill the memory of a slow device."""
    task = instantiate(compose_config([*IMAGENET, "task.epochs=10"]).task)
    task.prepare(torch.device("cuda"), seed=0)
    batches = task.batches(None, 0)
    size = next(batches)["x"].nbytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _, batch in zip(range(40), batches, strict=False):
        torch.cuda._sleep(10**8)  # cycles, about 50 ms: enough to decode several batches
        batch["x"].sum()
    # batches in flight and the current one, each held twice (in pieces and joined), and labels
    assert torch.cuda.max_memory_allocated() - before < 2.1 * (IN_FLIGHT + 2) * size


@pytest.fixture
def alone_in_a_group(monkeypatch):
    """Creates a process group of size one with the backends used for several GPUs."""
    processes.join(
        torch.distributed.HashStore(), rank=0, world_size=1, backend="cpu:gloo,cuda:nccl"
    )
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    yield
    torch.distributed.destroy_process_group()


def test_processes_exchange_without_a_host_sync(alone_in_a_group):
    """GPU tensors use NCCL, and flags use gloo, so a stop request does not wait for the GPU."""
    x, y = torch.randn(5, 3, device="cuda"), torch.randn(2, device="cuda", dtype=torch.float64)
    processes.mean([x])  # creates the communicator
    torch.cuda.set_sync_debug_mode("error")
    try:
        halves = processes.mean([x, y, x[0, 0]])
        flags = processes.anyone(True, False)
        processes.copy_from_first([x])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for half, whole in zip(halves, (x, y, x[0, 0]), strict=True):
        torch.testing.assert_close(2 * half, whole, rtol=0, atol=0)
    assert flags == [True, False]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["none", "sam", "ed"])
def test_two_gpus_train_like_one(method, tmp_path):
    """Without a regularizer, losses agree up to rounding; with one, random numbers differ."""
    root = Path(__file__).parents[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    overrides = ["task.epochs=2", "task.warmup_epochs=0", "optimizer=sgd", "precision=float32"]
    overrides += [f"regularizer={method}", "system.log_every=1"]
    losses = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        command = [*torchrun, f"--nproc-per-node={count}", "train.py", *overrides]
        environment = os.environ | {"PYTHONPATH": str(root)}
        subprocess.run(
            [*command, f"system.run_dir={folder}"], cwd=root, env=environment, check=True
        )
        rows = read_rows(folder / "metrics.jsonl")
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    if method == "none":
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    assert len(losses[0]) == len(losses[1]) == 40
