"""CLIP tasks: pretraining and fine-tuning the small stand-in, shifts, and evaluation."""

import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import nn

from ed.datasets.corruptions import corrupt
from ed.datasets.imagenet import shifts
from ed.datasets.images import load_images
from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import build_model, run
from ed.models.clip import classifier
from ed.runtime.files import read_rows
from ed.runtime.streams import generator
from ed.tasks.clip import matching_loss
from scripts import evaluate
from tests.helpers.clip import ARCHITECTURE
from tests.helpers.imagenet import fill
from tests.helpers.small import weights

open_clip = pytest.importorskip("open_clip")

CPU = torch.device("cpu")
TINY = ["model.architecture.embed_dim=16"]
TINY += [f"model.architecture.vision_cfg.{s}" for s in ("patch_size=16", "width=32", "layers=2")]
TINY += [f"model.architecture.text_cfg.{s}" for s in ("width=16", "layers=1")]
TINY += ["model.architecture.vision_cfg.head_width=16", "debug=tiny", "task.batch_size=200"]
PRETRAIN = ["task=clip_standin_pretrain", "model=clip_small_pretrain", "task.part=1"]
FINE_TUNE = ["task=clip_standin", "model=clip_small", "measures=ensembling"]
FINE_TUNE += ["measures.ensembling.alphas=[0,0.3,1]"]
ALPHAS = [f"{alpha / 10:g}" for alpha in range(11)]  # the paper's grid


def train(folder: Path, *overrides: str) -> dict:
    return run(compose_config([*overrides, *TINY, f"system.run_dir={folder}"]), ["clip"])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """Pretrains the stand-in model; returns the run folder."""
    folder = tmp_path_factory.mktemp("clip") / "pretrained"
    train(folder, *PRETRAIN, "task.epochs=2")
    return folder


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory, pretrained) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "fine_tuned"
    train(folder, *FINE_TUNE, f"model.weights={pretrained}/last.pt", "regularizer=ed")
    return folder


def test_pretraining_uses_only_the_first_images():
    settings = ["task=clip_standin_pretrain", "task.data=embedded", "task.part=0.3"]
    task = instantiate(compose_config(settings).task)
    whole, part = load_images("embedded", "train", classes=10, size=(32, 32)), task.load("train")
    assert torch.equal(part.pixels, whole.pixels[:600])
    assert torch.equal(part.labels, whole.labels[:600])
    assert len(task.load("test")) == 500


@pytest.mark.parametrize("name", ["clip_standin", "clip_standin_pretrain"])
def test_the_stand_in_uses_clips_normalisation(name):
    task = instantiate(compose_config([f"task={name}", "task.data=embedded"]).task)
    assert task.mean == (0.48145466, 0.4578275, 0.40821073)  # OpenAI's constants
    assert task.std == (0.26862954, 0.26130258, 0.27577711)


@pytest.mark.parametrize("name", ["clip_b32", "clip_b16_ed"])
def test_large_checkpoints_are_not_written_every_minute(name):
    """They contain four copies of the weights, 1.4 GB."""
    assert compose_config([f"experiment={name}"]).system.save_seconds == 600


def test_weights_load_from_every_supported_file(tmp_path, pretrained, fine_tuned):
    """Loads a pretraining checkpoint, plain weight files of both towers and a fine-tuned model."""

    def load(file: Path) -> nn.Module:
        return instantiate(compose_config([*FINE_TUNE, *TINY, f"model.weights={file}"]).model)

    started = load(pretrained / "last.pt")
    state = {name.removeprefix("clip."): value for name, value in weights(pretrained).items()}
    assert torch.equal(started.visual.proj, state["visual.proj"])
    torch.save({"state_dict": state}, tmp_path / "plain.pt")
    save_file(state, tmp_path / "plain.safetensors")
    for file in ("plain.pt", "plain.safetensors"):
        assert torch.equal(load(tmp_path / file).head.weight, started.head.weight)
    again = load(fine_tuned / "last.pt")
    for name, value in weights(fine_tuned).items():
        assert torch.equal(again.state_dict()[name], value), name


def test_the_zero_shot_head_is_computed_on_the_configured_device(monkeypatch, pretrained):
    """A GPU is used only if the config selects it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []

    def rows(_, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.device.type)
        return torch.zeros(10, 16, device=tokens.device)

    monkeypatch.setattr("ed.models.clip.zero_shot_rows", rows)
    cfg = compose_config([*FINE_TUNE, *TINY, f"model.weights={pretrained}/last.pt"])
    for name in ("cpu", "meta"):
        model = build_model(cfg, torch.device(name))
        assert {p.device.type for p in model.parameters()} == {name}
    assert seen == ["cpu", "meta"]


def test_fine_tuning_rejects_unfinished_pretraining(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path / "begun", *PRETRAIN, "system.max_minutes=0")
    settings = {"prompts": "cifar10", "classes": 10, "weights": f"{tmp_path}/begun/last.pt"}
    with pytest.raises(ValueError, match=r"model.weights=.*begun/last.pt"):
        classifier(ARCHITECTURE, **settings)
    train(tmp_path / "begun", *PRETRAIN)
    classifier(ARCHITECTURE, **settings)


@pytest.mark.parametrize("kind", ["checkpoint", "plain"])
def test_a_truncated_file_raises(tmp_path, pretrained, kind):
    whole = pretrained / "last.pt"
    if kind == "plain":
        whole = tmp_path / "plain.pt"
        torch.save(weights(pretrained), whole)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:-1000])
    settings = {"prompts": "cifar10", "classes": 10}
    with pytest.raises(ValueError, match=r"model.weights=.*cut.pt"):
        classifier(ARCHITECTURE, weights=str(tmp_path / "cut.pt"), **settings)


def test_matching_loss_equals_a_slow_reference():
    logits = torch.randn(5, 3, 2, generator=generator(5, "x"), dtype=torch.float64)
    labels = torch.tensor([0, 2, 2, 2, 2])  # class 1 has no image
    captions_of, images_of = [], []
    for n, label in enumerate(labels):
        others = sum(math.exp(value) for value in logits[n].flatten())
        captions_of += [math.log(others) - logits[n, label, t] for t in range(2)]
    for c in (0, 2):
        for t in range(2):
            others = sum(math.exp(value) for value in logits[:, c, t])
            own = [math.log(others) - logits[n, c, t] for n in range(5) if labels[n] == c]
            images_of.append(sum(own) / len(own))
    expected = (sum(captions_of) / 10 + sum(images_of) / 4) / 2
    torch.testing.assert_close(matching_loss(logits, labels), expected)
    task = instantiate(compose_config([*PRETRAIN, "task.classes=3"]).task)
    loss, report = task.loss(logits.flatten(1), {"label": labels})
    assert loss == matching_loss(logits, labels)
    right = [max(range(3), key=lambda c: sum(logits[n, c])) == labels[n] for n in range(5)]
    # a class's score is the sum over its templates
    assert report["acc"] == pytest.approx(20 * sum(right))


def test_shifts_of_the_stand_in_are_corrupted_test_images():
    cfg = compose_config(["task=clip_standin", "task.data=embedded"])
    task = instantiate(cfg.task)
    task.prepare(CPU, seed=0)
    assert list(task.shifts) == list(cfg.task.corruptions)
    for name, severity in cfg.task.corruptions.items():
        expected = corrupt(task.test.pixels, name, severity)
        assert torch.equal(task.shifts[name].pixels, expected)
        assert torch.equal(task.shifts[name].labels, task.test.labels)


def test_ensembling_requires_a_task_with_zero_shot_weights(tmp_path):
    with pytest.raises(ValueError, match=r"Cifar10.*clip_standin"):
        run(compose_config(["debug=tiny", "measures=ensembling"]), ["clip"])


def test_ensembling_of_the_stand_in_matches_evaluations(pretrained, fine_tuned):
    rows = read_rows(fine_tuned / "metrics.jsonl")
    final = {key: value for row in rows for key, value in row.items()}
    kinds = ("blur", "noise", "contrast", "pixelate", "brightness")
    mean = sum(final[f"eval/acc_{name}"] for name in kinds) / 5
    assert final["eval/acc_ood"] == pytest.approx(mean)
    for name in ("acc", "acc_ood", *(f"acc_{name}" for name in kinds)):
        assert final[f"measure/ensembling/alpha1/{name}"] == final[f"eval/{name}"]
    zero_shot = read_rows(pretrained / "metrics.jsonl")[-1]["eval/acc"]
    assert final["measure/ensembling/alpha0/acc"] == zero_shot


def test_resuming_does_not_reload_pretrained_weights(tmp_path, pretrained):
    """If the weights file changes, a resumed run still equals an uninterrupted one."""
    file = tmp_path / "towers.pt"
    file.write_bytes((pretrained / "last.pt").read_bytes())
    settings = [*FINE_TUNE, f"model.weights={file}", "regularizer=ed"]
    train(tmp_path / "whole", *settings)
    with pytest.raises(Interrupted):
        train(tmp_path / "pieces", *settings, "system.max_minutes=0")
    changed = {name: value + 1 for name, value in weights(pretrained).items()}
    torch.save(changed, file)
    train(tmp_path / "pieces", *settings)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "pieces")[name], value), name
    ends = [read_rows(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "pieces")]
    assert ends[0] == ends[1]
    assert "measure/ensembling/alpha0.3/acc_ood" in ends[0]


def test_mismatched_task_and_model_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="task=clip_standin_pretrain"):
        run(compose_config(["task=clip_standin_pretrain", "debug=tiny"]), ["clip"])
    with pytest.raises(ValueError, match=r"task.image_size=\[16, 16\]"):
        train(tmp_path, *PRETRAIN, "task.image_size=[16,16]")
    longer = "model.architecture.text_cfg.context_length=77"
    with pytest.raises(ValueError, match=r"task.classes=10"):
        train(tmp_path, *PRETRAIN, "model.prompts=imagenet_7", longer)


def test_evaluate_script_agrees_with_ensembling(pretrained, fine_tuned, capsys):
    """Without training, scripts/evaluate.py reproduces both ends of the ensemble."""
    last = read_rows(fine_tuned / "metrics.jsonl")[-1]
    for alpha, folder in (("0", pretrained), ("1", fine_tuned)):
        settings = ["task=clip_standin", "model=clip_small", f"model.weights={folder}/last.pt"]
        assert evaluate.main([*settings, *TINY]) == 0
        printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
        for name in ("acc", "acc_blur", "acc_ood"):
            expected = last[f"measure/ensembling/alpha{alpha}/{name}"]
            assert float(printed[f"eval/{name}"]) == pytest.approx(expected, abs=0.01)
    assert evaluate.main(["task=clip_standin", "model=clip_small", *TINY]) == 1
    assert "model.weights has no default" in capsys.readouterr().err


def as_override(value) -> str:
    """Formats a value, such as a mapping, in Hydra's override grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    return str(value).lower()


def test_accuracy_under_shift_uses_only_the_classes_of_the_shift(tmp_path):
    for name in ("r", "a"):
        fill(tmp_path / f"imagenet-{name}", shifts()[name].labels)
    settings = ["task=clip_finetune", "model=clip_b32", "model.weights=random"]
    settings += ["task.image_size=[32,32]"]
    settings += [f"model.architecture={as_override(ARCHITECTURE)}", "debug=tiny"]
    settings += [
        "task.batch_size=500",
        "system.workers=0",
        "optimizer.lr=3e-5",
        "optimizer.max_grad_norm=1",
    ]
    settings += [f"task.shifts={tmp_path}", "task.shift_names=[r,a]", "measures=ensembling"]
    settings += ["measures.ensembling.alphas=[0,1]", f"system.run_dir={tmp_path}/run"]
    last = run(compose_config(settings), ["clip"])["last"]
    # all images of a shift are equal, so only one of its 200 classes is predicted
    assert last["eval/acc_r"] == last["eval/acc_a"] == last["eval/acc_ood"] == 0.5
    for name in ("acc", "acc_r", "acc_ood"):
        assert last[f"measure/ensembling/alpha1/{name}"] == last[f"eval/{name}"]


def test_number_of_fine_tuning_steps_on_imagenet():
    task = instantiate(compose_config(["task=clip_finetune"]).task)
    task.train = range(1_281_167)
    task.plan(CPU, 0, epoch=len(task.train))
    assert (task.total_steps, task.warmup_steps) == (25_020, 500)


def test_error_on_missing_shifts_names_the_key():
    task = instantiate(compose_config(["task=clip_finetune", "task.data=embedded"]).task)
    with pytest.raises(FileNotFoundError, match=r"task.shifts=.data/imagenet_shifts"):
        task.prepare(CPU, 0)
    with pytest.raises(Exception, match=r"task.shift_names=x"):
        instantiate(compose_config(["task=clip_finetune", "task.shift_names=[r,x]"]).task)


def test_contrastive_batches_cannot_be_split():
    """The contrastive loss depends on the whole batch."""
    cfg = compose_config([*PRETRAIN, *TINY, "accumulate=2"])
    task = instantiate(cfg.task)
    with pytest.raises(ValueError, match="accumulate=2"):
        check(cfg, task, instantiate(cfg.regularizer))
    logits, labels = torch.randn(8, 4, 3), torch.arange(8) % 4
    parts = [matching_loss(*part) for part in zip(logits.chunk(2), labels.chunk(2), strict=True)]
    assert (sum(parts) / 2 - matching_loss(logits, labels)).abs() > 0.1


def test_a_resnet_tower_can_be_fine_tuned_and_ensembled(tmp_path):
    """Batch-norm statistics are interpolated; the integer counters are not."""
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}
    tower = as_override(ARCHITECTURE | {"vision_cfg": vision})
    settings = [*FINE_TUNE, "model.weights=random", f"model.architecture={tower}", "debug=tiny"]
    settings += ["task.batch_size=1000", f"system.run_dir={tmp_path}"]
    last = run(compose_config(settings), ["clip"])["last"]
    assert last["measure/ensembling/alpha1/acc"] == last["eval/acc"]
    with pytest.raises(ValueError, match=r"task\.space=block1"):
        build_model(compose_config(settings), CPU).to_space(torch.zeros(1, 3, 32, 32), "block1")
