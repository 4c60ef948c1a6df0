"""Integrations with other training frameworks; each module needs its own package."""

from collections.abc import Callable

from torch import Tensor, nn

import ed

QUICK = {"pairs": 50, "resolution": 50, "degree": 20}  # 2,500 forward passes


def track(model: nn.Module, inputs: Tensor | Callable[[nn.Module], ed.Field], **settings) -> float:
    """ED of a model on fixed inputs, or on the field that `inputs(model)` returns."""
    settings = QUICK | settings
    if not isinstance(inputs, Tensor):
        return ed.estimate(inputs(model), **settings).mean
    device = next(model.parameters()).device
    return ed.estimate(model, inputs.to(device), **settings).mean
