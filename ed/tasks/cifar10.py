"""CIFAR-10 classification: the paper's main image task."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.modes import batch_norms, frozen_statistics
from ed.core.streams import generator, reseed
from ed.models.spaces import split
from ed.tasks.base import Batch, Task
from ed.tasks.images import crop_and_flip, load_pictures

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PADDING = 4
EVAL_BATCH = 1000


class Cifar10(Task):
    """Pictures on the device, random crop and flip, cross-entropy."""

    metric = "eval/acc"
    has_labels = has_noise = True

    def __init__(
        self,
        data: str,
        *,
        epochs: int,
        warmup_epochs: float,
        batch_size: int,
        augment: bool,
        space: str,
        eval_every: int,
        classes: int,
        image_size: list[int],
    ):
        if batch_size < 1:
            raise ValueError(f"task.batch_size={batch_size}: must be at least 1")
        if epochs < 1 or not 0 <= warmup_epochs <= epochs:
            raise ValueError(
                f"task.epochs={epochs}, task.warmup_epochs={warmup_epochs}: need at least one "
                "epoch and a warm-up within them"
            )
        self.data, self.epochs, self.warmup_epochs = data, epochs, warmup_epochs
        self.batch_size, self.augment, self.space = batch_size, augment, space
        self.eval_every, self.classes, self.image_size = eval_every, classes, tuple(image_size)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.seed, self.device = seed, device
        self.train, self.test = (
            load_pictures(self.data, split, classes=self.classes, size=self.image_size).to(device)
            for split in ("train", "test")
        )
        if len(self.train) < self.batch_size:
            raise ValueError(
                f"task.batch_size={self.batch_size}: task.data={self.data} has only "
                f"{len(self.train)} training pictures"
            )
        pad = [PADDING] * 4 if self.augment else [0] * 4
        self.padded = F.pad(self.train.pixels, pad)  # black borders, as padding before scaling
        self.shift = torch.tensor(MEAN, device=device).view(3, 1, 1)
        self.scale = torch.tensor(STD, device=device).view(3, 1, 1)
        # the last incomplete batch is dropped, so that all steps have one shape
        self.steps_per_epoch = len(self.train) // self.batch_size
        self.total_steps = self.epochs * self.steps_per_epoch
        self.warmup_steps = round(self.warmup_epochs * self.steps_per_epoch)
        self.eval_steps = self.eval_every * self.steps_per_epoch

    def check_model(self, model: nn.Module) -> None:
        if self.space != "input":
            split(model, self.space)

    def batches(self, model, start: int) -> Iterator[Batch]:
        augmentation = torch.Generator(self.device)
        for step in range(start, self.total_steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            if step == start or place == 0:
                order = torch.randperm(
                    len(self.train), generator=generator(self.seed, "order", epoch)
                )
                order = order.to(self.device, non_blocking=True)
            index = order[place * self.batch_size : (place + 1) * self.batch_size]
            pixels = self.train.pixels[index]
            if self.augment:
                reseed(augmentation, self.seed, "augmentation", step)
                pixels = crop_and_flip(self.padded, index, PADDING, augmentation)
            yield {"x": self.normalise(pixels), "label": self.train.labels[index]}

    def normalise(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.shift) / self.scale

    def field(self, model: nn.Module, batch: Batch) -> Field:
        aside = partial(frozen_statistics, model) if batch_norms(model) else None
        if self.space == "input":
            return Field.of(model, batch["x"], aside=aside)
        before, after = split(model, self.space)
        return Field.of(after, before(batch["x"]), aside=aside)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(outputs.float(), batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        correct, loss = 0, 0
        for start in range(0, len(self.test), EVAL_BATCH):
            part = slice(start, start + EVAL_BATCH)
            labels = self.test.labels[part]
            outputs = model(self.normalise(self.test.pixels[part])).float()
            correct = correct + (outputs.argmax(-1) == labels).sum()
            loss = loss + F.cross_entropy(outputs, labels, reduction="sum")
        count = len(self.test)
        return {"eval/acc": 100 * float(correct) / count, "eval/loss": float(loss) / count}

    def noise_like(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform pixels in [0, 1] before normalisation: the paper's random-pixel ablation."""
        if self.space != "input":
            raise ValueError("regularizer.endpoints=noise makes pixels: set task.space=input")
        pixels = torch.rand(x.shape, generator=generator, device=x.device)
        return (pixels - self.shift) / self.scale
