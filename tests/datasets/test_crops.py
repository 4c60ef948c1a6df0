"""Tests of random crops against torchvision: the same pixels and the same distribution."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import pad
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import resized_crop, to_pil_image

from ed.analysis.curves import read_curves
from ed.datasets.crops import crop_and_flip, croppable, draw_boxes, random_crops, resize_boxes
from ed.engine.compose import compose_config
from ed.runtime import runs
from ed.tasks.cifar10 import Cifar10
from scripts import table

AREA = (0.08, 1.0)
ROOT = Path(__file__).parents[2]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pil_crop(image, box):
    """Returns torchvision's resized crop of a PIL image, as in a dataset pipeline."""
    from torchvision.transforms.functional import pil_to_tensor

    size = list(image.shape[-2:])
    return pil_to_tensor(resized_crop(to_pil_image(image), *box, size, InterpolationMode.BILINEAR))


@pytest.mark.parametrize("size", [(32, 32), (64, 32)])
def test_a_resized_crop_is_within_one_grey_level_of_torchvision(size):
    images = torch.randint(256, (40, 3, *size), dtype=torch.uint8, generator=seeded(0))
    boxes = draw_boxes(len(images), size, AREA, seeded(1))
    boxes[:, 0] = torch.tensor([0, 0, *size])  # the whole image
    boxes[:, 1] = torch.tensor([size[0] - 1, size[1] - 1, 1, 1])  # one pixel in a corner
    flip = torch.arange(len(images)) % 2 == 0
    found = resize_boxes(images.float(), boxes, flip)
    for image, box, mirrored, crop in zip(images, boxes.T.int().tolist(), flip, found, strict=True):
        expected = pil_crop(image, box).float()
        expected = expected.flip(-1) if mirrored else expected
        assert (crop.round() - expected).abs().max() <= 1


def test_boxes_have_the_areas_aspect_ratios_and_places_of_torchvision():
    count = 4000
    ours = draw_boxes(count, (32, 32), AREA, seeded(0))
    torch.manual_seed(0)
    image = torch.zeros(3, 32, 32)
    theirs = [RandomResizedCrop.get_params(image, list(AREA), [3 / 4, 4 / 3]) for _ in range(count)]
    top, left, height, width = torch.stack([ours, torch.tensor(theirs).T.float()], 1)
    rows, columns = 32 - height, 32 - width
    seen = {
        "area": height * width / 1024,
        "aspect": (width / height).log(),
        "row": torch.where(rows > 0, top / rows.clamp(min=1), 0.5),
        "column": torch.where(columns > 0, left / columns.clamp(min=1), 0.5),
        "whole": ((height == 32) & (width == 32)).float(),
    }
    # two-sample Kolmogorov-Smirnov test at significance level 0.001
    limit = 1.95 * math.sqrt(2 / count)
    for name, (a, b) in seen.items():
        grid = torch.cat([a, b]).unique()
        steps = [(x[:, None] <= grid).float().mean(0) for x in (a, b)]
        assert (steps[0] - steps[1]).abs().max() < limit, name
    assert (ours[0] + ours[2]).max() <= 32
    assert (ours[1] + ours[3]).max() <= 32
    assert ours.min() >= 0


def test_an_image_too_narrow_for_any_box_gets_a_centre_crop():
    image = torch.zeros(3, 64, 4)
    box = draw_boxes(5, (64, 4), (0.9, 1.0), seeded(0))
    expected = RandomResizedCrop.get_params(image, [0.9, 1.0], [3 / 4, 4 / 3])
    assert box.T.tolist() == [list(map(float, expected))] * 5


@pytest.mark.parametrize("crop", ["reflect", "pad"])
def test_shifted_crops_are_windows_of_the_padded_image(crop):
    pixels = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=seeded(0))
    padded = croppable(pixels, crop)
    how = {"mode": "reflect"} if crop == "reflect" else {}
    assert torch.equal(padded, pad(pixels.float(), [4] * 4, **how).to(torch.uint8))
    crops = random_crops(padded, torch.tensor([1] * 400), crop, AREA, seeded(0))
    windows = {
        variant.numpy().tobytes()
        for top in range(9)
        for left in range(9)
        for window in [padded[1, :, top : top + 8, left : left + 8]]
        for variant in (window.contiguous(), window.flip(-1).contiguous())
    }
    seen = {crop.contiguous().numpy().tobytes() for crop in crops}
    assert seen <= windows
    assert len(seen) > 100  # 400 draws cover most of the 162 windows


@pytest.mark.parametrize("crop", ["resized", "reflect", "pad"])
def test_crops_depend_only_on_the_seed(crop):
    images = croppable(torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8), crop)
    first, again, other = (
        random_crops(images, torch.arange(10), crop, AREA, seeded(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (10, 3, 32, 32)


def test_zero_padding_draws_the_crops_of_the_committed_runs():
    """Committed results depend on the random numbers drawn for `pad`, which must never change."""
    images = torch.arange(3 * 8 * 8).view(1, 3, 8, 8)
    crops = crop_and_flip(croppable(images, "pad"), torch.zeros(4, dtype=torch.long), 4, seeded(5))
    draws = seeded(5)
    shift = torch.randint(9, (2, 4, 1), generator=draws)
    flip = torch.rand(4, 1, generator=draws) < 0.5
    for i, crop in enumerate(crops):
        top, left = shift[:, i, 0].tolist()
        window = pad(images, [4] * 4)[0, :, top : top + 8, left : left + 8]
        assert torch.equal(crop, window.flip(-1) if flip[i] else window)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"crop": "black"}, "task.crop"),
        ({"crop_area": 0.5}, "task.crop_area"),
        ({"crop_area": [0.5]}, "task.crop_area"),
        ({"crop_area": [0.0, 1.0]}, "task.crop_area"),
        ({"crop_area": [0.9, 0.5]}, "task.crop_area"),
        ({"crop_area": [0.5, "all"]}, "task.crop_area"),
    ],
)
def test_invalid_crops_are_rejected(settings, key):
    leaf = {k: v for k, v in compose_config(["task=cifar10"]).task.items() if k != "_target_"}
    with pytest.raises(ValueError, match=key):
        Cifar10(**{**leaf, **settings})


def test_a_table_ignores_runs_with_another_crop(tmp_path, capsys):
    """Runs made before the setting existed are ignored, too."""
    found = read_curves(ROOT / "experiments" / "results" / "crop_300" / "curves.parquet")
    for seed in (1, 2):
        record, folder = found["pad_baseline", seed], tmp_path / f"table1/baseline/seed{seed}"
        folder.mkdir(parents=True)
        if seed == 1:
            del record.config["task"]["crop"]
        (folder / runs.CONFIG).write_text(yaml.safe_dump(record.config))
        runs.write_done(folder, record.done)
    assert table.main(["table1", "--runs", str(tmp_path)]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "baseline" in line]
    assert ["task.crop" in line for line in warnings] == [True, True]
