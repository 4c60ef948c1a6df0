"""Fine-tunes CLIP and evaluates it in and out of distribution.

`ImageNetFineTuning` uses ImageNet and its five shifts. The stand-in needs neither ImageNet nor
OpenAI's weights: `StandInPretraining` trains a small CLIP on captions for half of CIFAR-10, then
`StandIn` fine-tunes it on all of CIFAR-10, with corrupted test images as shifts.
"""

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.validate import choice, fraction
from ed.datasets.corruptions import corrupt
from ed.datasets.imagenet import CLIP, Source, open_shift
from ed.datasets.imagenet import shifts as known_shifts
from ed.datasets.images import Images
from ed.models.clip import Towers
from ed.tasks.base import Batch
from ed.tasks.image_task import ImageTask
from ed.tasks.imagenet_task import ImageNetTask


class FineTuning(ImageTask):
    """Adds evaluation under distribution shift, and keeps the initial weights.

    Checkpoints include the initial weights, because the original file may change.

    Attributes:
        shifts: evaluation sets, keyed by their names in metrics; set by subclasses.
    """

    zero_shot: dict[str, Tensor] | None = None

    def batches(self, model: nn.Module, start: int) -> Generator[Batch]:
        if self.zero_shot is None:
            state = model.state_dict()
            self.zero_shot = {name: value.detach().clone() for name, value in state.items()}
        return super().batches(model, start)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Adds the accuracy on each shift and the unweighted mean over all shifts."""
        report = super().evaluate(model)
        found = {name: self.score(model, images)[0] for name, images in self.shifts.items()}
        report |= {f"eval/acc_{name}": accuracy for name, accuracy in found.items()}
        return report | ({"eval/acc_ood": sum(found.values()) / len(found)} if found else {})

    def state_dict(self) -> dict:
        return super().state_dict() | {"zero_shot": self.zero_shot}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.zero_shot = {name: value.to(self.device) for name, value in state["zero_shot"].items()}


class ImageNetFineTuning(FineTuning, ImageNetTask):
    """Fine-tunes CLIP on ImageNet; evaluates on ImageNet and its shifts.

    Args:
        shifts: folder with the shifts, in their original layout; None: no shifts.
        shift_names: the shifts to evaluate on.
    """

    def __init__(self, data: str, *, shifts: str | None, shift_names: Sequence[str], **settings):
        super().__init__(data, CLIP, **settings)  # rejects unknown settings
        self.shift_folder, self.shift_names = shifts, list(shift_names)
        for name in self.shift_names:
            choice("task.shift_names", name, known_shifts())

    def prepare(self, device: torch.device, seed: int) -> None:
        names = [] if self.shift_folder is None else self.shift_names
        self.shifts = {name: open_shift(name, self.shift_folder) for name in names}
        super().prepare(device, seed)

    def sources(self) -> list[Source]:
        return [*super().sources(), *(shift.images for shift in self.shifts.values())]


class StandIn(FineTuning):
    """Stand-in for ImageNet and its shifts: CIFAR-10 and corrupted test images."""

    mean, std = CLIP.mean, CLIP.std

    def __init__(self, data: str, *, corruptions: Mapping[str, float], **settings):
        super().__init__(data, **settings)  # rejects unknown settings
        self.corruptions = dict(corruptions)

    def prepare(self, device: torch.device, seed: int) -> None:
        super().prepare(device, seed)
        clean = self.test.to("cpu")  # on the CPU, because GPUs round differently
        self.shifts = {
            name: Images(corrupt(clean.pixels, name, severity), clean.labels).to(device)
            for name, severity in self.corruptions.items()
        }


class StandInPretraining(ImageTask):
    """Trains a small CLIP contrastively on captions for the first `part` of CIFAR-10.

    With ten classes, captions repeat within a batch, and any caption of a class fits all of its
    images. The loss therefore compares each distinct caption with each image, and the targets are
    uniform over the class, in both directions.
    """

    mean, std = CLIP.mean, CLIP.std
    has_labels = False  # outputs belong to captions, not classes
    no_parts = "the loss compares captions with all images of a batch"

    def __init__(self, data: str, *, part: float, **settings):
        super().__init__(data, space="input", **settings)
        self.part = fraction("task.part", part, zero=False)

    def load(self, split: str) -> Images:
        images = super().load(split)
        if split == "test":
            return images
        count = round(self.part * len(images))
        return Images(images.pixels[:count], images.labels[:count])

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, Towers):
            raise ValueError("task=clip_standin_pretrain: use model=clip_small_pretrain")
        if len(model.tokens) != self.classes:
            raise ValueError(
                f"task.classes={self.classes}: model.prompts has {len(model.tokens)} classes"
            )
        super().check_model(model.zero_shot())  # the model that is evaluated

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logits = outputs.unflatten(1, (self.classes, -1))  # (images, classes, templates)
        loss = matching_loss(logits, batch["label"])
        accuracy = (logits.mean(-1).argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluates zero-shot classification of the test images."""
        return super().evaluate(model.zero_shot())


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean of the image-to-caption and caption-to-image cross-entropies.

    Targets are uniform over the class. Classes without an image in the batch are skipped.

    Args:
        logits: (images, classes, templates).
        labels: (images,).
    """
    classes = logits.shape[1]
    match = F.one_hot(labels, classes).to(logits.dtype)
    captions = logits.flatten(1).log_softmax(1).view_as(logits).mean(-1)
    choose_caption = -(match * captions).sum() / len(labels)
    counts = match.sum(0)
    images = (match * logits.log_softmax(0).mean(-1)).sum(0) / counts.clamp(min=1)
    choose_image = -images.sum() / (counts > 0).sum()
    return (choose_caption + choose_image) / 2
