"""Runs timm's transformer blocks with our kernels, using the blocks' own parameters.

The last residual sum of a block is fused with the next block's norm into one pass over memory. The
bias gradient of a matrix product is computed by the kernel that follows the product.

The kernels support widths from 192 to 384 and up to 257 tokens. They pay off up to ViT-S with 65
tokens or ViT-Tiny with 257, but make ViT-S slower with 197 tokens or more
(`experiments/results/speed/kernels.md`, one H200). By default they are used only for inputs of at
most `LARGEST` numbers per image.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch
from timm.layers.activations import GELU
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn
from torch.nn import functional as F

from ed.kernels.attention import HEAD_SIZES, TOKENS, attention
from ed.kernels.rowwise import WIDTHS, add_norm, gelu

HALVES = (torch.bfloat16, torch.float16)
LARGEST = TOKENS * WIDTHS[0]  # the largest tokens x width at which the kernels were faster
TRITON = find_spec("triton") is not None  # included with torch on Linux


def applies(blocks: Iterable[nn.Module], x: Tensor, *, always: bool = False) -> bool:
    """Whether to use `run` for these blocks: compiled, on a GPU, in half precision.

    Args:
        x: (B, N, C), input of the first block.
        always: whether to use it for all supported shapes, also where it is slower.
    """
    kind = x.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in HALVES
    fast = TRITON and x.is_cuda and half and torch.compiler.is_compiling()
    tokens, width = x.shape[1:]
    fits = tokens <= TOKENS and WIDTHS[0] <= width <= WIDTHS[1]
    chosen = fits and (always or pays(tokens, width))
    return fast and chosen and all(supported(block) for block in blocks)


def pays(tokens: int, width: int) -> bool:
    """Whether the kernels are faster than torch's operators, as measured on an H200."""
    return tokens * width <= LARGEST


def supported(block: nn.Module) -> bool:
    """Whether this is a plain timm block: exact GELU, biases, no dropout, no extra norms."""
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    attn, mlp = block.attn, block.mlp
    absent = (block.ls1, block.ls2, block.drop_path1, block.drop_path2, attn.q_norm, attn.k_norm)
    absent += (getattr(attn, "norm", nn.Identity()), mlp.norm)
    linears, norms = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2), (block.norm1, block.norm2)
    drops = (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2)
    return (
        all(isinstance(part, nn.Identity) for part in absent)
        and all(type(part) is nn.Linear for part in linears)  # subclasses add terms, e.g. LoRA
        and all(isinstance(part, nn.LayerNorm) for part in norms)
        and all(part.bias is not None for part in linears + norms)
        and not (block.training and any(part.p for part in drops))
        and isinstance(mlp.act, GELU)
        and getattr(attn, "gate", None) is None  # missing in older timm
        and attn.head_dim in HEAD_SIZES
    )


def run(
    blocks: Sequence[nn.Module] | nn.Sequential, x: Tensor, *, first_only: bool = False
) -> Tensor:
    """Returns outputs (B, N, C); with `first_only`, those of the first token (B, 1, C)."""
    rest = None
    for number, block in enumerate(blocks, start=1):
        x, rest = _block(block, x, rest, first_only and number == len(blocks))
    return x if rest is None else x + rest[0] + rest[1]


def _block(block: nn.Module, x: Tensor, rest: tuple[Tensor, Tensor] | None, first_only: bool):
    """Runs one block without its last sum, which is fused with the next block's norm.

    Args:
        rest: product and bias that the previous block has not yet added; None for the first block.
    """
    if rest is None:
        normed = block.norm1(x)
    else:
        x, normed = add_norm(x, *rest, block.norm1)
    attn, mlp = block.attn, block.mlp
    mixed = attention(_linear(normed, attn.qkv), attn.qkv.bias, attn.num_heads)
    if first_only:
        x, mixed = x[:, :1], mixed[:, :1]
    x, normed = add_norm(x, F.linear(mixed, attn.proj.weight), attn.proj.bias, block.norm2)
    hidden = gelu(_linear(normed, mlp.fc1), mlp.fc1.bias)
    return x, (F.linear(hidden, mlp.fc2.weight), mlp.fc2.bias)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Applies the layer without a bias gradient, which the next kernel computes."""
    return F.linear(x, layer.weight, layer.bias.detach())
