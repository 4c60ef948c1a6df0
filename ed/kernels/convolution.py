"""Fast 3 x 3 convolutions and pooling for layers with few channels, on a GPU in half precision.

cuDNN is tuned for wide layers: with the 16 and 32 channels of IMPALA, it reaches a tenth of the
memory bandwidth. `convolve` and `pool` use our kernels where they are faster, and PyTorch
elsewhere, with the same parameters. The kernels are custom operators with derivatives of any order,
as gradients of convolutions are convolutions.
"""

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.kernels.device import on_device_of_input

CHANNELS = (16, 32)  # supported numbers of output channels
WIDTHS = 8  # image widths must be a multiple of this, so that groups of pixels fill a row
LAUNCH = {  # by number of input channels; the best of five or six settings on an H200
    "convolve": {
        4: {"FOLD": 4, "BLOCK": 64, "num_warps": 4},
        16: {"FOLD": 2, "BLOCK": 64, "num_warps": 4},
        32: {"FOLD": 2, "BLOCK": 64, "num_warps": 4},
    },
    "convolve_few": {  # the best of eleven settings for 64 images, the batch of a policy step
        4: {"FOLD": 4, "BLOCK": 32, "num_warps": 2},
        16: {"FOLD": 2, "BLOCK": 32, "num_warps": 2},
        32: {"FOLD": 1, "BLOCK": 32, "num_warps": 2},
    },
    "weight_gradient": {
        4: {"FOLD": 4, "BLOCK": 64, "num_warps": 4},
        16: {"FOLD": 2, "BLOCK": 128, "num_warps": 8},
        32: {"FOLD": 1, "BLOCK": 64, "num_warps": 4},
    },
}
POOL = {"BLOCK": 64, "num_warps": 4}
PARTS = 2 * 132  # number of programs needed to keep a GPU busy
HALVES = (torch.bfloat16, torch.float16)
LAST = torch.channels_last
TRITON = find_spec("triton") is not None  # included with torch on Linux


def convolve(
    x: Tensor, layer: nn.Conv2d, *, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Returns layer(x) or layer(relu(x)), plus `residual`, for a 3 x 3 layer with padding 1."""
    dtype = _dtype(x)
    if _applies(x, dtype, layer.in_channels, layer.out_channels):
        residual = None if residual is None else residual.to(dtype)
        weight, extra = layer.weight, _aligned(layer.in_channels) - layer.in_channels
        if extra:
            x, weight = (F.pad(t, (0, 0, 0, 0, 0, extra)) for t in (x, weight))
        x = x.to(dtype, memory_format=LAST)
        return torch.ops.ed.convolve(x, weight, layer.bias, None, residual, relu, False)
    y = layer(x.relu() if relu else x)
    return y if residual is None else residual + y


def pool(x: Tensor) -> Tensor:
    """3 x 3 max pooling with stride 2."""
    if _applies(x, x.dtype, x.shape[1], x.shape[1]):
        return torch.ops.ed.pool(x)[0]
    return F.max_pool2d(x, 3, stride=2, padding=1)


def _dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _applies(x: Tensor, dtype: torch.dtype, inputs: int, outputs: int) -> bool:
    inputs, fast = _aligned(inputs), TRITON and x.is_cuda and dtype in HALVES
    fits = inputs in LAUNCH["convolve"] and outputs in CHANNELS and x.shape[-1] % WIDTHS == 0
    return fast and fits


def _aligned(channels: int) -> int:
    """Pads three channels to four, which aligns pixels for vectorised loads."""
    return 4 if channels == 3 else channels


def _empty(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape, how = (len(like), channels, height, width), {"dtype": like.dtype, "device": like.device}
    return torch.empty(shape, **how, memory_format=LAST)


# --- convolution -----------------------------------------------------------------------------


@torch.library.custom_op("ed::convolve", mutates_args=())
@on_device_of_input
def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    transposed: bool,
) -> Tensor:
    """Computes [mask > 0] (relu(x) * weight + bias) + residual; the weight may have any dtype.

    Args:
        weight: (CO, CI, 3, 3).
        transposed: compute a layer's input gradient; the weight is then (CI, CO, 3, 3).
    """
    from ed.kernels.convolution_kernels import convolve, convolve_few

    x, bias = x.contiguous(memory_format=LAST), None if bias is None else bias.contiguous()
    mask, residual = (
        None if t is None else t.contiguous(memory_format=LAST) for t in (mask, residual)
    )
    outputs = weight.shape[1 if transposed else 0]
    y = _empty(x, outputs, *x.shape[2:])
    kernel, (shape, number) = convolve, _shape(x, outputs, "convolve")
    if number <= (PARTS - 1) * shape["BLOCK"]:  # too few strands to keep the GPU busy
        kernel, (shape, number) = convolve_few, _shape(x, outputs, "convolve_few")
        number *= shape["H"]
    flags = {"RELU": relu, "BIAS": bias is not None, "MASK": mask is not None}
    flags["RESIDUAL"] = residual is not None
    bands, grid = _bands(weight, x.dtype, shape, transposed), (-(-number // shape["BLOCK"]),)
    kernel[grid](x, bands, bias, mask, residual, y, number, **shape, **flags)
    return y


def _bands(weight: Tensor, dtype: torch.dtype, shape: dict[str, int], transposed: bool) -> Tensor:
    from ed.kernels.convolution_kernels import pack as kernel

    bands = weight.new_empty((3, shape["K"], shape["FOLD"] * shape["CO"]), dtype=dtype)
    first, second, *rest = weight.stride()
    strides = (second, first, *rest) if transposed else (first, second, *rest)
    sizes = {name: shape[name] for name in ("CI", "CO", "FOLD", "K")}
    kernel[(3,)](weight, bands, *strides, **sizes, FLIP=transposed)
    return bands


@_convolve.register_fake
def _(x, weight, bias, mask, residual, relu, transposed):
    return _empty(x, weight.shape[1 if transposed else 0], *x.shape[2:])


@torch.library.custom_op("ed::weight_gradient", mutates_args=())
@on_device_of_input
def _weight_gradient(x: Tensor, gradient: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """Returns gradients of weight (CO, CI, 3, 3) and bias for a convolution of x or relu(x)."""
    from ed.kernels.convolution_kernels import weight_gradient as kernel

    x, gradient = (t.contiguous(memory_format=LAST) for t in (x, gradient))
    inputs, outputs = x.shape[1], gradient.shape[1]
    shape, strands = _shape(x, outputs, "weight_gradient")
    blocks = -(-strands // shape["BLOCK"])
    each = -(-blocks // PARTS)  # blocks per program
    programs, fold, k, n = -(-blocks // each), shape["FOLD"], shape["K"], shape["FOLD"] * outputs
    bands = x.new_empty((programs, 3, k, n), dtype=torch.float32)
    biases = x.new_empty((programs, fold, outputs), dtype=torch.float32)
    kernel[(programs,)](x, gradient, bands, biases, strands, each, **shape, RELU=relu)
    # each tap appears in the band matrix once per pixel of a group, along a diagonal
    sizes = (programs, 3, 3, inputs, fold, outputs)
    strides = (3 * k * n, k * n, inputs * n, n, inputs * n + outputs, 1)
    weights = bands.as_strided(sizes, strides).sum((0, 4))
    return weights.permute(3, 2, 0, 1).contiguous(), biases.sum((0, 1))


@_weight_gradient.register_fake
def _(x, gradient, relu):
    inputs, outputs = x.shape[1], gradient.shape[1]
    made = x.new_empty((outputs, inputs, 3, 3), dtype=torch.float32)
    return made, made.new_empty(outputs)


def _shape(x: Tensor, outputs: int, kernel: str) -> tuple[dict[str, int], int]:
    """Returns the constants and launch settings of a kernel, and the number of strands."""
    inputs, (height, width) = x.shape[1], x.shape[2:]
    launch = LAUNCH[kernel][inputs]
    k = 1 << ((launch["FOLD"] + 2) * inputs - 1).bit_length()
    shape = {"H": height, "W": width, "CI": inputs, "CO": outputs, "K": k}
    return shape | launch, len(x) * width // launch["FOLD"]


def _keep_convolution(ctx, inputs, output) -> None:
    x, weight, bias, mask, _, relu, transposed = inputs
    ctx.save_for_backward(x, weight, mask)
    ctx.relu, ctx.transposed = relu, transposed
    ctx.bias = None if bias is None else bias.dtype


def _convolution_gradient(ctx, gradient: Tensor):
    x, weight, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad
    inner = gradient if mask is None else gradient * (mask > 0)
    to_x = to_weight = to_bias = None
    if needs[0]:
        to_x = _input_gradient(inner, weight, x if ctx.relu else None, not ctx.transposed)
    if needs[1] or needs[2]:
        to_weight, to_bias = torch.ops.ed.weight_gradient(x, inner, ctx.relu)
        if ctx.transposed:
            to_weight = to_weight.transpose(0, 1).flip(2, 3)
        to_weight = to_weight.to(weight.dtype)
        to_bias = None if ctx.bias is None else to_bias.to(ctx.bias)
    return to_x, to_weight, to_bias, None, gradient if needs[4] else None, None, None


def _input_gradient(
    gradient: Tensor, weight: Tensor, mask: Tensor | None, transposed: bool
) -> Tensor:
    """Uses the kernel if it supports this number of output channels, else PyTorch."""
    outputs = weight.shape[1 if transposed else 0]
    if outputs in CHANNELS:
        return torch.ops.ed.convolve(gradient, weight, None, mask, None, False, transposed)
    weight = weight.to(gradient.dtype)
    y = (F.conv_transpose2d if transposed else F.conv2d)(gradient, weight, padding=1)
    return y if mask is None else y * (mask > 0)


_convolve.register_autograd(_convolution_gradient, setup_context=_keep_convolution)


def _keep_weight_gradient(ctx, inputs, output) -> None:
    x, gradient, ctx.relu = inputs
    ctx.save_for_backward(x, gradient)


def _weight_gradient_gradient(ctx, to_weight: Tensor, to_bias: Tensor):
    """Differentiates the weight gradient, which is linear in x and in the upstream gradient."""
    x, gradient = ctx.saved_tensors
    to_x = _input_gradient(gradient, to_weight, x if ctx.relu else None, True)
    to_gradient = torch.ops.ed.convolve(x, to_weight, to_bias, None, None, ctx.relu, False)
    return to_x, to_gradient, None


_weight_gradient.register_autograd(_weight_gradient_gradient, setup_context=_keep_weight_gradient)


# --- pooling ---------------------------------------------------------------------------------


@torch.library.custom_op("ed::pool", mutates_args=())
@on_device_of_input
def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the maxima, and the index of each among its window's nine pixels."""
    from ed.kernels.convolution_kernels import pool as kernel

    x, (height, width) = x.contiguous(memory_format=LAST), x.shape[2:]
    y, taps = _pooled(x)
    pixels = y.numel() // y.shape[1]
    kernel[(-(-pixels // POOL["BLOCK"]),)](
        x, y, taps, pixels, H=height, W=width, C=x.shape[1], **POOL
    )
    return y, taps


@_pool.register_fake
def _pooled(x):
    y = _empty(x, x.shape[1], *((size + 1) // 2 for size in x.shape[2:]))
    return y, torch.empty_like(y, dtype=torch.int8)


@torch.library.custom_op("ed::pool_gradient", mutates_args=())
@on_device_of_input
def _pool_gradient(gradient: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    from ed.kernels.convolution_kernels import pool_gradient as kernel

    gradient = gradient.contiguous(memory_format=LAST)
    x = _unpooled(gradient, taps, height, width)
    number, channels = taps.numel() // taps.shape[1], taps.shape[1]
    kernel[(-(-number // POOL["BLOCK"]),)](
        gradient, taps, x, number, H=height, W=width, C=channels, **POOL
    )
    return x


@_pool_gradient.register_fake
def _unpooled(gradient, taps, height, width):
    return _empty(gradient, gradient.shape[1], height, width)


def _keep_pool(ctx, inputs, output) -> None:
    (x,), (_, taps) = inputs, output
    ctx.save_for_backward(taps)
    ctx.mark_non_differentiable(taps)
    ctx.size = tuple(x.shape[2:])


def _gradient_of_pool(ctx, gradient: Tensor, _):
    return torch.ops.ed.pool_gradient(gradient, ctx.saved_tensors[0], *ctx.size)


_pool.register_autograd(_gradient_of_pool, setup_context=_keep_pool)


def _keep_pool_gradient(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient_of_pool_gradient(ctx, gradient: Tensor):
    """Gathers the gradient at the pixels that pooling selected."""
    (taps,) = ctx.saved_tensors
    width = gradient.shape[-1]
    rows = torch.arange(taps.shape[2], device=taps.device)[:, None] * 2 - 1 + taps // 3
    columns = torch.arange(taps.shape[3], device=taps.device) * 2 - 1 + taps % 3
    place = (rows.long() * width + columns.long()).flatten(2)
    picked = gradient.flatten(2).gather(2, place).view(taps.shape)
    return picked, None, None, None


_pool_gradient.register_autograd(_gradient_of_pool_gradient, setup_context=_keep_pool_gradient)
