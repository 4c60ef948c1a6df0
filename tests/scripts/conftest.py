"""Fixtures of tests of scripts/measure.py."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for index in range(5):
        pixels = draw.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        kind = "L" if index == 0 else "RGB"  # one grey image
        Image.fromarray(pixels).convert(kind).save(folder / f"{index}.png")
    return folder
