"""Random crops and horizontal flips for batches of small images, on the device.

`resized` is torchvision's RandomResizedCrop: a box of random area and aspect ratio, resized to the
full image. `reflect` and `pad` shift the image by up to four pixels and fill the border with its
reflection or with black. ED without label anchors can exploit black borders: they appear only at
the ends of a path, so a network that is confident only when it sees one makes every path flat.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.validate import choice, each, fraction

CROPS = ("resized", "reflect", "pad")
PADDING = 4
ASPECT = (3 / 4, 4 / 3)  # range of width / height; torchvision's default
_STRETCH = tuple(math.log(ratio) / 2 for ratio in ASPECT)  # range of log(sqrt(width / height))
ATTEMPTS = 10  # draws before falling back to a centre crop, as in torchvision


def check_crop(crop: str, area: Sequence[float]) -> None:
    choice("task.crop", crop, CROPS)
    low, high = each(fraction, "task.crop_area", area, zero=False, length=2)
    if low > high:
        raise ValueError(f"task.crop_area={area}: must be in ascending order")


def croppable(pixels: Tensor, crop: str) -> Tensor:
    """Pads images (N, C, H, W) for `random_crops` if this kind of crop needs padding."""
    if crop == "pad":
        return F.pad(pixels, [PADDING] * 4)
    if crop == "reflect":
        rows, columns = (_mirrored(side, pixels.device) for side in pixels.shape[-2:])
        return pixels[..., rows[:, None], columns]
    return pixels


def random_crops(
    images: Tensor, index: Tensor, crop: str, area: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Returns random crops and flips (B, C, H, W) of `images[index]`, padded by `croppable`."""
    if crop != "resized":
        return crop_and_flip(images, index, PADDING, generator)
    boxes = draw_boxes(len(index), images.shape[-2:], area, generator)
    flip = torch.rand(len(index), generator=generator, device=images.device) < 0.5
    return resize_boxes(images[index].float(), boxes, flip)


def crop_and_flip(padded: Tensor, index: Tensor, padding: int, generator) -> Tensor:
    """Randomly crops and flips padded images, with a single gather for the whole batch.

    Args:
        padded: (N, C, H + 2 padding, W + 2 padding).
        index: (B,), the images to crop.
    Returns:
        (B, C, H, W), with the dtype of `padded`.
    """
    device, count = padded.device, len(index)
    height, width = (side - 2 * padding for side in padded.shape[-2:])
    shift = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    flip = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows = shift[0] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = shift[1] + torch.where(flip, width - 1 - columns, columns)
    channels = torch.arange(padded.shape[1], device=device)
    return padded[
        index[:, None, None, None],
        channels[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def draw_boxes(
    count: int, size: Sequence[int], area: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Draws boxes (4, count) like torchvision's RandomResizedCrop: top, left, height, width.

    The area is uniform in `area` x H x W and the aspect ratio is log-uniform. A box that does not
    fit is redrawn; after ten failures the largest centred box is used.
    """
    device = generator.device
    sizes, whole = _column(tuple(size), device), _column(_whole(size), device)
    ranges = [tuple(share * size[0] * size[1] for share in area), _STRETCH]
    low = _column(tuple(least for least, _ in ranges), device)
    span = _column(tuple(most - least for least, most in ranges), device)
    draws = torch.rand(2, ATTEMPTS, count, generator=generator, device=device)
    draws = torch.addcmul(low[:, None], draws, span[:, None])
    side, stretch = draws[0].sqrt_(), draws[1].exp_()
    sides = torch.stack([side / stretch, side * stretch]).round_()
    fits = ((sides <= sizes[:, None]) & (sides > 0)).all(0)
    first = F.pad(fits, (0, 0, 0, 1), value=True).byte().argmax(0)  # the fallback always fits
    sides = torch.cat([sides, whole[:, None].expand(2, 1, count)], 1)
    sides = sides.gather(1, first.expand(2, 1, count)).squeeze(1)
    room = sizes - sides
    draws = torch.rand(2, count, generator=generator, device=device)
    drawn = (draws * (room + 1)).floor_().minimum(room)
    centred = room.div(2, rounding_mode="floor")
    return torch.cat([torch.where(first == ATTEMPTS, centred, drawn), sides])


def resize_boxes(pixels: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Resizes one box per image to the full image size (bilinear); `flip` mirrors it.

    Args:
        pixels: (B, C, H, W), float.
        boxes: (4, B); top, left, height and width in whole pixels.
        flip: (B,), bool.
    """
    height, width = size = pixels.shape[-2:]
    sizes = _column(size, pixels.device)[:, None]
    start, side = boxes.view(2, 2, -1, 1)
    # where each output pixel samples the box, clamped to the centres of its outermost pixels
    steps = _steps(max(size), pixels.device)
    place = (steps * (side / sizes)).sub_(0.5).clamp_(min=0).minimum(side - 1).add_(start)
    # grid_sample with align_corners=True puts the first pixel at -1 and the last at 1
    scale = _column((2 / max(1, height - 1), 2 / max(1, width - 1)), pixels.device)
    place = place.mul_(scale[:, None]).sub_(1)
    y, x = place[0, :, :height], place[1, :, :width]
    x = torch.where(flip[:, None], x.flip(-1), x)
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=True)


@cache
def _column(values: tuple[float, float], device: torch.device) -> Tensor:
    """Returns the values as a (2, 1) tensor; cached, because a copy from the host would block."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


@cache
def _steps(length: int, device: torch.device) -> Tensor:
    """Returns the pixel centres, 0.5 to length - 0.5."""
    return torch.arange(0.5, length, device=device)


def _whole(size: Sequence[int]) -> tuple[int, int]:
    """Returns the height and width of the largest centred box with an allowed aspect ratio."""
    height, width = size
    low, high = ASPECT
    return min(height, round(width / low)), min(width, round(height * high))


def _mirrored(side: int, device) -> Tensor:
    """Returns indices that reflect-pad an axis by PADDING without repeating the edge pixel."""
    last = side - 1
    return last - (last - torch.arange(-PADDING, side + PADDING, device=device).abs()).abs()
