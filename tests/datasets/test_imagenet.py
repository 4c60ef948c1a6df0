"""Tests of ImageNet: image sources, classes and scores."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image

from ed.datasets.imagenet import (
    EvaluationSet,
    ImageError,
    Views,
    accuracy,
    classes,
    evaluation_batches,
    loading,
    open_shift,
    open_split,
    open_training,
    restrict,
    shifts,
    sources,
)
from ed.datasets.imagenet.sources import open_folders
from ed.runtime.streams import generator
from tests.helpers.imagenet import InMemory, as_one_of_two, encoded, fill
from tests.helpers.launching import wait_for

# ---- classes and their restriction


def test_class_lists_are_complete():
    names = classes.synsets()
    assert len(names) == len(set(names)) == 1000
    assert list(names) == sorted(names)
    assert (names[0], names[999]) == ("n01440764", "n15075141")
    for name in ("r", "a"):
        indices = classes.subset(name)
        assert len(indices) == 200
        assert list(indices) == sorted(set(indices))
        assert 0 <= indices[0] <= indices[-1] < 1000
    known = classes.objectnet()
    used = [index for indices in known.values() for index in indices]
    assert len(known) == 113
    assert len(used) == len(set(used)) == 125
    assert not known.keys() & set(classes.objectnet_others())
    assert len(known) + len(classes.objectnet_others()) == 313


def test_restriction_keeps_the_largest_logit_of_each_group():
    logits = torch.tensor([[0.0, 5.0, 2.0, 9.0], [3.0, -1.0, 1.0, 9.0]])
    restricted = restrict(logits, ((2,), (0, 1)))
    assert restricted.tolist() == [[2.0, 5.0], [1.0, 3.0]]


@pytest.mark.parametrize("name", ["r", "a", "objectnet"])
def test_logits_of_other_classes_never_win(name):
    """Even infinite logits of unmapped classes do not change the result."""
    groups = shifts()[name].groups
    mapped = torch.tensor([index for group in groups for index in group])
    logits = torch.randn(50, 1000, generator=generator(0, "logits"))
    others = torch.ones(1000, dtype=torch.bool)
    others[mapped] = False
    raised = logits.clone()
    raised[:, others] = torch.inf
    assert others.sum() == 1000 - len(mapped)
    assert torch.equal(restrict(raised, groups), restrict(logits, groups))
    assert restrict(logits, groups).isfinite().all()


@pytest.mark.parametrize("name", ["r", "a", "objectnet"])
def test_a_perfect_model_scores_100_percent(name):
    """Any index mapped to the label is correct, even if an unmapped class has a larger logit."""
    groups = shifts()[name].groups
    mapped = {index for group in groups for index in group}
    wrong = max(set(range(1000)) - mapped)  # a class outside the set
    answers = [(label, index) for label, group in enumerate(groups) for index in group]
    labels, indices = map(list, zip(*answers, strict=True))
    source = InMemory(labels)
    logits = torch.zeros(len(labels), 1000)
    logits[torch.arange(len(labels)), indices] = 1.0
    logits[:, wrong] = 2.0
    place = iter(logits.split(64))
    how = {"view": Views(size=8).evaluate, "normalise": lambda x: x, "device": "cpu", "workers": 0}
    score, _ = accuracy(
        lambda x: next(place), EvaluationSet(name, source, groups), batch_size=64, **how
    )
    assert score == 100.0
    place = iter(logits.split(64))  # without restriction, the class outside the set always wins
    unrestricted, _ = accuracy(
        lambda x: next(place), EvaluationSet(name, source), batch_size=64, **how
    )
    assert unrestricted == 0.0


def test_two_processes_get_the_same_score_as_one(monkeypatch):
    images = EvaluationSet("val", InMemory([0, 1, 2, 0, 1]))
    how = {"view": Views(size=8).evaluate, "normalise": lambda x: x.float() / 255, "device": "cpu"}

    def score():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
        return accuracy(model, images, **how, batch_size=2, workers=0)

    whole, parts = score(), []
    monkeypatch.setattr("ed.runtime.processes.total", lambda value: value)
    for rank in range(2):
        as_one_of_two(monkeypatch, rank)
        parts.append(score())
    assert torch.tensor(parts).sum(0).tolist() == pytest.approx(whole)


# ---- folders


def test_official_layouts_are_found_and_labelled(tmp_path):
    """One folder contains all sets, each in the layout published by its authors."""
    sets = shifts()
    assert sets.pop("sketch").labels == {name: i for i, name in enumerate(classes.synsets())}
    for name, shift in sets.items():
        suffix = ".png" if name == "objectnet" else ".jpg"
        fill(tmp_path / shift.folders[0], [*shift.labels, *shift.ignored[:2]], suffix=suffix)
    for name, shift in sets.items():
        found = open_shift(name, tmp_path)
        assert found.groups == shift.groups
        assert sorted(found.images.labels) == list(range(len(shift.labels)))
        (remark,) = found.images.remarks
        for value in (f"{len(shift.labels):,}", f"{shift.images:,}", shift.title):
            assert value in remark
        for index in (0, len(found.images) - 1):
            folder = Path(found.images.name(index)).parent.name
            assert found.images.labels[index] == shift.labels[folder]
    # folder "10" comes before "2" but is still class 10
    v2 = open_shift("v2", tmp_path / shifts()["v2"].folders[0]).images
    for index in range(len(v2)):
        assert str(v2.labels[index]) == Path(v2.name(index)).parent.name


def test_the_border_of_objectnet_is_cropped(tmp_path):
    shift = shifts()["objectnet"]
    framed = Image.new("RGB", (20, 14), (255, 0, 0))
    framed.paste((0, 0, 200), (2, 2, 18, 12))
    for folder in shift.labels:
        (tmp_path / "images" / folder).mkdir(parents=True)
        framed.save(tmp_path / "images" / folder / "a.png")
    inside = open_shift("objectnet", tmp_path).images.image(0)
    assert inside.size == (16, 10)
    assert inside.getcolors() == [(160, (0, 0, 200))]


@pytest.fixture
def few_classes(monkeypatch) -> tuple[str, ...]:
    """Limits ImageNet to 20 classes, because a thousand folders are slow to remove."""
    few = classes.synsets()[:20]
    monkeypatch.setattr(sources, "folder_labels", lambda: {name: i for i, name in enumerate(few)})
    return few


def test_training_folders_are_read(tmp_path, few_classes):
    fill(tmp_path / "train", few_classes, count=2)
    fill(tmp_path / "val", few_classes)
    train, validation = open_training(str(tmp_path))
    assert train.labels.tolist() == [index // 2 for index in range(40)]
    assert validation.labels.tolist() == list(range(20))
    assert train.name(3).endswith("train/n01443537/1.JPEG")
    assert "1,281,167" in train.remarks[0]


def test_problems_with_folders_are_listed_and_counted(tmp_path):
    labels = {"n1": 0, "n2": 1, "n3": 2, "n4": 3}
    root = fill(tmp_path / "set", ["n1", "n2", "extra"])
    (root / "n3").mkdir()
    (root / "loose.JPEG").write_bytes(encoded())
    with pytest.raises(ValueError, match=r"^task\.data=here: ") as error:
        open_folders(root, labels, what="task.data=here")
    for phrase in ("1 of 4", "missing (n4)", "no images (n3)", "(extra)", "outside class folders"):
        assert phrase in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"task\.data=x: .*nowhere"):
        open_folders(tmp_path / "nowhere", labels, what="task.data=x")


def test_other_files_are_counted(tmp_path):
    root = fill(tmp_path, ["n1"], count=2)
    (root / "n1" / "notes.txt").write_text("")
    source = open_folders(root, {"n1": 0}, what="x")
    assert len(source) == 2
    assert [remark.startswith(f"{root}: skipped 1 ") for remark in source.remarks] == [True]


def test_missing_validation_and_shift_folders_raise(tmp_path, few_classes):
    fill(tmp_path / "train", few_classes)
    with pytest.raises(FileNotFoundError, match=r"task.validation=validation"):
        open_training(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"task.shifts=.*ImageNet-R.*task.shift_names"):
        open_shift("r", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"task.data=./nowhere"):
        open_split("./nowhere", "train")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_for_a_corrupt_image_contains_its_path(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(loading, "PIECE", 2)  # a single piece would need no workers
    root = fill(tmp_path, ["n1"], count=3)
    whole = (root / "n1" / "1.JPEG").read_bytes()
    (root / "n1" / "1.JPEG").write_bytes(whole[: len(whole) // 2])
    source = open_folders(root, {"n1": 0}, what="x")
    how = {"device": "cpu", "workers": workers}
    with pytest.raises(ImageError) as error:
        list(evaluation_batches(source, Views(size=8).evaluate, **how))
    assert str(error.value).startswith(f"{root}/n1/1.JPEG ")
    assert len(str(error.value).splitlines()) == 1
    wait_for(lambda: not multiprocessing.active_children(), "the worker to end")


@pytest.mark.parametrize("place", ["imagenet/train", "", "ILSVRC"])
def test_folders_around_train_are_rejected_before_they_are_indexed(place, tmp_path, monkeypatch):
    """`datasets` would read the images of any folder, which takes hours for ImageNet."""
    fill(tmp_path / "imagenet" / "train", classes.synsets()[:2])
    fill(tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "train", classes.synsets()[:2])
    monkeypatch.setattr(sources, "load_table", lambda *_: pytest.fail("read by `datasets`"))
    with pytest.raises(FileNotFoundError, match=r"^task\.data=.*train/ and val/"):
        open_split(str(tmp_path / place), "train")


# ---- parquet files


def write_table(folder: Path, labels, split: str = "train", names=None) -> Path:
    import datasets

    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows = {"image": [{"bytes": encoded(), "path": None}] * len(labels), "label": list(labels)}
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )
    return folder


def test_parquet_files_are_read(tmp_path):
    write_table(tmp_path, range(1000), "train", list(classes.synsets()))
    write_table(tmp_path, [999, *range(1000)], "validation", list(classes.synsets()))
    train, validation = open_training(str(tmp_path))
    assert train.labels.tolist() == list(range(1000))
    assert len(validation) == 1001
    assert train.image(5).size == (40, 30)


@pytest.mark.parametrize("folder", ["train", "default/train"])
def test_parquet_files_in_a_folder_called_train_are_read(tmp_path, folder):
    write_table(tmp_path / folder, range(1000))
    assert len(open_split(str(tmp_path), "train")) == 1000


def test_tables_with_other_classes_are_rejected(tmp_path):
    few = write_table(tmp_path / "few", range(999))
    with pytest.raises(ValueError, match=r"task.data=.*few, split 'train' has 999 classes"):
        open_split(str(few), "train")
    swapped = ["n01443537", "n01440764", *classes.synsets()[2:]]
    other = write_table(tmp_path / "other", range(1000), names=swapped)
    with pytest.raises(ValueError, match=r"class 0 .*n01443537.*n01440764"):
        open_split(str(other), "train")
    with pytest.raises(ValueError, match=r"task.data=.*few: split 'validation'"):
        open_split(str(few), "validation")


def test_the_imagenet_sample_is_read(full_data):
    """The sample has one full-size image per class, in class order."""
    source = open_split(str(full_data / "imagenet_sample"), "train")
    assert source.labels.tolist() == list(range(1000))
    batches = list(
        evaluation_batches(source, Views().evaluate, index=range(0, 1000, 20), device="cpu")
    )
    pixels = torch.cat([batch["x"] for batch in batches])
    assert pixels.shape == (50, 3, 224, 224)
    assert 90 < pixels.float().mean() < 140  # ImageNet's mean is 116
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(0, 1000, 20))
