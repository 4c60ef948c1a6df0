"""Residual sum with layer norm, and GELU, each fused with the preceding layer's bias gradient."""

import torch
from torch import Tensor

from ed.kernels.device import on_device_of_input

WIDTHS = (192, 384)  # smallest and largest supported widths
LAUNCH = {  # the best settings from a sweep at width 192 on an H200
    "add_norm": {"ROWS": 2, "num_warps": 1},
    "add_norm_gradient": {"ROWS": 8, "num_warps": 2},
    "gelu": {"SIZE": 2048, "num_warps": 2},
    "gelu_gradient": {"ROWS": 4, "WIDE": 256, "num_warps": 8},
}
PROGRAMS = {"add_norm_gradient": 528, "gelu_gradient": 264}  # each writes one row of partial sums


def add_norm(x: Tensor, y: Tensor, offset: Tensor, norm: torch.nn.LayerNorm):
    """Returns x + y + offset in x's dtype, and its layer norm in y's dtype: both (..., C).

    Args:
        offset: (C,), bias of the layer that computed y.
    """
    total, normed, *_ = torch.ops.ed.add_norm(x, y, offset, norm.weight, norm.bias, norm.eps)
    return total, normed


def gelu(x: Tensor, offset: Tensor) -> Tensor:
    """Returns x Phi(x). `offset` (C,), already included in x, only receives a gradient."""
    return torch.ops.ed.gelu(x, offset)


def _programs(x: Tensor, kernel: str) -> int:
    """Returns the number of programs that share the rows of x, at most one per row."""
    # passed to the operators, so that cached compiled code stays valid if PROGRAMS changes
    return min(x.numel() // x.shape[-1], PROGRAMS[kernel])


def _steps(rows: int, programs: int, kernel: str) -> int:
    """Returns the number of row groups per program."""
    return -(-rows // (LAUNCH[kernel]["ROWS"] * programs))


def _wide(columns: int) -> int:
    return 1 << (columns - 1).bit_length()


# --- residual sum and layer norm ---------------------------------------------------------------


@torch.library.custom_op("ed::add_norm", mutates_args=())
@on_device_of_input
def _add_norm(
    x: Tensor, y: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the sum, its norm, and each row's mean and reciprocal deviation in float32."""
    from ed.kernels.rowwise_kernels import add_norm as kernel

    x, y, columns = x.contiguous(), y.contiguous(), x.shape[-1]
    made, launch = _sum_and_norm(x, y, offset, weight, bias, eps), LAUNCH["add_norm"]
    rows = x.numel() // columns
    kernel[(-(-rows // launch["ROWS"]),)](
        x, y, offset, weight, bias, *made, rows, eps, C=columns, WIDE=_wide(columns), **launch
    )
    return made


@_add_norm.register_fake
def _sum_and_norm(x, y, offset, weight, bias, eps):
    statistics = [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2)]
    return x.new_empty(x.shape), y.new_empty(y.shape), *statistics


@torch.library.custom_op("ed::add_norm_gradient", mutates_args=())
@on_device_of_input
def _add_norm_gradient(
    to_total: Tensor, to_normed: Tensor, total: Tensor, weight: Tensor, means: Tensor,
    scales: Tensor, programs: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns gradients of x and y, and partial sums (programs, 3, C) for weight, bias, offset."""
    from ed.kernels.rowwise_kernels import add_norm_gradient as kernel

    to_total, to_normed = to_total.contiguous(), to_normed.contiguous()
    made = _sum_and_norm_gradients(to_total, to_normed, total, weight, means, scales, programs)
    columns, launch = total.shape[-1], LAUNCH["add_norm_gradient"]
    rows = total.numel() // columns
    steps = _steps(rows, programs, "add_norm_gradient")
    kernel[(programs,)](
        to_total, to_normed, total, weight, means, scales, *made, rows, steps,
        C=columns, WIDE=_wide(columns), **launch,
    )  # fmt: skip
    return made


@_add_norm_gradient.register_fake
def _sum_and_norm_gradients(to_total, to_normed, total, weight, means, scales, programs):
    sums = total.new_empty((programs, 3, total.shape[-1]), dtype=torch.float32)
    return total.new_empty(total.shape), to_normed.new_empty(to_normed.shape), sums


def _keep_add_norm(ctx, inputs, output) -> None:
    (_, _, offset, weight, bias, _), (total, _, means, scales) = inputs, output
    ctx.save_for_backward(total, weight, means, scales)
    ctx.mark_non_differentiable(means, scales)
    ctx.kinds = weight.dtype, bias.dtype, offset.dtype


def _backward_of_add_norm(ctx, to_total: Tensor, to_normed: Tensor, *_):
    programs = _programs(to_total, "add_norm_gradient")
    to_x, to_y, sums = torch.ops.ed.add_norm_gradient(
        to_total, to_normed, *ctx.saved_tensors, programs
    )
    totals = zip(sums.sum(0), ctx.kinds, strict=True)
    to_weight, to_bias, to_offset = (total.to(kind) for total, kind in totals)
    return to_x, to_y, to_offset, to_weight, to_bias, None


_add_norm.register_autograd(_backward_of_add_norm, setup_context=_keep_add_norm)


# --- GELU --------------------------------------------------------------------------------------


@torch.library.custom_op("ed::gelu", mutates_args=())
@on_device_of_input
def _gelu(x: Tensor, offset: Tensor) -> Tensor:
    from ed.kernels.rowwise_kernels import gelu as kernel

    x, launch = x.contiguous(), LAUNCH["gelu"]
    y = torch.empty_like(x)
    kernel[(-(-x.numel() // launch["SIZE"]),)](x, y, x.numel(), **launch)
    return y


@_gelu.register_fake
def _(x, offset):
    return x.new_empty(x.shape)


@torch.library.custom_op("ed::gelu_gradient", mutates_args=())
@on_device_of_input
def _gelu_gradient(gradient: Tensor, x: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and partial sums (programs, C) for its bias."""
    from ed.kernels.rowwise_kernels import gelu_gradient as kernel

    gradient, x, columns = gradient.contiguous(), x.contiguous(), x.shape[-1]
    made, launch = _gelu_gradients(gradient, x, programs), LAUNCH["gelu_gradient"]
    rows = x.numel() // columns
    steps = _steps(rows, programs, "gelu_gradient")
    grid = (programs, -(-columns // launch["WIDE"]))
    kernel[grid](gradient, x, *made, rows, steps, C=columns, **launch)
    return made


@_gelu_gradient.register_fake
def _gelu_gradients(gradient, x, programs):
    sums = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    return x.new_empty(x.shape), sums


def _keep_gelu(ctx, inputs, output) -> None:
    x, offset = inputs
    ctx.save_for_backward(x)
    ctx.kind = offset.dtype


def _backward_of_gelu(ctx, gradient: Tensor):
    programs = _programs(gradient, "gelu_gradient")
    to_x, sums = torch.ops.ed.gelu_gradient(gradient, *ctx.saved_tensors, programs)
    return to_x, sums.sum(0).to(ctx.kind)


_gelu.register_autograd(_backward_of_gelu, setup_context=_keep_gelu)
