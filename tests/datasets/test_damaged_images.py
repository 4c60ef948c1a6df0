"""Images and labels that cannot be read raise one-line errors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ed.datasets.imagenet import ImageError, open_split
from ed.datasets.images import load_images
from ed.tasks.image_folder import ImageFolder


def write_images(folder, images, labels):
    folder.mkdir()
    table = pa.table({"img": images, "label": labels})
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    return str(folder)


def png(side=2):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


READERS = {
    "images": lambda folder: load_images(folder, "train", classes=2, size=(2, 2)),
    "imagenet": lambda folder: open_split(folder, "train"),
    "image_folder": ImageFolder,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("labels", "shown"),
    [([0, None], "row 1 "), ([[0], [1]], r"\[0\]"), (["0", "1"], "'0'"), ([0.0, 1.7], r"0\.0")],
)
def test_labels_that_are_not_integers_are_rejected(labels, shown, reader, tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))
    folder = write_images(tmp_path / "data", [png(), png()], labels)
    with pytest.raises(ValueError, match=rf"task\.data=.*{shown}"):
        READERS[reader](folder)


@pytest.mark.parametrize("image", [None, {"bytes": None, "path": None}])
def test_missing_images_are_reported(image, tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))
    images = [png(), image, *[png()] * 998]
    folder = write_images(tmp_path / "null", images, list(range(1000)))
    with pytest.raises(ValueError, match=r"task\.data=.*image 1"):
        load_images(folder, "train", classes=1000, size=(2, 2))
    with pytest.raises(ImageError, match=r"task\.data=.*row 1 "):
        open_split(folder, "train").image(1)


def test_oversized_images_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))
    # Pillow rejects images with more than twice this many pixels
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    folder = write_images(tmp_path / "bomb", [png(2), png(8)], [0, 1])
    with pytest.raises(ValueError, match=r"task\.data=.*image 1 .*bomb"):
        load_images(folder, "train", classes=2, size=(2, 2))


def test_cached_images_of_a_different_size_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))
    folder = write_images(tmp_path / "data", [png(), png()], [0, 1])
    expected = load_images(folder, "train", classes=2, size=(2, 2))
    (cached,) = (tmp_path / "cache").glob("*.npz")
    np.savez(cached, pixels=np.zeros((1, 3, 9, 9), np.uint8), labels=np.zeros(1, np.int64))
    assert torch.equal(load_images(folder, "train", classes=2, size=(2, 2)).pixels, expected.pixels)
