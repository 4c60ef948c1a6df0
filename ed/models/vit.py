"""timm's vision transformers at any size, for paths between pixels or between features."""

import math
from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ed.core.validate import choice, counts, fraction
from ed.kernels import block as fused

POSITIONS, HEADS, INITS = ("learned", "sincos"), ("linear", "tanh"), ("timm", "jax")
POOLS = ("token", "avg")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh")  # timm's names


class ViT(VisionTransformer):
    """timm's ViT. Defaults to the paper's ViT-Tiny for 32 x 32 images, as we understand it.

    `pool="token"` uses the class token; `"avg"` has no class token and averages the patches after
    the last norm. `positions`, `head` and `init` are for big_vision recipes: fixed positions, a
    hidden tanh layer before the output, and big_vision's initialisation, with a zero output
    layer. `kernels` says whether a compiled step uses `ed.kernels`: `True` for all blocks they
    support, `"auto"` for those they make faster.
    """

    kernels: bool | str = False  # set by the training step

    def __init__(
        self,
        *,
        classes: int = 10,
        image_size: Sequence[int] = (32, 32),
        patch: int = 4,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        pool: str = "token",
        dropout: float = 0.0,
        activation: str = "gelu",
        positions: str = "learned",
        head: str = "linear",
        init: str = "timm",
    ):
        counts("model", patch=patch, width=width, depth=depth, heads=heads)
        fraction("model.dropout", dropout, one=False)
        if width % heads:
            raise ValueError(f"model.width={width}: must be a multiple of model.heads={heads}")
        if any(side % patch for side in image_size):
            raise ValueError(f"model.patch={patch}: must divide task.image_size={image_size}")
        choice("model.pool", pool, POOLS)
        choice("model.activation", activation, ACTIVATIONS)
        choice("model.positions", positions, POSITIONS)
        choice("model.head", head, HEADS)
        choice("model.init", init, INITS)
        super().__init__(
            img_size=tuple(image_size),
            patch_size=patch,
            num_classes=classes,
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            global_pool=pool,
            class_token=pool == "token",
            fc_norm=False,
            pos_drop_rate=dropout,
            proj_drop_rate=dropout,
            act_layer=activation,
            weight_init="jax" if init == "jax" else "",
        )
        if head == "tanh":
            self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), self.head)
            nn.init.xavier_uniform_(self.head[0].weight)
            nn.init.zeros_(self.head[0].bias)
        if init == "jax":
            self._init_attention(width)
        if positions == "sincos":
            self._fix_positions(width)

    def _init_attention(self, width: int) -> None:
        """Initialises queries, keys and values as three separate matrices, unlike timm."""
        bound = math.sqrt(6 / (2 * width))
        for block in self.blocks:
            nn.init.uniform_(block.attn.qkv.weight, -bound, bound)

    def _fix_positions(self, width: int) -> None:
        """Replaces learned positions with sines and cosines, and zeros for the class token."""
        patches = sincos_positions(*self.patch_embed.grid_size, width)
        token = patches.new_zeros(self.num_prefix_tokens, width)
        del self.pos_embed
        self.register_buffer("pos_embed", torch.cat([token, patches])[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._finish(self._embed(x), self.blocks)

    def to_space(self, x: Tensor, space: str) -> Tensor:
        """Maps pixels to features after the embedding ("embedding") or first block ("block1")."""
        x = self._embed(x)
        return self._run(x, self.blocks[:1]) if space == "block1" else x

    def from_space(self, features: Tensor, space: str) -> Tensor:
        """Maps features from `to_space` to outputs."""
        return self._finish(features, self.blocks[1:] if space == "block1" else self.blocks)

    def _embed(self, x: Tensor) -> Tensor:
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))

    def _finish(self, x: Tensor, blocks: nn.Sequential) -> Tensor:
        """Runs the remaining blocks and the head."""
        x = self._run(x, blocks, first_only=self.global_pool == "token")
        return self.forward_head(self.norm(x))

    def _run(self, x: Tensor, blocks: nn.Sequential, *, first_only: bool = False) -> Tensor:
        """Runs the blocks; with `first_only`, the last one may drop all tokens but the first."""
        if self.kernels and fused.applies(blocks, x, always=self.kernels is True):
            return fused.run(blocks, x, first_only=first_only)
        for block in blocks:
            x = block(x)
        return x


def sincos_positions(rows: int, columns: int, width: int) -> Tensor:
    """Returns fixed position embeddings of a grid, row by row: (rows * columns, width).

    The sine and cosine of the column and row each take a quarter of the width, with frequencies
    that decrease geometrically from 1 to 1e-4.
    """
    if width % 4 or width < 8:
        raise ValueError(
            f"model.width={width}: model.positions=sincos requires a multiple of 4, >= 8"
        )
    frequencies = 1e4 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    x, y = (place.reshape(-1, 1) * frequencies for place in (column, row))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()
