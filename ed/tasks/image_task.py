"""Classification of small images, kept on the training device as uint8."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.validate import count, counts, each
from ed.datasets.batches import Batch, shuffled_batches
from ed.datasets.crops import check_crop, croppable, random_crops
from ed.datasets.images import Images, load_images
from ed.models import spaces
from ed.runtime import processes
from ed.runtime.streams import reseed
from ed.tasks.base import EpochTask, check_shapes, check_warmup

EVAL_BATCH = 1000


class ImageTask(EpochTask):
    """Classifies the small images that `load` returns; keeps them on the device.

    Attributes:
        mean, std: normalisation per channel.
    """

    metric = "eval/acc"
    has_labels = True
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __init__(
        self,
        data: str = "uoft-cs/cifar10",
        *,
        epochs: int = 300,
        warmup_epochs: float = 10,
        batch_size: int = 256,
        augment: bool = True,
        crop: str = "resized",
        crop_area: Sequence[float] = (0.08, 1.0),
        space: str = "input",
        eval_every: int = 5,
        classes: int = 10,
        image_size: Sequence[int] = (32, 32),
    ):
        counts("task", epochs=epochs, batch_size=batch_size, eval_every=eval_every, classes=classes)
        check_warmup("epochs", warmup_epochs, epochs)
        each(count, "task.image_size", image_size, length=2)
        check_crop(crop, crop_area)
        self.data, self.epochs, self.warmup_epochs = data, epochs, warmup_epochs
        self.batch_size, self.augment, self.space = batch_size, augment, space
        self.crop, self.crop_area = crop, tuple(crop_area)
        self.eval_every, self.classes, self.image_size = eval_every, classes, tuple(image_size)

    @property
    def has_noise(self) -> bool:
        return self.space == "input"

    def load(self, split: str) -> Images:
        """Loads the "train" or "test" split."""
        return load_images(self.data, split, classes=self.classes, size=self.image_size)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.train, self.test = (self.load(split).to(device) for split in ("train", "test"))
        if self.augment:
            self.croppable = croppable(self.train.pixels, self.crop)
        self.plan(device, seed, epoch=len(self.train))

    def plan(self, device: torch.device, seed: int, *, epoch: int) -> None:
        """Counts the steps, given `epoch` images per epoch, and moves constants to the device."""
        self.count_steps(epoch)
        self.seed, self.device, self.num_examples = seed, device, len(self.train)
        self.shift = torch.tensor(self.mean, device=device).view(3, 1, 1)
        self.scale = torch.tensor(self.std, device=device).view(3, 1, 1)

    def check_model(self, model: nn.Module) -> None:
        size = tuple(getattr(model, "image_size", self.image_size))
        if size != self.image_size:
            raise ValueError(
                f"task.image_size={list(self.image_size)}: the model expects {list(size)}"
            )
        if self.space != "input":
            spaces.split(model, self.space)
        check_shapes(
            model,
            f"task.image_size={list(self.image_size)}, task.classes={self.classes}",
            inputs=(3, *self.image_size),
            outputs=self.classes,
            remedy="start from an experiment, e.g. experiment=cifar10_vit_tiny",
        )

    def batches(self, model, start: int) -> Iterator[Batch]:
        augmentation = torch.Generator(self.device)
        steps = range(start, self.total_steps)
        how = {"seed": self.seed, "device": self.device}
        for step, index in shuffled_batches(len(self.train), self.batch_size, steps, **how):
            if self.augment:
                reseed(augmentation, self.seed, "augmentation", step)
                pixels = random_crops(
                    self.croppable, index, self.crop, self.crop_area, augmentation
                )
            else:
                pixels = self.train.pixels[index]
            yield {"x": self.normalise(pixels), "label": self.train.labels[index]}

    def examples(self, index: Tensor) -> Batch:
        if self.device.type == "cuda":  # copying from pageable memory would block
            index = index.pin_memory()
        index = index.to(self.device, non_blocking=True)
        return {"x": self.normalise(self.train.pixels[index]), "label": self.train.labels[index]}

    def images(self, batch: Batch) -> Tensor:
        return (batch["x"] * self.scale + self.shift).clamp(0, 1)

    def normalise(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.shift) / self.scale

    def field(self, model: nn.Module, batch: Batch) -> Field:
        if self.space == "input":
            return Field.of(model, batch["x"])
        before, after = spaces.split(model, self.space)
        return Field.of(after, before(batch["x"]), module=model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        accuracy, loss = self.score(model, self.test)
        return {"eval/acc": accuracy, "eval/loss": loss}

    def score(self, model: nn.Module, images: Images) -> tuple[float, float]:
        """Returns the accuracy in percent and the mean loss; processes share the work."""
        ours = processes.part(len(images))
        correct, loss = images.labels.new_zeros(()), self.shift.new_zeros(())
        for start in ours[::EVAL_BATCH]:
            part = slice(start, min(start + EVAL_BATCH, ours.stop))
            labels = images.labels[part]
            outputs = model(self.normalise(images.pixels[part])).float()
            correct = correct + (outputs.argmax(-1) == labels).sum()
            loss = loss + F.cross_entropy(outputs, labels, reduction="sum")
        correct, loss = (float(processes.total(value)) for value in (correct, loss))
        return 100 * correct / len(images), loss / len(images)

    def noise_like(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns normalised uniform random pixels, for the paper's random-pixel ablation."""
        pixels = torch.rand(x.shape, generator=generator, device=x.device)
        return (pixels - self.shift) / self.scale
