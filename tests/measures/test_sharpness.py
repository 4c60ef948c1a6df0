"""Sharpness: closed forms, Auto-PGD, chunks and groups."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ed.measures.base import fixed_subset
from ed.measures.sharpness import TINY, Sharpness, _checkpoints, worst_case
from tests.helpers.measuring import Toy, network


class Bowl(nn.Module):
    """A model whose loss is w'Aw / 2 for any data."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix
        draw = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(len(matrix), generator=draw, dtype=torch.float64))

    def forward(self, x):
        return (self.w @ self.matrix @ self.w / 2).expand(len(x), 1)


class BowlTask(Toy):
    def loss(self, outputs, batch):
        return outputs.mean(), {}


def matrix(*eigenvalues):
    draw = torch.Generator().manual_seed(2)
    square = torch.randn(len(eigenvalues), len(eigenvalues), generator=draw, dtype=torch.float64)
    vectors = torch.linalg.qr(square).Q
    return vectors @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T


@pytest.mark.parametrize("rho", [0.01, 0.5])
def test_one_step_sharpness_of_a_quadratic(rho):
    """L(w + e) - L(w) = g'e + e'Ae / 2 with g = Aw.

    The step e is rho g / ||g||, or rho w^2 g / || |w| g || for adaptive sharpness.
    """
    model = Bowl(matrix(0.5, 2.0, 7.0))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    w, a = model.w.detach(), model.matrix
    g = a @ w
    for adaptive in (False, True):
        e = rho * w**2 * g / (w.abs() * g).norm() if adaptive else rho * g / g.norm()
        expected = (g @ e + e @ a @ e / 2).item()
        found = Sharpness(radii=(rho,), adaptive=adaptive, batch_size=7)(model, BowlTask())
        assert found[f"_{rho:g}"] == pytest.approx(expected, rel=1e-9)


def test_worst_case_sharpness_of_a_quadratic():
    """The worst e is along g if A is a multiple of I, else (m - A) e = g with ||e|| = rho."""
    rho = 0.3
    model = Bowl(2 * torch.eye(4, dtype=torch.float64))
    worst = Sharpness(radii=(rho,), method="worst", steps=20)
    expected = 2 * rho * model.w.norm().item() + rho**2
    assert worst(model, BowlTask())["_0.3"] == pytest.approx(expected, rel=1e-9)
    model = Bowl(matrix(0.1, 1.0, 20.0))
    w, a = model.w.detach(), model.matrix
    low, high = 20.0 + 1e-9, 1e6
    for _ in range(200):  # bisects for the multiplier m at which e has length rho
        middle = (low + high) / 2
        e = torch.linalg.solve(middle * torch.eye(3, dtype=torch.float64) - a, a @ w)
        low, high = (middle, high) if e.norm() > rho else (low, middle)
    expected = (w @ a @ e + e @ a @ e / 2).item()
    assert worst(model, BowlTask())["_0.3"] == pytest.approx(expected, rel=1e-4)


class Waves:
    """A two-dimensional surface with many maxima that records where it is evaluated."""

    def __init__(self):
        self.centre, self.seen = [torch.zeros(2, dtype=torch.float64)], []
        self.loss, self.slope = self.gradient(self.centre)

    def gradient(self, u):
        point = u[0].clone().requires_grad_()
        self.seen.append(u[0])
        height = torch.tensor([1.0, 0.7], dtype=torch.float64)
        loss = (height * (5 * point + 0.4).sin()).sum() + point.sum() / 3
        return loss.item(), list(torch.autograd.grad(loss, point))


def auto_pgd(surface: Waves, rho: float, steps: int, checkpoints: list[int]) -> list[int]:
    """Runs Algorithm 1 of Croce & Hein; returns the checkpoints at which the step was halved."""

    def inside(u):
        return u * min(1.0, rho / (u.norm().item() + TINY))

    points, losses, slopes = [surface.centre[0]], [surface.loss], [surface.slope[0]]
    at, old, step, rises, halvings, top = 0, 0, 2 * rho, [], [], surface.loss
    for k in range(1, steps + 1):
        ahead = inside(points[at] + step * slopes[at] / (slopes[at].norm() + TINY))
        move = 0.75 * (ahead - points[at]) + 0.25 * (points[at] - points[old])
        points.append(ahead if k == 1 else inside(points[at] + move))
        loss, (slope,) = surface.gradient([points[-1]])
        rises.append(loss > losses[at])
        losses, slopes, at, old = [*losses, loss], [*slopes, slope], k, at
        if k in checkpoints:
            before = checkpoints[checkpoints.index(k) - 1] if k > checkpoints[0] else 0
            stuck = before not in halvings and max(losses) == top
            if sum(rises) < 0.75 * len(rises) or stuck:
                step, halvings = step / 2, [*halvings, k]
                at = old = losses.index(max(losses))
            rises, top = [], max(losses)
    return halvings


# covers halving if no better point is found (rho = 4), except right after a halving (rho = 2.8)
@pytest.mark.parametrize("rho", [0.2, 2.0, 2.8, 4.0])
def test_worst_case_search_equals_auto_pgd(rho):
    found, expected = Waves(), Waves()
    rise = worst_case(found, rho, 20)
    halvings = auto_pgd(expected, rho, 20, [5, 9, 12, 14, 16, 18, 19, 20])
    # large steps between maxima amplify rounding errors (to 1e-9 at rho = 4)
    torch.testing.assert_close(found.seen, expected.seen, rtol=0, atol=1e-6)
    assert 0 < len(halvings) < 8
    assert rise == max(found.gradient([u])[0] for u in found.seen[:21]) - found.loss
    assert {22, 41, 57, 70, 80, 87, 93, 99} == _checkpoints(100) & set(range(101))


@pytest.mark.parametrize("adaptive", [False, True])
def test_worst_case_is_at_least_one_step_sharpness(adaptive):
    model, radii = network(), (0.05, 0.5)
    step = Sharpness(radii=radii, adaptive=adaptive)(model, Toy())
    worst = Sharpness(radii=radii, adaptive=adaptive, method="worst", steps=8)(model, Toy())
    assert all(worst[key] >= step[key] > 0 for key in step)


def test_one_step_sharpness_equals_finite_differences_for_small_radii():
    """L(w + rho g / ||g||) - L(w) tends to rho ||g||; finite differences give the norm."""
    model, task, rho, h = network().eval(), Toy(), 1e-5, 1e-6

    def loss():
        with torch.no_grad():
            return task.loss(model(task.x), {"label": task.label})[0].item()

    squares = 0.0
    for weight in model.parameters():
        flat = weight.data.view(-1)
        for i in range(len(flat)):
            old = flat[i].item()
            flat[i] = old + h
            above = loss()
            flat[i] = old - h
            squares += ((above - loss()) / (2 * h)) ** 2
            flat[i] = old
    found = Sharpness(radii=(rho,), examples=None, batch_size=11)(model, task)["_1e-05"]
    assert found == pytest.approx(rho * math.sqrt(squares), rel=1e-3)


@pytest.mark.parametrize("scale", [12, 18])
@pytest.mark.parametrize("adaptive", [False, True])
def test_sharpness_of_a_confident_network_is_exact(adaptive, scale):
    """The loss is 3e-8 or 4e-12; in float32, cross-entropy would round it to 0."""
    corners = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    task, model = Toy(), nn.Linear(2, 3, bias=False)
    task.x, task.label = corners.repeat(20, 1), torch.arange(3).repeat(20)
    model.weight.data = scale * corners
    found = Sharpness(radii=(0.05,), adaptive=adaptive)(model, task)["_0.05"]
    weight = (scale * corners).double().requires_grad_()

    def loss(weight):
        return nn.functional.cross_entropy(task.x.double() @ weight.T, task.label)

    (slope,) = torch.autograd.grad(loss(weight), weight)
    ball = weight.detach().abs() if adaptive else torch.ones_like(slope)
    step = 0.05 * ball**2 * slope / (ball * slope).norm()
    exact = (loss(weight + step) - loss(weight)).item()
    assert found == pytest.approx(exact, rel=2e-2, abs=0)
    assert 0 < exact < 1e-7


def test_chunks_do_not_change_the_result():
    whole, parts = (
        Sharpness(radii=(0.1,), batch_size=size)(network(), Toy()) for size in (1000, 7)
    )
    assert whole["_0.1"] == pytest.approx(parts["_0.1"], rel=1e-10)


def test_a_subset_is_fixed_and_has_no_repeats():
    index = fixed_subset(1000, 100, seed=3)
    assert torch.equal(index, fixed_subset(1000, 100, seed=3))
    assert not torch.equal(index, fixed_subset(1000, 100, seed=4))
    assert len(index.unique()) == 100
    assert torch.equal(fixed_subset(5, None, seed=0), torch.arange(5))
    assert torch.equal(fixed_subset(5, 9, seed=0), torch.arange(5))


def test_groups_have_separate_searches_and_are_averaged_by_size():
    """The sharpness of a group equals the sharpness of a task with only its examples."""
    model, grouped = network(), Sharpness(radii=(0.05, 0.1), examples=30, group=12, seed=3)
    parts = grouped.groups(60)
    assert [len(part) for part in parts] == [12, 12, 6]
    assert torch.cat(list(parts)).sort().values.equal(fixed_subset(60, 30, 3))
    assert not torch.cat(list(parts)).equal(fixed_subset(60, 30, 3))  # groups are shuffled
    one, other = (replace(grouped, examples=None, seed=seed).groups(60)[0] for seed in (3, 4))
    assert not one.equal(other)

    class Part(Toy):
        def __init__(self, index):
            super().__init__()
            self.x, self.label, self.num_examples = self.x[index], self.label[index], len(index)

    alone = [Sharpness(radii=(0.05, 0.1))(model, Part(part)) for part in parts]
    for key, value in grouped(model, Toy()).items():
        expected = sum(n * rises[key] for n, rises in zip((12, 12, 6), alone, strict=True)) / 30
        assert value == pytest.approx(expected, rel=1e-9)
