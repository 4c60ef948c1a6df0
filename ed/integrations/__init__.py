"""Integrations with other training frameworks. Each module requires its framework."""

import torch
from torch import nn

import ed
from ed.core.inputs import moved
from ed.core.model_state import evaluating

QUICK = {"pairs": 50, "resolution": 50, "degree": 20}  # evaluates the model at 2,500 points


def track(model: nn.Module, inputs, **settings) -> float:
    """Returns the ED of a model on fixed inputs, or of the field that `inputs(model)` returns."""
    settings = QUICK | settings
    if callable(inputs):
        with torch.no_grad(), evaluating(model):  # dropout would draw random numbers
            inputs = inputs(model)
        return ed.estimate(inputs, **settings).mean
    return ed.estimate(model, moved(inputs, model), **settings).mean
