"""MNIST-CIFAR: pairs of digits and objects, and accuracies on randomized blocks."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from ed.datasets.images import load_table
from ed.engine.compose import compose_config
from ed.tasks.mnist_cifar import OBJECTS, MnistCifar

CPU = torch.device("cpu")


def write_set(folder: Path, split: str, column: str, images: np.ndarray, labels) -> None:
    """Writes uint8 images (N, H, W[, 3]) and labels in the format of the hub's data sets."""
    rows = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(rows, kind), "label": pa.array(labels, pa.int64())})
    features = {column: {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}
    note = json.dumps({"info": {"features": features}})  # like the hub's files
    table = table.replace_schema_metadata({"huggingface": note})
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Writes objects of brightness 100 + i and digits of brightness 1 + i, to tell them apart."""
    root = tmp_path_factory.mktemp("sets")
    for split, digits in (("train", 40), ("test", 30)):
        labels = np.arange(100) % 10  # 10 images of each class
        objects = np.broadcast_to((100 + np.arange(100))[:, None, None, None], (100, 32, 32, 3))
        write_set(root / "cifar", split, "img", objects.astype(np.uint8), labels)
        # the test set has fewer zeros (3) than automobiles (10), as in the real data
        labels = np.arange(digits) % 10 if split == "test" else np.arange(digits) % 2
        grey = np.broadcast_to((1 + np.arange(digits))[:, None, None], (digits, 28, 28))
        write_set(root / "mnist", split, "image", grey.astype(np.uint8), labels)
    with pytest.MonkeyPatch.context() as patch:  # keeps the user's caches clean
        patch.setenv("ED_CACHE", str(root / "cache"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(root / "datasets"))
        yield {"data": str(root / "cifar"), "mnist": str(root / "mnist")}


def make(sources: dict[str, str], *overrides: str) -> MnistCifar:
    given = [f"task.{key}={value}" for key, value in sources.items()]
    return instantiate(compose_config(["task=mnist_cifar", *given, *overrides]).task)


def test_real_data_sets_have_the_papers_sizes(full_data, tmp_path, monkeypatch):
    """Decodes only the test sets; the labels give the size of the training set."""
    monkeypatch.setenv("ED_CACHE", str(tmp_path))
    labels = load_table(str(full_data / "cifar10"), "train", "task.data")["label"][:]
    assert [labels.count(name) for name in OBJECTS] == [5000, 5000]
    task = make({"data": str(full_data / "cifar10"), "mnist": str(full_data / "mnist")})
    monkeypatch.setattr(task, "load", lambda _, load=task.load: load("test"))
    task.prepare(CPU, seed=0)
    assert task.test.labels.bincount().tolist() == [1000, 1000]  # one image is 0.05 % of the set
    assert task.test.pixels.shape[1:] == (3, 64, 32)
    top = task.test.pixels[:, :, :32].float()
    assert torch.equal(top[:, 0], top[:, 1])  # digits are grey
    assert not task.test.pixels[:, :, 32:][:, 0].equal(task.test.pixels[:, :, 32:][:, 1])
    assert top[..., :2].max() == top[..., 30:].max() == 0  # digits have a black margin
    ink = top[:, :, 2:30, 2:30].mean((1, 2, 3))
    zeros, ones = (ink[task.test.labels == label].mean() for label in (0, 1))
    assert zeros > 1.5 * ones  # zeros have about twice as much ink as ones
    distinct = top[task.test.labels == 0].unique(dim=0)
    assert len(distinct) == 980  # all of MNIST's test zeros are used
    for block, rows in (("mnist", slice(None, 32)), ("cifar", slice(32, None))):
        own, shuffled = task.test.pixels[:, :, rows], task.randomized[block].pixels[:, :, rows]
        pairs = zip(own, task.test.labels.tolist(), strict=True)
        label_of = {image.numpy().tobytes(): label for image, label in pairs}
        labels = torch.tensor([label_of[image.numpy().tobytes()] for image in shuffled])
        agreement = (labels == task.test.labels).double().mean()
        assert abs(agreement - 0.5) < 0.056  # within 5 sigma of chance for 2,000 draws


@pytest.fixture(scope="module")
def task(sources) -> MnistCifar:
    task = make(sources, "task.batch_size=10")
    task.prepare(CPU, seed=0)
    return task


def identities(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices of the digit and the object in each image, from their brightness."""
    return pixels[:, 0, 16, 16].long() - 1, pixels[:, 0, 48, 16].long() - 100


def test_an_image_is_a_padded_digit_above_an_object(task):
    assert task.train.pixels.shape == (20, 3, 64, 32)
    digits, objects = identities(task.train.pixels)
    for pixels, digit, thing in zip(task.train.pixels, digits, objects, strict=True):
        expected = torch.zeros(3, 64, 32, dtype=torch.uint8)
        expected[:, 2:30, 2:30] = 1 + digit  # a grey digit with a black margin of 2
        expected[:, 32:] = 100 + thing
        assert torch.equal(pixels, expected)


@pytest.mark.parametrize("split", ["train", "test"])
def test_both_blocks_determine_the_label(task, split):
    images = getattr(task, split)
    digits, objects = identities(images.pixels)
    digit_class = digits % 2 if split == "train" else digits % 10
    assert torch.equal(digit_class, images.labels)  # label 0 has digit 0, label 1 has digit 1
    # automobiles and trucks
    assert torch.equal(objects % 10, torch.where(images.labels == 0, 1, 9))
    assert len(objects.unique()) == len(images) == 20  # each object occurs once


def test_no_digit_repeats_before_all_are_used(task):
    train, _ = identities(task.train.pixels)
    assert len(train.unique()) == 20  # per class, 20 digits for 10 objects
    zeros = train[task.train.labels == 0].tolist()
    assert zeros != sorted(zeros)  # digits are drawn at random
    test, _ = identities(task.test.pixels)
    _, counts = test[task.test.labels == 0].unique(return_counts=True)
    assert sorted(counts.tolist()) == [3, 3, 4]  # 10 automobiles share 3 zeros


def test_pairing_does_not_depend_on_the_run(task, sources):
    again = make(sources, "task.batch_size=10")
    again.prepare(CPU, seed=7)
    assert torch.equal(again.train.pixels, task.train.pixels)
    for block in ("mnist", "cifar"):
        assert torch.equal(again.randomized[block].pixels, task.randomized[block].pixels)
    ours, theirs = next(task.batches(None, 0)), next(again.batches(None, 0))
    assert not torch.equal(ours["x"], theirs["x"])  # the order of examples depends on the seed


def test_inputs_are_unnormalised_and_unaugmented(task):
    batch = next(task.batches(None, 0))
    known = {p.numpy().tobytes() for p in task.train.pixels.float() / 255}
    assert all(image.numpy().tobytes() in known for image in batch["x"])
    noise = task.noise_like(batch["x"], torch.Generator().manual_seed(0))
    assert noise.shape == batch["x"].shape
    assert noise.min() >= 0
    assert noise.max() <= 1


def test_randomized_sets_shuffle_one_block_and_keep_the_other(task):
    digits, objects = identities(task.test.pixels)
    for block, kept, shuffled in (("mnist", 1, 0), ("cifar", 0, 1)):
        images = task.randomized[block]
        assert torch.equal(images.labels, task.test.labels)
        now, before = identities(images.pixels), (digits, objects)
        assert torch.equal(now[kept], before[kept])
        assert torch.equal(now[shuffled].sort().values, before[shuffled].sort().values)
        assert not torch.equal(now[shuffled], before[shuffled])


def oracle(block: str):
    """Returns a model that predicts the label from one block only."""

    def model(x):
        digits, objects = identities((255 * x).round())
        label = digits % 10 if block == "mnist" else (objects % 10 == 9).long()
        return 10 * torch.nn.functional.one_hot(label, 2).float()

    return model


@pytest.mark.parametrize(("looks_at", "other"), [("mnist", "cifar"), ("cifar", "mnist")])
def test_accuracies_show_which_block_a_model_uses(task, looks_at, other):
    report = task.evaluate(oracle(looks_at))
    assert report["eval/acc"] == 100
    assert report[f"eval/acc_{other}_randomized"] == 100
    shuffled, labels = identities(task.randomized[looks_at].pixels), task.test.labels
    predicted = shuffled[0] % 10 if looks_at == "mnist" else (shuffled[1] % 10 == 9).long()
    expected = 100 * float((predicted == labels).double().mean())
    assert report[f"eval/acc_{looks_at}_randomized"] == pytest.approx(expected)
    assert expected < 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.image_size=[32,32]"], r"task.image_size=\[32, 32\]"),
        (["task.classes=10"], r"task.classes=10"),
    ],
)
def test_unsupported_layouts_are_rejected(sources, overrides, message):
    with pytest.raises(Exception, match=message):
        make(sources, *overrides)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mnist": "./nowhere"}, r"task.mnist=./nowhere"),
        ({"mnist": "embedded"}, "task.mnist=embedded"),
        ({"data": "./nowhere"}, r"task.data=./nowhere"),
    ],
)
def test_error_on_missing_data_names_the_key(sources, changed, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make(sources | changed).prepare(CPU, seed=0)
