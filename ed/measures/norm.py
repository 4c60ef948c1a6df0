"""The L2 norm of the parameters."""

from dataclasses import dataclass

import torch
from torch import nn

from ed.measures.base import Measure


@dataclass(frozen=True)
class ParameterNorm(Measure):
    """L2 norm of all parameters, including biases and normalisation layers."""

    reads_examples = False

    @torch.no_grad()
    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        # float64, as the sum has millions of terms
        squares = [weight.double().square().sum() for weight in model.parameters()]
        return {"": torch.stack(squares).sum().sqrt().item()}
