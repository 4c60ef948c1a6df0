"""Corruptions of images: closed forms, determinism and severity."""

import numpy as np
import pytest
import torch

from ed.datasets.corruptions import CORRUPTIONS, blur, corrupt
from ed.engine.compose import compose_config
from ed.runtime.streams import generator


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_corruptions_are_deterministic_and_grow_with_severity(name):
    severity = compose_config(["task=clip_standin"]).task.corruptions[name]
    pixels = torch.randint(256, (4, 3, 32, 32), generator=generator(0, "x"), dtype=torch.uint8)
    before = pixels.clone()
    corrupted = corrupt(pixels, name, severity)
    assert torch.equal(pixels, before)
    assert corrupted.dtype == torch.uint8
    assert corrupted.shape == pixels.shape
    assert torch.equal(corrupt(pixels, name, severity), corrupted)  # deterministic
    change = (corrupted.float() - pixels.float()).abs().mean()
    assert change > 5
    milder = (corrupt(pixels, name, severity / 2).float() - pixels.float()).abs().mean()
    assert milder < change


def test_corruptions_of_plain_images():
    """Checks uniform and striped images against closed-form results."""
    grey = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    for name in ("blur", "contrast", "pixelate"):
        assert torch.equal(corrupt(grey, name, 2 if name == "pixelate" else 0.7), grey)
    assert torch.equal(corrupt(grey, "brightness", 0.2), grey + 51)
    assert torch.equal(corrupt(grey, "brightness", 0.108), grey + 28)  # 0.108 x 255 = 27.54
    assert corrupt(grey, "brightness", 2.0).min() == 255  # clipped to white
    noise = (corrupt(grey, "noise", 0.1).float() - 100) / 255
    assert noise.std() == pytest.approx(0.1, rel=0.05)
    stripes = grey.clone()
    stripes[..., ::2] = 200
    assert torch.equal(corrupt(stripes, "pixelate", 2), torch.full_like(grey, 150))
    assert corrupt(stripes, "contrast", 0.5).unique().tolist() == [125, 175]
    stripes[:, 0] = 10  # contrast uses each channel's mean
    assert corrupt(stripes, "contrast", 1.0)[0, :, 0, 0].tolist() == [10, 150, 150]


def test_blur_is_gaussian_with_reflected_borders():
    row = torch.rand(32, generator=generator(0, "x"), dtype=torch.float64)
    kernel = np.exp(-0.5 * (np.arange(-3, 4) / 0.7) ** 2)  # the kernel covers three sigma
    expected = np.convolve(np.pad(row, 3, "reflect"), kernel / kernel.sum(), "valid")
    columns = row.float().expand(1, 3, 32, 32)
    for image, found in ((columns, blur(columns, 0.7)), (columns.mT, blur(columns.mT, 0.7).mT)):
        assert found.shape == image.shape
        torch.testing.assert_close(found.double(), torch.tensor(expected).expand(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("name", "severity", "message"),
    [
        ("fog", 1, "task.corruptions=fog"),
        ("pixelate", 5, r"task.corruptions.pixelate=5"),
        ("blur", 0, "task.corruptions.blur=0"),
        ("contrast", 1.5, "task.corruptions.contrast=1.5"),
        ("blur", 11, "task.corruptions.blur=11"),
    ],
)
def test_invalid_corruptions_are_rejected(name, severity, message):
    with pytest.raises(ValueError, match=message):
        corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), name, severity)
