"""Attention that reads the packed projection and writes packed outputs, without copies."""

import math

import torch
from torch import Tensor

from ed.kernels.device import on_device_of_input

TOKENS, HEAD_SIZES = 257, (32, 64)  # maximum number of tokens, supported head sizes
LAUNCH = {  # tokens per tile, and launch settings
    "forward": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
    "backward": {"BLOCK": 64, "num_warps": 4, "maxnreg": 168},
    "backward_once": {"BLOCK": 64, "num_warps": 4, "maxnreg": 168},
}
SMALLEST = 16  # minimum number of rows in a tensor-core product


def attention(qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Computes softmax(q k' / sqrt(D)) v for each head: (B, N, 3 H D) -> (B, N, H D).

    Args:
        bias: (3 H D,), already included in qkv. It is passed only so that it receives a gradient,
            the sum of qkv's gradient over all tokens, so `detach` it where it is added.
    """
    return torch.ops.ed.attention(qkv, bias, heads)[0]


def tiles(tokens: int, block: int) -> dict[str, int]:
    """Returns the number of full tiles, and the size of the last tile, a power of two."""
    rest = tokens % block
    tail = max(SMALLEST, 1 << (rest - 1).bit_length()) if rest else 0
    return {"FULL": tokens // block, "TAIL": tail, "BLOCK": block}


def _constants(qkv: Tensor, heads: int, direction: str) -> dict[str, int]:
    tokens, size = qkv.shape[1], qkv.shape[2] // (3 * heads)
    launch = LAUNCH[direction]
    shape = {"N": tokens, "H": heads, "D": size}
    return shape | launch | tiles(tokens, launch["BLOCK"])


@torch.library.custom_op("ed::attention", mutates_args=())
@on_device_of_input
def _attention(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Returns outputs (B, N, H D), and base-2 logarithms of softmax sums (B, H, N) in float32."""
    from ed.kernels.attention_kernels import attention as kernel

    qkv = qkv.contiguous()
    out, logs = _outputs(qkv, bias, heads)
    constants = _constants(qkv, heads, "forward")
    scale = math.log2(math.e) / math.sqrt(constants["D"])
    kernel[(len(qkv) * heads,)](qkv, out, logs, scale, **constants)
    return out, logs


@_attention.register_fake
def _outputs(qkv, bias, heads):
    images, tokens, width = qkv.shape
    logs = qkv.new_empty((images, heads, tokens), dtype=torch.float32)
    return qkv.new_empty((images, tokens, width // 3)), logs


@torch.library.custom_op("ed::attention_gradient", mutates_args=())
@on_device_of_input
def _attention_gradient(
    gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of qkv (B, N, 3 H D), and its float32 sums over tokens (B, 3 H D)."""
    from ed.kernels import attention_kernels

    gradient, qkv = gradient.contiguous(), qkv.contiguous()
    to_qkv, sums = _gradients(gradient, qkv, out, logs, heads)
    constants, passes = _constants(qkv, heads, "backward"), 2
    kernel = attention_kernels.attention_gradient
    if constants["FULL"] == 1 and constants["TAIL"] == SMALLEST:  # fits in registers
        kernel, passes = attention_kernels.attention_gradient_once, 1
        constants = _constants(qkv, heads, "backward_once")
    factor = 1 / math.sqrt(constants["D"])
    kernel[(len(qkv) * heads, passes)](
        qkv, out, gradient, logs, to_qkv, sums, factor * math.log2(math.e), factor, **constants
    )
    return to_qkv, sums


@_attention_gradient.register_fake
def _gradients(gradient, qkv, out, logs, heads):
    sums = qkv.new_empty((len(qkv), qkv.shape[2]), dtype=torch.float32)
    return qkv.new_empty(qkv.shape), sums


def _keep(ctx, inputs, output) -> None:
    qkv, bias, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.bias = bias.dtype


def _backward(ctx, gradient: Tensor, _):
    to_qkv, sums = torch.ops.ed.attention_gradient(gradient, *ctx.saved_tensors, ctx.heads)
    return to_qkv, sums.sum(0).to(ctx.bias), None


_attention.register_autograd(_backward, setup_context=_keep)
