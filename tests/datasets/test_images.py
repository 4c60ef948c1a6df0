"""Tests of image data: embedded images, other folders, augmentation."""

import io
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from ed.datasets.batches import shuffled_batches
from ed.datasets.images import EMBEDDED, load_images, load_table
from ed.engine.compose import compose_config
from ed.runtime.files import sweep
from ed.tasks.cifar10 import Cifar10

SIZE = {"classes": 10, "size": (32, 32)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))


def write_folder(folder, columns: dict) -> str:
    folder.mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def png(size=(32, 32), value=7) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def test_embedded_images_are_balanced_and_small():
    for split, count in (("train", 200), ("test", 50)):
        images = load_images("embedded", split, **SIZE)
        assert images.pixels.shape == (10 * count, 3, 32, 32)
        assert images.labels.bincount().tolist() == [count] * 10
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 5e6


def assert_balanced(labels: torch.Tensor, count: int) -> None:
    assert labels.bincount().tolist() == [count] * 10


def assert_mean(pixels: torch.Tensor, *known: float) -> None:
    mean = pixels.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-8)


def test_complete_test_set_has_the_known_mean_and_the_embedded_images(full_data):
    small = load_images("embedded", "test", **SIZE)
    whole = load_images(str(full_data / "cifar10"), "test", **SIZE)
    assert_balanced(whole.labels, 1000)
    assert_mean(whole.pixels, 0.49421428, 0.48513139, 0.45040909)
    known = {row.numpy().tobytes() for row in whole.pixels}
    assert all(row.numpy().tobytes() in known for row in small.pixels)


def test_the_complete_training_set_is_balanced(full_data):
    table = load_table(str(full_data / "cifar10"), "train", "task.data")
    assert_balanced(torch.tensor(table["label"][:]), 5000)


@pytest.mark.slow
def test_the_complete_training_set_has_the_known_mean(full_data):
    """Decodes 50,000 images, which is slow; a quick test checks the test set."""
    whole = load_images(str(full_data / "cifar10"), "train", **SIZE)
    assert_mean(whole.pixels, 0.49139968, 0.48215841, 0.44653091)


def test_images_are_decoded_once(tmp_path, monkeypatch):
    first = load_images("embedded", "test", **SIZE)
    monkeypatch.setattr("ed.datasets.images.decode", lambda *_, **__: pytest.fail("decoded again"))
    second = load_images("embedded", "test", **SIZE)
    assert torch.equal(first.pixels, second.pixels)


def test_other_sizes_are_rejected_even_with_a_cache():
    load_images("embedded", "test", **SIZE)
    with pytest.raises(ValueError, match=r"task.data=embedded: image 0 is 32x32"):
        load_images("embedded", "test", classes=10, size=(28, 28))


def test_a_damaged_cache_is_rebuilt(tmp_path):
    first = load_images("embedded", "test", **SIZE)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
        path.with_name(f"{path.name}.1.tmp").touch()  # left by a killed process
    assert torch.equal(load_images("embedded", "test", **SIZE).pixels, first.pixels)
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_losing_a_race_for_the_cache_still_returns_the_images(tmp_path, monkeypatch):
    """Another process that writes the same cache may remove our temporary file."""
    replace = os.replace

    def overtaken(temporary, path):
        sweep(path)
        replace(temporary, path)

    monkeypatch.setattr("ed.runtime.files.os.replace", overtaken)
    assert len(load_images("embedded", "test", **SIZE)) == 500
    assert not list((tmp_path / "cache").iterdir())


def test_a_folder_with_columns_as_on_the_hub_is_read(tmp_path):
    folder = write_folder(tmp_path / "data", {"img": [png(), png(value=9)], "label": [0, 9]})
    images = load_images(folder, "train", **SIZE)
    assert images.pixels.unique().tolist() == [7, 9]
    assert images.labels.tolist() == [0, 9]
    for path in (tmp_path / "data").iterdir():  # replaces the images
        pq.write_table(pa.table({"img": [png(), png(value=8)], "label": [0, 9]}), path)
    assert load_images(folder, "train", **SIZE).pixels.unique().tolist() == [7, 8]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"photo": [png()], "label": [1]}, r"\['label', 'photo'\].*'img'"),
        ({"img": [png()], "class": [1]}, r"\['class', 'img'\].*'label'"),
        ({"img": [png()], "label": [10]}, "10 to 10.*task.classes"),
        ({"img": [png()], "label": [-1]}, "-1 to -1.*task.classes"),
        ({"img": [png((28, 28))], "label": [1]}, "image 0.*28x28.*task.image_size"),
        ({"img": [png(), {"bytes": b"no image"}], "label": [1, 2]}, "image 1"),
    ],
)
def test_invalid_data_is_rejected(tmp_path, columns, message):
    folder = write_folder(tmp_path / "data", columns)
    with pytest.raises(ValueError, match=f"task.data=.*{message}"):
        load_images(folder, "train", **SIZE)


def test_missing_folders_and_splits_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"task\.data=\./nothing"):
        load_images("./nothing", "train", **SIZE)
    folder = write_folder(tmp_path / "data", {"img": [png()], "label": [1]})
    with pytest.raises(ValueError, match=r"task.data=.*split 'validation'"):
        load_images(folder, "validation", **SIZE)


MEAN, STD = (  # published values for CIFAR-10
    torch.tensor(values)[:, None, None]
    for values in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
)


@pytest.fixture(scope="module")
def task() -> Cifar10:
    settings = ["task=cifar10", "task.data=embedded", "task.batch_size=300", "task.epochs=4"]
    settings += ["task.warmup_epochs=1.5", "task.eval_every=2", "task.crop=pad"]
    task = instantiate(compose_config(settings).task)
    task.prepare(torch.device("cpu"), seed=3)
    return task


def test_images_are_standardised_by_channel_and_epochs_have_only_full_batches(task):
    index = torch.tensor([5, 1999, 7])
    found = task.examples(index)
    expected = (task.train.pixels[index] / 255 - MEAN) / STD  # neither cropped nor flipped
    torch.testing.assert_close(found["x"], expected)
    assert torch.equal(found["label"], task.train.labels[index])
    lengths = task.total_steps, task.warmup_steps, task.eval_steps, task.num_examples
    assert lengths == (24, 9, 12, 2000)  # six batches per epoch
    noise = task.noise_like(found["x"], torch.Generator().manual_seed(0))
    pixels = noise * STD + MEAN  # uniform in [0, 1]
    assert 0 <= pixels.min() < 0.01
    assert 0.99 < pixels.max() <= 1
    inner = instantiate(compose_config(["task=cifar10", "task.space=block1"]).task)
    assert (task.has_noise, inner.has_noise) == (True, False)  # feature spaces have no noise


def test_training_images_are_crops_of_images_with_a_black_border_of_four(task):
    """Finds each crop and flip by trying all of them; they must differ between epochs."""
    padded = torch.nn.functional.pad(task.train.pixels, [4] * 4)
    orders, places = [], []
    for start in (0, task.steps_per_epoch):  # the first batches of two epochs
        batch = next(task.batches(None, start))
        pixels = ((batch["x"] * STD + MEAN) * 255).round().to(torch.uint8)[:60]
        _, order = next(shuffled_batches(2000, 300, range(start, 24), seed=3, device="cpu"))
        orders.append(order)
        assert torch.equal(batch["label"], task.train.labels[order])
        for image, source in zip(pixels, padded[order], strict=False):
            windows = source.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
            both = torch.stack([windows, windows.flip(-1)])
            places.append((both == image).flatten(3).all(-1).nonzero()[0].tolist())
    assert not torch.equal(*orders)
    flips, rows, columns = torch.tensor(places).T
    assert rows.unique().tolist() == columns.unique().tolist() == list(range(9))
    assert 0.3 < flips.float().mean() < 0.7  # 4 standard deviations for 120 images
    assert places[:60] != places[60:]
