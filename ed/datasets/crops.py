"""Random crops and horizontal flips for batches of small images, on the device.

`resized` is torchvision's RandomResizedCrop: a box of random area and aspect ratio, resized to the
full image. `reflect` and `pad` shift the image by up to four pixels and fill the border with its
reflection or with black. ED without label anchors can exploit black borders: only unblended crops
have them, so a network that is confident only next to a black border makes every path flat.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.validate import choice, each, fraction

CROPS = ("resized", "reflect", "pad")
PADDING = 4
ASPECT = (3 / 4, 4 / 3)  # width / height; torchvision's default
ATTEMPTS = 10  # boxes to draw before falling back to the whole image, as in torchvision


def check_crop(crop: str, area: Sequence[float]) -> None:
    choice("task.crop", crop, CROPS)
    low, high = each(fraction, "task.crop_area", area, zero=False, length=2)
    if low > high:
        raise ValueError(f"task.crop_area={area}: must be in ascending order")


def croppable(pixels: Tensor, crop: str) -> Tensor:
    """Pads images (N, C, H, W) for `random_crops`, where the crop needs it."""
    if crop == "pad":
        return F.pad(pixels, [PADDING] * 4)
    if crop == "reflect":
        rows, columns = (_mirrored(side, pixels.device) for side in pixels.shape[-2:])
        return pixels[..., rows[:, None], columns]
    return pixels


def random_crops(
    images: Tensor, index: Tensor, crop: str, area: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Randomly crops and flips `images[index]`, padded by `croppable`: (B, C, H, W)."""
    if crop != "resized":
        return crop_and_flip(images, index, PADDING, generator)
    boxes = draw_boxes(len(index), images.shape[-2:], area, generator)
    flip = torch.rand(len(index), generator=generator, device=images.device) < 0.5
    return resize_boxes(images[index].float(), boxes, flip)


def crop_and_flip(padded: Tensor, index: Tensor, padding: int, generator) -> Tensor:
    """Random crops and horizontal flips of padded images, in one gather for the whole batch.

    Args:
        padded: (N, C, H + 2 padding, W + 2 padding).
        index: (B,), the images to crop.
    Returns:
        (B, C, H, W), same dtype.
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
    """Boxes (4, count) as top, left, height, width, drawn like torchvision's RandomResizedCrop.

    The area is uniform in `area` x H x W, the aspect ratio log-uniform; a box that does not fit is
    redrawn up to ten times.
    """
    device, (rows, columns) = generator.device, size
    draws = torch.rand(2, ATTEMPTS, count, generator=generator, device=device)
    side = draws[0].mul_((area[1] - area[0]) * rows * columns).add_(area[0] * rows * columns)
    side = side.sqrt_()
    low, high = (math.log(ratio) / 2 for ratio in ASPECT)
    stretch = draws[1].mul_(high - low).add_(low).exp_()  # square root of the aspect ratio
    heights, widths = (side / stretch).round_(), (side * stretch).round_()
    fits = (heights <= rows) & (widths <= columns) & (heights > 0) & (widths > 0)
    # pad with Python numbers: copying a tensor to the device would block
    last = (0, 0, 0, 1)  # one more attempt, which always fits
    first = F.pad(fits, last, value=True).byte().argmax(0, keepdim=True)
    box = [
        F.pad(sides, last, value=whole).gather(0, first).squeeze(0)
        for sides, whole in zip((heights, widths), _whole(size), strict=True)
    ]
    places = torch.rand(2, count, generator=generator, device=device)
    for place, side, limit in zip(places, box, size, strict=True):
        room = limit - side
        drawn = (place * (room + 1)).floor().minimum(room)
        place.copy_(torch.where(first[0] == ATTEMPTS, (room / 2).floor(), drawn))
    return torch.cat([places, torch.stack(box)])


def resize_boxes(pixels: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Bilinear resize of one box per image to the image's own size; `flip` mirrors columns.

    Args:
        pixels: (B, C, H, W), float.
        boxes: (4, B), top, left, height, width in whole pixels.
        flip: (B,), bool.
    """
    height, width = pixels.shape[-2:]
    top, left, rows, columns = boxes[:, :, None]
    y, x = _centres(top, rows, height), _centres(left, columns, width)
    x = torch.where(flip[:, None], x.flip(-1), x)
    # grid_sample with align_corners=True: pixel 0 at -1, the last pixel at 1
    y, x = (2 * place / (side - 1) - 1 for place, side in ((y, height), (x, width)))
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=True)


def _centres(start: Tensor, side: Tensor, length: int) -> Tensor:
    """Positions (B, length) of pixel centres within a box, clamped to its outer pixels."""
    steps = torch.arange(length, device=side.device) + 0.5
    inside = (steps * (side / length) - 0.5).clamp_(min=0)
    return start + torch.minimum(inside, side - 1)


def _whole(size: Sequence[int]) -> tuple[int, int]:
    """Height and width of the largest centred box whose aspect ratio is allowed."""
    height, width = size
    low, high = ASPECT
    return min(height, round(width / low)), min(width, round(height * high))


def _mirrored(side: int, device) -> Tensor:
    """Indices that reflect-pad an axis by PADDING; the edge pixel is not repeated."""
    last = side - 1
    return last - (last - torch.arange(-PADDING, side + PADDING, device=device).abs()).abs()
