"""Tests of SAM, ASAM, mixup and the ED penalty against their definitions."""

import contextlib
import copy
import functools
import math

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.nodes import ChebyshevNodes, RandomizedCosine, UniformNodes
from ed.core.representation import Representation
from ed.engine.compose import compose_config
from ed.engine.optimizer import SGD, AdamW
from ed.kernels import eigen
from ed.regularizers.base import Regularizer, StepState
from ed.regularizers.ed import EDRegularizer
from ed.regularizers.jacobian import Jacobian
from ed.regularizers.mixup import Mixup
from ed.regularizers.sam import Asam, Sam
from ed.tasks.base import Task
from tests.helpers.toy import (
    BATCH,
    CLASSES,
    Toy,
    assert_same_weights,
    config,
    convolution,
    first_batch,
    run,
    state,
    training,
    vit,
)

# --- SAM and ASAM


@pytest.mark.parametrize(
    "method", [Sam(0.0), Asam(0.0, eta=0.01, scope="weights"), Asam(0.0, eta=0.0, scope="all")]
)
@pytest.mark.parametrize("recipe", [SGD, AdamW])
def test_zero_radius_gives_the_plain_step(method, recipe):
    recipe = recipe(lr=0.01, weight_decay=0.1)
    plain = run(training(Regularizer(), vit(), recipe=recipe), 0, 3)
    aware = run(training(method, vit(), recipe=recipe), 0, 3)
    assert_same_weights(aware.model, plain.model)  # bitwise, because w + 0 = w


class Quadratic(nn.Module):
    """A model with loss theta' A theta / 2 and gradient A theta, where theta = (weight, bias)."""

    A = torch.tensor([[3.0, 1.0, 0.5], [1.0, 2.0, -0.4], [0.5, -0.4, 1.5]], dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7, -1.2], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))

    def theta(self):
        return torch.cat([self.weight, self.bias])

    def forward(self):
        return self.theta() @ self.A @ self.theta() / 2


@pytest.mark.parametrize(
    ("method", "scale"),
    [
        (Sam(0.3), [1, 1, 1]),
        (Asam(0.3, eta=0.05, scope="weights"), [0.7 + 0.05, 1.2 + 0.05, 1]),
        (Asam(0.3, eta=0.05, scope="all"), [0.7, 1.2, 0.4]),
    ],
    ids=["sam", "asam-weights", "asam-all"],
)
def test_step_on_a_quadratic_equals_the_formula(method, scale):
    model, learning_rate = Quadratic(), 0.1
    optimizer = torch.optim.SGD(model.named_parameters(), lr=learning_rate)
    theta, scale = model.theta().detach(), torch.tensor(scale, dtype=torch.float64)
    gradient = model.A @ theta
    perturbation = 0.3 * scale**2 * gradient / torch.linalg.vector_norm(scale * gradient)
    expected = theta - learning_rate * model.A @ (theta + perturbation)

    passes = []

    def closure(sync=True, update_statistics=True):
        passes.append((sync, update_statistics))
        optimizer.zero_grad()
        model().backward()
        return {}

    method.step(optimizer, closure)
    # gradients are synchronised only in the second pass; statistics are updated only in the first
    assert passes == [(False, True), (True, False)]
    # allows for rounding in a dozen float64 operations on numbers near 1
    torch.testing.assert_close(model.theta().detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [Sam(0.5), Asam(0.5, eta=0.01, scope="weights")])
def test_clipping_does_not_change_the_ascent(method):
    model = Quadratic()
    model().backward()
    named = dict(model.named_parameters())
    with torch.no_grad():
        free = method.ascent(named)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = method.ascent(named)
    # TINY is 1e-10 times the clipped norm
    torch.testing.assert_close(clipped, free, rtol=1e-9, atol=0)


def test_perturbed_weights_are_restored_exactly():
    model = vit()
    before = copy.deepcopy(model)
    still = SGD(lr=1e-300, weight_decay=0.0)  # too small to change a nonzero weight
    run(training(Sam(0.7), model, recipe=still), 0, 1)
    for (name, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        # zero weights change by 1e-300; `w + e - e` would have an error of 1e-17
        torch.testing.assert_close(now, then, rtol=0, atol=1e-200, msg=name)


def test_second_pass_uses_the_perturbed_weights_under_autocast():
    """Autocast caches bf16 copies of the weights, which the second pass must not reuse."""
    gradients = []
    for radius in (0.0, 1.0):
        step = training(Sam(radius), vit(torch.float32), bf16=True)
        run(step, 0, 1, torch.float32)
        gradients.append(step.model.head.weight.grad)
    change = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert change > 0.1  # unperturbed weights would give 0; bf16 has a precision of 0.004


def test_sam_updates_batch_norm_statistics_once_at_the_unperturbed_weights():
    model = convolution()
    reference = copy.deepcopy(model)
    run(training(Sam(0.5), model), 0, 1)
    reference(first_batch()["x"])
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    assert torch.equal(model[1].running_var, reference[1].running_var)


def test_asam_uses_parameter_names_in_training():
    """With scope="weights", biases and tokens are not scaled."""
    seen = {}

    class Spy(Asam):
        def scales(self, named):
            seen.update(super().scales(named))
            return seen

    model = vit()
    run(training(Spy(0.5, eta=0.01, scope="weights"), model), 0, 1)
    assert seen.keys() == {name for name, _ in model.named_parameters() if "weight" in name}


def test_asam_without_named_weights_is_sam():
    bias = {"bias": nn.Parameter(torch.tensor([0.4, -2.0], dtype=torch.float64))}
    bias["bias"].grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    with torch.no_grad():
        found, expected = Asam(0.5).ascent(bias), Sam(0.5).ascent(bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- mixup


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_mixup_equals_soft_label_cross_entropy(alpha, per_example):
    model, batch = convolution(), first_batch()
    method = Mixup(alpha, per_example=per_example)
    loss, report = method.objective(Toy(), Toy().field(model, batch), batch, state())
    draw = state().generator
    partner = torch.randperm(BATCH, generator=draw)
    lam = method.draw(BATCH if per_example else 1, batch["x"], draw).expand(BATCH)
    assert len(lam.unique()) == (BATCH if per_example else 1)
    assert not torch.equal(partner, torch.arange(BATCH))
    weight = lam.view(-1, 1, 1, 1)
    x = weight * batch["x"] + (1 - weight) * batch["x"][partner]
    target = F.one_hot(batch["label"], CLASSES).double()
    target = lam[:, None] * target + (1 - lam)[:, None] * target[partner]
    torch.testing.assert_close(loss, F.cross_entropy(model(x), target))
    assert report.keys() == {"loss", "acc"}
    torch.testing.assert_close(report["loss"], loss.detach())


@pytest.mark.parametrize("alpha", [1.0, 0.3, 2.0])
def test_lambda_follows_the_beta_distribution(alpha):
    count = 40_000
    like = torch.zeros((), dtype=torch.float64)
    lam = Mixup(alpha, per_example=True).draw(count, like, state().generator)
    variance = 1 / (4 * (2 * alpha + 1))
    assert lam.min() >= 0
    assert lam.max() <= 1
    assert abs(lam.mean() - 0.5) < 5 * (variance / count) ** 0.5
    # (lam - 1/2)^2 lies in [0, 1/4], so its variance is at most 1/64
    assert abs((lam - 0.5).square().mean() - variance) < 5 * (1 / 64 / count) ** 0.5


def test_mixup_needs_labels():
    with pytest.raises(ValueError, match="regularizer=mixup"):
        Mixup(1.0, per_example=False).check(Task())


def test_mixup_needs_two_examples_in_every_part_of_a_batch():
    """A single example could only be mixed with itself."""
    Mixup(1.0, per_example=False).check(Toy(), parts=BATCH // 2)
    with pytest.raises(ValueError, match=rf"task\.batch_size={BATCH}"):
        Mixup(1.0, per_example=False).check(Toy(), parts=BATCH)


# --- effective degree


@pytest.mark.parametrize(("endpoints", "depends"), [("noise", False), ("batch", True)])
def test_noise_paths_do_not_depend_on_the_batch(endpoints, depends):
    method = instantiate(config("ed"), endpoints=endpoints)
    model, batch = vit(), first_batch()

    def penalty(x):
        return method.objective(Toy(), Field.of(model, x), batch, state())[1]["penalty"]

    one, other = penalty(batch["x"]), penalty(5 - 3 * batch["x"])
    # batch and paths share a forward pass, so only rounding may differ
    assert bool((one - other).abs() > 1e-12 * one) == depends

    x = batch["x"].clone().requires_grad_()
    total, _ = method.objective(Toy(), Field.of(model, x), batch, state())
    plain, _ = Toy().loss(model(x), batch)
    (gradient,) = torch.autograd.grad(total - plain, x)
    assert bool(gradient.abs().max() > 1e-12) == depends  # nonzero gradients are about 1e-2


@pytest.mark.parametrize(("space", "same"), [("embedding", True), ("block1", False)])
def test_paths_between_embeddings_equal_paths_between_images(space, same):
    """The embedding is affine, so it keeps paths straight; a block does not."""
    model, batch, method = vit(), first_batch(), instantiate(config("ed"))
    features = model.to_space(batch["x"], space)
    inner = Field.of(functools.partial(model.from_space, space=space), features)
    found = []
    for field in (Field.of(model, batch["x"]), inner):
        loss, _ = method.objective(Toy(), field, batch, state())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients])
    gaps = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
    assert (max(gaps) < 1e-10) == same  # float64 rounding of gradients up to 1


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.25, 0.5), (1.0, 1.0)])
def test_penalty_weight_increases_over_its_ramp(progress, share):
    method = instantiate(config("ed"), weight=3.0, ramp=0.5, ramp_shape="cosine")
    batch, when = first_batch(), StepState(torch.tensor(progress), torch.Generator().manual_seed(0))
    total, report = method.objective(Toy(), Field.of(vit(), batch["x"]), batch, when)
    torch.testing.assert_close(
        total.detach(), report["loss"] + 3.0 * share * report["penalty"], rtol=1e-6, atol=0
    )


def test_settings_reach_the_representation():
    settings = {
        "resolution": 9, "degree": 4, "basis": "legendre", "components": 2,
        "weighting": "quadratic", "damping": 0.1, "detach_pca": True,
    }  # fmt: skip
    method = instantiate(config("ed"), **settings)
    assert method.representation == Representation(**settings)


def test_efficiency_config_matches_the_paper():
    method = instantiate(config("ed"))
    paper = {"resolution": 4, "degree": 3, "sampler": RandomizedCosine(), "damping": 1e-6}
    assert method.representation == Representation(**paper) == Representation()
    assert (method.weight, method.pairs, method.anchored) == (7.0, None, True)
    assert (method.ramp, method.ramp_shape) == (pytest.approx(1 / 3), "sine")


def test_performance_config_uses_fixed_nodes():
    method = instantiate(compose_config(["regularizer=ed_performance"]).regularizer)
    assert method.representation.sampler == ChebyshevNodes()
    assert (method.representation.resolution, method.representation.degree) == (15, 7)
    assert (method.weight, method.pairs, method.anchored) == (2.0, 256, True)


@pytest.mark.parametrize("leaf", ["ed", "ed_performance"])
def test_sampler_on_the_command_line_overrides_the_regularizer(leaf):
    method = instantiate(compose_config([f"regularizer={leaf}", "sampler=uniform"]).regularizer)
    assert method.representation.sampler == UniformNodes()


def test_pca_that_waits_for_the_device_is_not_captured(monkeypatch):
    """The kernel takes up to 16 nodes; torch's solver syncs with the host, which ends a capture."""
    for usable, resolution, components, captured in (
        (True, 16, 3, True),
        (True, 17, 3, False),
        (False, 4, 3, False),
        (False, 17, None, True),
    ):
        monkeypatch.setattr(eigen, "USABLE", usable)
        method = EDRegularizer(resolution=resolution, components=components)
        assert (method.no_capture is None) == captured


# --- settings


@pytest.mark.parametrize(
    ("settings", "parts", "lacking", "key"),
    [
        ({"pairs": BATCH**2}, 1, None, None),
        ({"pairs": BATCH**2 + 1}, 1, None, r"regularizer\.pairs=65"),
        ({"pairs": BATCH**2 // 2}, 2, None, None),
        ({"pairs": BATCH**2 // 2 + 2}, 2, None, r"regularizer\.pairs=34"),
        ({"pairs": 7}, 2, None, r"regularizer\.pairs=7"),
        ({}, BATCH // 2, None, None),
        ({}, BATCH, None, r"task\.batch_size=8"),
        ({}, 1, "has_logits", "regularizer=ed"),
        ({}, 1, "has_labels", r"regularizer\.anchored=true"),
        ({"anchored": False}, 1, "has_labels", None),
        ({"endpoints": "noise"}, 1, None, None),
        ({"endpoints": "noise"}, 1, "has_noise", r"regularizer\.endpoints=noise"),
        ({}, 1, "has_noise", None),
    ],
)
def test_the_penalty_is_checked_against_the_task(settings, parts, lacking, key):
    """A part of a batch of n examples has n^2 pairs, and every part has the same number."""
    task, method = Toy(), EDRegularizer(**settings)
    if lacking:
        assert getattr(task, lacking)
        setattr(task, lacking, False)
    with contextlib.nullcontext() if key is None else pytest.raises(ValueError, match=key):
        method.check(task, parts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixup(0.0, per_example=False), r"regularizer.alpha=0.0"),
        (lambda: Mixup(math.inf, per_example=False), r"regularizer.alpha=inf"),
        (lambda: Sam(-1.0), r"regularizer.rho=-1.0"),
        (lambda: Asam(0.5, eta=-1.0, scope="all"), r"regularizer.eta=-1.0"),
        (lambda: Asam(0.5, eta=0.0, scope="bias"), r"regularizer.scope=bias"),
        (lambda: EDRegularizer(every=0), r"regularizer.every=0"),
        (lambda: EDRegularizer(pairing="all"), r"regularizer.pairing=all"),
        (lambda: Jacobian(-0.1, projections=1), r"regularizer.weight=-0.1"),
        (lambda: Jacobian(0.1, projections=0), r"regularizer.projections=0"),
        (lambda: Jacobian(0.1, projections=1.5), r"regularizer.projections=1.5"),
        (lambda: SGD(lr=0.1, weight_decay=0, momentum=1), r"optimizer.momentum=1"),
        (lambda: SGD(lr=0.1, weight_decay=0, momentum=0, nesterov=True), r"optimizer.nesterov"),
    ],
)
def test_impossible_settings_raise_with_their_key(make, message):
    with pytest.raises(ValueError, match=message):
        make()
