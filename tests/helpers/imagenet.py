"""Generated images, in folders and in memory, for tests of ImageNet."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from ed.datasets.imagenet import Source


def make_image(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Returns a smooth random image of size (width, height)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(kind: str = "JPEG", **how) -> bytes:
    buffer = io.BytesIO()
    make_image(**how).save(buffer, kind)
    return buffer.getvalue()


def fill(root: Path, folders, *, count: int = 1, suffix: str = ".JPEG") -> Path:
    """Creates class folders that all contain the same small image; returns `root`."""
    content = encoded("PNG" if suffix == ".png" else "JPEG")
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(count):
            (root / folder / f"{number}{suffix}").write_bytes(content)
    return root


class InMemory(Source):
    """Generated images, one per label."""

    def __init__(self, labels, kind: str = "PNG"):
        self.place, self.labels = "memory", np.asarray(labels)
        self.files = [encoded(kind, seed=index) for index in range(len(labels))]

    def name(self, index: int) -> str:
        return f"memory/{index}"

    def read(self, index: int) -> bytes:
        return self.files[index]


def as_one_of_two(monkeypatch, rank: int) -> None:
    monkeypatch.setattr("ed.runtime.processes.world_size", lambda: 2)
    monkeypatch.setattr("ed.runtime.processes.rank", lambda: rank)
