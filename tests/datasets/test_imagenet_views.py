"""Tests of views (crops, flips, RandAugment) against torchvision and closed forms."""

import numpy as np
import pytest
import torch
from PIL import ImageFilter

from ed.datasets.imagenet import CLIP, Views
from ed.datasets.imagenet.randaugment import OPERATIONS, rand_augment
from ed.datasets.imagenet.views import random_crop, to_tensor
from ed.runtime.streams import generator
from tests.helpers.imagenet import make_image


@pytest.mark.parametrize("views", [Views(), CLIP, Views(size=32)], ids=["224", "clip", "32"])
@pytest.mark.parametrize("size", [(500, 375), (333, 499), (96, 96), (250, 1001)])
def test_the_centre_crop_equals_torchvision(views, size):
    from torchvision.transforms import v2

    image = make_image(size=size)
    how = v2.InterpolationMode.BICUBIC if views.bicubic else v2.InterpolationMode.BILINEAR
    expected = v2.functional.center_crop(
        v2.functional.resize(image, round(views.size * views.resize), how), views.size
    )
    assert torch.equal(views.evaluate(image), to_tensor(expected))


def test_evaluation_resizes_to_256_and_clip_to_224():
    assert Views().resize * Views().size == 256
    assert CLIP.resize * CLIP.size == 224


def test_random_crops_have_the_requested_areas_and_ratios():
    draws = generator(0, "crops")
    width, height = 500, 375
    crops = [random_crop((width, height), (0.05, 1.0), (3 / 4, 4 / 3), draws) for _ in range(2000)]
    left, top, w, h = np.array(crops).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + w <= width).all()
    assert (top + h <= height).all()
    area, ratio = w * h / (width * height), w / h
    assert 0.048 < area.min() < 0.06
    assert area.max() > 0.97
    assert 0.73 < ratio.min() < 0.77
    assert 1.30 < ratio.max() < 1.36
    # small crops always fit, so their area and position are uniform and their ratio log-uniform
    small = area < 0.4
    assert abs(area[small].mean() - 0.225) < 0.02
    assert abs(np.log(ratio[small]).mean()) < 0.02  # a uniform ratio would give 0.028
    assert abs((left / (width - w).clip(1))[small].mean() - 0.5) < 0.04


def test_an_image_that_fits_no_crop_gets_a_centre_crop():
    assert random_crop((1000, 30), (0.5, 1), (3 / 4, 4 / 3), generator(0, "x")) == (480, 0, 40, 30)
    assert random_crop((30, 1000), (0.5, 1), (3 / 4, 4 / 3), generator(0, "x")) == (0, 480, 30, 40)


def test_the_training_view_equals_torchvisions_resized_crop():
    from torchvision.transforms import v2

    image = make_image(size=(120, 90))
    views = Views(size=48, flip=False)
    left, top, width, height = random_crop(image.size, views.area, views.ratio, generator(3, "x"))
    expected = v2.functional.resized_crop(image, top, left, height, width, [48, 48])
    assert torch.equal(views.train(image, generator(3, "x")), to_tensor(expected))


def test_half_of_the_images_are_flipped_but_none_for_clip():
    image = make_image(size=(32, 32))
    whole = Views(size=32, area=(1.0, 1.0), ratio=(1.0, 1.0))
    mirrored = to_tensor(image).flip(-1)
    seen = [whole.train(image, generator(i, "x")) for i in range(200)]
    count = sum(torch.equal(pixels, mirrored) for pixels in seen)
    assert sum(torch.equal(pixels, to_tensor(image)) for pixels in seen) == 200 - count
    assert 75 < count < 125
    assert not CLIP.flip
    assert CLIP.area == (0.9, 1.0)
    assert CLIP.bicubic
    assert not Views().bicubic


def test_randaugment_operations_equal_their_closed_forms():
    """Checks most of the sixteen operations, by their position in the list."""
    image = make_image(size=(56, 56))
    pixels = np.array(image).astype(int)
    results = [np.array(operation(image, [0.1, 0.1])).astype(int) for operation in OPERATIONS]
    assert len(results) == 16
    assert results[0].min((0, 1)).tolist() == [0, 0, 0]  # autocontrast
    assert results[0].max((0, 1)).tolist() == [255, 255, 255]
    assert (results[2] == 255 - pixels).all()  # invert
    assert (results[3] == pixels // 16 * 16).all()  # posterise to 4 bits
    assert (results[4] == pixels).all()  # solarise above 256: no change
    assert (results[5] == np.where(pixels < 128, pixels + 110, pixels)).all()
    assert abs(results[8] - (pixels * 1.9).clip(0, 255)).max() <= 1  # brightness
    shifted = np.full_like(pixels, 128)
    shifted[:, :-25] = pixels[:, 25:]  # shifts by 100 / 224 of the width
    assert (results[13] == shifted).all()
    shifted = np.full_like(pixels, 128)
    shifted[:-25] = pixels[25:]
    assert (results[14] == shifted).all()
    grey = (results[15] == 128).all(-1)
    assert grey[:15, :15].all()  # a square of side 20 around (5, 5)
    assert (results[15][15:] == pixels[15:]).all()
    for result in (results[10], results[11], results[12]):
        assert (result == 128).all(-1).any()  # grey fill
    assert (results[11][50, :41] == pixels[50, 15:]).all()  # sheared by 0.3 x 50.5 pixels
    assert (results[12][:41, 50] == pixels[15:, 50]).all()
    turned = image.rotate(30, fillcolor=(128, 128, 128))
    assert (results[10] == np.array(turned)).all()


def test_colour_operations_of_randaugment():
    """Each operation scales the difference from a grey, mean, black or smoothed image by 1.9."""
    image = make_image(size=(56, 56))
    pixels, grey = np.array(image) / 1.0, np.array(image.convert("L"))[..., None] / 1.0
    mean = np.round(grey.mean())
    smooth = np.array(image.filter(ImageFilter.SMOOTH)) / 1.0
    results = [np.array(OPERATIONS[place](image, [0.1, 0.1])) for place in (6, 7, 8, 9)]
    for result, origin in zip(results, (grey, mean, 0, smooth), strict=True):
        expected = (origin + 1.9 * (pixels - origin)).clip(0, 255)
        assert abs(result - expected).max() <= 2


def test_signs_of_randaugment_are_random():
    image = make_image(size=(56, 56))
    for operation in OPERATIONS[10:15]:
        there, back = (np.array(operation(image, [draw, 0.5])) for draw in (0.1, 0.9))
        assert (there != back).any()


def test_zero_randaugment_operations_return_the_image():
    image = make_image()
    assert rand_augment(image, 0, generator(0, "x")) is image
