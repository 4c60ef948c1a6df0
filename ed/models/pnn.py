"""Polynomial networks, whose output is a polynomial in the input due to square activations."""

import itertools
import math

import torch
from torch import Tensor, nn

from ed.core.validate import counts, not_negative

HIDDEN_LAYERS = 3  # as in the paper; allows degrees up to 2^3


class PolynomialNetwork(nn.Module):
    """MLP with three hidden layers and square activations: (N, inputs) -> (N, outputs).

    The activation is the second Hermite polynomial, (z^2 - 1) / sqrt(2). It represents the same
    functions as z^2, but its mean near zero makes training better conditioned.

    Always runs in float64, as float32 is too imprecise for eighth powers.
    """

    def __init__(
        self,
        *,
        inputs: int = 3,
        outputs: int = 3,
        width: int = 128,
        gain: float = 0.5,
        bias: float = 0.5,
    ):
        counts("model", inputs=inputs, outputs=outputs, width=width)
        for name, value in (("gain", gain), ("bias", bias)):
            not_negative(f"model.{name}", value)
        super().__init__()
        widths = [inputs, *[width] * HIDDEN_LAYERS]
        self.hidden = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(widths)
        )
        self.output = nn.Linear(width, outputs)
        for layer in self.hidden:
            nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
            nn.init.normal_(layer.bias, std=bias)  # so that all degrees occur initially
        nn.init.normal_(self.output.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.output.bias)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        for layer in self.hidden:
            x = (layer(x).square() - 1) / math.sqrt(2)
        return self.output(x)
