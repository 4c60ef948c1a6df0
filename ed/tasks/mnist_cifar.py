"""MNIST-CIFAR (Shah et al., 2020): the paper's failure case, where simple features mislead.

Each image is an MNIST digit above a CIFAR-10 image: 0 above an automobile (label 0) or 1 above a
truck (label 1). Either block alone predicts the label. For evaluation, one block is also shuffled
across images; if accuracy drops to chance, the model uses only this block.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.datasets.images import Images, load_images
from ed.runtime.streams import generator
from ed.tasks.image_task import ImageTask

DIGITS, OBJECTS = (0, 1), (1, 9)  # MNIST and CIFAR-10 classes of label 0 and label 1
SIDE, DIGIT_SIDE = 32, 28  # side lengths of a block and of an unpadded digit
STACKED_SIZE = (2 * SIDE, SIDE)
MNIST_REMEDY = "a folder with MNIST's parquet files, or a reachable hub id (like ylecun/mnist)"
PAIRING_SEED = 0  # fixed, so that all runs use the same data set


class MnistCifar(ImageTask):
    """Classifies a digit stacked on an object: 3 x 64 x 32 pixels in [0, 1], not normalised."""

    def __init__(self, data: str, mnist: str, **settings):
        super().__init__(data, **settings)  # rejects unknown settings
        self.mnist = mnist
        if self.image_size != STACKED_SIZE or self.classes != len(DIGITS):
            raise ValueError(
                f"task.image_size={list(self.image_size)}, task.classes={self.classes}: use the "
                f"defaults {list(STACKED_SIZE)} and {len(DIGITS)}"
            )

    def load(self, split: str) -> Images:
        objects = load_images(self.data, split, classes=10, size=(SIDE, SIDE))
        digits = load_images(
            self.mnist,
            split,
            classes=10,
            size=(DIGIT_SIDE, DIGIT_SIDE),
            key="task.mnist",
            remedy=MNIST_REMEDY,
        )
        return stack(digits, objects, generator(PAIRING_SEED, f"pairing {split}"))

    def prepare(self, device: torch.device, seed: int) -> None:
        super().prepare(device, seed)
        self.randomized = {}
        for block, rows in (("mnist", slice(None, SIDE)), ("cifar", slice(SIDE, None))):
            draw = generator(PAIRING_SEED, f"randomized {block}")
            pixels = shuffle_rows(self.test.pixels, rows, draw)
            self.randomized[block] = Images(pixels, self.test.labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        report = super().evaluate(model)
        for block, images in self.randomized.items():
            report[f"eval/acc_{block}_randomized"] = self.score(model, images)[0]
        return report


def stack(digits: Images, objects: Images, generator: torch.Generator) -> Images:
    """Stacks a random digit of the same label on top of each object of the two classes.

    Digits repeat only after all of their class are used (980 zeros for 1,000 test cars).
    """
    chosen = torch.isin(objects.labels, torch.tensor(OBJECTS)).nonzero().squeeze(1)
    labels = (objects.labels[chosen] == OBJECTS[1]).long()
    partner = torch.empty_like(chosen)
    for label, (digit, name) in enumerate(zip(DIGITS, OBJECTS, strict=True)):
        places = (labels == label).nonzero().squeeze(1)
        available = (digits.labels == digit).nonzero().squeeze(1)
        if not len(places) or not len(available):
            raise ValueError(
                f"task.data has {len(places)} images of class {name}, task.mnist has "
                f"{len(available)} of digit {digit}; use the complete sets"
            )
        partner[places] = available[_repeated_permutation(len(available), len(places), generator)]
    margin = [(SIDE - DIGIT_SIDE) // 2] * 4
    top = F.pad(digits.pixels[partner], margin)
    return Images(torch.cat([top, objects.pixels[chosen]], dim=-2), labels)


def shuffle_rows(pixels: Tensor, rows: slice, generator: torch.Generator) -> Tensor:
    """Returns a copy of pixels (N, 3, H, W) with the given rows permuted across images."""
    order = torch.randperm(len(pixels), generator=generator).to(pixels.device)
    shuffled = pixels.clone()
    shuffled[..., rows, :] = pixels[order][..., rows, :]
    return shuffled


def _repeated_permutation(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` random indices below `size`; none repeats before all are used."""
    rounds = [torch.randperm(size, generator=generator) for _ in range(math.ceil(count / size))]
    return torch.cat(rounds)[:count]
