"""A small task and network for tests of measures, and options of a quick measurement."""

import torch
from torch import nn

from ed.core.field import Field

# options of scripts/measure.py
QUICK = ["--pairs", "6", "--resolution", "20", "--degree", "6", "--device", "cpu"]


class Toy:
    """The part of a task that measures use: 60 points in the plane, three classes."""

    num_examples, has_noise, penalised, metric = 60, True, slice(None), "eval/acc"

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(60, 2, generator=draw, dtype=torch.float64)
        self.label = torch.randint(3, (60,), generator=draw)

    def examples(self, index):
        return {"x": self.x[index], "label": self.label[index]}

    def field(self, model, batch):
        return Field.of(model, batch["x"])

    def loss(self, outputs, batch):
        right = (outputs.argmax(-1) == batch["label"]).float().mean()
        return nn.functional.cross_entropy(outputs, batch["label"]), {"acc": 100 * right}

    def evaluate(self, model):
        return {"eval/acc": 100 * (model(-self.x).argmax(-1) == self.label).double().mean().item()}

    def noise_like(self, x, generator):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype)


def network(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)]
    if norm:
        layers.insert(2, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()
