"""From a decoded picture to uint8 pixels of one size, by random crops or the centre crop.

Every draw comes from the generator that is passed in, so a view is a function of the picture and
a seed. Normalisation waits for the device: bytes are a quarter of what floats would be to move.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ed.datasets.imagenet.randaugment import rand_augment

CROP_ATTEMPTS = 10  # as torchvision: then the largest centre crop within the ratios


@dataclass(frozen=True)
class Views:
    """How a recipe looks at pictures.

    Attributes:
        size: height and width of what the network sees.
        resize: the shorter side before the centre crop, as a multiple of the size.
        area, ratio: ranges of the random crop's part of the picture and of width / height.
        flip: mirror half of the training pictures.
        randaugment: operations of RandAugment after crop and flip, each at full magnitude.
        bicubic: resample so rather than bilinearly; both smooth when they shrink.
        mean, std: of the normalisation, per channel; 0.5 and 0.5 put pixels into [-1, 1].
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

    def train(self, picture: Image.Image, generator: torch.Generator) -> Tensor:
        """A random crop, mirrored or not, and what RandAugment makes of it."""
        left, top, width, height = random_crop(picture.size, self.area, self.ratio, generator)
        # cut first: resizing a box within the picture would look at the pixels around it
        picture = picture.crop((left, top, left + width, top + height))
        picture = picture.resize((self.size, self.size), self.resample)
        if self.flip and torch.rand((), generator=generator) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(rand_augment(picture, self.randaugment, generator))

    def evaluate(self, picture: Image.Image, generator: torch.Generator | None = None) -> Tensor:
        """The centre crop after resizing the shorter side; no draws."""
        short = round(self.resize * self.size)
        # as torchvision: the longer side rounded down, the crop's place to the nearest pixel
        sides = [int(short * side / min(picture.size)) for side in picture.size]
        left, top = (round((side - self.size) / 2) for side in sides)
        picture = picture.resize(sides, self.resample)
        return to_tensor(picture.crop((left, top, left + self.size, top + self.size)))


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
    """(left, top, width, height) of an "Inception" crop in a picture of `size` (width, height).

    The area is uniform in its range, the ratio log-uniform. Where ten attempts do not fit, the
    largest centre crop within the ratios.
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


def to_tensor(picture: Image.Image) -> Tensor:
    """RGB picture -> (3, H, W) uint8."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
