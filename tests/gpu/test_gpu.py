"""GPU tests: captured and eager steps agree, and steps never wait for the device."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

import ed
from ed.core.field import Field
from ed.core.fit import fit_matrix
from ed.core.model_state import evaluating
from ed.core.nodes import ChebyshevNodes, UniformNodes
from ed.core.pca import gram_eigen, principal_scores
from ed.core.penalty import Paths
from ed.core.representation import Representation
from ed.datasets.imagenet.loading import IN_FLIGHT
from ed.engine.compose import compose_config
from ed.engine.optimizer import ParallelAdamW
from ed.engine.step import TrainStep
from ed.runtime import processes
from ed.runtime.files import read_rows

pytestmark = pytest.mark.gpu
STAND_IN = ["task.data=embedded", "task.batch_size=100", "optimizer.lr=1e-4"]
IMAGENET = ["task=imagenet", "model=vit_s16", "task.data=embedded", "task.image_size=[32,32]"]
IMAGENET += ["task.batch_size=100", "model.width=64", "model.depth=2", "model.heads=2"]
IMAGENET += ["model.positions=sincos", "model.head=tanh"]


GROKKING = ["task=grokking", "model=grokking", "optimizer.lr=0.001", "optimizer.weight_decay=0"]
PNN = ["task=pnn", "model=pnn"]


def make_step(overrides: list[str], *, bf16=False, **how) -> TrainStep:
    in_steps = {"task=grokking", "task=pnn"}  # the others count epochs
    length = ["task.epochs=10"] if in_steps.isdisjoint(overrides) else []
    cfg = compose_config([*length, *overrides])
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
        ["regularizer=ed", "regularizer.every=3", "regularizer.pairing=stratified"],
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
        GROKKING,
        [*GROKKING, "regularizer=ed"],
        ["task=clip_standin_pretrain", "model=clip_small_pretrain", *STAND_IN],
        ["task=clip_standin", "model=clip_small", "model.weights=random", *STAND_IN],
        [*IMAGENET, "regularizer=none"],
        [*IMAGENET, "regularizer=ed", "regularizer.components=3", "optimizer=adamw_matrices"],
    ],
    ids=lambda overrides: "-".join(
        override.split("=")[1] for override in overrides if override not in STAND_IN + IMAGENET[2:]
    ),
)
def test_captured_equals_eager(overrides):
    torch.backends.cudnn.deterministic = True
    eager = losses(make_step(overrides), 0, 50)
    captured = losses(make_step(overrides, capture=True), 0, 50)
    # both run the same kernels in the same order; only atomic reductions may round differently
    torch.testing.assert_close(captured, eager, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(captured[:10], eager[:10], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["none", "ed"])
def test_fast_run_learns_as_well_as_an_eager_one(method):
    """Compares a short eager run in float32 with a compiled, captured run in bf16.

    The final training loss is the mean over the same 1,600 examples. The accuracy on 500 test
    images has a standard error of two points.
    """
    learnt = []
    for how in ({}, {"bf16": True, "compile_model": True, "capture": True}):
        step = make_step([f"regularizer={method}", "optimizer.lr=0.002"], **how)
        seen = losses(step, 0, step.task.total_steps)
        with evaluating(step.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            accuracy = step.task.evaluate(step.model)["eval/acc"]
        learnt.append((sum(seen[-16:]) / 16, accuracy))
    (loss, accuracy), (fast_loss, fast_accuracy) = learnt
    assert fast_loss == pytest.approx(loss, rel=0.05)
    assert fast_accuracy == pytest.approx(accuracy, abs=6)
    assert accuracy > 20  # chance is 10 %


@pytest.mark.parametrize("space", ["input", "block1"])
def test_compiled_jacobian_equals_eager(space):
    """The compiled graph contains the first derivative; the whole step is captured."""
    overrides = ["regularizer=jacobian", "regularizer.weight=0.1", f"task.space={space}"]
    eager = losses(make_step(overrides), 0, 20)
    compiled = losses(make_step(overrides, compile_model=True, capture=True), 0, 20)
    torch.testing.assert_close(compiled, eager, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("saved_on", ["cuda", "cpu"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_captured_run_resumes_with_its_learning_rate(optimizer, saved_on):
    """The rate changes after resuming, which would reveal a rate baked into the graph."""
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
    state = torch.load(buffer, map_location="cpu", weights_only=True)
    if saved_on == "cpu":  # as saved by an optimizer on a CPU
        for group in state["optimizer"]["param_groups"]:
            group |= {"fused": None, "capturable": False, "lr": 0.01}
    second.load_state_dict(state)
    resumed = losses(second, 20, 60)
    torch.testing.assert_close(resumed, expected[20:], rtol=2e-3, atol=1e-4)
    rates = [group["lr"] for group in second.optimizer.param_groups]
    assert all(rate.is_cuda for rate in rates)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns a function that builds overrides for a tiny BERT on made-up sentences."""
    pytest.importorskip("transformers")
    from tests.tasks.test_glue import write_checkpoint, write_sentences

    data = write_sentences(tmp_path_factory.mktemp("glue"))

    def overrides(dropout: float, *others: str) -> list[str]:
        chances = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        folder = write_checkpoint(tmp_path_factory.mktemp("bert"), **chances)
        task = ["task=glue", f"task.data={data}", "task.name=cola", "task.batch_size=8"]
        model = ["model=bert_base", f"model.checkpoint={folder}", "optimizer.max_grad_norm=1.0"]
        return [*task, *model, "task.max_length=24", "optimizer.schedule=constant", *others]

    return overrides


ED = ("regularizer=ed", "regularizer.ramp=0", "regularizer.weight=0.5")


@pytest.mark.parametrize(("compiled", "early", "late"), [(False, 1e-5, 2e-3), (True, 1e-3, 2e-2)])
def test_captured_equals_eager_in_embedding_space(text, compiled, early, late):
    overrides = text(0.0, *ED, "optimizer.lr=1e-3")
    eager = losses(make_step(overrides), 0, 50)
    captured = losses(make_step(overrides, capture=True, compile_model=compiled), 0, 50)
    torch.testing.assert_close(captured, eager, rtol=late, atol=late)
    torch.testing.assert_close(captured[:10], eager[:10], rtol=early, atol=early)


@pytest.mark.parametrize("how", [{}, {"bf16": True}, {"bf16": True, "compile_model": True}])
def test_captured_step_draws_new_dropout_masks_and_trains(text, how):
    """Repeats one batch; with a tiny learning rate, only dropout can change the loss."""
    still = make_step(text(0.1, *ED, "optimizer.lr=1e-30"), capture=True, **how)
    batch = next(still.task.batches(still.model, 0))

    def repeat(step: TrainStep, count: int) -> list[float]:
        seen = []
        for number in range(count):
            step(batch, number)
            seen.append(step.means()["train/loss"])
        return seen

    replayed = repeat(still, 20)[4:]
    assert len(set(replayed)) > 12  # bf16 may round some losses to the same number
    moving = make_step(text(0.1, *ED, "optimizer.lr=2e-3"), capture=True, **how)
    seen = repeat(moving, 50)
    assert sum(seen[-10:]) / 10 < 0.7 * sum(seen[:4]) / 4


@pytest.mark.parametrize("method", ["none", "mixup", "ed"])
def test_text_step_never_waits_for_the_device(text, method):
    """Covers the whole step, including data, clipping and optimizer."""
    step = make_step(text(0.1, f"regularizer={method}"))
    batches = step.task.batches(step.model, 0)
    for number in range(2):
        step(next(batches), number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(next(batches), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_penalty_never_waits_for_the_device():
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


@pytest.mark.parametrize("overrides", [GROKKING, PNN], ids=["grokking", "pnn"])
def test_captured_steps_and_their_batches_never_wait_for_the_device(overrides):
    """A grokking epoch has only five short steps, so even one wait per epoch would be slow."""
    step = make_step(overrides, capture=True)

    def train(start: int, stop: int) -> None:
        batches = step.task.batches(step.model, start)
        for number, batch in zip(range(start, stop), batches, strict=False):
            step(batch, number)

    train(0, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(5, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.graphs


def test_parallel_adamw_equals_torch():
    """Results are bitwise equal, including in a CUDA graph and after loading a state."""

    def train(kind, steps: int, state=None) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(7 * n, device="cuda")) for n in range(1, 120)]
        groups = [{"params": weights[:90]}, {"params": weights[90:], "weight_decay": 0.0}]
        rate = torch.tensor(0.01, device="cuda")
        optimizer = kind(groups, lr=rate, weight_decay=0.1, fused=True, capturable=True)
        if state is not None:
            optimizer.load_state_dict(state)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            optimizer.step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step()
        for _ in range(steps):
            optimizer.param_groups[0]["lr"].mul_(0.9)
            graph.replay()
        return weights, optimizer.state_dict()

    (first, state), (expected, their_state) = (
        train(kind, 5) for kind in (ParallelAdamW, torch.optim.AdamW)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    resumed, expected = (
        train(kind, 3, given)[0]
        for kind, given in ((ParallelAdamW, their_state), (torch.optim.AdamW, state))
    )
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))


@pytest.mark.parametrize("resolution", [2, 3, 4, 15, 16, 40])
def test_eigen_decomposition_matches_lapack(resolution):
    values = torch.randn(64, resolution, 50, dtype=torch.float64)
    gram = values @ values.mT
    eigenvalues, vectors = gram_eigen(gram.cuda())
    rebuilt = (vectors * eigenvalues[..., None, :]) @ vectors.mT
    torch.testing.assert_close(rebuilt.cpu(), gram, rtol=1e-5, atol=1e-5 * float(gram.max()))


@pytest.mark.parametrize(("resolution", "degree"), [(4, 3), (15, 14)])
def test_fit_of_ill_conditioned_nodes_on_cuda_equals_cpu(resolution, degree):
    nodes = UniformNodes()(torch.rand(20_000, resolution), True)
    ours, theirs = fit_matrix(nodes.cuda(), degree).cpu(), fit_matrix(nodes, degree)
    error = (ours - theirs).abs().amax((1, 2)) / theirs.abs().amax((1, 2))
    assert error.max() < 1e-6  # solved in float64, rounded to float32


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_on_cuda_equal_cpu(compiled):
    values = torch.randn(32, 4, 100, generator=torch.Generator().manual_seed(0))
    score = torch.compile(principal_scores) if compiled else principal_scores
    results = []
    for device, how in (("cpu", principal_scores), ("cuda", score)):
        given = values.to(device).requires_grad_()
        scores = how(given, 3).abs()
        (gradient,) = torch.autograd.grad(scores.square().sum() + scores.sum(), given)
        results.append([scores.cpu(), gradient.cpu()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


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


WRONG = """
import sys, torch, ed
how, kind = sys.argv[1:]
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 3).cuda(), torch.randn(6, 4, device="cuda")
labels, number = torch.arange(6, device="cuda") % 3, torch.ones(6, 4, device="cuda")

def penalty():
    field = ed.Field.of(lambda x, number: model(x * number), x, context={"number": number})
    return ed.penalty(field, labels=labels, pairs=36)

if how == "compiled":
    penalty = torch.compile(penalty, fullgraph=True)
value = penalty()
if how == "captured":
    torch.cuda.set_sync_debug_mode("error")
    graph, outer = torch.cuda.CUDAGraph(), penalty
    with torch.cuda.graph(graph):
        value = outer()
    penalty = graph.replay
    penalty()
    torch.cuda.set_sync_debug_mode("default")
print("right", value.isfinite().item(), flush=True)
if kind == "labels":
    labels[2] = -100
else:
    number.copy_(torch.rand(6, 4))
penalty()
torch.cuda.synchronize()
print("not rejected")
"""


@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("kind", ["labels", "context"])
def test_wrong_values_trigger_a_device_assertion(how, kind):
    """Runs in a separate process, because a process cannot use the GPU after an assertion."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", WRONG, how, kind], cwd=root, capture_output=True, text=True
    )
    assert run.stdout.split() == ["right", "True"], run.stderr
    assert run.returncode == 1
    assert f"{kind}: " in run.stderr or f"{kind} 'number'" in run.stderr
    assert "device-side assert" in run.stderr


def test_estimate_rejects_float_contexts_on_the_gpu():
    x, number = torch.randn(9, 4, device="cuda"), torch.rand(9, 1, device="cuda")
    field = Field(lambda p, c: p, x, {"number": number})
    with pytest.raises(ValueError, match="context 'number'"):
        ed.estimate(field, pairs=3)


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
