"""Evaluation of published models on ImageNet, without training."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from ed.core.validate import count
from ed.datasets.imagenet import CLIP
from ed.runtime.streams import generator
from ed.tasks.base import Batch
from ed.tasks.imagenet_task import ImageNetTask


class Soup(ImageNetTask):
    """Evaluates and measures a model without training it, with CLIP's preprocessing.

    Args:
        examples: number of random training images, the same for all models, for measures.
    """

    recipe: dict | None = None  # the model's training recipe, if known

    def __init__(
        self,
        data: str = "ILSVRC/imagenet-1k",
        *,
        validation: str = "validation",
        examples: int = 50_000,
        classes: int = 1000,
        image_size: Sequence[int] = (224, 224),
    ):
        training = {"repeat": 1, "epochs": 1, "warmup_epochs": 0, "batch_size": 1, "eval_every": 1}
        settings = {"classes": classes, "image_size": image_size, "space": "input"}
        super().__init__(data, CLIP, validation=validation, **training, **settings)
        self.chosen_count = count("task.examples", examples, least=2)  # a path needs two examples

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        self.recipe = getattr(model, "recipe", None)

    def provenance(self) -> dict:
        """Adds the model's recipe, which identifies it in a pool of models."""
        return super().provenance() | ({"recipe": self.recipe} if self.recipe else {})

    def prepare(self, device: torch.device, seed: int) -> None:
        super().prepare(device, seed)
        order = torch.randperm(len(self.train), generator=generator(0, "soup"))
        self.chosen = order[: self.chosen_count]  # the same for all models and seeds
        self.num_examples, self.total_steps = len(self.chosen), 0

    def batches(self, model, start: int) -> Generator[Batch]:
        self.log_remarks()
        return (_ for _ in ())

    def examples(self, index: Tensor) -> Batch:
        return super().examples(self.chosen[index])
