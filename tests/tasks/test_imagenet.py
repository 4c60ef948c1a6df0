"""The ImageNet task: resuming, number of steps, evaluation and measures."""

import json
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from ed.datasets.imagenet import CLIP, EvaluationSet
from ed.datasets.imagenet.views import to_tensor
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import run
from ed.engine.run import resolved
from ed.runtime import processes
from ed.runtime.runs import digest
from ed.tasks.imagenet_task import ImageNetTask
from scripts import evaluate
from tests.helpers.small import weights

CPU = torch.device("cpu")
SETTINGS = {"epochs": 1, "warmup_epochs": 0, "batch_size": 8, "space": "input", "eval_every": 1}
SETTINGS |= {"classes": 1000, "image_size": [16, 16]}

SMALL = [
    "task=imagenet",
    "model=vit_s16",
    "debug=tiny",
    "task.image_size=[16,16]",
    "model.width=16",
]
SMALL += ["model.depth=1", "model.heads=2", "model.dropout=0.1", "task.batch_size=600"]
SMALL += ["optimizer=adamw_matrices", "optimizer.max_grad_norm=1.0"]
SMALL += ["regularizer=ed", "regularizer.pairs=8", "regularizer.components=3"]
SMALL += ["system.workers=0", "system.log_every=1"]


def small_run(folder: Path, *overrides: str) -> dict:
    return run(compose_config([*SMALL, f"system.run_dir={folder}", *overrides]), ["imagenet"])


@pytest.fixture
def no_workers(monkeypatch):
    """Fails if a loader starts worker processes."""
    monkeypatch.setattr(processes, "available_cores", lambda: pytest.fail("workers were started"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, no_workers):
    small_run(tmp_path / "whole")
    for _ in range(2):  # stops after each of the first two steps
        with pytest.raises(Interrupted):
            small_run(tmp_path / "pieces", "system.max_minutes=0")
    summary = small_run(tmp_path / "pieces")
    assert summary["steps"] == 3
    whole, pieces = (weights(tmp_path / name) for name in ("whole", "pieces"))
    assert all(torch.equal(value, pieces[name]) for name, value in whole.items())
    assert {"eval/acc", "eval/loss"} <= summary["last"].keys()
    log = (tmp_path / "pieces" / "train.log").read_text()
    remark = "2,000 images instead of the 1,281,167 of ImageNet (train)"
    assert remark in log
    assert "500 images instead of the 50,000 of ImageNet (validation)" in log
    for session in json.loads((tmp_path / "pieces" / "meta.json").read_text())["sessions"]:
        assert remark in session["data"]


def test_evaluate_scores_the_initial_model_of_training(no_workers):
    """Scores are computed without dropout, and the seed determines the weights."""
    small = [*SMALL, "model.init=timm"]  # by default, the last layer is zero
    found, plain, other = (
        evaluate.evaluate([*small, *more]) for more in ([], ["model.dropout=0"], ["seed=1"])
    )
    assert found == plain
    assert found["eval/loss"] != other["eval/loss"]


def test_a_runs_identity_does_not_depend_on_workers():
    ours, theirs = (compose_config([*SMALL, f"system.workers={n}"]) for n in (0, 3))
    assert digest(resolved(ours)) == digest(resolved(theirs))


def test_number_of_steps_follows_from_images_and_repeats():
    cfg = compose_config(["task=imagenet", "task.data=embedded", "task.batch_size=300"])
    task = instantiate(cfg.task)
    task.repeat = 3
    task.prepare(CPU, seed=0)
    assert task.steps_per_epoch == 20  # 3 x 2,000 images
    assert task.total_steps == 1800
    assert task.num_examples == 2000


def test_warmup_takes_ten_thousand_steps():
    """The warmup epochs in the config equal 10,000 steps on all of ImageNet."""
    for batch, steps in ((1024, 1251), (512, 2502)):
        assert 1_281_167 // batch == steps
    assert round(compose_config(["task=imagenet"]).task.warmup_epochs * 1251) == 10_000


def test_evaluation_and_measures_use_the_same_view():
    """Evaluating on training images must give the loss that measures compute on the same images."""
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


def test_labels_outside_the_classes_are_rejected():
    task = instantiate(
        compose_config(["task=imagenet", "task.data=embedded", "task.classes=9"]).task
    )
    with pytest.raises(ValueError, match=r"task.classes=9"):
        task.prepare(CPU, seed=0)


def test_examples_are_unaugmented():
    cfg = compose_config(["task=imagenet", "task.data=embedded", "task.image_size=[28,28]"])
    task = instantiate(cfg.task)
    task.workers = 0
    task.prepare(CPU, seed=0)
    batch = task.examples(torch.tensor([5, 3]))
    assert batch["label"].tolist() == task.train.labels[[5, 3]].tolist()
    centre = to_tensor(task.train.image(3))[:, 2:30, 2:30]  # 32 px images are cropped, not resized
    assert torch.equal(batch["x"][1], centre)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.augment=none"], "task.augment=none"),
        (["task.repeat=0"], "task.repeat=0"),
        (["task.image_size=[224,112]"], r"task.image_size=\[224, 112\]"),
        (["model.pool=cls"], "model.pool=cls"),
        (["model.positions=no"], "model.positions=no"),
        (["model.head=no"], "model.head=no"),
        (["model.init=no"], "model.init=no"),
    ],
)
def test_invalid_settings_are_rejected(overrides, message):
    cfg = compose_config(["task=imagenet", "model=vit_s16", *overrides])
    with pytest.raises(Exception, match=message):
        instantiate(cfg.task), instantiate(cfg.model)


def test_normalisation():
    """ImageNet inputs are scaled to [-1, 1]; CLIP uses OpenAI's constants."""
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
