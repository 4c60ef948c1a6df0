"""Tests of the Jacobian penalty: estimate, gradient, compilation, attention."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ed.core.field import Field
from ed.models.impala import Impala
from ed.regularizers.jacobian import Jacobian, aligned_attention, plain_attention, sphere
from tests.helpers.toy import CLASSES, Toy, first_batch, state, two_layers, vit


class Operations(TorchDispatchMode):
    """Records every operation and its result."""

    def __init__(self, seen: list):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((str(func), out))
        return out


def jacobians(function, points):
    return torch.stack([torch.func.jacrev(function)(point) for point in points])  # (B, C, D)


def test_jacobian_estimate_is_exact_for_its_direction():
    model = two_layers()
    x = torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    outputs = model(x)
    estimate = Jacobian(1.0, projections=1).estimate(outputs, x, state().generator)
    v = sphere(outputs, state().generator)
    torch.testing.assert_close(v.square().sum(-1), torch.ones(4, dtype=torch.float64))
    projected = torch.einsum("bc,bcd->bd", v, jacobians(model, x.detach()))
    torch.testing.assert_close(estimate, CLASSES * projected.square().sum() / (2 * 4))


@pytest.mark.parametrize("projections", [1, 3])
def test_jacobian_estimate_is_unbiased(projections):
    model, count = two_layers(), 20_000
    point = torch.randn(5, dtype=torch.float64)
    x = point.repeat(count, 1).requires_grad_()  # each row gets its own direction
    penalty = Jacobian(1.0, projections=projections)
    estimate = penalty.estimate(model(x), x, state().generator)
    J = torch.func.jacrev(model)(point)
    M, C = J @ J.T, CLASSES
    exact = J.square().sum() / 2
    # the variance follows from E[(v'Mv)^2] = (2 tr M^2 + (tr M)^2) / (C (C + 2)) on the sphere
    second = (2 * (M @ M).trace() + M.trace() ** 2) / (C * (C + 2))
    variance = C**2 / 4 * (second - M.trace() ** 2 / C**2)
    error = 5 * (variance / (count * projections)).sqrt()  # 5 sigma: a 1e-6 chance of failure
    assert error < 0.05 * exact
    assert abs(estimate - exact) < error


def test_jacobian_estimate_does_not_depend_on_autocast():
    """Gradients keep the precision of the forward pass and are squared in float32."""
    model, x = two_layers().float(), torch.randn(4, 5, requires_grad=True)
    outputs, penalty = model(x), Jacobian(1.0, projections=1)
    expected = penalty.estimate(outputs, x, state().generator)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(penalty.estimate(outputs, x, state().generator), expected)
    features = x.detach().bfloat16().requires_grad_()
    outputs = model.bfloat16()(features).float()
    v = sphere(outputs, state().generator)
    (projected,) = torch.autograd.grad(outputs, features, v, retain_graph=True)
    expected = CLASSES * projected.float().square().sum() / (2 * 4)
    estimate = penalty.estimate(outputs.bfloat16(), features, state().generator)
    torch.testing.assert_close(estimate.detach(), expected)


def test_jacobian_penalty_trains_the_layers_before_an_inner_space():
    """The penalty's gradient reaches all weights, including those before the features."""
    model, x = two_layers(), torch.randn(4, 5, dtype=torch.float64)
    before, after = model[:2], model[2:]

    class Silent(Toy):
        def loss(self, outputs, batch):
            return 0 * outputs.sum(), {}

    field = Field.of(after, before(x))
    loss, report = Jacobian(2.0, projections=1).objective(Silent(), field, {}, state())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    features = before(x)
    v = sphere(after(features), state().generator)
    projected = torch.einsum("bc,bcd->bd", v, jacobians(after, features))
    expected = 2.0 * CLASSES * projected.square().sum() / (2 * 4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(2.0 * report["penalty"], expected.detach())
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    )


@pytest.mark.parametrize("space", ["input", "block1", "output"])
def test_compiled_jacobian_equals_the_eager_one(space, monkeypatch):
    """Compares loss, penalty and gradients; uses ahead-of-time autograd, as on a GPU."""
    compiler = functools.partial(torch.compile, backend="aot_eager")  # without code generation
    monkeypatch.setattr(torch, "compile", compiler)
    model, batch, found = vit(), first_batch(), []
    for compiled in (False, True):
        penalty = Jacobian(1.0, projections=2)
        if compiled:
            penalty.compile(model)
        field = Field.of(model, batch["x"])
        if space == "block1":
            features = model.to_space(batch["x"], space)
            field = Field.of(functools.partial(model.from_space, space=space), features)
        elif space == "output":
            field = Field.of(lambda x: {"scores": model(x)}, batch["x"], output="scores")
        loss, report = penalty.objective(Toy(), field, batch, state())
        found.append((report, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0])


def test_jacobian_rejects_outputs_with_positions():
    task = Toy()
    task.probe = first_batch
    Jacobian().check_model(vit(), task)
    with pytest.raises(ValueError, match="regularizer=jacobian"):
        Jacobian().check_model(nn.Conv2d(3, CLASSES, 1).double(), task)


def test_compiled_jacobian_finds_its_width_without_random_numbers(monkeypatch):
    """A resumed run determines the width again; this must not change the dropout masks."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, CLASSES), nn.Tanh())
    model.double()
    penalty, batch, losses = Jacobian(1.0, projections=1), first_batch(), []
    penalty.compile(model)
    for known in (None, CLASSES):
        penalty.width = known
        torch.manual_seed(1)
        losses.append(penalty.objective(Toy(), Field.of(model, batch["x"]), batch, state())[0])
    assert torch.equal(*losses)


@pytest.mark.parametrize("part", [nn.BatchNorm1d(2), Impala(image_size=[16, 16])])
def test_jacobian_is_not_compiled_where_torch_func_fails(part):
    penalty = Jacobian(1.0, projections=1)
    penalty.compile(nn.Sequential(nn.Linear(2, 2), part))
    assert penalty.pull_back is None


def test_jacobian_attention_suits_tensor_cores():
    """Products are in bf16, and 5 tokens are padded to 8; torch's setting is restored."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    q = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    seen = []
    with plain_attention(), Operations(seen):
        out = F.scaled_dot_product_attention(q, q, q)
        (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        first.float().square().sum().backward()
    products = [out for name, out in seen if name.startswith("aten.bmm")]
    assert len(products) > 6
    assert {out.dtype for out in products} == {torch.bfloat16}
    assert {size for out in products for size in out.shape[1:]} == {8}
    assert not allowed()  # torch's default
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mask", ["none", "bool", "float", "rows", "columns", "one head's"])
def test_aligned_attention_equals_attention(mask):
    """Outputs and gradients are the same for 13 queries and 10 keys."""
    torch.manual_seed(0)
    made = [torch.randn(2, 3, count, 8, dtype=torch.float64) for count in (13, 10, 10)]
    inputs = [x.requires_grad_() for x in made]
    keep = torch.rand(2, 1, 1, 10) > 0.3
    masks = {
        "none": None,
        "bool": keep,
        "float": torch.zeros(2, 1, 1, 10, dtype=torch.float64).masked_fill(~keep, -math.inf),
        "rows": torch.rand(2, 1, 13, 10) > 0.3,
        "columns": torch.randn(2, 3, 13, 1, dtype=torch.float64),
        "one head's": torch.randn(13, 10, dtype=torch.float64),
    }
    settings = {"attn_mask": masks[mask], "dropout_p": 0.0, "scale": 0.3}
    found = []
    for attention in (F.scaled_dot_product_attention, aligned_attention):
        out = attention(*inputs, **settings)
        found.append((out, torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(found[1], found[0])


def test_aligned_attention_does_not_pad_causal_attention():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(aligned_attention(q, q, q, is_causal=True), expected)
    assert torch.equal(aligned_attention(q, q, q, None, 0.0, True), expected)


def test_jacobian_differentiates_attention_twice():
    """For a ViT, the gradient of the objective matches central differences."""
    model, batch, penalty = vit(), first_batch(), Jacobian(1.0, projections=1)
    field = Field.of(model, batch["x"])

    def objective():
        return penalty.objective(Toy(), field, batch, state())[0]

    weight = model.blocks[0].attn.qkv.weight
    (gradient,) = torch.autograd.grad(objective(), weight)
    direction = torch.randn(weight.shape, dtype=torch.float64)
    h, values = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * h)
        values.append(objective().detach())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * h)
    slope = (values[0] - values[1]) / (2 * h)
    # truncation (h^2) and rounding (eps / h) both contribute about 1e-9
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-7)
