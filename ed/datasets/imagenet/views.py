"""Crops and augments decoded images; returns uint8 pixels of a fixed size.

All randomness comes from the generator that is passed in. Normalisation happens on the device,
because bytes are four times cheaper to copy than floats.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ed.datasets.imagenet.randaugment import rand_augment

CROP_ATTEMPTS = 10  # before falling back to a centre crop, as in torchvision


@dataclass(frozen=True)
class Views:
    """Preprocessing for training and evaluation.

    Attributes:
        size: height and width of the network's input.
        resize: the shorter side before the centre crop, as a multiple of `size`.
        area, ratio: ranges of the random crop's relative area and of its width / height.
        flip: whether to mirror training images, with probability 1/2.
        randaugment: number of RandAugment operations after crop and flip.
        bicubic: use bicubic instead of bilinear resampling; both are antialiased.
        mean, std: normalisation per channel; 0.5 and 0.5 map pixels to [-1, 1].
    """

    size: int = 224
    resize: float = 256 / 224
    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    randaugment: int = 0
    bicubic: bool = False
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def resample(self) -> Image.Resampling:
        return Image.Resampling.BICUBIC if self.bicubic else Image.Resampling.BILINEAR

    def train(self, image: Image.Image, generator: torch.Generator) -> Tensor:
        """Applies a random crop, a random flip and RandAugment."""
        left, top, width, height = random_crop(image.size, self.area, self.ratio, generator)
        # crop first, because resize(box=...) would also read pixels around the box
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), self.resample)
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(rand_augment(image, self.randaugment, generator))

    def evaluate(self, image: Image.Image, generator: torch.Generator | None = None) -> Tensor:
        """Resizes the shorter side, then takes the centre crop."""
        short = round(self.resize * self.size)
        # rounding as in torchvision: the longer side down, the crop to the nearest pixel
        sides = [int(short * side / min(image.size)) for side in image.size]
        left, top = (round((side - self.size) / 2) for side in sides)
        image = image.resize(sides, self.resample)
        return to_tensor(image.crop((left, top, left + self.size, top + self.size)))


CLIP = Views(
    resize=1.0,
    area=(0.9, 1.0),
    flip=False,
    bicubic=True,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


def random_crop(
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> tuple[int, int, int, int]:
    """Draws (left, top, width, height) of an Inception crop; `size` is (width, height).

    The area is uniform in its range and the ratio is log-uniform. If ten attempts do not fit,
    returns the largest centre crop with an allowed ratio.
    """
    width, height = size
    draws = torch.rand(CROP_ATTEMPTS, 4, generator=generator, dtype=torch.float64).tolist()
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for part, shape, across, down in draws:
        target = width * height * (area[0] + (area[1] - area[0]) * part)
        aspect = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(across * (width - w + 1)), int(down * (height - h + 1)), w, h
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def to_tensor(image: Image.Image) -> Tensor:
    """Converts an RGB image to a uint8 tensor (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
