"""Polynomial networks: square activations, so the network is a polynomial of its inputs."""

import itertools
import math

import torch
from torch import Tensor, nn

HIDDEN_LAYERS = 3  # as in the paper: degree up to 2^3


class PolynomialNetwork(nn.Module):
    """Three hidden layers with square activation and a linear output: (N, inputs) -> (N, outputs).

    The activation is (z^2 - 1) / sqrt(2), the second Hermite polynomial: the square, shifted and
    scaled by constants that the next linear layer can absorb. It describes the same functions as
    z^2, but features whose mean is not far from zero make a better conditioned problem.

    Runs in float64 whatever the inputs are: eighth powers leave float32 few digits for an error
    near zero.
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
        super().__init__()
        widths = [inputs, *[width] * HIDDEN_LAYERS]
        self.hidden = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(widths)
        )
        self.output = nn.Linear(width, outputs)
        for layer in self.hidden:
            nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
            nn.init.normal_(layer.bias, std=bias)  # mixes degrees from the start
        nn.init.normal_(self.output.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.output.bias)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        for layer in self.hidden:
            x = (layer(x).square() - 1) / math.sqrt(2)
        return self.output(x)
