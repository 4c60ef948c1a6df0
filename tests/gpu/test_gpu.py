"""GPU tests: captured and eager steps agree, and steps never wait for the device."""

import io

import pytest
import torch

from ed.core.field import Field
from ed.core.model_state import evaluating
from ed.core.nodes import ChebyshevNodes, UniformNodes
from ed.core.penalty import Paths
from ed.core.representation import Representation
from ed.engine.step import TrainStep
from tests.helpers.gpu import IMAGENET, STAND_IN, losses, make_step

pytestmark = pytest.mark.gpu
GROKKING = ["task=grokking", "model=grokking", "optimizer.lr=0.001", "optimizer.weight_decay=0"]
PNN = ["task=pnn", "model=pnn"]


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
    from tests.helpers.text import write_checkpoint, write_sentences

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
