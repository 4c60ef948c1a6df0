"""Tests of the ViT kernels against torch's operators, on a GPU or with Triton's interpreter."""

import copy
import os

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F

from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.kernels import block as fused
from ed.kernels import rowwise
from ed.kernels.attention import attention, tiles
from ed.models.vit import ViT
from ed.regularizers.base import Regularizer
from ed.regularizers.jacobian import Jacobian
from tests.helpers.toy import training

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter does not support bf16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CLOSE = {"rtol": 2e-2, "atol": 2e-2} if CUDA else {"rtol": 1e-4, "atol": 1e-4}  # TF32 on a GPU


@pytest.fixture
def small(monkeypatch):
    """Launches few programs, so that each handles several groups of rows, the last one partial."""
    if not (CUDA or INTERPRETED):
        pytest.skip("needs a GPU or Triton's interpreter: see test_interpreted")
    for kernel in rowwise.PROGRAMS:
        monkeypatch.setitem(rowwise.PROGRAMS, kernel, 3)


@pytest.fixture
def runs(request):
    """Uses default launch settings on a GPU and small ones for the slow interpreter."""
    if not CUDA:
        request.getfixturevalue("small")


def errors(found: list, exact: list) -> torch.Tensor:
    """Returns relative errors in the Euclidean norm."""
    pairs = zip(found, exact, strict=True)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs])


def assert_no_worse(ours, theirs, inputs: list[torch.Tensor], upstreams: list[torch.Tensor]):
    """Checks that errors in values and gradients are not much larger than torch's.

    `inputs` are tensors in half precision or float32; both functions return lists of tensors.
    """

    def results(function, exact: bool) -> list[torch.Tensor]:
        given = [(t.double() if exact else t.clone()).requires_grad_() for t in inputs]
        made = function(*given)
        above = [u.to(y.dtype) for u, y in zip(upstreams, made, strict=True)]
        return [*made, *torch.autograd.grad(made, given, above)]

    exact = results(theirs, True)
    error, allowed = errors(results(ours, False), exact), errors(results(theirs, False), exact)
    # rounding errors vary: allow 50 % more, plus one half-precision rounding
    assert (error < 1.5 * allowed + torch.finfo(HALF).eps).all(), (error, allowed)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(HALF)


def plain_attention(qkv, bias, heads):
    """Attention in plain torch; the bias has no effect and only receives a gradient."""
    qkv = qkv + bias.to(qkv.dtype) - bias.detach().to(qkv.dtype)
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# tiles of 64 tokens: one partial; one full; one full and one partial; several
SHAPES = [(17, 32), (64, 32), (65, 64), *([(197, 32), (257, 64)] if CUDA else [(133, 32)])]


@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_attention_is_as_accurate_as_torch(runs, tokens, size):
    heads, images = (3, 8) if CUDA else (2, 1) if tokens < 100 else (1, 1)
    qkv, bias = half(images, tokens, 3 * heads * size), torch.zeros(3 * heads * size, device=DEVICE)
    assert_no_worse(
        lambda *given: [attention(*given, heads)],
        lambda *given: [plain_attention(*given, heads)],
        [qkv, bias],
        [half(images, tokens, heads * size)],
    )


def test_attention_is_accurate_for_large_scores(runs):
    """With scores in the hundreds, one of them dominates the softmax."""
    qkv, bias = 30 * half(1, 20, 3 * 64), torch.zeros(3 * 64, device=DEVICE)
    upstream = half(1, 20, 64)
    ours, theirs = lambda *t: [attention(*t, 1)], lambda *t: [plain_attention(*t, 1)]
    assert_no_worse(ours, theirs, [qkv, bias], [upstream])


def test_tiles_cover_the_tokens():
    for tokens in range(1, 258):
        for block in (16, 64, 128):
            made = tiles(tokens, block)
            covered = made["FULL"] * block + made["TAIL"]
            assert tokens <= covered < tokens + max(16, block)
            assert made["TAIL"] & (made["TAIL"] - 1) == 0  # a power of two


@pytest.mark.parametrize("width", [64, 192, 384])
def test_residual_norm_is_as_accurate_as_torch(small, width):
    rows = 30
    weight, bias = (torch.randn(width, device=DEVICE) for _ in range(2))
    offset = torch.randn(width, device=DEVICE)

    def theirs(x, y, offset, weight, bias):
        total = x + y + offset
        return [total, F.layer_norm(total, (width,), weight, bias, 1e-6).to(y.dtype)]

    def ours(*given):
        return list(torch.ops.ed.add_norm(*given, 1e-6)[:2])

    inputs = [3 + torch.randn(2, rows, width, device=DEVICE), half(2, rows, width)]
    upstreams = [torch.randn(2, rows, width, device=DEVICE), half(2, rows, width)]
    assert_no_worse(ours, theirs, [*inputs, offset, weight, bias], upstreams)


def test_gelu_is_as_accurate_as_torch(small):
    offset = torch.zeros(320, device=DEVICE)

    def theirs(x, offset):
        return [F.gelu(x + offset.to(x.dtype) - offset.detach().to(x.dtype))]

    inputs = [4 * half(70, 320), offset]
    assert_no_worse(lambda *given: [rowwise.gelu(*given)], theirs, inputs, [half(70, 320)])


def test_gelu_is_accurate_in_its_tails(runs):
    """The error is at most 1e-6 |x|; far from 0, the result is exactly x or 0."""
    x = torch.linspace(-6, 6, 400, device=DEVICE)
    ours, exact = rowwise.gelu(x[None], x)[0], F.gelu(x.double())
    assert ((ours - exact).abs() <= 1e-6 * x.abs()).all()
    far = torch.tensor([[-40.0, 0.0, 40.0]], device=DEVICE)
    assert rowwise.gelu(far, far[0]).tolist() == [[0.0, 0.0, 40.0]]


def vit(**changes) -> ViT:
    shape = {"image_size": [16, 16], "patch": 4, "width": 64, "depth": 2, "heads": 2}
    rest = {"pool": "token", "dropout": 0.0, "activation": "gelu"}
    torch.manual_seed(0)
    model = ViT(classes=5, **(shape | rest | changes)).to(DEVICE)
    for weight in model.parameters():  # a zero bias or class token would hide errors
        nn.init.normal_(weight, mean=weight.mean().item(), std=0.1)
    return model


def gradients(model: ViT, x: torch.Tensor, forward=None) -> list[torch.Tensor]:
    y = model(x) if forward is None else forward(x)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, model.parameters(), upstream)]


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_whole_network_equals_timm(runs, monkeypatch, pool):
    model, x = vit(pool=pool), torch.randn(2, 3, 16, 16, device=DEVICE)
    exact = gradients(copy.deepcopy(model).double(), x.double())
    names = list(model.state_dict())
    monkeypatch.setattr(fused, "applies", lambda *_, **__: True)
    model.kernels = True
    for ours, theirs in zip(gradients(model, x), exact, strict=True):
        torch.testing.assert_close(ours.double() / theirs.norm(), theirs / theirs.norm(), **CLOSE)
    assert list(model.state_dict()) == names


def test_inner_spaces_give_the_outputs_of_the_network(runs, monkeypatch):
    model, x = vit(), torch.randn(2, 3, 16, 16, device=DEVICE)
    expected = model(x)
    monkeypatch.setattr(fused, "applies", lambda *_, **__: True)
    model.kernels = True
    for space in ("embedding", "block1"):
        features = model.to_space(x, space)
        assert features.shape == (2, 17, 64)
        torch.testing.assert_close(model.from_space(features, space), expected, **CLOSE)


def test_a_path_after_the_only_block_needs_no_blocks(monkeypatch):
    model = vit(depth=1)
    features = model.to_space(torch.randn(2, 3, 16, 16, device=DEVICE), "block1")
    expected = model.from_space(features, "block1")
    monkeypatch.setattr(fused, "applies", lambda *_, **__: True)
    model.kernels = True
    assert torch.equal(model.from_space(features, "block1"), expected)


def test_a_compiled_network_equals_the_eager_one(runs, monkeypatch):
    """The network runs under autocast and compiles to one graph without breaks."""
    model, x = vit(depth=1), torch.randn(1, 3, 16, 16, device=DEVICE)
    monkeypatch.setattr(fused, "applies", lambda *_, **__: True)
    model.kernels = True
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    with torch.autocast(DEVICE, HALF):
        ours, theirs = (gradients(model, x, forward) for forward in (compiled, model))
    assert (errors(ours, [t.double() for t in theirs]) < 20 * torch.finfo(HALF).eps).all()


def test_operators_are_registered_correctly(small):
    """Checks shapes, strides and derivatives, on which torch.compile relies."""
    check_operator, operators = torch.library.opcheck, torch.ops.ed

    def given(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, requires_grad=True)

    qkv, offset = given(1, 17, 3 * 64), given(3 * 64)
    check_operator(operators.attention.default, (qkv, offset, 2), **CLOSE)
    with torch.no_grad():
        out, logs = operators.attention(qkv, offset, 2)
    known = (torch.randn_like(out), qkv.detach(), out, logs, 2)
    check_operator(operators.attention_gradient.default, known, **CLOSE)
    x, y, row = given(1, 17, 64), given(1, 17, 64), given(64)
    check_operator(operators.add_norm.default, (x, y, row, row, row, 1e-6), **CLOSE)
    check_operator(operators.gelu.default, (x, row), **CLOSE)
    check_operator(operators.gelu_gradient.default, (y.detach(), x.detach(), 3), **CLOSE)


CHANGES = [{"activation": "gelu_tanh"}, {"dropout": 0.1}, {"width": 48, "heads": 2}]


@pytest.mark.parametrize("changes", CHANGES, ids=["activation", "dropout", "head size"])
def test_unsupported_blocks_use_timm(changes):
    assert all(fused.supported(part) for part in vit().blocks)
    assert not any(fused.supported(part) for part in vit(**changes).blocks)
    assert all(fused.supported(part) for part in vit(dropout=0.1).eval().blocks)


class Adapted(nn.Linear):
    """A layer that computes more than its weight and bias, like LoRA."""


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.attn, "qkv", Adapted(64, 192)),
        lambda block: setattr(block.mlp, "fc2", Adapted(256, 64)),
        lambda block: setattr(block, "norm2", nn.RMSNorm(64)),
        lambda block: setattr(block, "norm1", nn.Identity()),
    ],
    ids=["queries", "last layer", "other norm", "no norm"],
)
def test_blocks_with_replaced_layers_use_timm(change):
    block = vit().blocks[0]
    supported = torch.compile(lambda: fused.supported(block), backend="eager", fullgraph=True)
    assert supported()
    change(block)
    assert not supported()


def test_kernels_are_used_only_in_compiled_half_precision_steps_on_a_gpu(monkeypatch):
    model = vit(width=192, heads=3)
    x = torch.randn(2, 17, 192, device=DEVICE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.autocast(DEVICE, HALF):
        assert fused.applies(model.blocks, x) == CUDA
        assert not fused.applies(model.blocks, torch.randn(2, 300, 192, device=DEVICE))
        small = vit(width=384, heads=6).blocks
        slow = torch.randn(2, 197, 384, device=DEVICE)  # supported, but slower than torch
        assert not fused.applies(small, slow)
        assert fused.applies(small, slow, always=True) == CUDA
        assert not fused.applies(vit().blocks, torch.randn(2, 17, 64, device=DEVICE))
    assert not fused.applies(model.blocks, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    with torch.autocast(DEVICE, HALF):
        assert not fused.applies(model.blocks, x)


def test_kernels_are_enabled_unless_the_regularizer_forbids_them():
    for regularizer, kernels, expected in (
        (Regularizer(), False, False),
        (Regularizer(), True, True),
        (Regularizer(), "auto", "auto"),
        (Jacobian(0.1, projections=1), True, False),
    ):
        model = vit()
        training(regularizer, model, kernels=kernels)
        assert model.kernels == expected


def test_unknown_values_of_system_kernels_are_rejected():
    cfg = compose_config(["system.kernels=sometimes"])
    with pytest.raises(ValueError, match=r"^system\.kernels=sometimes"):
        check(cfg, instantiate(cfg.task), instantiate(cfg.regularizer))


def test_kernels_compile_for_a_gpu(compiled_for_hopper):
    """The compiler, which needs no GPU, rejects some code that the interpreter accepts."""
    from ed.kernels import attention as operators
    from ed.kernels import attention_kernels, rowwise_kernels

    qkv, number = torch.empty(1, 65, 3 * 32), {"scale": "fp32", "factor": "fp32"}
    sizes = operators._constants(qkv, 1, "forward")
    compiled_for_hopper(attention_kernels.attention, "qkv out logs:f", sizes, number)
    sizes = operators._constants(qkv, 1, "backward")
    pointers = "qkv out gradient logs:f to_qkv sums:f"
    compiled_for_hopper(attention_kernels.attention_gradient, pointers, sizes, number)
    sizes = operators._constants(qkv, 1, "backward_once")
    compiled_for_hopper(attention_kernels.attention_gradient_once, pointers, sizes, number)
    number = dict.fromkeys(("rows", "steps", "number"), "i32") | {"eps": "fp32"}
    for name, pointers in {
        "add_norm": "x:f y offset:f weight:f bias:f total:f normed means:f scales:f",
        "add_norm_gradient": "to_total:f to_normed total:f weight:f means:f scales:f to_x:f to_y "
        "sums:f",
        "gelu": "x y",
        "gelu_gradient": "gradient x to_x sums:f",
    }.items():
        sizes = {"C": 192, "WIDE": 256} | rowwise.LAUNCH[name]
        compiled_for_hopper(getattr(rowwise_kernels, name), pointers, sizes, number)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", "ed"])
def test_a_captured_step_learns_as_with_timms_blocks(method, monkeypatch):
    """Losses stay close for twenty compiled and captured steps of a shallow ViT-Tiny."""
    from tests.helpers.gpu import losses, make_step

    used, run = [], fused.run
    monkeypatch.setattr(fused, "run", lambda *a, **k: used.append(1) or run(*a, **k))
    overrides = ["model=vit_tiny", "model.depth=3", f"regularizer={method}", "optimizer.lr=1e-4"]
    fast = {"bf16": True, "compile_model": True, "capture": True}
    seen = []
    for kernels in (True, False):
        torch._dynamo.reset()
        step = make_step(overrides, kernels=kernels, **fast)
        seen.append(losses(step, 0, 20))
        assert bool(used) == kernels
        assert step.graphs
        used.clear()
    torch.testing.assert_close(*seen, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_network_in_bf16_is_as_accurate_as_timms_blocks():
    """Compares relative errors of the outputs and gradients of a compiled ViT-Tiny."""
    model = instantiate(compose_config(["model=vit_tiny", "model.depth=4"]).model).cuda()
    x = torch.randn(64, 3, 32, 32, device="cuda")

    def found(bf16: bool, kernels: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model.kernels = kernels
        forward = torch.compile(model, dynamic=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            return [t.float() for t in gradients(model, x, forward)]

    exact = [t.double() for t in found(False, False)]
    ours, theirs = errors(found(True, True), exact), errors(found(True, False), exact)
    assert ours.mean() < 1.2 * theirs.mean()
    assert (ours < 2 * theirs + 1e-3).all()
