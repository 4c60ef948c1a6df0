"""Integrations with other training frameworks. Each module requires its framework."""

from torch import nn

import ed
from ed.core.inputs import moved

QUICK = {"pairs": 50, "resolution": 50, "degree": 20}  # evaluates the model at 2,500 points


def track(model: nn.Module, inputs, **settings) -> float:
    """Returns the ED of a model on fixed inputs, or of the field that `inputs(model)` returns."""
    settings = QUICK | settings
    if callable(inputs):
        return ed.estimate(inputs(model), **settings).mean
    return ed.estimate(model, moved(inputs, model), **settings).mean
