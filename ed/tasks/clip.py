"""Fine-tuning CLIP: accuracy in and out of distribution, and the weights it all started from.

On ImageNet with its five shifts (`ImageNetFineTuning`), or as a stand-in that needs neither
ImageNet nor OpenAI's weights: a small CLIP is trained on captions of one half of CIFAR-10
(`StandInPretraining`), then fine-tuned on all of it (`StandIn`), with corrupted test pictures as
shifts.
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
    """What fine-tuning adds to a task on pictures: shifts, and the weights it started from.

    These are part of every checkpoint: the file they were read from may be trained anew meanwhile.

    Attributes:
        shifts: sets of pictures to score, by the names that metrics carry; a subclass fills it.
    """

    zero_shot: dict[str, Tensor] | None = None

    def batches(self, model: nn.Module, start: int) -> Generator[Batch]:
        if self.zero_shot is None:
            state = model.state_dict()
            self.zero_shot = {name: value.detach().clone() for name, value in state.items()}
        return super().batches(model, start)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """As without shifts; and the accuracy under each of them, and their plain mean."""
        report = super().evaluate(model)
        found = {name: self.score(model, pictures)[0] for name, pictures in self.shifts.items()}
        report |= {f"eval/acc_{name}": accuracy for name, accuracy in found.items()}
        return report | ({"eval/acc_ood": sum(found.values()) / len(found)} if found else {})

    def state_dict(self) -> dict:
        return super().state_dict() | {"zero_shot": self.zero_shot}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.zero_shot = {name: value.to(self.device) for name, value in state["zero_shot"].items()}


class ImageNetFineTuning(FineTuning, ImageNetTask):
    """ImageNet, CLIP's views of it, and the sets that shift it.

    Args:
        shifts: the folder with the shifted sets, as their authors distribute them; None: none.
        shift_names: which of them.
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
        return [*super().sources(), *(shift.pictures for shift in self.shifts.values())]


class StandIn(FineTuning):
    """Stand-in for ImageNet and its shifts: CIFAR-10, and its test pictures corrupted."""

    mean, std = CLIP.mean, CLIP.std

    def __init__(self, data: str, *, corruptions: Mapping[str, float], **settings):
        super().__init__(data, **settings)  # rejects unknown settings
        self.corruptions = dict(corruptions)

    def prepare(self, device: torch.device, seed: int) -> None:
        super().prepare(device, seed)
        clean = self.test.to("cpu")  # a GPU rounds otherwise, and all should see the same pictures
        self.shifts = {
            name: Images(corrupt(clean.pixels, name, severity), clean.labels).to(device)
            for name, severity in self.corruptions.items()
        }


class StandInPretraining(ImageTask):
    """Images and captions of a part of CIFAR-10: contrastive training of a small CLIP.

    With ten classes most captions of a batch come several times, and all captions of a class fit
    all its pictures. So no pair of one class is a negative: every distinct caption is compared with
    every picture, and both ways of matching have the whole class as their target.
    """

    mean, std = CLIP.mean, CLIP.std
    has_labels = False  # outputs are captions, not classes
    no_parts = "its captions choose among all pictures of a batch"

    def __init__(self, data: str, *, part: float, **settings):
        super().__init__(data, space="input", **settings)
        self.part = fraction("task.part", part, zero=False)

    def load(self, split: str) -> Images:
        pictures = super().load(split)
        if split == "test":
            return pictures
        count = round(self.part * len(pictures))
        return Images(pictures.pixels[:count], pictures.labels[:count])

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, Towers):
            raise ValueError(
                "task=clip_standin_pretrain needs both towers: model=clip_small_pretrain"
            )
        if len(model.tokens) != self.classes:
            raise ValueError(
                f"model.prompts names {len(model.tokens)} classes, but task.classes={self.classes}"
            )
        super().check_model(model.zero_shot())  # what is evaluated

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logits = outputs.unflatten(1, (self.classes, -1))  # (pictures, classes, templates)
        loss = matching_loss(logits, batch["label"])
        accuracy = (logits.mean(-1).argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Zero-shot classification of the test pictures."""
        return super().evaluate(model.zero_shot())


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of two cross-entropies: pictures choose among captions, captions among pictures.

    Args:
        logits: (pictures, classes, templates).
        labels: (pictures,). Targets are uniform over what shares the class; a class of which the
            batch has no picture chooses none.
    """
    classes = logits.shape[1]
    match = F.one_hot(labels, classes).to(logits.dtype)
    captions = logits.flatten(1).log_softmax(1).view_as(logits).mean(-1)
    choose_caption = -(match * captions).sum() / len(labels)
    counts = match.sum(0)
    pictures = (match * logits.log_softmax(0).mean(-1)).sum(0) / counts.clamp(min=1)
    choose_picture = -pictures.sum() / (counts > 0).sum()
    return (choose_caption + choose_picture) / 2
