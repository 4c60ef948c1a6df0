"""RandAugment as the ViT baselines of Beyer et al. (2022) use it: magnitude 10 of 10.

torchvision counts magnitudes to 31 and lacks three of the sixteen operations, so its (2, 10) is
weaker; timm's draws from global generators. Here all sixteen stand in Pillow's terms at their full
magnitude, grey (128) where nothing is known. Known differences from big_vision: contrast pivots on
the picture's mean, as everywhere else (there: on a constant), and solarising at 256 changes
nothing, as written there.
"""

from collections.abc import Callable

import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

DEGREES, SHEAR, ENHANCE, POSTERIZE_BITS, SOLARIZE_ADD = 30.0, 0.3, 1.9, 4, 110
SHIFT, CUTOUT = 100 / 224, 40 / 224  # pixels at size 224, in parts of the side
GREY = (128, 128, 128)
Operation = Callable[[Image.Image, list[float]], Image.Image]  # picture, two draws from U[0, 1)


def rand_augment(picture: Image.Image, operations: int, generator: torch.Generator) -> Image.Image:
    """Applies that many operations in turn, each drawn uniformly from all sixteen."""
    for _ in range(operations):
        chosen = int(torch.randint(len(OPERATIONS), (), generator=generator))
        picture = OPERATIONS[chosen](picture, torch.rand(2, generator=generator).tolist())
    return picture


def _enhance(kind) -> Operation:
    return lambda picture, draws: kind(picture).enhance(ENHANCE)


def _affine(a: float, b: float, c: float, d: float, e: float, f: float) -> Operation:
    """Output (x, y) shows input (a x + b y + c, d x + e y + f), c and f in parts of the side.

    Half the time all but the identity's ones change sign.
    """

    def apply(picture: Image.Image, draws: list[float]) -> Image.Image:
        sign = 1 if draws[0] < 0.5 else -1
        width, height = picture.size
        matrix = (a, sign * b, sign * c * width, sign * d, e, sign * f * height)
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)

    return apply


def _rotate(picture: Image.Image, draws: list[float]) -> Image.Image:
    return picture.rotate(DEGREES if draws[0] < 0.5 else -DEGREES, fillcolor=GREY)


def _solarize_add(picture: Image.Image, draws: list[float]) -> Image.Image:
    """Brightens what is darker than 128."""
    table = [min(255, value + SOLARIZE_ADD) if value < 128 else value for value in range(256)]
    return picture.point(table * 3)


def _cutout(picture: Image.Image, draws: list[float]) -> Image.Image:
    """A grey square around a random pixel, cut where it leaves the picture."""
    width, height = picture.size
    x, y, reach = int(draws[0] * width), int(draws[1] * height), round(CUTOUT * width)
    picture = picture.copy()
    box = (x - reach, y - reach, x + reach - 1, y + reach - 1)
    ImageDraw.Draw(picture).rectangle(box, fill=GREY)
    return picture


OPERATIONS: tuple[Operation, ...] = (
    lambda picture, draws: ImageOps.autocontrast(picture),
    lambda picture, draws: ImageOps.equalize(picture),
    lambda picture, draws: ImageOps.invert(picture),
    lambda picture, draws: ImageOps.posterize(picture, POSTERIZE_BITS),
    lambda picture, draws: ImageOps.solarize(picture, 256),
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
