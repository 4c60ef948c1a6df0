"""Base class of ImageNet tasks; worker processes load images during training."""

import logging
from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ed.core.field import Field
from ed.core.validate import count
from ed.datasets.imagenet.evaluation import EvaluationSet, accuracy
from ed.datasets.imagenet.loading import evaluation_batches, training_batches
from ed.datasets.imagenet.sources import Source, open_training
from ed.datasets.imagenet.views import Views
from ed.runtime.streams import generator
from ed.tasks.base import Batch
from ed.tasks.image_task import ImageTask

logger = logging.getLogger("ed")


class ImageNetTask(ImageTask):
    """Classifies ImageNet; subclasses choose the preprocessing.

    Batches contain uint8 pixels, which `field` normalises on the device.

    Args:
        views: preprocessing; `image_size` replaces its size.
        validation: the split to evaluate on; use "train" if there is no other.
        repeat: how often each training image is used in an epoch.
    """

    yields_share = True

    def __init__(self, data: str, views: Views, *, validation: str, repeat: int, **settings):
        super().__init__(data, augment=True, **settings)  # rejects unknown settings
        if len(set(self.image_size)) != 1:
            raise ValueError(f"task.image_size={list(self.image_size)}: must be square")
        count("task.repeat", repeat)
        self.views = replace(views, size=self.image_size[0])
        self.mean, self.std = views.mean, views.std
        self.validation, self.repeat = validation, repeat

    def prepare(self, device: torch.device, seed: int) -> None:
        self.train, validation = open_training(self.data, validation=self.validation)
        highest = max(int(source.labels.max()) for source in (self.train, validation))
        if highest >= self.classes:
            raise ValueError(
                f"task.classes={self.classes}: task.data={self.data} has labels up to {highest}"
            )
        self.test = EvaluationSet("val", validation)
        self.plan(device, seed, epoch=self.repeat * len(self.train))

    def sources(self) -> list[Source]:
        """Returns all image sources; subclasses may add more."""
        return [self.train, self.test.images]

    def remarks(self) -> list[str]:
        """Returns the remarks of all sources, without duplicates."""
        return list(dict.fromkeys(r for source in self.sources() for r in source.remarks))

    def log_remarks(self) -> None:
        for remark in self.remarks():
            logger.warning(remark)

    def provenance(self) -> dict[str, str]:
        return {"data": "; ".join(self.remarks())} if self.remarks() else {}

    def batches(self, model: nn.Module, start: int) -> Generator[Batch]:
        self.log_remarks()  # not in `prepare`, which runs before the log is opened
        return training_batches(
            self.train,
            self.views.train,
            batch_size=self.batch_size,
            steps=range(start, self.total_steps),
            seed=self.seed,
            device=self.device,
            repeat=self.repeat,
            workers=self.workers,
        )

    def examples(self, index: Tensor) -> Batch:
        how = {"index": index.tolist(), "device": self.device, "workers": self.workers}
        batches = list(evaluation_batches(self.train, self.views.evaluate, **how))
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def images(self, batch: Batch) -> Tensor:
        return batch["x"] / 255

    def input_stages(self) -> dict[str, Callable[[int], object]]:
        def augment(index: int) -> Tensor:
            return self.views.train(self.train.image(index), generator(self.seed, "stage", index))

        size = self.views.size
        stages = {"read": self.train.read, "read, decode": self.train.image}
        return stages | {f"read, decode, augment to {size} x {size} bytes": augment}

    def field(self, model: nn.Module, batch: Batch) -> Field:
        return super().field(model, batch | {"x": self.normalise(batch["x"])})

    def score(self, model: nn.Module, images: EvaluationSet) -> tuple[float, float]:
        """Returns the accuracy in percent and the mean loss."""
        return accuracy(
            model,
            images,
            view=self.views.evaluate,
            normalise=self.normalise,
            device=self.device,
            workers=self.workers,
        )
