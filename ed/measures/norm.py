"""The L2 norm of the parameters."""

from dataclasses import dataclass

import torch
from torch import nn

from ed.measures.base import Measure


@dataclass(frozen=True)
class ParameterNorm(Measure):
    """||w||, over all parameters: weights, biases and those of the normalisations."""

    reads_examples = False

    @torch.no_grad()
    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        # float64: millions of squares add up
        squares = [weight.double().square().sum() for weight in model.parameters()]
        return {"": torch.stack(squares).sum().sqrt().item()}
