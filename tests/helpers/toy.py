"""A task with random images, small networks, and training steps that use them."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.engine.compose import compose_config
from ed.engine.optimizer import SGD
from ed.engine.step import TrainStep
from ed.models.vit import ViT
from ed.regularizers.base import StepState
from ed.tasks.base import Task

CLASSES, BATCH = 3, 8
CPU = torch.device("cpu")
METHODS = {  # config leaf: overrides that make it small
    "none": [],
    "mixup": [],
    "sam": [],
    "asam": [],
    "jacobian": ["regularizer.projections=2"],
    "ed": [],
    "ed_performance": ["regularizer.pairs=4"],
    "ed_fast": ["regularizer.pairs=3", "regularizer.every=2"],
}


class Toy(Task):
    """A task with random images and random labels."""

    batch_size, total_steps = BATCH, 10
    has_labels = has_noise = True

    def batches(self, model, start, dtype=torch.float64):
        for step in range(start, self.total_steps):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 3, 8, 8, generator=draw, dtype=dtype)
            yield {"x": x, "label": torch.randint(CLASSES, (BATCH,), generator=draw)}

    def field(self, model, batch):
        return Field.of(model, batch["x"])

    def loss(self, outputs, batch):
        loss = F.cross_entropy(outputs, batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).double().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def noise_like(self, x, generator):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype)


def vit(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    size = {"image_size": [8, 8], "patch": 4, "width": 16, "depth": 2, "heads": 2}
    model = ViT(classes=CLASSES, **size, pool="token", dropout=0.0, activation="gelu")
    return model.to(dtype)


def convolution() -> nn.Module:
    """Returns a small convolutional network with batch norm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, CLASSES)).double()


@functools.cache
def config(name: str):
    return compose_config([f"regularizer={name}", *METHODS[name]]).regularizer


def training(regularizer, model, *, recipe=None, **how) -> TrainStep:
    recipe = recipe or SGD(lr=0.1, weight_decay=0.0, schedule="constant")
    return TrainStep(Toy(), model, regularizer, recipe, device=CPU, seed=0, **how)


def run(step: TrainStep, start: int, stop: int, dtype=torch.float64) -> TrainStep:
    batches = Toy().batches(step.model, start, dtype)
    for number, batch in zip(range(start, stop), batches, strict=False):
        step(batch, number)
    return step


def state(seed: int = 0) -> StepState:
    return StepState(torch.tensor(0.5), torch.Generator().manual_seed(seed))


def first_batch() -> dict:
    return next(Toy().batches(None, 0))


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES), nn.Tanh()).double()
