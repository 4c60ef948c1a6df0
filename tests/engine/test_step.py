"""Training steps with every regularizer."""

import contextlib
import copy
import functools
import math
from unittest import mock

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.penalty import EFFICIENT, Paths
from ed.engine.optimizer import SGD, AdamW, fixed_rate
from ed.engine.step import EAGER_STEPS
from ed.regularizers.base import Regularizer
from ed.regularizers.ed import EDRegularizer
from ed.runtime import processes
from ed.runtime.distributed import average_gradients
from ed.runtime.streams import reseed
from tests.helpers.toy import (
    BATCH,
    CLASSES,
    METHODS,
    Toy,
    assert_same_weights,
    config,
    convolution,
    first_batch,
    run,
    state,
    training,
    two_layers,
    vit,
)


@pytest.mark.parametrize(
    ("name", "compiled"), [("ed", False), ("jacobian", False), ("jacobian", True)]
)
def test_penalties_see_only_penalised_outputs(name, compiled, monkeypatch):
    """The last output, like PPO's value, is not a logit; scaling it must not change the penalty."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    class Named(Toy):
        penalised = slice(0, 2)

    batch, model, penalties = first_batch(), two_layers(), []
    points = batch["x"].flatten(1)[:, :5]
    for factor in (1, 10):
        changes = {"anchored": False} if name == "ed" else {}
        method = instantiate(config(name), **changes)
        if compiled:
            method.compile(model)
        size = torch.tensor([1, 1, factor], dtype=torch.float64)
        field = Field.of(lambda x, size=size: size * model(x), points)
        penalties.append(method.objective(Named(), field, batch, state())[1]["penalty"])
    assert torch.equal(*penalties)
    if compiled:
        eager = instantiate(config(name)).objective(Named(), field, batch, state())[1]["penalty"]
        torch.testing.assert_close(penalties[1], eager)


class Spy(Regularizer):
    """Trains without a penalty and records the arguments of each call."""

    def __init__(self):
        self.seen, self.losses = [], []

    def objective(self, task, field, batch, state):
        draw = torch.rand((), generator=state.generator).item()
        self.seen.append((draw, state.parts, len(field.x), state.progress.item()))
        loss, report = super().objective(task, field, batch, state)
        self.losses.append(loss.item())
        return loss, report


def test_each_process_draws_its_own_random_numbers(monkeypatch):
    spies = {None: Spy(), 0: Spy(), 1: Spy()}
    run(training(spies[None], vit()), 0, 1)
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(processes, "mean", list)  # there is no second process
    monkeypatch.setattr(processes, "anyone", lambda *flags: list(flags))
    for rank in (0, 1):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        run(training(spies[rank], vit(), accumulate=2), 0, 1)
    draws, parts, sizes, _ = zip(*spies[0].seen, *spies[1].seen, strict=True)
    assert len(set(draws)) == 4
    assert draws[0] == spies[None].seen[0][0]  # rank 0 draws the same as a single process
    assert set(parts) == {4}
    assert set(sizes) == {BATCH // 4}


def test_random_numbers_differ_between_steps_and_seeds():
    spies = []
    for seed in (0, 1):
        spies.append(Spy())
        step = training(spies[-1], vit())
        step.seed = seed
        run(step, 0, 4)
    assert len({draw for spy in spies for draw, *_ in spy.seen}) == 8


def test_means_cover_all_steps_since_the_last_row():
    spy = Spy()
    step = run(training(spy, vit(), accumulate=2), 0, 3)
    assert step.means()["train/loss"] == pytest.approx(sum(spy.losses) / 6)
    run(step, 3, 5)
    assert step.means()["train/loss"] == pytest.approx(sum(spy.losses[6:]) / 4)


@pytest.mark.parametrize("every", [1, 2])
def test_penalty_at_every_kth_step_equals_an_explicit_loop(every):
    step = run(training(EDRegularizer(every=every), vit()), 0, 5)
    model, generator = vit(), torch.Generator()
    optimizer = step.recipe.build(model.named_parameters(), step.device)
    for number, batch in zip(range(5), Toy().batches(None, 0), strict=False):
        reseed(generator, 0, processes.own_stream("regularizer"), number)
        field, labels = Field.of(model, batch["x"]), batch["label"]
        if number % every:
            loss = F.cross_entropy(model(batch["x"]), labels)
        else:
            how = {"labels": labels, "generator": generator}
            paths = Paths.draw(field, EFFICIENT, BATCH // 2, **how)
            at_batch, on_paths = field.with_paths(paths.field)
            ramp = ((torch.tensor(number / 10) / (1 / 3)).clamp(max=1) * math.pi / 2).sin()
            penalty = 7.0 * every * ramp * paths.degrees(on_paths).mean()
            loss = F.cross_entropy(at_batch, labels) + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same_weights(step.model, model)


def test_penalty_is_averaged_over_the_steps_that_have_one(monkeypatch):
    seen, degrees = [], Paths.degrees

    def spied(paths, outputs):
        seen.append(degrees(paths, outputs))
        return seen[-1]

    monkeypatch.setattr(Paths, "degrees", spied)
    # penalty at steps 0 and 3
    step = run(training(EDRegularizer(every=3), vit(), accumulate=2), 0, 4)
    found = step.means()
    assert len(seen) == 4
    assert found["train/penalty"] == pytest.approx(sum(d.mean().item() for d in seen) / 4)
    # steps 4 and 5 have no penalty
    assert run(step, 4, 6).means().keys() == {"train/loss", "train/acc"}


def test_learning_rate_and_progress_follow_the_step_and_warmup():
    spy, recipe = Spy(), AdamW(lr=0.1, weight_decay=0.0, decay="matrices")  # two parameter groups
    step = training(spy, vit(), recipe=recipe)
    step.task.warmup_steps = 4
    rates = []
    for number, batch in zip((0, 1, 7), Toy().batches(None, 0), strict=False):
        step(batch, number)
        rates.append([group["lr"] for group in step.optimizer.param_groups])
    cosine = (1 + math.cos(math.pi * 3 / 6)) / 2
    for group in zip(*rates, strict=True):
        assert group == pytest.approx([0.1 / 4, 0.2 / 4, 0.1 * cosine])
    assert [progress for *_, progress in spy.seen] == pytest.approx([0, 0.1, 0.7])


def test_accumulation_does_not_change_the_gradient():
    whole = run(training(Regularizer(), vit()), 0, 1).model
    parts = run(training(Regularizer(), vit(), accumulate=2), 0, 1).model
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        # the order of summation differs
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_supports_accumulation_and_clipping(name, bf16):
    recipe = AdamW(lr=0.01, weight_decay=0.1, max_grad_norm=0.1)
    model, before = vit(torch.float32), vit(torch.float32)
    step = training(instantiate(config(name)), model, recipe=recipe, accumulate=2, bf16=bf16)
    run(step, 0, 2, torch.float32)
    values = step.means()
    assert values.keys() >= {"train/loss", "train/acc"}
    assert all(torch.tensor(value).isfinite() for value in values.values())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm <= 0.1 * (1 + 1e-4)  # clipped, up to float32 rounding
    for (key, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        assert now.isfinite().all(), key
        assert not torch.equal(now, then), key


@pytest.mark.parametrize("name", METHODS)
def test_resumed_training_is_bitwise_identical(name):
    recipe = AdamW(lr=0.01, weight_decay=0.1)
    whole = run(training(instantiate(config(name)), vit(), recipe=recipe), 0, 4)
    first = run(training(instantiate(config(name)), vit(), recipe=recipe), 0, 2)
    again = training(instantiate(config(name)), vit(), recipe=recipe)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    run(again, 2, 4)
    assert_same_weights(again.model, whole.model)
    assert again.peek() == whole.peek()


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_sees_each_example_once(name):
    """Extra forward passes (paths, projections, perturbed weights) do not update the statistics."""
    model = convolution()
    run(training(instantiate(config(name)), model), 0, 1)
    assert int(model[1].num_batches_tracked) == 1
    if name != "mixup":  # mixup replaces the batch
        reference = convolution()
        reference(first_batch()["x"])
        assert torch.equal(model[1].running_mean, reference[1].running_mean)


def test_unused_weights_are_averaged_as_zero(monkeypatch):
    """Processes that skip different blocks must still average the same list of gradients."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    weights[0].grad = torch.full((2,), 4.0)
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    # whether any process uses the weight
    monkeypatch.setattr(processes, "anyone", lambda *flags: [True, True, False])
    monkeypatch.setattr(processes, "mean", lambda values: [v / 2 for v in values])
    average_gradients([*weights, nn.Parameter(torch.ones(2), requires_grad=False)])
    assert [w.grad if w.grad is None else w.grad[0].item() for w in weights] == [2.0, 0.0, None]


def test_report_keys_must_not_change_between_steps():
    class Rare(Regularizer):
        seen = 0

        def objective(self, task, field, batch, state):
            loss, report = super().objective(task, field, batch, state)
            self.seen += 1
            return loss, report | ({"rare": loss.detach()} if self.seen == 3 else {})

    for how in ({}, {"accumulate": 2}):
        with pytest.raises(ValueError, match=r"Rare reports .*rare"):
            run(training(Rare(), vit(), **how), 0, 4)


class Recorded:
    """A recorded CUDA graph that counts its replays."""

    replays = 0

    def replay(self):
        self.replays += 1


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {name: value[:1] for name, value in batch.items()},
        lambda batch: {"x": batch["x"]},
        lambda batch: batch | {"weight": batch["label"].double()},
    ],
    ids=["one example", "fewer tensors", "more tensors"],
)
def test_a_recorded_step_accepts_only_batches_of_its_shapes(change):
    """`copy_` alone would repeat a single example, and keep a missing tensor's old values."""
    step, graph = training(Regularizer(), vit()), Recorded()
    step.capture, step.graphs, step.reported = True, {0: graph}, {0: ("loss",)}
    step.eager_steps[0] = EAGER_STEPS
    step.inputs = {name: torch.zeros_like(value) for name, value in first_batch().items()}
    step(first_batch(), 0)
    assert graph.replays == 1
    assert all(torch.equal(step.inputs[name], value) for name, value in first_batch().items())
    with pytest.raises(ValueError, match=r"static_shapes.*system\.cuda_graph"):
        step(change(first_batch()), 1)
    assert graph.replays == 1


class Plain(SGD):
    """An optimizer of one's own, whose learning rate is a number on every device."""

    def build(self, parameters, device):
        return torch.optim.SGD(parameters, lr=self.lr)


def test_steps_with_a_fixed_learning_rate_are_not_captured():
    """A CUDA graph would repeat the learning rate of its first step."""
    recipe = Plain(lr=0.1, schedule="constant")
    step = training(Regularizer(), vit(), recipe=recipe, capture=True)
    assert not step.capture
    run(step, 0, 1)
    tensor = torch.optim.SGD(step.model.parameters(), lr=torch.tensor(0.1))
    assert fixed_rate(tensor, step.device) is None
    assert "SGD" in fixed_rate(tensor, torch.device("cuda"))


def test_an_error_during_capture_names_the_setting_that_prevents_it(monkeypatch):
    @contextlib.contextmanager
    def refuse(*_, **__):
        yield
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = training(Regularizer(), vit())
    with pytest.raises(RuntimeError, match="not permitted") as error:
        step._record(first_batch())
    assert "system.cuda_graph=false" in error.value.__notes__[0]
    assert not step.graphs


def test_largest_weight_is_not_finite_if_any_weight_is_not():
    step = training(Regularizer(), vit())
    largest = max(weight.abs().max().item() for weight in step.model.parameters())
    assert step.largest_weight() == {"largest weight": largest}
    for value in (-math.inf, math.nan):
        with torch.no_grad():
            next(step.model.parameters()).view(-1)[0] = value
        assert not math.isfinite(step.largest_weight()["largest weight"])


def test_dropout_can_be_disabled_on_paths():
    """Paths run in a separate pass in eval mode, while the batch still uses dropout."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, CLASSES)).double()
    overrides = {"ramp": 0.0, "weight": 1.0, "anchored": False}
    penalties = {}
    for choice in (True, False):
        method = instantiate(config("ed"), **overrides, path_dropout=choice)
        batch = first_batch()
        reports = [
            method.objective(Toy(), Toy().field(model, batch), batch, state())[1] for _ in range(2)
        ]
        penalties[choice] = {report["penalty"].item() for report in reports}
    assert {choice: len(found) for choice, found in penalties.items()} == {True: 2, False: 1}
    assert all(module.training for module in model.modules())
