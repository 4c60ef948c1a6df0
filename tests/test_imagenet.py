"""ImageNet: where pictures come from, what a network sees of them, and how sets are scored."""

import io
import math
import multiprocessing
import os
import runpy
import signal
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image, ImageFilter

from ed.core.streams import generator
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import run
from ed.engine.optimizer import AdamW
from ed.engine.run import digest
from ed.models.vit import ViT, sincos_positions
from ed.tasks.imagenet_data import (
    CLIP,
    EvaluationSet,
    ImageNetTask,
    PictureError,
    Source,
    Views,
    accuracy,
    classes,
    evaluation_batches,
    open_shift,
    open_split,
    open_training,
    restrict,
    shifts,
    sources,
    training_batches,
)
from ed.tasks.imagenet_data.randaugment import OPERATIONS, rand_augment
from ed.tasks.imagenet_data.sources import open_folders
from ed.tasks.imagenet_data.views import random_crop, to_tensor
from tests.small import weights

ROOT, CPU = Path(__file__).parents[1], torch.device("cpu")
SETTINGS = {"epochs": 1, "warmup_epochs": 0, "batch_size": 8, "space": "input", "eval_every": 1}
SETTINGS |= {"classes": 1000, "image_size": [16, 16]}


def picture(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A smooth random picture of (width, height)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(kind: str = "JPEG", **how) -> bytes:
    buffer = io.BytesIO()
    picture(**how).save(buffer, kind)
    return buffer.getvalue()


def fill(root: Path, folders, *, count: int = 1, suffix: str = ".JPEG") -> Path:
    """Class folders with the same small picture in each."""
    content = encoded("PNG" if suffix == ".png" else "JPEG")
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(count):
            (root / folder / f"{number}{suffix}").write_bytes(content)
    return root


class InMemory(Source):
    """Fabricated pictures, one per label."""

    def __init__(self, labels, kind: str = "PNG"):
        self.place, self.labels = "memory", np.asarray(labels)
        self.files = [encoded(kind, seed=index) for index in range(len(labels))]

    def name(self, index: int) -> str:
        return f"memory/{index}"

    def read(self, index: int) -> bytes:
        return self.files[index]


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


def test_restriction_is_the_largest_of_each_group():
    logits = torch.tensor([[0.0, 5.0, 2.0, 9.0], [3.0, -1.0, 1.0, 9.0]])
    restricted = restrict(logits, ((2,), (0, 1)))
    assert restricted.tolist() == [[2.0, 5.0], [1.0, 3.0]]


@pytest.mark.parametrize("name", ["r", "a", "objectnet"])
def test_logits_of_other_classes_never_win(name):
    """Raising every unmapped logit without bound changes nothing."""
    groups = shifts()[name].groups
    mapped = torch.tensor([index for group in groups for index in group])
    logits = torch.randn(50, 1000, generator=generator(0, "logits"))
    others = torch.ones(1000, dtype=torch.bool)
    others[mapped] = False
    louder = logits.clone()
    louder[:, others] = torch.inf
    assert others.sum() == 1000 - len(mapped)
    assert torch.equal(restrict(louder, groups), restrict(logits, groups))
    assert restrict(logits, groups).isfinite().all()


@pytest.mark.parametrize("name", ["r", "a", "objectnet"])
def test_a_model_that_is_perfect_on_the_mapped_classes_scores_all(name):
    """Each label is answered by each of its indices in turn, below a louder wrong class."""
    groups = shifts()[name].groups
    mapped = {index for group in groups for index in group}
    wrong = max(set(range(1000)) - mapped)  # beyond all labels of the set
    answers = [(label, index) for label, group in enumerate(groups) for index in group]
    labels, indices = map(list, zip(*answers, strict=True))
    source = InMemory(labels)
    logits = torch.zeros(len(labels), 1000)
    logits[torch.arange(len(labels)), indices] = 1.0
    logits[:, wrong] = 2.0
    place = iter(logits.split(64))
    how = {"view": Views(size=8).evaluate, "normalise": lambda x: x, "device": "cpu", "workers": 0}
    score = accuracy(
        lambda x: next(place), EvaluationSet(name, source, groups), batch_size=64, **how
    )
    assert (score.accuracy, score.count) == (100.0, len(labels))
    place = iter(logits.split(64))  # without the restriction the loud class wins every time
    unrestricted = accuracy(
        lambda x: next(place), EvaluationSet(name, source), batch_size=64, **how
    )
    assert unrestricted.accuracy == 0.0


# ---- folders


def test_official_layouts_are_found_and_labelled(tmp_path):
    """Each set as its authors distribute it, side by side in one collection."""
    sets = shifts()
    assert sets.pop("sketch").labels == {name: i for i, name in enumerate(classes.synsets())}
    for name, shift in sets.items():
        suffix = ".png" if name == "objectnet" else ".jpg"
        fill(tmp_path / shift.folders[0], [*shift.labels, *shift.ignored[:2]], suffix=suffix)
    for name, shift in sets.items():
        found = open_shift(name, tmp_path)
        assert found.groups == shift.groups
        assert sorted(found.pictures.labels) == list(range(len(shift.labels)))
        for index in (0, len(found.pictures) - 1):
            folder = Path(found.pictures.name(index)).parent.name
            assert found.pictures.labels[index] == shift.labels[folder]
    # folder "10" sorts before "2", but is class 10
    v2 = open_shift("v2", tmp_path / shifts()["v2"].folders[0]).pictures
    for index in range(len(v2)):
        assert str(v2.labels[index]) == Path(v2.name(index)).parent.name


def test_the_border_of_objectnet_is_cut(tmp_path):
    shift = shifts()["objectnet"]
    framed = Image.new("RGB", (20, 14), (255, 0, 0))
    framed.paste((0, 0, 200), (2, 2, 18, 12))
    for folder in shift.labels:
        (tmp_path / "images" / folder).mkdir(parents=True)
        framed.save(tmp_path / "images" / folder / "a.png")
    inside = open_shift("objectnet", tmp_path).pictures.picture(0)
    assert inside.size == (16, 10)
    assert inside.getcolors() == [(160, (0, 0, 200))]


@pytest.fixture
def few_classes(monkeypatch) -> tuple[str, ...]:
    """ImageNet as if it had 20 classes: a thousand folders take long to remove again."""
    few = classes.synsets()[:20]
    monkeypatch.setattr(sources, "synsets", lambda: few)
    return few


def test_training_folders(tmp_path, few_classes):
    fill(tmp_path / "train", few_classes, count=2)
    fill(tmp_path / "val", few_classes)
    train, validation = open_training(str(tmp_path))
    assert train.labels.tolist() == [index // 2 for index in range(40)]
    assert validation.labels.tolist() == list(range(20))
    assert train.name(3).endswith("train/n01443537/1.JPEG")
    assert "40 pictures instead of ImageNet's 1,281,167 (train)" in train.remarks[0]


def test_what_is_wrong_in_folders_is_said_with_names_and_counts(tmp_path):
    labels = {"n1": 0, "n2": 1, "n3": 2, "n4": 3}
    root = fill(tmp_path / "set", ["n1", "n2", "extra"])
    (root / "n3").mkdir()
    (root / "loose.JPEG").write_bytes(encoded())
    with pytest.raises(ValueError, match=r"^task\.data=here: in ") as error:
        open_folders(root, labels, what="task.data=here")
    for phrase in (
        "1 of 4 class folders are missing (n4)",
        "1 of 4 class folders hold no pictures (n3)",
        "1 folders are of no known class (extra)",
        "1 pictures lie outside class folders",
    ):
        assert phrase in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"task\.data=x: .*nowhere: no such folder"):
        open_folders(tmp_path / "nowhere", labels, what="task.data=x")


def test_files_that_are_no_pictures_are_counted(tmp_path):
    root = fill(tmp_path, ["n1"], count=2)
    (root / "n1" / "notes.txt").write_text("")
    source = open_folders(root, {"n1": 0}, what="x")
    assert len(source) == 2
    assert source.remarks == (f"{root}: 1 files that are no pictures are left out",)


def test_missing_validation_folder_and_missing_shift(tmp_path, few_classes):
    fill(tmp_path / "train", few_classes)
    with pytest.raises(FileNotFoundError, match=r"task\.data=.*/val: no such folder"):
        open_training(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"ImageNet-R: no class folders"):
        open_shift("r", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no shift 'x'; there are v2, r, a, sketch, objectnet"):
        open_shift("x", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such folder\. Give a folder with train/"):
        open_split("./nowhere", "train")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_picture_is_named(tmp_path, workers):
    root = fill(tmp_path, ["n1"], count=3)
    whole = (root / "n1" / "1.JPEG").read_bytes()
    (root / "n1" / "1.JPEG").write_bytes(whole[: len(whole) // 2])
    source = open_folders(root, {"n1": 0}, what="x")
    how = {"device": "cpu", "workers": workers}
    with pytest.raises(PictureError) as error:
        list(evaluation_batches(source, Views(size=8).evaluate, **how))
    assert str(error.value).startswith(f"{root}/n1/1.JPEG cannot be decoded")
    assert len(str(error.value).splitlines()) == 1
    assert not multiprocessing.active_children()  # none is left to wait for


# ---- parquet files


def write_table(folder: Path, labels, split: str = "train", names=None) -> Path:
    import datasets

    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows = {"image": [{"bytes": encoded(), "path": None}] * len(labels), "label": list(labels)}
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )
    return folder


def test_parquet_files(tmp_path):
    write_table(tmp_path, range(1000), "train", list(classes.synsets()))
    write_table(tmp_path, [999, *range(1000)], "validation", list(classes.synsets()))
    train, validation = open_training(str(tmp_path))
    assert train.labels.tolist() == list(range(1000))
    assert len(validation) == 1001
    assert train.picture(5).size == (40, 30)


def test_parquet_files_in_a_folder_called_train(tmp_path):
    write_table(tmp_path / "train", range(1000))
    assert len(open_split(str(tmp_path), "train")) == 1000


def test_tables_with_other_classes_are_refused(tmp_path):
    few = write_table(tmp_path / "few", range(999))
    with pytest.raises(ValueError, match="pictures of 999 classes, with labels from 0 to 998"):
        open_split(str(few), "train")
    swapped = ["n01443537", "n01440764", *classes.synsets()[2:]]
    other = write_table(tmp_path / "other", range(1000), names=swapped)
    with pytest.raises(ValueError, match="calls class 0 n01443537, which is usually n01440764"):
        open_split(str(other), "train")
    with pytest.raises(ValueError, match="split 'validation' could not be read"):
        open_split(str(few), "validation")


def test_the_real_sample(full_data):
    """One picture per class, decoded, in the usual order, seen at the true size."""
    source = open_split(str(full_data / "imagenet_sample"), "train")
    assert source.labels.tolist() == list(range(1000))
    batches = list(
        evaluation_batches(source, Views().evaluate, index=range(0, 1000, 20), device="cpu")
    )
    pixels = torch.cat([batch["x"] for batch in batches])
    assert pixels.shape == (50, 3, 224, 224)
    assert 90 < pixels.float().mean() < 140  # ImageNet's mean is 116
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(0, 1000, 20))


# ---- views


@pytest.mark.parametrize("views", [Views(), CLIP, Views(size=32)], ids=["224", "clip", "32"])
@pytest.mark.parametrize("size", [(500, 375), (333, 499), (96, 96), (250, 1001)])
def test_the_centre_crop_is_torchvisions(views, size):
    from torchvision.transforms import v2

    image = picture(size=size)
    how = v2.InterpolationMode.BICUBIC if views.bicubic else v2.InterpolationMode.BILINEAR
    expected = v2.functional.center_crop(
        v2.functional.resize(image, round(views.size * views.resize), how), views.size
    )
    assert torch.equal(views.evaluate(image), to_tensor(expected))


def test_evaluation_resizes_to_256_and_clip_to_224():
    assert Views().resize * Views().size == 256
    assert CLIP.resize * CLIP.size == 224


def test_random_crops_keep_their_area_and_ratio():
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
    # small crops always fit, so among them area and place are uniform, the ratio log-uniform
    small = area < 0.4
    assert abs(area[small].mean() - 0.225) < 0.02
    assert abs(np.log(ratio[small]).mean()) < 0.03
    assert abs((left / (width - w).clip(1))[small].mean() - 0.5) < 0.04


def test_a_picture_that_no_crop_fits_gives_its_centre():
    assert random_crop((1000, 30), (0.5, 1), (3 / 4, 4 / 3), generator(0, "x")) == (480, 0, 40, 30)
    assert random_crop((30, 1000), (0.5, 1), (3 / 4, 4 / 3), generator(0, "x")) == (0, 480, 30, 40)


def test_the_training_view_is_torchvisions_resized_crop():
    from torchvision.transforms import v2

    image = picture(size=(120, 90))
    views = Views(size=48, flip=False)
    left, top, width, height = random_crop(image.size, views.area, views.ratio, generator(3, "x"))
    expected = v2.functional.resized_crop(image, top, left, height, width, [48, 48])
    assert torch.equal(views.train(image, generator(3, "x")), to_tensor(expected))


def test_half_of_the_pictures_are_mirrored_and_clips_never():
    image = picture(size=(32, 32))
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


def test_normalisation():
    """Bytes 0, 51 and 255 of the three channels: [-1, 1] here, OpenAI's constants for CLIP."""
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    task = instantiate(compose_config(["task=imagenet", "task.data=embedded"]).task)
    task.prepare(CPU, seed=0)
    assert task.normalise(pixels).flatten().tolist() == pytest.approx([-1, -0.6, 1])
    x = task.field(torch.nn.Identity(), {"x": pixels})()
    assert x.flatten().tolist() == pytest.approx([-1, -0.6, 1])
    clip = ImageNetTask("embedded", CLIP, validation="validation", repeat=1, **SETTINGS)
    clip.prepare(CPU, seed=0)
    expected = [(0 - 0.48145466) / 0.26862954, (0.2 - 0.4578275) / 0.26130258]
    expected.append((1 - 0.40821073) / 0.27577711)
    assert clip.normalise(pixels).flatten().tolist() == pytest.approx(expected)


def test_randaugment_operations():
    """Closed forms of what each of the sixteen does to a picture, in their order."""
    image = picture(size=(56, 56))
    pixels = np.array(image).astype(int)
    results = [np.array(operation(image, [0.1, 0.1])).astype(int) for operation in OPERATIONS]
    assert len(results) == 16
    assert results[0].min((0, 1)).tolist() == [0, 0, 0]  # autocontrast
    assert results[0].max((0, 1)).tolist() == [255, 255, 255]
    assert (results[2] == 255 - pixels).all()  # invert
    assert (results[3] == pixels // 16 * 16).all()  # 4 bits
    assert (results[4] == pixels).all()  # solarise at 256
    assert (results[5] == np.where(pixels < 128, pixels + 110, pixels)).all()
    assert abs(results[8] - (pixels * 1.9).clip(0, 255)).max() <= 1  # brightness
    shifted = np.full_like(pixels, 128)
    shifted[:, :-25] = pixels[:, 25:]  # 100 of 224 pixels
    assert (results[13] == shifted).all()
    shifted = np.full_like(pixels, 128)
    shifted[:-25] = pixels[25:]
    assert (results[14] == shifted).all()
    grey = (results[15] == 128).all(-1)
    assert grey[:15, :15].all()  # a square of 20 around (5, 5)
    assert (results[15][15:] == pixels[15:]).all()
    for result in (results[10], results[11], results[12]):
        assert (result == 128).all(-1).any()  # grey where nothing is known
    assert (results[11][50, :41] == pixels[50, 15:]).all()  # row 50.5 is moved by 0.3 of it
    assert (results[12][:41, 50] == pixels[15:, 50]).all()
    turned = image.rotate(30, fillcolor=(128, 128, 128))
    assert (results[10] == np.array(turned)).all()


def test_colours_of_randaugment():
    """All enhanced to 1.9: away from grey, from the mean, from black and from the smoothed."""
    image = picture(size=(56, 56))
    pixels, grey = np.array(image) / 1.0, np.array(image.convert("L"))[..., None] / 1.0
    mean = np.round(grey.mean())
    smooth = np.array(image.filter(ImageFilter.SMOOTH)) / 1.0
    results = [np.array(OPERATIONS[place](image, [0.1, 0.1])) for place in (6, 7, 8, 9)]
    for result, origin in zip(results, (grey, mean, 0, smooth), strict=True):
        expected = (origin + 1.9 * (pixels - origin)).clip(0, 255)
        assert abs(result - expected).max() <= 2


def test_signs_of_randaugment_are_drawn():
    image = picture(size=(56, 56))
    for operation in OPERATIONS[10:15]:
        there, back = (np.array(operation(image, [draw, 0.5])) for draw in (0.1, 0.9))
        assert (there != back).any()


def test_randaugment_of_none_is_the_picture():
    image = picture()
    assert rand_augment(image, 0, generator(0, "x")) is image


# ---- order


def stream(source: Source, start: int, *, seed: int = 0, workers: int = 0, repeat: int = 1):
    how = {"seed": seed, "device": "cpu", "workers": workers, "repeat": repeat}
    steps = range(start, 8)
    view = Views(size=16, randaugment=2).train
    return list(training_batches(source, view, batch_size=70, steps=steps, **how))


def test_batches_are_the_same_from_any_step_and_with_any_number_of_workers():
    source = InMemory(range(150))  # 2 batches of 70 an epoch, each in two pieces
    whole = stream(source, 0)
    assert len(whole) == 8
    assert whole[0]["x"].shape == (70, 3, 16, 16)
    assert whole[0]["x"].dtype == torch.uint8
    for start, workers in ((3, 0), (4, 2)):
        for resumed, expected in zip(
            stream(source, start, workers=workers), whole[start:], strict=True
        ):
            assert torch.equal(resumed["x"], expected["x"])
            assert torch.equal(resumed["label"], expected["label"])
    assert not torch.equal(stream(source, 7, seed=1)[0]["label"], whole[7]["label"])


def test_every_epoch_has_another_order_and_augmentation():
    source = InMemory(range(70))
    batches = stream(source, 0)
    assert all(sorted(batch["label"].tolist()) == list(range(70)) for batch in batches)
    first, second = (batch["x"][batch["label"].argsort()] for batch in batches[:2])
    assert not torch.equal(batches[0]["label"], batches[1]["label"])
    assert (first != second).flatten(1).any(1).float().mean() > 0.9


def test_repeated_pictures_come_equally_often_with_other_augmentations():
    source = InMemory(range(35))
    (batch, *_) = stream(source, 0, repeat=2)
    assert sorted(batch["label"].tolist()) == sorted([*range(35), *range(35)])
    pairs = batch["x"][batch["label"].argsort()].unflatten(0, (35, 2))
    assert (pairs[:, 0] != pairs[:, 1]).flatten(1).any(1).float().mean() > 0.9


def as_one_of_two(monkeypatch, rank: int) -> None:
    monkeypatch.setattr("ed.core.processes.world_size", lambda: 2)
    monkeypatch.setattr("ed.core.processes.rank", lambda: rank)


def test_two_processes_read_the_rows_of_one(monkeypatch):
    source = InMemory(range(150))
    whole, parts = stream(source, 6), []
    for rank in range(2):
        as_one_of_two(monkeypatch, rank)
        parts.append(stream(source, 6))
    for first, second, both in zip(*parts, whole, strict=True):
        assert len(first["label"]) == 35
        for name, value in both.items():
            assert torch.equal(torch.cat([first[name], second[name]]), value)


def test_two_processes_score_what_one_scores(monkeypatch):
    pictures = EvaluationSet("val", InMemory([0, 1, 2, 0, 1]))
    how = {"view": Views(size=8).evaluate, "normalise": lambda x: x.float() / 255, "device": "cpu"}

    def score():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
        return accuracy(model, pictures, **how, batch_size=2, workers=0)

    whole, parts = score(), []
    monkeypatch.setattr("ed.core.processes.total", lambda value: value)
    for rank in range(2):
        as_one_of_two(monkeypatch, rank)
        parts.append(score())
    assert sum(part.accuracy for part in parts) == pytest.approx(whole.accuracy)
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss)


def test_loading_leaves_the_global_random_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stream(InMemory(range(70)), 7)
    list(evaluation_batches(InMemory(range(3)), Views(size=8).evaluate, device="cpu", workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_workers_outlive_a_request_to_stop_and_end_with_their_batches():
    """A scheduler signals all processes of a job; the run must still finish its step and save."""
    source, how = InMemory(range(100)), {"seed": 0, "device": "cpu", "workers": 2}
    view = Views(size=8).train
    batches = training_batches(source, view, batch_size=10, steps=range(100), **how)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(worker.pid, number)
    assert len(list(islice(batches, 50))) == 50
    assert all(worker.is_alive() for worker in workers)
    batches.close()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)


def test_fewer_than_no_workers_are_refused():
    how = {"device": "cpu", "workers": -1}
    with pytest.raises(ValueError, match=r"system.workers=-1: must be at least 0"):
        next(evaluation_batches(InMemory([0]), Views(size=8).evaluate, **how))


def test_chosen_pictures_come_in_the_order_asked_for():
    source = InMemory(range(9))
    how = {"device": "cpu", "workers": 0, "batch_size": 2}
    batches = list(
        evaluation_batches(source, Views(size=8).evaluate, index=torch.tensor([7, 0, 3]), **how)
    )
    assert [batch["label"].tolist() for batch in batches] == [[7, 0], [3]]


# ---- the model and its optimizer


def vit(**settings) -> ViT:
    small = {"classes": 10, "image_size": [32, 48], "patch": 16, "width": 16, "depth": 2}
    small |= {"heads": 2, "pool": "avg", "dropout": 0.0, "activation": "gelu"}
    return ViT(**(small | settings))


def test_sincos_positions_are_the_formula():
    """Written out for each row, column and channel, as big_vision defines it."""
    rows, columns, width, quarter = 3, 4, 16, 4
    expected = torch.zeros(rows * columns, width, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            for k in range(quarter):
                frequency = 1 / 10000 ** (k / (quarter - 1))
                place = expected[row * columns + column]
                place[k] = math.sin(column * frequency)
                place[quarter + k] = math.cos(column * frequency)
                place[2 * quarter + k] = math.sin(row * frequency)
                place[3 * quarter + k] = math.cos(row * frequency)
    torch.testing.assert_close(sincos_positions(rows, columns, width).double(), expected)
    with pytest.raises(ValueError, match=r"model\.width=18: model\.positions=sincos"):
        sincos_positions(2, 2, 18)


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_fixed_positions_are_no_parameter_and_come_before_the_first_block(pool):
    model = vit(positions="sincos", pool=pool)
    assert "pos_embed" not in dict(model.named_parameters())
    assert "pos_embed" not in model.state_dict()
    x = torch.randn(2, 3, 32, 48)
    seen = model.to_space(x, "embedding") - vit_without_positions(model, x)
    expected = sincos_positions(2, 3, 16)
    if pool == "token":
        expected = torch.cat([torch.zeros(1, 16), expected])
    torch.testing.assert_close(seen, expected.expand(2, -1, -1), rtol=1e-4, atol=1e-5)


def vit_without_positions(model: ViT, x: torch.Tensor) -> torch.Tensor:
    patches = model.patch_embed(x)
    return (
        patches
        if model.cls_token is None
        else torch.cat([model.cls_token.expand(2, -1, -1), patches], 1)
    )


@pytest.mark.parametrize("head", ["linear", "tanh"])
def test_the_head_starts_at_zero(head):
    model = vit(init="jax", head=head)
    x = torch.randn(4, 3, 32, 48)
    assert torch.equal(model(x), torch.zeros(4, 10))
    last = model.head if head == "linear" else model.head[-1]
    assert not last.weight.any()
    if head == "tanh":
        assert model.head[0].weight.detach().std() == pytest.approx(
            1 / 4, rel=0.15
        )  # variance 1 / width
    torch.manual_seed(0)
    assert vit(head=head)(x).abs().max() > 0


def test_initial_weights_of_attention_are_those_of_three_square_matrices():
    torch.manual_seed(0)
    weight = vit(init="jax", width=64).blocks[0].attn.qkv.weight.detach()
    bound = math.sqrt(6 / 128)
    assert 0.98 * bound < weight.abs().max() < bound
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_average_pooling_comes_after_the_last_norm():
    model = vit()
    x = torch.randn(2, 3, 32, 48)
    tokens = model.norm(model.blocks(model.to_space(x, "embedding")))
    assert tokens.shape == (2, 6, 16)
    torch.testing.assert_close(model(x), model.head(tokens.mean(1)))
    torch.testing.assert_close(model.from_space(model.to_space(x, "block1"), "block1"), model(x))


def test_dropout_follows_positions_and_every_dense_layer_but_queries_keys_and_values():
    model = vit(dropout=0.1)
    rates = {n: m.p for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    wanted = {
        f"blocks.{b}.{n}" for b in (0, 1) for n in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    }
    assert {name for name, rate in rates.items() if rate} == wanted | {"pos_drop"}
    assert {rate for rate in rates.values() if rate} == {0.1}


def test_vit_s16_is_the_published_size():
    """22.05 M parameters with class token, learnt positions and a linear head (timm's count)."""
    cfg = compose_config(["task=imagenet", "model=vit_s16"])
    assert sum(p.numel() for p in instantiate(cfg.model).parameters()) == 22_050_664


def test_only_matrices_decay():
    model = vit(pool="token")
    groups = AdamW(lr=0.1, weight_decay=0.5, decay="matrices").build(model.named_parameters(), CPU)
    decayed, others = groups.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= set(
        decayed["param_names"]
    )
    assert all(
        "bias" in n or "norm" in n or n in ("cls_token", "pos_embed") for n in others["param_names"]
    )
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    with pytest.raises(ValueError, match=r"optimizer\.decay=none: use all or matrices"):
        AdamW(lr=0.1, weight_decay=0.5, decay="none")


# ---- the task


SMALL = [
    "task=imagenet",
    "model=vit_s16",
    "debug=tiny",
    "task.image_size=[16,16]",
    "model.width=16",
]
SMALL += ["model.depth=1", "model.heads=2", "model.dropout=0.1", "task.batch_size=600"]
SMALL += ["optimizer=adamw_matrices", "optimizer.clip=1.0"]
SMALL += ["regularizer=ed", "regularizer.pairs=8", "regularizer.components=3"]
SMALL += ["system.workers=0", "system.log_every=1"]


def small_run(folder: Path, *overrides: str) -> dict:
    return run(compose_config([*SMALL, f"system.run_dir={folder}", *overrides]), ["imagenet"])


def test_a_run_in_pieces_is_the_run_in_one(tmp_path):
    small_run(tmp_path / "whole")
    for _ in range(2):  # of 3 steps, each in a session of its own
        with pytest.raises(Interrupted):
            small_run(tmp_path / "pieces", "system.max_minutes=0")
    summary = small_run(tmp_path / "pieces")
    assert summary["steps"] == 3
    whole, pieces = (weights(tmp_path / name) for name in ("whole", "pieces"))
    assert all(torch.equal(value, pieces[name]) for name, value in whole.items())
    assert {"eval/acc", "eval/loss"} <= summary["last"].keys()
    log = (tmp_path / "pieces" / "train.log").read_text()
    assert (
        "2,000 pictures instead of ImageNet's 1,281,167 (train): results are not comparable" in log
    )


def test_workers_are_no_part_of_a_runs_identity():
    ours, theirs = (compose_config([*SMALL, f"system.workers={n}"]) for n in (0, 3))
    assert digest(ours) == digest(theirs)


def test_lengths_follow_from_pictures_and_repeats():
    cfg = compose_config(["task=imagenet", "task.data=embedded", "task.batch_size=300"])
    task = instantiate(cfg.task)
    task.repeat = 3
    task.prepare(CPU, seed=0)
    assert task.steps_per_epoch == 20  # 3 x 2,000 pictures
    assert task.total_steps == 1800
    assert task.num_examples == 2000


def test_ten_thousand_steps_of_warm_up():
    """The config states epochs; with all of ImageNet they are the recipes' 10,000 steps."""
    for batch, steps in ((1024, 1251), (512, 2502)):
        assert 1_281_167 // batch == steps
    assert round(compose_config(["task=imagenet"]).task.warmup_epochs * 1251) == 10_000


def test_evaluation_sees_what_measures_see():
    """On the training pictures: the same view, normalised alike."""
    task = ImageNetTask("embedded", CLIP, validation="train", repeat=1, **SETTINGS)
    task.workers = 0
    task.prepare(CPU, seed=0)
    task.train.labels, task.train.table = task.train.labels[:40], task.train.table.select(range(40))
    task.test = EvaluationSet("val", task.train)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10))
    batch = task.examples(torch.arange(40))
    loss, report = task.loss(task.field(model, batch)(), batch)
    found = task.evaluate(model)
    assert found["eval/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["eval/acc"] == pytest.approx(report["acc"].item(), rel=1e-5)


def test_labels_beyond_the_classes_are_refused():
    task = instantiate(
        compose_config(["task=imagenet", "task.data=embedded", "task.classes=9"]).task
    )
    with pytest.raises(ValueError, match=r"task.classes=9: task.data=embedded has labels up to 9"):
        task.prepare(CPU, seed=0)


def test_examples_are_unaugmented():
    cfg = compose_config(["task=imagenet", "task.data=embedded", "task.image_size=[28,28]"])
    task = instantiate(cfg.task)
    task.workers = 0
    task.prepare(CPU, seed=0)
    batch = task.examples(torch.tensor([5, 3]))
    assert batch["label"].tolist() == task.train.labels[[5, 3]].tolist()
    centre = to_tensor(task.train.picture(3))[:, 2:30, 2:30]  # 32 px: no resizing needed
    assert torch.equal(batch["x"][1], centre)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.augment=none"], "task.augment=none: use crop or randaugment"),
        (["task.repeat=0"], "task.repeat=0: must be a whole number, at least 1"),
        (["task.image_size=[224,112]"], r"task.image_size=\[224, 112\]: must be a square"),
        (["model.pool=cls"], "model.pool=cls: use token or avg"),
        (["model.positions=no"], "model.positions=no: use learned or sincos"),
        (["model.head=no"], "model.head=no: use linear or tanh"),
        (["model.init=no"], "model.init=no: use timm or jax"),
    ],
)
def test_impossible_settings_are_refused(overrides, message):
    cfg = compose_config(["task=imagenet", "model=vit_s16", *overrides])
    with pytest.raises(Exception, match=message):
        instantiate(cfg.task), instantiate(cfg.model)


# ---- the commands


def script(name: str) -> dict:
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def test_the_check_counts_and_says_what_lacks(tmp_path, capsys):
    shift = shifts()["a"]
    fill(tmp_path / "imagenet-a", list(shift.labels)[1:])
    broken = tmp_path / "imagenet-a" / "n01531178" / "0.JPEG"
    broken.write_bytes(b"no picture")
    assert script("check_imagenet")["main"](["--shifts", str(tmp_path), "--decode", "200"]) == 1
    found = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in found.splitlines()}
    assert rows["ImageNet-A"][1:6] == ["199", "200", "199", "7,500", "incomplete"]
    assert rows["ObjectNet"][1:6] == ["0", "113", "0", "18,574", "incomplete"]
    assert "ImageNet-A: 1 of 200 class folders are missing (n01498041)" in found
    assert f"ImageNet-A: {broken} cannot be decoded" in found


def test_the_check_of_empty_folders(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    assert script("check_imagenet")["main"](["--data", str(tmp_path), "--decode", "3"]) == 1
    found = capsys.readouterr().out
    assert "train: 1000 of 1000 class folders are missing (n01440764, n01443537" in found
    assert f"validation: {tmp_path}/val: no such folder" in found


def test_a_complete_set_passes_the_check(tmp_path):
    check = script("check_imagenet")
    root = fill(tmp_path, ["n1", "n2"], count=3)
    for pictures, problems in ((6, []), (8, ["-2 pictures"])):
        report = check["Report"]("set", pictures, classes=2)
        report = check["check_folders"](report, lambda: root, {"n1": 0, "n2": 1})
        assert report.problems == problems
        assert (report.found_classes, report.found_pictures) == (2, 6)


def test_the_input_benchmark_runs(capsys):
    words = ["task.data=embedded", "task.image_size=[16,16]", "task.batch_size=64", "--steps", "2"]
    words += ["model.width=16", "model.heads=2", "model.depth=1", "system.device=cpu"]
    script("benchmark_input")["main"](["--seconds", "0.1", *words, "system.workers=1"])
    assert capsys.readouterr().out.count("pictures/s") == 6
