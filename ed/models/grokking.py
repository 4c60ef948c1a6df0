"""The small decoder of the grokking study (Power et al. 2022), seen from its embedding space."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SPECIAL_TOKENS = 2  # behind the numbers: the operator and the equals sign


class GrokkingTransformer(nn.Module):
    """Embeddings (N, L, width) -> logits (N, numbers + 2) of the token behind the last one.

    Causal, post-norm, ReLU, no biases but those of the norms, fixed sinusoidal positions, an output
    layer of its own. Cut like a text classifier: `embed` makes the embeddings of token ids,
    `forward` runs everything after them, so that paths between equations can run there.

    Args:
        numbers: how many the vocabulary has; the special tokens come on top.
        length: tokens of the longest sequence.
    """

    def __init__(self, *, numbers: int, length: int, depth: int, width: int, heads: int):
        super().__init__()
        if width % heads or width % 2:
            raise ValueError(f"model.width={width}: must be even, and model.heads={heads} times n")
        self.vocabulary = numbers + SPECIAL_TOKENS
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.output = nn.Linear(width, self.vocabulary, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (N, L) -> what the first block receives, (N, L, width)."""
        return self.tokens(ids) + self.positions[: ids.shape[1]]

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.output(self.blocks(embeddings)[:, -1])


class Block(nn.Module):
    """Attention to what came before, then two layers, each normalised with its own input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.norm_attention, self.norm_layers = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_attention(x + self.attention(x))
        return self.norm_layers(x + self.narrow(F.relu(self.widen(x))))

    def attention(self, x: Tensor) -> Tensor:
        parts = self.attend(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.transpose(1, 3).unbind(2)  # each (N, heads, L, width / heads)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(found.transpose(1, 2).flatten(2))


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as sines (even places) and cosines (odd) of falling frequency: (length, width)."""
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
