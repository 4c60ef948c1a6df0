"""Training timm and transformers models on your own images."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import ed
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.models.named import timm_model, transformers_model
from ed.tasks.image_folder import ImageFolder, channel_statistics
from ed.tasks.text_classification import TextClassification
from tests.datasets.test_images import png, write_folder
from tests.helpers.commands import run_together
from tests.helpers.own_data import CPU, REGULARIZERS, TEXTS, write_labels

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES = {"epochs": 1, "warmup_epochs": 0, "batch_size": 8, "augment": False, "space": "input"}
IMAGES |= {"eval_every": 1, "image_size": [32, 32]}
CLASSIFIERS = {"vit": "ViTForImageClassification", "convnext": "ConvNextForImageClassification"}


def write_images(folder, count=8, names=("red", "green", "blue"), size=(40, 36)):
    """Writes noisy images of one colour per class; returns their folder."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 80, (*size, 3), dtype=np.uint8)
            pixels[..., label % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train")
    write_images(root / "val", 3)
    return root


def train_images(images, folder, *extra):
    settings = ["task=image_folder", f"task.data={images}", "task.image_size=[32,32]", *CPU]
    settings += ["model=timm", "model.name=resnet18", f"system.run_dir={folder}", *extra]
    return run(compose_config(settings), ["own"])


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_timm_model_trains_on_a_folder_of_images(images, tmp_path, regularizer):
    network = "resnet18" if regularizer == "ed" else "test_resnet"  # timm's smallest model
    extra = [f"regularizer={regularizer}", f"model.name={network}"]
    summary = train_images(images, tmp_path / "run", *extra)
    assert summary["steps"] == 3
    assert np.isfinite(summary["last"]["eval/loss"])
    trained = ed.load_run(tmp_path / "run", "cpu")
    assert trained.config.model.classes == trained.task.classes == 3
    record = json.loads((tmp_path / "run" / "meta.json").read_text())["sessions"][0]
    assert record["class_names"] == "blue, green, red"


def test_a_run_rejects_renamed_class_folders(tmp_path):
    """Labels follow the order of the names: yellow becomes 2, the label that red was trained as."""
    data, folder = write_images(tmp_path / "images"), tmp_path / "run"
    train_images(data, folder, "model.name=test_resnet")
    (data / "blue").rename(data / "yellow")
    names = r"^task\.data: class 0 is green, but was blue"
    with pytest.raises(ValueError, match=names):
        ed.load_run(folder, "cpu")
    with pytest.raises(ValueError, match=names):  # measures of a finished run
        train_images(data, folder, "model.name=test_resnet", "measures=[norm]")
    (folder / "DONE").unlink()
    with pytest.raises(ValueError, match=names):  # resumes
        train_images(data, folder, "model.name=test_resnet")
    (folder / "meta.json").write_text('{"sessions": [{}]}')  # as in runs of older versions
    assert ed.load_run(folder, "cpu").task.class_names == ["green", "red", "yellow"]
    train_images(data, folder, "model.name=test_resnet")


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """Saves a ViT and a ConvNeXt for 5 classes; returns the parent folder."""
    root = tmp_path_factory.mktemp("vision")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = transformers.ViTConfig(
        image_size=32, patch_size=8, intermediate_size=16, num_labels=5, **sizes
    )
    transformers.ViTForImageClassification(vit).save_pretrained(root / "vit")
    convnext = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    convnext.num_stages = 2
    transformers.ConvNextForImageClassification(convnext).save_pretrained(root / "convnext")
    return root


@pytest.mark.parametrize("network", ["vit", "convnext"])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_transformers_model_trains_on_a_folder_of_images(
    images, vision, tmp_path, regularizer, network
):
    extra = ["model=transformers", f"model.name={vision / network}", f"regularizer={regularizer}"]
    summary = train_images(images, tmp_path / "run", *extra)
    assert summary["steps"] == 3
    assert np.isfinite(summary["last"]["eval/loss"])
    trained = ed.load_run(tmp_path / "run", "cpu")
    assert trained.config.model.classes == trained.task.classes == 3
    assert trained.model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    stored = getattr(transformers, CLASSIFIERS[network]).from_pretrained(vision / network)
    before = next(iter(stored.base_model.parameters()))
    after = next(iter(trained.model.model.base_model.parameters()))
    assert not torch.equal(before, after)  # all layers are trained, not only the new head
    assert (before - after).norm() < 0.5 * before.norm()  # training starts from the stored weights


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_half_precision_checkpoints_become_float32(vision, checkpoint, tmp_path, kind, pretrained):
    load = transformers.AutoModelForSequenceClassification
    load = transformers.AutoModelForImageClassification if kind == "image" else load
    stored = load.from_pretrained(vision / "vit" if kind == "image" else checkpoint)
    stored.half().save_pretrained(tmp_path)
    model = transformers_model(str(tmp_path), classes=stored.num_labels, pretrained=pretrained)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_two_processes_train_on_a_folder_of_images(images, tmp_path):
    settings = ["task=image_folder", f"task.data={images}", "task.image_size=[32,32]", *CPU]
    settings += ["model=timm", "model.name=test_resnet", "regularizer=ed"]
    done = run_together(["train.py", *settings, f"system.run_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "DONE").read_text())["steps"] == 3


def test_images_keep_their_class_and_are_resized(images):
    task = ImageFolder(str(images), **IMAGES)
    task.prepare(torch.device("cpu"), seed=0)
    assert task.class_names == ["blue", "green", "red"]
    assert (len(task.train), len(task.test)) == (24, 9)
    assert task.train.pixels.shape[1:] == (3, 32, 32)
    brightest = task.train.pixels.double().mean((2, 3)).argmax(1)  # 0 is red, 1 is green, 2 is blue
    assert torch.equal(2 - brightest, task.train.labels)
    normalised = task.normalise(task.train.pixels).double()
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    # the tolerance allows for float32 rounding in the mean of 24,576 pixels
    torch.testing.assert_close(normalised.mean((0, 2, 3)), zeros, atol=1e-5, rtol=0)
    torch.testing.assert_close(normalised.std((0, 2, 3), correction=0), ones, atol=1e-5, rtol=0)


def test_channel_statistics_cover_all_pixels():
    pixels = torch.randint(256, (300, 3, 5, 4), dtype=torch.uint8)
    mean, std = map(torch.tensor, channel_statistics(pixels))
    values = pixels.double() / 255
    torch.testing.assert_close(mean.double(), values.mean((0, 2, 3)), rtol=1e-6, atol=0)
    expected = values.std((0, 2, 3), correction=0)
    torch.testing.assert_close(std.double(), expected, rtol=1e-6, atol=0)


def test_given_statistics_are_used(images):
    task = ImageFolder(str(images), mean=[0.5] * 3, std=[0.25] * 3, **IMAGES)
    task.prepare(torch.device("cpu"), seed=0)
    assert task.normalise(torch.full((1, 3, 2, 2), 255)).unique().tolist() == [2.0]


def test_the_held_out_set_does_not_depend_on_the_seed(tmp_path):
    write_images(tmp_path / "images", 10, names=("a", "b"))
    tasks = []
    for seed in (0, 1):
        task = ImageFolder(str(tmp_path / "images"), holdout=0.25, **IMAGES)
        task.prepare(torch.device("cpu"), seed=seed)
        tasks.append(task)
    assert (len(tasks[0].train), len(tasks[0].test)) == (15, 5)
    assert torch.equal(tasks[0].test.pixels, tasks[1].test.pixels)


def test_images_in_columns_are_resized_and_classes_counted(tmp_path):
    columns = {"image": [png((20, 30)), png((32, 32))] * 5, "label": [0, 1, 2, 3, 0] * 2}
    task = ImageFolder(write_folder(tmp_path / "set", columns), **IMAGES | {"image_size": [16, 24]})
    task.prepare(torch.device("cpu"), seed=0)
    assert task.classes == 4
    assert task.train.pixels.shape == (10, 3, 16, 24)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"classes": 5}, "task.classes=5"),
        ({"holdout": 1.0}, "task.holdout=1.0"),
        ({"mean": [0.5] * 3}, "task.mean"),
        ({"mean": [0.5] * 3, "std": [0.0, 1.0, 1.0]}, "task.std"),
        ({"split": "nowhere"}, "task.split=nowhere"),
    ],
)
def test_errors_name_the_invalid_key(images, settings, key):
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}"):
        ImageFolder(str(images), **IMAGES, **settings).load("test")


def test_an_unreadable_image_is_reported(tmp_path):
    write_images(tmp_path / "images", 2)
    (tmp_path / "images" / "red" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"^task\.data=.*broken\.png"):
        ImageFolder(str(tmp_path / "images"), **IMAGES).load("train")


def test_hidden_files_and_folders_are_skipped(tmp_path):
    write_images(tmp_path / "images", 4)
    copies = tmp_path / "images" / "red" / ".ipynb_checkpoints"
    copies.mkdir()
    (copies / "0-checkpoint.png").write_bytes((tmp_path / "images/red/0.png").read_bytes())
    (tmp_path / "images" / "red" / "._0.png").write_bytes(b"not an image")
    (tmp_path / "images" / ".ipynb_checkpoints").mkdir()
    task = ImageFolder(str(tmp_path / "images"), **IMAGES)
    assert task.class_names == ["blue", "green", "red"]
    assert len(task.load("train")) + len(task.load("test")) == 12


def test_a_class_without_images_is_reported(tmp_path):
    write_images(tmp_path / "images" / "train", 4)
    write_images(tmp_path / "images" / "val", 4, names=("blue",))
    (tmp_path / "images" / "val" / "red").mkdir()  # no error, as evaluation needs no red images
    assert len(ImageFolder(str(tmp_path / "images"), **IMAGES).load("test")) == 4
    (tmp_path / "images" / "train" / "violet").mkdir()
    with pytest.raises(ValueError, match=r"^task\.data=.*violet"):
        ImageFolder(str(tmp_path / "images"), **IMAGES).load("train")


def test_splits_with_other_names_are_not_taken_for_classes(tmp_path):
    write_images(tmp_path / "images" / "Training", 2)
    write_images(tmp_path / "images" / "Testing", 2)
    with pytest.raises(ValueError, match=r"^task\.data=.*Testing, Training"):
        ImageFolder(str(tmp_path / "images"), **IMAGES)


@pytest.mark.parametrize("values", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_reported(tmp_path, values):
    write_images(tmp_path / "images", 2)
    image = Image.fromarray(np.full((8, 8), 500, dtype=values))  # would become all white
    image.save(tmp_path / "images" / "red" / "deep.tiff")
    with pytest.raises(ValueError, match=r"^task\.data=.*deep\.tiff"):
        ImageFolder(str(tmp_path / "images"), **IMAGES).load("train")


@pytest.mark.parametrize("labels", [[1, 2] * 4, [0, 2] * 4, [7, 3_000_000_007] * 4, [0] * 8])
def test_classes_are_counted_only_if_labels_are_numbered_from_0(tmp_path, labels):
    path = write_labels(tmp_path, labels)
    with pytest.raises(ValueError, match=r"^task\.data=.*texts\.csv: "):
        TextClassification(path, **TEXTS)
    assert TextClassification(path, **TEXTS, classes=8).classes == 8
    columns = {"image": [png((8, 8))] * len(labels), "label": labels}
    with pytest.raises(ValueError, match=r"^task\.data=.*set: "):
        ImageFolder(write_folder(tmp_path / "set", columns), **IMAGES)


def test_fixed_size_architectures_use_the_tasks_image_size():
    model = timm_model("vit_tiny_patch16_224", classes=5, image_size=[32, 48])
    assert model(torch.randn(2, 3, 32, 48)).shape == (2, 5)


def test_error_on_a_mistyped_network_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"^model\.name=resnet81: .*resnet18"):
        timm_model("resnet81", classes=2)


@pytest.mark.parametrize("build", [timm_model, transformers_model])
def test_unreachable_weights_raise_one_line_errors(build, monkeypatch):
    monkeypatch.setattr("ed.runtime.hub.unanswered", lambda _: "the hub does not answer")
    name = "resnet18.a1_in1k" if build is timm_model else "nobody/nothing"
    with pytest.raises(ValueError, match=rf"^model\.name={re.escape(name)}: .*") as error:
        build(name, classes=2, pretrained=True)
    assert "\n" not in str(error.value)


def test_a_transformers_image_classifier_gets_a_new_head(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=7, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    model = transformers_model(str(tmp_path), classes=3).eval()
    assert model.image_size == [32, 32]
    assert transformers_model(str(tmp_path), classes=3, image_size=[16, 24]).image_size == [32, 32]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    stored = transformers.ViTForImageClassification.from_pretrained(tmp_path).vit
    for name, value in stored.state_dict().items():
        assert torch.equal(model.model.vit.state_dict()[name], value), name
    fresh = transformers_model(str(tmp_path), classes=3, pretrained=False, image_size=[16, 24])
    assert fresh.eval()(torch.randn(2, 3, 16, 24)).shape == (2, 3)
