"""Corrupted pictures: shifts of the test set that need no other data.

Each takes pictures (N, 3, H, W) in [0, 1] and a severity, and gives pictures; values that leave the
unit interval are cut. In the manner of CIFAR-10-C (Hendrycks & Dietterich, 2019), not its files.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.validate import choice, fraction, positive
from ed.runtime.streams import generator

SEED = 0  # of the noise; not the run's: all runs are tested on the same pictures


def corrupt(pixels: Tensor, name: str, severity: float) -> Tensor:
    """uint8 pictures on the CPU -> the same pictures, corrupted; always the same way."""
    choice("task.corruptions", name, CORRUPTIONS)
    positive(f"task.corruptions.{name}", severity)
    corrupted = CORRUPTIONS[name](pixels.float() / 255, severity)
    return (255 * corrupted.clamp(0, 1)).round().to(torch.uint8)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur, sigma in pixels; the border is mirrored."""
    radius = math.ceil(3 * sigma)
    if radius >= min(x.shape[-2:]):
        raise ValueError(
            f"task.corruptions.blur={sigma}: too wide for pictures of {list(x.shape[-2:])}"
        )
    offsets = torch.arange(-radius, radius + 1)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.pad(x, [radius] * 4, mode="reflect")
    for weight in (kernel, kernel.mT):
        x = F.conv2d(x, weight, groups=x.shape[1])
    return x


def noise(x: Tensor, sigma: float) -> Tensor:
    """Independent Gaussian noise."""
    return x + sigma * torch.randn(x.shape, generator=generator(SEED, "corruption"))


def contrast(x: Tensor, loss: float) -> Tensor:
    """Every picture drawn towards its own mean colour by the given part."""
    fraction("task.corruptions.contrast", loss)
    return torch.lerp(x, x.mean((-2, -1), keepdim=True), loss)


def pixelate(x: Tensor, block: float) -> Tensor:
    """Squares of the given side in one colour."""
    side = int(block)
    if side != block or any(length % side for length in x.shape[-2:]):
        raise ValueError(f"task.corruptions.pixelate={block}: must divide {list(x.shape[-2:])}")
    return F.interpolate(F.avg_pool2d(x, side), scale_factor=side, mode="nearest")


def brightness(x: Tensor, shift: float) -> Tensor:
    return x + shift


CORRUPTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "blur": blur,
    "noise": noise,
    "contrast": contrast,
    "pixelate": pixelate,
    "brightness": brightness,
}
