"""What only a GPU can show: captured and eager steps agree, and nothing in a step waits for it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from ed.core import processes
from ed.core.field import Field
from ed.core.nodes import ChebyshevNodes, UniformNodes
from ed.core.pca import gram_eigen, principal_scores
from ed.core.penalty import Paths
from ed.core.representation import Representation
from ed.engine.compose import compose_config
from ed.engine.metrics import read_rows
from ed.engine.step import TrainStep

pytestmark = pytest.mark.gpu


def make_step(overrides: list[str], *, bf16=False, **how) -> TrainStep:
    cfg = compose_config(["task.epochs=10", *overrides])
    device = torch.device("cuda")
    torch.manual_seed(0)
    task, model = instantiate(cfg.task), instantiate(cfg.model).to(device)
    task.prepare(device, seed=0)
    regularizer, recipe = instantiate(cfg.regularizer), instantiate(cfg.optimizer)
    return TrainStep(task, model, regularizer, recipe, device=device, seed=0, bf16=bf16, **how)


def losses(step: TrainStep, start: int, stop: int) -> list[float]:
    seen = []
    batches = step.task.batches(step.model, start)
    for number, batch in zip(range(start, stop), batches, strict=False):
        step(batch, number)
        seen.append(step.means()["train/loss"])
    return seen


@pytest.mark.parametrize(
    "overrides",
    [
        ["regularizer=none"],
        ["regularizer=ed"],
        ["regularizer=ed", "regularizer.components=3"],
        ["regularizer=ed", "model=resnet18", "optimizer=sgd", "optimizer.lr=0.01"],
        ["regularizer=ed_performance", "regularizer.pairs=32"],
        ["regularizer=mixup"],
        ["regularizer=mixup", "regularizer.alpha=0.4"],
        ["regularizer=mixup", "regularizer.per_example=true"],
        ["regularizer=sam"],
        ["regularizer=asam"],
        ["regularizer=asam", "regularizer.scope=all"],
        ["regularizer=sam", "model=resnet18", "optimizer=sgd", "optimizer.lr=0.01"],
        ["regularizer=jacobian"],
        ["regularizer=jacobian", "task.space=block1"],
    ],
    ids=lambda overrides: "-".join(override.split("=")[1] for override in overrides),
)
def test_captured_equals_eager(overrides):
    torch.backends.cudnn.deterministic = True
    eager = losses(make_step(overrides), 0, 50)
    captured = losses(make_step(overrides, capture=True), 0, 50)
    # the same kernels in the same order: only the reductions of atomics may round differently
    torch.testing.assert_close(captured, eager, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(captured[:10], eager[:10], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_captured_run_resumes_with_its_learning_rate(optimizer):
    """Two warm-ups' worth of changing rates after a resume: a rate baked into the graph shows."""
    overrides = ["regularizer=ed", f"optimizer={optimizer}", "optimizer.lr=0.01"]
    overrides += ["task.warmup_epochs=8", "optimizer.schedule=cosine"]
    whole = make_step(overrides, capture=True)
    expected = losses(whole, 0, 60)
    first = make_step(overrides, capture=True)
    losses(first, 0, 20)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make_step(overrides, capture=True)
    second.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=True))
    resumed = losses(second, 20, 60)
    torch.testing.assert_close(resumed, expected[20:], rtol=2e-3, atol=1e-4)
    rates = [group["lr"] for group in second.optimizer.param_groups]
    assert all(rate.is_cuda for rate in rates)


def test_a_step_never_waits_for_the_device():
    field = Field.of(torch.nn.Linear(8, 5, device="cuda"), torch.randn(16, 8, device="cuda"))
    labels = torch.randint(5, (16,), device="cuda")
    for settings in (
        {},
        {"components": 3},
        {"components": 2, "detach_pca": True},
        {"sampler": ChebyshevNodes()},
        {"sampler": UniformNodes()},
    ):
        representation = Representation(**settings)

        def penalty(representation=representation):
            paths = Paths.draw(field, representation, 8, labels=labels)
            paths.degrees(paths.field()).mean().backward()

        penalty()
        torch.cuda.set_sync_debug_mode("error")
        try:
            penalty()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("resolution", [2, 3, 4, 15, 16, 40])
def test_eigen_decomposition_matches_lapack(resolution):
    values = torch.randn(64, resolution, 50, dtype=torch.float64)
    gram = values @ values.mT
    eigenvalues, vectors = gram_eigen(gram.cuda())
    rebuilt = (vectors * eigenvalues[..., None, :]) @ vectors.mT
    torch.testing.assert_close(rebuilt.cpu(), gram, rtol=1e-5, atol=1e-5 * float(gram.max()))


def test_scores_on_cuda_equal_cpu():
    values = torch.randn(32, 4, 100, dtype=torch.float64)
    on_cpu, on_cuda = principal_scores(values, 3), principal_scores(values.cuda(), 3).cpu()
    torch.testing.assert_close(on_cuda.abs(), on_cpu.abs(), rtol=1e-6, atol=1e-8)


@pytest.fixture
def alone_in_a_group(monkeypatch):
    """A group of one with the backends of several GPUs, in which nothing is cut short."""
    processes.join(
        torch.distributed.HashStore(), rank=0, world_size=1, backend="cpu:gloo,cuda:nccl"
    )
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    yield
    torch.distributed.destroy_process_group()


def test_processes_exchange_without_a_host_sync(alone_in_a_group):
    """GPU tensors by NCCL, flags by gloo: the stop request of a step does not wait for the GPU."""
    x, y = torch.randn(5, 3, device="cuda"), torch.randn(2, device="cuda", dtype=torch.float64)
    processes.mean([x])  # makes the communicator
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
    """Plain steps, to rounding; the others to the end, as their draws differ."""
    root = Path(__file__).parents[1]
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
