"""The small decoder of the grokking study (Power et al. 2022), applied to embeddings."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.validate import choice, counts, fraction

NORMS = ("post", "pre", "stream")
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}
POSITIONS = ("fixed", "learned")
SPECIAL_TOKENS = 2  # the operator and the equals sign, with ids after the numbers


class GrokkingTransformer(nn.Module):
    """Maps embeddings (N, L, width) to next-token logits (N, numbers + 2).

    A causal decoder whose output layer is untied and has no bias. `embed` maps token ids to
    embeddings, and `forward` does the rest, so that paths can connect embeddings. Defaults to the
    network of Power et al.

    Args:
        numbers: vocabulary size without the special tokens.
        length: maximum sequence length.
        norm: `post` normalises after each residual sum, `pre` before each layer. In `stream`, the
            norm before attention also replaces the residual stream: x = ln1(x);
            x = x + attention(x); x = x + mlp(ln2(x)). With `pre` and `stream`, a layer norm follows
            the last block.
        dropout: dropout on each residual branch.
        bias: whether linear layers in the blocks have biases.
        activation: `relu` or `gelu`.
        positions: `fixed` sinusoids, or `learned`, initialised from a standard normal.
    """

    def __init__(
        self,
        *,
        numbers: int = 97,
        length: int = 4,
        depth: int = 2,
        width: int = 128,
        heads: int = 4,
        norm: str = "post",
        dropout: float = 0.0,
        bias: bool = False,
        activation: str = "relu",
        positions: str = "fixed",
    ):
        super().__init__()
        counts("model", numbers=numbers, length=length, depth=depth, width=width, heads=heads)
        if width % heads or width % 2:
            raise ValueError(f"model.width={width}: must be even and a multiple of {heads} heads")
        choice("model.norm", norm, NORMS)
        choice("model.bias", bias, (True, False))
        choice("model.activation", activation, ACTIVATIONS)
        choice("model.positions", positions, POSITIONS)
        fraction("model.dropout", dropout, one=False)
        self.vocabulary = numbers + SPECIAL_TOKENS
        self.tokens = nn.Embedding(self.vocabulary, width)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(length, width))
        else:
            self.register_buffer("positions", sinusoids(length, width), persistent=False)
        how = {"norm": norm, "dropout": dropout, "bias": bias, "activation": activation}
        self.blocks = nn.Sequential(*(Block(width, heads, **how) for _ in range(depth)))
        self.norm = nn.Identity() if norm == "post" else nn.LayerNorm(width)
        self.output = nn.Linear(width, self.vocabulary, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Maps token ids (N, L) to inputs of the first block (N, L, width)."""
        return self.tokens(ids) + self.positions[: ids.shape[1]]

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(embeddings)[:, -1]))


class Block(nn.Module):
    """Causal attention followed by a two-layer MLP."""

    def __init__(
        self, width: int, heads: int, *, norm: str, dropout: float, bias: bool, activation: str
    ):
        super().__init__()
        self.heads, self.order, self.activation = heads, norm, ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)
        self.attend = nn.Linear(width, 3 * width, bias=bias)
        self.mix = nn.Linear(width, width, bias=bias)
        self.widen = nn.Linear(width, 4 * width, bias=bias)
        self.narrow = nn.Linear(4 * width, width, bias=bias)
        self.norm_attention, self.norm_layers = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "stream":
            x = self.norm_attention(x)
            x = x + self.dropout(self.attention(x))
        else:
            x = self.add(x, self.attention, self.norm_attention)
        return self.add(x, self.layers, self.norm_layers)

    def add(self, x: Tensor, layer: Callable, norm: nn.Module) -> Tensor:
        if self.order == "post":
            return norm(x + self.dropout(layer(x)))
        return x + self.dropout(layer(norm(x)))

    def layers(self, x: Tensor) -> Tensor:
        return self.narrow(self.activation(self.widen(x)))

    def attention(self, x: Tensor) -> Tensor:
        parts = self.attend(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.transpose(1, 3).unbind(2)  # each (N, heads, L, width / heads)
        return self.mix(causal_attention(query, key, value).transpose(1, 2).flatten(2))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention (N, heads, L, d), faster than fused kernels for short sequences."""
    scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights[..., None] * value[..., None, :, :]).sum(-2)


def sinusoids(length: int, width: int) -> Tensor:
    """Position embeddings: sines (even channels) and cosines (odd channels), (length, width)."""
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
