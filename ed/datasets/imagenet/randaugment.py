"""RandAugment as in the ViT baselines of Beyer et al. (2022): magnitude 10 of 10.

In torchvision, magnitudes go up to 31 and three of the sixteen operations are missing, so
RandAugment(2, 10) is weaker there. timm draws from global generators. This version applies all
sixteen at full magnitude with Pillow and fills borders with grey (128). Contrast is relative to the
image's mean, unlike in big_vision. As in big_vision, solarize has threshold 256, which makes it the
identity.
"""

from collections.abc import Callable

import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

DEGREES, SHEAR, ENHANCE, POSTERIZE_BITS, SOLARIZE_ADD = 30.0, 0.3, 1.9, 4, 110
SHIFT, CUTOUT = 100 / 224, 40 / 224  # as fractions of the image side
GREY = (128, 128, 128)
Operation = Callable[[Image.Image, list[float]], Image.Image]  # image, two draws from U[0, 1)


def rand_augment(image: Image.Image, operations: int, generator: torch.Generator) -> Image.Image:
    """Applies `operations` random operations, each drawn uniformly from all sixteen."""
    for _ in range(operations):
        chosen = int(torch.randint(len(OPERATIONS), (), generator=generator))
        image = OPERATIONS[chosen](image, torch.rand(2, generator=generator).tolist())
    return image


def _enhance(kind) -> Operation:
    return lambda image, draws: kind(image).enhance(ENHANCE)


def _affine(a: float, b: float, c: float, d: float, e: float, f: float) -> Operation:
    """Maps output (x, y) to input (a x + b y + c, d x + e y + f).

    c and f are fractions of the image side. With probability 1/2, b, c, d and f change sign.
    """

    def apply(image: Image.Image, draws: list[float]) -> Image.Image:
        sign = 1 if draws[0] < 0.5 else -1
        width, height = image.size
        matrix = (a, sign * b, sign * c * width, sign * d, e, sign * f * height)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)

    return apply


def _rotate(image: Image.Image, draws: list[float]) -> Image.Image:
    return image.rotate(DEGREES if draws[0] < 0.5 else -DEGREES, fillcolor=GREY)


def _solarize_add(image: Image.Image, draws: list[float]) -> Image.Image:
    """Brightens pixel values below 128."""
    table = [min(255, value + SOLARIZE_ADD) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


def _cutout(image: Image.Image, draws: list[float]) -> Image.Image:
    """Covers a square around a random pixel with grey."""
    width, height = image.size
    x, y, reach = int(draws[0] * width), int(draws[1] * height), round(CUTOUT * width)
    image = image.copy()
    box = (x - reach, y - reach, x + reach - 1, y + reach - 1)
    ImageDraw.Draw(image).rectangle(box, fill=GREY)
    return image


OPERATIONS: tuple[Operation, ...] = (
    lambda image, draws: ImageOps.autocontrast(image),
    lambda image, draws: ImageOps.equalize(image),
    lambda image, draws: ImageOps.invert(image),
    lambda image, draws: ImageOps.posterize(image, POSTERIZE_BITS),
    lambda image, draws: ImageOps.solarize(image, 256),
    _solarize_add,
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    _rotate,
    _affine(1, SHEAR, 0, 0, 1, 0),
    _affine(1, 0, 0, SHEAR, 1, 0),
    _affine(1, 0, SHIFT, 0, 1, 0),
    _affine(1, 0, 0, 0, 1, SHIFT),
    _cutout,
)
