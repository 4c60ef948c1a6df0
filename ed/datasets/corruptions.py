"""Image corruptions in the style of CIFAR-10-C (Hendrycks & Dietterich, 2019).

Each function takes images (N, 3, H, W) in [0, 1] and a severity. `corrupt` clips the result.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.validate import choice, fraction, positive
from ed.runtime.streams import generator

SEED = 0  # fixed, so that all runs are tested on the same images


def corrupt(pixels: Tensor, name: str, severity: float) -> Tensor:
    """Corrupts uint8 images on the CPU, deterministically."""
    choice("task.corruptions", name, CORRUPTIONS)
    positive(f"task.corruptions.{name}", severity)
    corrupted = CORRUPTIONS[name](pixels.float() / 255, severity)
    return (255 * corrupted.clamp(0, 1)).round().to(torch.uint8)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Applies a Gaussian blur with reflected borders; `sigma` is in pixels."""
    radius = math.ceil(3 * sigma)
    if radius >= min(x.shape[-2:]):
        size = list(x.shape[-2:])
        raise ValueError(f"task.corruptions.blur={sigma}: too wide for images of size {size}")
    offsets = torch.arange(-radius, radius + 1)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.pad(x, [radius] * 4, mode="reflect")
    for weight in (kernel, kernel.mT):
        x = F.conv2d(x, weight, groups=x.shape[1])
    return x


def noise(x: Tensor, sigma: float) -> Tensor:
    """Adds independent Gaussian noise to each pixel."""
    return x + sigma * torch.randn(x.shape, generator=generator(SEED, "corruption"))


def contrast(x: Tensor, loss: float) -> Tensor:
    """Blends each image with its mean colour."""
    fraction("task.corruptions.contrast", loss)
    return torch.lerp(x, x.mean((-2, -1), keepdim=True), loss)


def pixelate(x: Tensor, block: float) -> Tensor:
    """Replaces blocks of `block` x `block` pixels with their means."""
    side = int(block)
    if side != block or any(length % side for length in x.shape[-2:]):
        raise ValueError(
            f"task.corruptions.pixelate={block}: must divide the image size {list(x.shape[-2:])}"
        )
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
