"""Integrations with other training frameworks. Each module requires its framework."""

from collections.abc import Callable

from torch import Tensor, nn

import ed

QUICK = {"pairs": 50, "resolution": 50, "degree": 20}  # evaluates the model at 2,500 points


def track(model: nn.Module, inputs: Tensor | Callable[[nn.Module], ed.Field], **settings) -> float:
    """Returns the ED of a model on fixed inputs, or of the field that `inputs(model)` returns."""
    settings = QUICK | settings
    if not isinstance(inputs, Tensor):
        return ed.estimate(inputs(model), **settings).mean
    device = next(model.parameters()).device
    return ed.estimate(model, inputs.to(device), **settings).mean
