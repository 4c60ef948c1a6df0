"""Transformer blocks of timm by our kernels, on the blocks' own parameters.

A block's last sum waits for the next block's norm, so that both are one pass over memory. Biases
get their gradients from the kernels behind their products.
"""

from collections.abc import Collection, Iterable, Sequence
from importlib.util import find_spec

import torch
from timm.layers.activations import GELU
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn
from torch.nn import functional as F

from ed.kernels import norm_products
from ed.kernels.attention import HEAD_SIZES, SMALLEST, TOKENS, attention
from ed.kernels.norm_products import add_norm_linear, add_norm_mlp
from ed.kernels.rowwise import WIDTHS, add_norm, gelu

# norms that are part of the products behind them, and the projection that is part of the MLP
FUSED = {"qkv", "mlp", "proj"}
HALVES = (torch.bfloat16, torch.float16)
TRITON = find_spec("triton") is not None  # torch brings it on Linux


def applies(blocks: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether `run` takes over: in half precision on a GPU, compiled, for blocks that it knows.

    Args:
        x: (B, N, C), what the first block receives.
    """
    kind = x.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in HALVES
    fast = TRITON and x.is_cuda and half and torch.compiler.is_compiling()
    tokens, width = x.shape[1:]
    fits = tokens <= TOKENS and WIDTHS[0] <= width <= WIDTHS[1]
    return fast and fits and all(supported(block) for block in blocks)


def supported(block: nn.Module) -> bool:
    """A plain block of timm: exact GELU, biases, no dropout, no norm of queries, no layer scale."""
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    attn, mlp = block.attn, block.mlp
    absent = (block.ls1, block.ls2, block.drop_path1, block.drop_path2, attn.q_norm, attn.k_norm)
    absent += (getattr(attn, "norm", nn.Identity()), mlp.norm)
    linears, norms = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2), (block.norm1, block.norm2)
    drops = (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2)
    return (
        all(isinstance(part, nn.Identity) for part in absent)
        and all(part.bias is not None for part in linears + norms)
        and not (block.training and any(part.p for part in drops))
        and isinstance(mlp.act, GELU)
        and getattr(attn, "gate", None) is None  # older timm has none
        and attn.head_dim in HEAD_SIZES
    )


def run(
    blocks: Sequence[nn.Module] | nn.Sequential, x: Tensor, *, first_only: bool = False
) -> Tensor:
    """Features (B, N, C) behind the blocks; with `first_only` (B, 1, C), of the first token alone.

    The first token needs the others up to the last block's attention and no further.
    """
    rest = None
    for number, block in enumerate(blocks, start=1):
        x, rest = _block(block, x, rest, first_only and number == len(blocks))
    return x + rest[0] + rest[1]


def _block(block: nn.Module, x: Tensor, rest: tuple[Tensor, Tensor] | None, first_only: bool):
    """One block up to its last sum, which comes with the next block's norm.

    Args:
        rest: what the block before left to be added, a product and its bias; None at the first.
    """
    attn, fusions = block.attn, FUSED if _fits(block) else ()
    if rest is None:
        qkv = _linear(block.norm1(x), attn.qkv)
    elif "qkv" in fusions:
        x, qkv = add_norm_linear(x, *rest, norm=block.norm1, layer=attn.qkv)
    else:
        x, normed = add_norm(x, *rest, block.norm1)
        qkv = _linear(normed, attn.qkv)
    mixed = attention(qkv, attn.qkv.bias, attn.num_heads)
    if first_only:  # too few rows for tiles of them to fill a GPU
        return _mlp(block, x[:, :1], mixed[:, :1], ())
    return _mlp(block, x, mixed, fusions)


def _mlp(block: nn.Module, x: Tensor, mixed: Tensor, fusions: Collection[str]):
    """From the attention's outputs to the block's last sum."""
    proj, norm, fc1, fc2 = block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2
    if "mlp" not in fusions:
        x, normed = add_norm(x, F.linear(mixed, proj.weight), proj.bias, norm)
        return x, (F.linear(gelu(_linear(normed, fc1), fc1.bias), fc2.weight), fc2.bias)
    layers = {"norm": norm, "fc1": fc1, "fc2": fc2}
    if "proj" in fusions:
        x, y = add_norm_mlp(x, mixed, proj.bias, projection=proj, **layers)
    else:
        x, y = add_norm_mlp(x, F.linear(mixed, proj.weight), proj.bias, **layers)
    return x, (y, fc2.bias)


def _fits(block: nn.Module) -> bool:
    """Whether norms are fused into products: their tiles need the shared memory of Hopper."""
    hidden, width = block.mlp.fc1.weight.shape
    return width in norm_products.WIDTHS and hidden % SMALLEST == 0 and _on_hopper()


@torch.compiler.assume_constant_result
def _on_hopper() -> bool:
    """True without a GPU too, where Triton's interpreter has no such limit."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer; its bias gets no gradient here: the kernel behind it sends one."""
    return F.linear(x, layer.weight, layer.bias.detach())
