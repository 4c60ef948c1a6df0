"""Residual sum and layer norm in front of matrix products, as one kernel each.

`add_norm_linear` is for the projection to queries, keys and values. `add_norm_mlp` is a whole MLP,
whose hidden layer stays on the chip; it also takes the attention's last projection in. Gradients
of weights are products of their own, on what the backward kernels write. They are float32 from the
start: operators read weights in half precision and send gradients to the parameters themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# At 384 every program would read 2.4 MB of weights, which takes longer than its arithmetic, and
# chunks of 64 columns in two buffers leave no shared memory for the rows.
WIDTHS = (48, 96, 192)
LAUNCH = {  # rows of a tile, columns of a chunk, and how a program runs
    "add_norm_linear": {"ROWS": 64, "CHUNK": 64, "num_warps": 4, "num_stages": 2},
    "add_norm_linear_gradient": {"ROWS": 64, "CHUNK": 64, "num_warps": 4, "num_stages": 2},
    "add_norm_mlp": {"ROWS": 128, "CHUNK": 64, "num_warps": 8, "num_stages": 2},
    "add_norm_mlp_gradient": {"ROWS": 64, "CHUNK": 32, "num_warps": 4, "num_stages": 2},
}


def add_norm_linear(
    x: Tensor, y: Tensor, offset: Tensor, *, norm: nn.LayerNorm, layer: nn.Linear
) -> tuple[Tensor, Tensor]:
    """total = x + y + offset (..., C), in x's precision, and layer(norm(total)), in y's.

    The layer's bias gets no gradient here: `ed.kernels.attention` sends it.
    """
    w = layer.weight.detach().to(y.dtype)
    return torch.ops.ed.add_norm_linear(
        x, y, offset, norm.weight, norm.bias, w, layer.bias.detach(), norm.eps, layer.weight
    )


def add_norm_mlp(
    x: Tensor,
    y: Tensor,
    offset: Tensor,
    *,
    norm: nn.LayerNorm,
    fc1: nn.Linear,
    fc2: nn.Linear,
    projection: nn.Linear | None = None,
) -> tuple[Tensor, Tensor]:
    """total = x + y + offset (..., C), in x's precision, and the MLP of its norm, in y's.

    The MLP comes without the bias of `fc2`, which belongs to the next sum.

    Args:
        projection: the layer that is still to be applied to y; its bias is `offset`.
    """
    owners = [fc1.weight, fc2.weight]
    if projection is not None:
        owners.append(projection.weight)
    w1, w2, *project = (owner.detach().to(y.dtype) for owner in owners)
    return torch.ops.ed.add_norm_mlp(
        x, y, *(project or [None]), offset, norm.weight, norm.bias, w1, fc1.bias, w2, norm.eps,
        owners,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _launch(kernel: str, width: int) -> dict[str, int]:
    """Settings of a kernel; a chunk divides the width that it walks over."""
    launch = LAUNCH[kernel]
    return launch | {"CHUNK": min(launch["CHUNK"], width & -width)}


def _tiles(x: Tensor, rows: int) -> int:
    return -(-x.numel() // (x.shape[-1] * rows))


@torch.library.custom_op("ed::transposed_product", mutates_args=())
def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """a' b of rows (..., A) and (..., B): (A, B), float32."""
    a, b = _rows(a).T, _rows(b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()  # a CPU has no product with another precision of its result


@_transposed_product.register_fake
def _(a, b):
    return a.new_empty((a.shape[-1], b.shape[-1]), dtype=torch.float32)


# --- layer norm and a layer --------------------------------------------------------------------


@torch.library.custom_op("ed::add_norm_linear", mutates_args=())
def _add_norm_linear(
    x: Tensor, y: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor,
    eps: float, owner: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum and the layer's outputs. The gradient of w goes to `owner`, which w is a copy of."""
    from ed.kernels.norm_product_kernels import add_norm_linear as kernel

    x, y, w = x.contiguous(), y.contiguous(), w.contiguous()
    made = _sum_and_outputs(x, y, offset, weight, bias, w, b, eps, owner)
    launch = _launch("add_norm_linear", len(w))
    kernel[(_tiles(x, launch["ROWS"]),)](
        x, y, offset, weight, bias, w, b, *made, len(_rows(x)), eps,
        C=x.shape[-1], WIDTH=len(w), **launch,
    )  # fmt: skip
    return made


@_add_norm_linear.register_fake
def _sum_and_outputs(x, y, offset, weight, bias, w, b, eps, owner):
    return x.new_empty(x.shape), y.new_empty((*y.shape[:-1], w.shape[0]))


@torch.library.custom_op("ed::add_norm_linear_gradient", mutates_args=())
def _add_norm_linear_gradient(
    to_total: Tensor, to_out: Tensor, total: Tensor, weight: Tensor, bias: Tensor, w: Tensor,
    eps: float, tile: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """For x and y; the norm; sums (tiles of rows, 3, C) for weight, bias and offset.

    Args:
        tile: rows of a program; an argument, so that compiled code in a cache keeps its shapes
            when launch settings change.
    """
    from ed.kernels.norm_product_kernels import add_norm_linear_gradient as kernel

    to_total, to_out, w = to_total.contiguous(), to_out.contiguous(), w.contiguous()
    made = _linear_gradients(to_total, to_out, total, weight, bias, w, eps, tile)
    launch = _launch("add_norm_linear_gradient", len(w)) | {"ROWS": tile}
    kernel[(len(made[-1]),)](
        to_total, to_out, total, weight, bias, w, *made, len(_rows(total)), eps,
        C=total.shape[-1], WIDTH=len(w), **launch,
    )  # fmt: skip
    return made


@_add_norm_linear_gradient.register_fake
def _linear_gradients(to_total, to_out, total, weight, bias, w, eps, tile):
    columns = total.shape[-1]
    sums = total.new_empty((_tiles(total, tile), 3, columns), dtype=torch.float32)
    like_y = [to_out.new_empty(total.shape) for _ in range(2)]
    return total.new_empty(total.shape), *like_y, sums


def _keep_linear(ctx, inputs, output) -> None:
    _, _, offset, weight, bias, w, _, ctx.eps, owner = inputs
    ctx.save_for_backward(output[0], weight, bias, w)
    ctx.kinds, ctx.owner = (weight.dtype, bias.dtype, offset.dtype), owner.dtype


def _backward_of_linear(ctx, to_total: Tensor, to_out: Tensor):
    tile = LAUNCH["add_norm_linear_gradient"]["ROWS"]
    to_x, to_y, normed, sums = torch.ops.ed.add_norm_linear_gradient(
        to_total, to_out, *ctx.saved_tensors, ctx.eps, tile
    )
    totals = zip(sums.sum(0), ctx.kinds, strict=True)
    to_weight, to_bias, to_offset = (total.to(kind) for total, kind in totals)
    to_owner = torch.ops.ed.transposed_product(to_out, normed).to(ctx.owner)
    return to_x, to_y, to_offset, to_weight, to_bias, None, None, None, to_owner


_add_norm_linear.register_autograd(_backward_of_linear, setup_context=_keep_linear)


# --- layer norm and an MLP ---------------------------------------------------------------------


@torch.library.custom_op("ed::add_norm_mlp", mutates_args=())
def _add_norm_mlp(
    x: Tensor, y: Tensor, project: Tensor | None, offset: Tensor, weight: Tensor, bias: Tensor,
    w1: Tensor, b1: Tensor, w2: Tensor, eps: float, owners: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum and the MLP's outputs. Gradients of w1, w2 and project go to `owners`."""
    from ed.kernels.norm_product_kernels import add_norm_mlp as kernel

    x, y, w1, w2 = (given.contiguous() for given in (x, y, w1, w2))
    made = _sum_and_mlp(x, y, project, offset, weight, bias, w1, b1, w2, eps, owners)
    launch = _launch("add_norm_mlp", len(w1))
    kernel[(_tiles(x, launch["ROWS"]),)](
        x, y, _or_any(project, w1), offset, weight, bias, w1, b1, w2, *made, len(_rows(x)), eps,
        C=x.shape[-1], H=len(w1), PROJECT=project is not None, **launch,
    )  # fmt: skip
    return made


def _or_any(project: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for a kernel that does not follow it where there is no projection."""
    return other if project is None else project.contiguous()


@_add_norm_mlp.register_fake
def _sum_and_mlp(x, y, project, offset, weight, bias, w1, b1, w2, eps, owners):
    return x.new_empty(x.shape), y.new_empty(y.shape)


@torch.library.custom_op("ed::add_norm_mlp_gradient", mutates_args=())
def _add_norm_mlp_gradient(
    to_total: Tensor, to_out: Tensor, total: Tensor, project: Tensor | None, weight: Tensor,
    bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, eps: float, tile: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """For x, for y behind and (if there is one) in front of its projection; norm, hidden layer and
    its gradient before GELU; sums (tiles of rows, H + 3 C) for b1, weight, bias and offset.

    Args:
        tile: rows of a program, as in `add_norm_linear_gradient`.
    """
    from ed.kernels.norm_product_kernels import add_norm_mlp_gradient as kernel

    to_total, to_out, w1, w2 = (given.contiguous() for given in (to_total, to_out, w1, w2))
    made = _mlp_gradients(to_total, to_out, total, project, weight, bias, w1, b1, w2, eps, tile)
    launch = _launch("add_norm_mlp_gradient", len(w1)) | {"ROWS": tile}
    kernel[(len(made[-1]),)](
        to_total, to_out, total, _or_any(project, w1), weight, bias, w1, b1, w2, *made,
        len(_rows(total)), eps, C=total.shape[-1], H=len(w1), PROJECT=project is not None,
        **launch,
    )  # fmt: skip
    return made


@_add_norm_mlp_gradient.register_fake
def _mlp_gradients(to_total, to_out, total, project, weight, bias, w1, b1, w2, eps, tile):
    hidden, columns = w1.shape
    to_sum, normed = (to_out.new_empty(to_out.shape) for _ in range(2))
    to_y = to_out.new_empty(0 if project is None else to_out.shape)
    wide = [to_out.new_empty((*to_out.shape[:-1], hidden)) for _ in range(2)]
    lines = (_tiles(total, tile), hidden + 3 * columns)
    sums = total.new_empty(lines, dtype=torch.float32)
    return total.new_empty(total.shape), to_sum, to_y, normed, *wide, sums


def _keep_mlp(ctx, inputs, output) -> None:
    _, y, project, offset, weight, bias, w1, b1, w2, ctx.eps, owners = inputs
    y = None if project is None else y
    ctx.save_for_backward(y, output[0], project, weight, bias, w1, b1, w2)
    ctx.kinds = b1.dtype, weight.dtype, bias.dtype, offset.dtype
    ctx.owners = [owner.dtype for owner in owners]


def _backward_of_mlp(ctx, to_total: Tensor, to_out: Tensor):
    y, total, project, weight, bias, w1, b1, w2 = ctx.saved_tensors
    tile = LAUNCH["add_norm_mlp_gradient"]["ROWS"]
    to_x, to_sum, to_y, normed, hidden, to_hidden, sums = torch.ops.ed.add_norm_mlp_gradient(
        to_total, to_out, total, project, weight, bias, w1, b1, w2, ctx.eps, tile
    )
    parts = sums.sum(0).split([len(w1), *[w1.shape[1]] * 3])
    totals = zip(parts, ctx.kinds, strict=True)
    to_b1, to_weight, to_bias, to_offset = (total.to(kind) for total, kind in totals)
    factors = [(to_hidden, normed), (to_out, hidden)]
    if project is None:
        to_y = to_sum
    else:
        factors.append((to_sum, y))
    product = torch.ops.ed.transposed_product
    to_owners = [product(*pair).to(kind) for pair, kind in zip(factors, ctx.owners, strict=True)]
    return to_x, to_y, None, to_offset, to_weight, to_bias, None, to_b1, None, None, to_owners


_add_norm_mlp.register_autograd(_backward_of_mlp, setup_context=_keep_mlp)
