"""Tests of kernels for few channels against PyTorch, on a GPU or with Triton's interpreter."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ed.kernels import convolution
from ed.models.impala import Impala

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def everywhere(monkeypatch):
    """Enables the kernels for float32 on any device, with small blocks, the last one partial."""
    if not (CUDA or INTERPRETED):
        pytest.skip("needs a GPU or Triton's interpreter: see test_interpreted")
    monkeypatch.setattr(convolution, "_applies", lambda *_: True)
    small = {"BLOCK": 32, "num_warps": 1}
    for kernel, by_channels in convolution.LAUNCH.items():
        smaller = {channels: launch | small for channels, launch in by_channels.items()}
        monkeypatch.setitem(convolution.LAUNCH, kernel, smaller)
    monkeypatch.setattr(convolution, "POOL", small)
    monkeypatch.setattr(convolution, "PARTS", 3)


CLOSE = {"rtol": 2e-2, "atol": 2e-2} if CUDA else {"rtol": 1e-4, "atol": 1e-4}
SHAPES = [(16, 16, 8, 8), (16, 32, 2, 16), (32, 16, 5, 8), (3, 16, 8, 8), (3, 32, 4, 16)]


def plain(x, layer, *, relu=False, residual=0):
    return layer(x.relu() if relu else x) + residual


def plain_pool(x):
    return F.max_pool2d(x, 3, stride=2, padding=1)


@pytest.mark.parametrize("parts", [1, 3], ids=["many", "few"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "height", "width"), SHAPES)
def test_convolution_and_its_gradients_equal_torch(
    everywhere, monkeypatch, inputs, outputs, height, width, relu, parts
):
    monkeypatch.setattr(convolution, "PARTS", parts)
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, 3, padding=1).to(DEVICE)
    x = torch.randn(3, inputs, height, width, device=DEVICE, requires_grad=True)
    residual = torch.randn(3, outputs, height, width, device=DEVICE, requires_grad=True)
    upstream = torch.randn(3, outputs, height, width, device=DEVICE)
    seen = []
    for convolve in (convolution.convolve, plain):
        y = convolve(x, layer, relu=relu, residual=residual)
        wanted = [x, layer.weight, layer.bias, residual]
        seen.append([y, *torch.autograd.grad(y, wanted, upstream)])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("channels", "height", "width"), [(16, 8, 8), (16, 5, 7), (32, 6, 5)])
def test_pooling_and_its_gradient_equal_torch(everywhere, channels, height, width):
    torch.manual_seed(0)
    x = torch.randn(3, channels, height, width, device=DEVICE).round(decimals=1).requires_grad_()
    upstream = torch.randn_like(plain_pool(x))
    assert len(x.unique()) < x.numel() / 3  # so some windows contain ties
    ours, theirs = convolution.pool(x), plain_pool(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    gradients = [torch.autograd.grad(y, x, upstream)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_nan_passes_through_pooling(everywhere):
    x = torch.zeros(1, 16, 4, 4, device=DEVICE)
    x[0, 2, 1, 1] = torch.nan
    assert convolution.pool(x).isnan().sum() == 4  # four windows contain the NaN


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 32), (3, 16)])
def test_second_derivatives_equal_torch(everywhere, inputs, outputs, relu):
    """The Jacobian regularizer differentiates a gradient with respect to the weights."""
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, 3, padding=1).to(DEVICE)
    x = torch.randn(2, inputs, 6, 8, device=DEVICE, requires_grad=True)
    upstream = torch.randn(2, outputs, 3, 4, device=DEVICE)
    seen = []
    for convolve, pool in ((convolution.convolve, convolution.pool), (plain, plain_pool)):
        y = pool(convolve(x, layer, relu=relu).square())
        (slope,) = torch.autograd.grad(y, x, upstream, create_graph=True)
        wanted = [x, layer.weight, layer.bias]
        seen.append(torch.autograd.grad(slope.square().sum(), wanted))
    for ours, theirs in zip(*seen, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, **CLOSE)


def test_operators_are_registered_correctly(everywhere):
    """Checks shapes, strides and derivatives, on which torch.compile relies."""
    x = torch.randn(2, 16, 6, 6, device=DEVICE, requires_grad=True)
    layer, check = nn.Conv2d(16, 16, 3, padding=1).to(DEVICE), torch.library.opcheck
    close = {"rtol": CLOSE["rtol"], "atol": CLOSE["atol"]}
    given = (x, layer.weight, layer.bias, None, x.detach(), True, False)
    check(torch.ops.ed.convolve.default, given, **close)
    check(torch.ops.ed.weight_gradient.default, (x, torch.randn_like(x), True), **close)
    check(torch.ops.ed.pool.default, (x,))


def test_kernels_compile_for_a_gpu(compiled_for_hopper):
    """The compiler, which needs no GPU, rejects some code that the interpreter accepts."""
    from ed.kernels import convolution_kernels as kernels

    both, numbers = {"RELU": True}, dict.fromkeys(("number", "blocks", "pixels"), "i32")
    for inputs in (4, 16, 32):
        x = torch.empty(2, inputs, 8, 8)
        flags = both | {"BIAS": True, "MASK": True, "RESIDUAL": True}
        shape, _ = convolution._shape(x, 16, "convolve")
        pointers = "x bands bias:f mask residual y"
        compiled_for_hopper(kernels.convolve, pointers, shape | flags, numbers)
        shape, _ = convolution._shape(x, 16, "convolve_few")
        compiled_for_hopper(kernels.convolve_few, pointers, shape | flags, numbers)
        shape, _ = convolution._shape(x, 16, "weight_gradient")
        pointers = "x gradient bands:f biases:f"
        compiled_for_hopper(kernels.weight_gradient, pointers, shape | both, numbers)
    sizes = convolution.POOL | {"H": 8, "W": 8, "C": 16}
    compiled_for_hopper(kernels.pool, "x y taps:i", sizes, numbers)
    compiled_for_hopper(kernels.pool_gradient, "gradient taps:i x", sizes, numbers)


def test_float32_and_other_widths_use_pytorch():
    x = torch.randn(2, 16, 8, 8)
    assert not convolution._applies(x, torch.bfloat16, 16, 16)  # on a CPU
    if CUDA:
        assert convolution._applies(x.cuda(), torch.bfloat16, 16, 16)
        assert not convolution._applies(x.cuda(), torch.float32, 16, 16)
        assert not convolution._applies(x.cuda(), torch.bfloat16, 16, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_impala_in_bf16_is_as_accurate_as_cudnn(monkeypatch, compiled):
    """Compares relative errors of the network's outputs and gradients."""
    torch.manual_seed(0)
    model = Impala(actions=15, channels=[16, 32, 32], hidden=256, image_size=[64, 64]).cuda()
    for layer in (model.actor, model.critic):
        nn.init.orthogonal_(layer.weight)
    model.to(memory_format=torch.channels_last)
    x = torch.rand(64, 3, 64, 64, device="cuda")
    upstream = torch.randn(64, 16, device="cuda")

    def gradients(bf16: bool, compiled: bool = False) -> list[torch.Tensor]:
        run = torch.compile(model) if compiled else model
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            y = run(x)
        return [y.float(), *torch.autograd.grad((y.float() * upstream).sum(), model.parameters())]

    def errors(found: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(found, exact, strict=True)
        return torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs])

    exact = gradients(False)
    ours = errors(gradients(True, compiled))
    monkeypatch.setattr(convolution, "_applies", lambda *_: False)
    cudnn = errors(gradients(True))
    assert ours.mean() < 1.2 * cudnn.mean()
    assert (ours < 2 * cudnn + 1e-3).all()
