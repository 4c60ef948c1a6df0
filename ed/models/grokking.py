"""The small decoder of the grokking study (Power et al. 2022), seen from its embedding space."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.validate import choice, counts, fraction

NORMS = ("post", "pre")
SPECIAL_TOKENS = 2  # behind the numbers: the operator and the equals sign


class GrokkingTransformer(nn.Module):
    """Embeddings (N, L, width) -> logits (N, numbers + 2) of the token behind the last one.

    Causal, ReLU, no biases but those of the norms, fixed sinusoidal positions, an output layer of
    its own. Cut like a text classifier: `embed` makes the embeddings of token ids,
    `forward` runs everything after them, so that paths between equations can run there.

    Args:
        numbers: how many the vocabulary has; the special tokens come on top.
        length: tokens of the longest sequence.
        norm: `post` normalises sums (Power et al.), `pre` what enters a layer, and the end.
        dropout: on what each layer adds.
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
    ):
        super().__init__()
        counts("model", numbers=numbers, length=length, depth=depth, width=width, heads=heads)
        if width % heads or width % 2:
            raise ValueError(f"model.width={width}: must be even and a multiple of {heads} heads")
        choice("model.norm", norm, NORMS)
        fraction("model.dropout", dropout, one=False)
        self.vocabulary = numbers + SPECIAL_TOKENS
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, heads, norm, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.output = nn.Linear(width, self.vocabulary, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (N, L) -> what the first block receives, (N, L, width)."""
        return self.tokens(ids) + self.positions[: ids.shape[1]]

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(embeddings)[:, -1]))


class Block(nn.Module):
    """Attention to what came before, then two layers."""

    def __init__(self, width: int, heads: int, norm: str, dropout: float):
        super().__init__()
        self.heads, self.first = heads, norm == "pre"
        self.dropout = nn.Dropout(dropout)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.norm_attention, self.norm_layers = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.attention, self.norm_attention)
        return self.add(x, self.layers, self.norm_layers)

    def add(self, x: Tensor, layer: Callable, norm: nn.Module) -> Tensor:
        if self.first:
            return x + self.dropout(layer(norm(x)))
        return norm(x + self.dropout(layer(x)))

    def layers(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x)))

    def attention(self, x: Tensor) -> Tensor:
        parts = self.attend(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.transpose(1, 3).unbind(2)  # each (N, heads, L, width / heads)
        return self.mix(causal_attention(query, key, value).transpose(1, 2).flatten(2))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As F.scaled_dot_product_attention, each (N, heads, L, d), for sequences of a few tokens.

    Kernels made for hundreds of tokens took 0.34 of 0.79 ms of a step with four; sums of products,
    which the compiler fuses, take next to nothing.
    """
    scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights[..., None] * value[..., None, :, :]).sum(-2)


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as sines (even places) and cosines (odd) of falling frequency: (length, width)."""
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
