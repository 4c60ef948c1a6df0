"""CLIP: zero-shot head, fine-tuning, weight ensembling and the small stand-in task."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from ed.analysis.collect import Row
from ed.analysis.tables import load_table
from ed.datasets.corruptions import CORRUPTIONS, blur, corrupt
from ed.datasets.imagenet import shifts
from ed.datasets.images import load_images
from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted, _Session
from ed.engine.main import build_model, run
from ed.figures import ensembling
from ed.measures.ensembling import Ensembling, interpolate
from ed.models.clip import ClipClassifier, Towers, build, classifier, tokenise, zero_shot_rows
from ed.models.prompts import captions
from ed.runtime.files import read_rows
from ed.runtime.runs import Record
from ed.runtime.streams import generator
from ed.tasks.clip import matching_loss
from scripts import evaluate
from tests.helpers.imagenet import fill
from tests.helpers.small import weights

open_clip = pytest.importorskip("open_clip")

CPU = torch.device("cpu")
ARCHITECTURE = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
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
def towers() -> Towers:
    torch.manual_seed(0)
    return Towers(ARCHITECTURE, prompts="cifar10")


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


@pytest.mark.parametrize(
    ("prompts", "templates", "first", "last"),
    [
        ("imagenet", 80, "a bad photo of a tench.", "toilet paper"),
        ("imagenet_7", 7, "itap of a tench.", "toilet paper"),
        ("cifar10", 8, "a photo of a airplane.", "truck"),
    ],
)
def test_captions_use_class_names_and_templates(prompts, templates, first, last):
    texts = captions(prompts)
    assert len(texts) == (10 if prompts == "cifar10" else 1000)
    assert {len(row) for row in texts} == {templates}
    assert texts[0][0] == first
    assert all(last in text for text in texts[-1])


def test_zero_shot_head_equals_a_slow_reference(towers):
    rows = zero_shot_rows(towers.clip, towers.tokens)
    scale = math.exp(towers.clip.logit_scale.item())
    for row, texts in zip(rows, captions("cifar10"), strict=True):
        total = torch.zeros(16, dtype=torch.float64)
        for text in texts:  # one caption at a time, with open_clip's tokenizer
            embedded = towers.clip.encode_text(open_clip.tokenize([text], context_length=16))[0]
            embedded = embedded.detach().double()
            total += embedded / embedded.square().sum().sqrt()
        expected = scale * total / total.square().sum().sqrt()
        torch.testing.assert_close(row.double(), expected, rtol=1e-4, atol=1e-5)


def test_towers_return_scaled_cosines_with_every_caption(towers):
    x = torch.randn(3, 3, 32, 32, generator=generator(0, "x"))
    logits = towers(x).unflatten(1, (10, -1))
    image = F.normalize(towers.clip.encode_image(x), dim=-1)
    text = open_clip.tokenize([captions("cifar10")[4][2]], context_length=16)
    cosine = image @ F.normalize(towers.clip.encode_text(text), dim=-1).T
    expected = cosine[:, 0] / 0.07  # CLIP's initial temperature
    torch.testing.assert_close(logits[:, 4, 2], expected, rtol=1e-4, atol=1e-4)


def test_the_head_has_zero_bias_and_normalised_inputs(towers):
    model = towers.zero_shot()
    assert torch.equal(model.head.bias, torch.zeros(10))
    x = torch.randn(4, 3, 32, 32, generator=generator(0, "x"))
    before = model(x)
    with torch.no_grad():
        model.visual.proj.mul_(3)  # triples the length of the features
    try:
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    finally:
        with torch.no_grad():
            model.visual.proj.div_(3)


def test_the_logit_scale_is_bounded(towers):
    before = towers.clip.logit_scale.detach().clone()
    with torch.no_grad():
        towers.clip.logit_scale.fill_(9.0)
    try:
        lengths = zero_shot_rows(towers.clip, towers.tokens).norm(dim=-1)
        torch.testing.assert_close(lengths, torch.full((10,), 100.0))
    finally:
        with torch.no_grad():
            towers.clip.logit_scale.copy_(before)


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


def test_building_a_zero_shot_model_does_not_change_the_random_state(towers):
    before = torch.get_rng_state()
    towers.zero_shot()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("space", ["embedding", "block1"])
def test_split_model_equals_the_full_model(towers, space):
    model = towers.zero_shot().eval()
    x = torch.randn(2, 3, 32, 32, generator=generator(0, "x"))
    torch.testing.assert_close(model.from_space(model.to_space(x, space), space), model(x))


@pytest.mark.parametrize("name", ["clip_b32", "clip_b16"])
def test_openai_architectures_use_quickgelu(name):
    architecture = compose_config([f"model={name}"]).model.architecture
    assert open_clip.get_model_config(architecture)["quick_gelu"]
    small = dict(open_clip.get_model_config(architecture))
    small["vision_cfg"] = small["vision_cfg"] | {"layers": 1, "width": 64}
    small["text_cfg"] = small["text_cfg"] | {"layers": 1, "width": 64}
    clip = build(small)
    for tower in (clip.visual.transformer, clip.transformer):
        x = torch.linspace(-3, 3, 20)
        gelu = tower.resblocks[0].mlp.gelu(x)
        torch.testing.assert_close(gelu, x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("name", ["clip_b32", "clip_b16_ed"])
def test_large_checkpoints_are_not_written_every_minute(name):
    """They contain four copies of the weights, 1.4 GB."""
    assert compose_config([f"experiment={name}"]).system.save_seconds == 600


def test_openai_weights_require_quickgelu():
    settings = {"weights": "openai", "prompts": "cifar10", "classes": 10}
    with pytest.raises(ValueError, match=r"QuickGELU.*ViT-B-32-quickgelu"):
        classifier("ViT-B-32", **settings)
    with pytest.raises(ValueError, match="QuickGELU"):
        classifier(ARCHITECTURE, **settings)


def test_unreachable_weights_raise(monkeypatch):
    def offline(*_, **__):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(open_clip, "create_model", offline)
    with pytest.raises(ValueError, match=r"model.weights=openai.*model.weights=FILE"):
        classifier("ViT-B-32-quickgelu", weights="openai", prompts="cifar10", classes=10)


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"weights": "nowhere.pt"},
            "model.weights=nowhere.pt.*clip_standin_pretrain",
        ),
        ({"prompts": "cifar11"}, "model.prompts=cifar11"),
        ({"classes": 3}, "model.prompts=cifar10.*task.classes=3"),
        ({"architecture": "ViT-Z-1"}, "model.architecture=ViT-Z-1"),
    ],
)
def test_errors_name_the_invalid_key(given, message):
    settings = {"architecture": ARCHITECTURE, "weights": "random", "prompts": "cifar10"}
    settings |= {"classes": 10} | given
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        classifier(settings.pop("architecture"), **settings)


def test_captions_that_are_too_long_are_rejected():
    assert tokenise([["a photo of a cat."]], 8).shape == (1, 1, 8)
    with pytest.raises(ValueError, match="context_length=7"):
        tokenise([["a photo of a cat."]], 7)


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


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_corruptions_are_deterministic_and_grow_with_severity(name):
    severity = compose_config(["task=clip_standin"]).task.corruptions[name]
    pixels = torch.randint(256, (4, 3, 32, 32), generator=generator(0, "x"), dtype=torch.uint8)
    before = pixels.clone()
    corrupted = corrupt(pixels, name, severity)
    assert torch.equal(pixels, before)
    assert corrupted.dtype == torch.uint8
    assert corrupted.shape == pixels.shape
    assert torch.equal(corrupt(pixels, name, severity), corrupted)  # deterministic
    change = (corrupted.float() - pixels.float()).abs().mean()
    assert change > 5
    milder = (corrupt(pixels, name, severity / 2).float() - pixels.float()).abs().mean()
    assert milder < change


def test_corruptions_of_plain_images():
    """Checks uniform and striped images against closed-form results."""
    grey = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    for name in ("blur", "contrast", "pixelate"):
        assert torch.equal(corrupt(grey, name, 2 if name == "pixelate" else 0.7), grey)
    assert torch.equal(corrupt(grey, "brightness", 0.2), grey + 51)
    assert torch.equal(corrupt(grey, "brightness", 0.108), grey + 28)  # 0.108 x 255 = 27.54
    assert corrupt(grey, "brightness", 2.0).min() == 255  # clipped to white
    noise = (corrupt(grey, "noise", 0.1).float() - 100) / 255
    assert noise.std() == pytest.approx(0.1, rel=0.05)
    stripes = grey.clone()
    stripes[..., ::2] = 200
    assert torch.equal(corrupt(stripes, "pixelate", 2), torch.full_like(grey, 150))
    assert corrupt(stripes, "contrast", 0.5).unique().tolist() == [125, 175]
    stripes[:, 0] = 10  # contrast uses each channel's mean
    assert corrupt(stripes, "contrast", 1.0)[0, :, 0, 0].tolist() == [10, 150, 150]


def test_blur_is_gaussian_with_reflected_borders():
    row = torch.rand(32, generator=generator(0, "x"), dtype=torch.float64)
    kernel = np.exp(-0.5 * (np.arange(-3, 4) / 0.7) ** 2)  # the kernel covers three sigma
    expected = np.convolve(np.pad(row, 3, "reflect"), kernel / kernel.sum(), "valid")
    columns = row.float().expand(1, 3, 32, 32)
    for image, found in ((columns, blur(columns, 0.7)), (columns.mT, blur(columns.mT, 0.7).mT)):
        assert found.shape == image.shape
        torch.testing.assert_close(found.double(), torch.tensor(expected).expand(1, 3, 32, 32))


def test_shifts_of_the_stand_in_are_corrupted_test_images():
    cfg = compose_config(["task=clip_standin", "task.data=embedded"])
    task = instantiate(cfg.task)
    task.prepare(CPU, seed=0)
    assert list(task.shifts) == list(cfg.task.corruptions)
    for name, severity in cfg.task.corruptions.items():
        expected = corrupt(task.test.pixels, name, severity)
        assert torch.equal(task.shifts[name].pixels, expected)
        assert torch.equal(task.shifts[name].labels, task.test.labels)


@pytest.mark.parametrize(
    ("name", "severity", "message"),
    [
        ("fog", 1, "task.corruptions=fog"),
        ("pixelate", 5, r"task.corruptions.pixelate=5"),
        ("blur", 0, "task.corruptions.blur=0"),
        ("contrast", 1.5, "task.corruptions.contrast=1.5"),
        ("blur", 11, "task.corruptions.blur=11"),
    ],
)
def test_invalid_corruptions_are_rejected(name, severity, message):
    with pytest.raises(ValueError, match=message):
        corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), name, severity)


class LinearTask:
    """Reports one output of a linear model, which is linear in the weights."""

    def __init__(self, zero_shot):
        self.zero_shot = zero_shot

    def evaluate(self, model):
        return {"eval/acc": model(torch.ones(1, 3)).item(), "eval/loss": 0.0}


def test_ensembling_of_a_linear_model_is_linear():
    torch.manual_seed(0)
    first, second = (nn.Linear(3, 1) for _ in range(2))
    before = {name: value.clone() for name, value in second.state_dict().items()}
    values = Ensembling()(second, LinearTask(first.state_dict()))
    low, high = first(torch.ones(1, 3)).item(), second(torch.ones(1, 3)).item()
    assert list(values) == [f"/alpha{alpha}/acc" for alpha in ALPHAS]
    for alpha in ALPHAS:
        expected = (1 - float(alpha)) * low + float(alpha) * high
        assert values[f"/alpha{alpha}/acc"] == pytest.approx(expected, abs=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())


def test_interpolation_is_exact_at_both_ends():
    first = {"w": torch.randn(1000, generator=generator(0, "a")) * 1e3}
    second = {"w": torch.randn(1000, generator=generator(0, "b")) * 1e-3}
    assert torch.equal(interpolate(first, second, 0.0)["w"], first["w"])
    assert torch.equal(interpolate(first, second, 1.0)["w"], second["w"])
    counts = ({"batches": torch.tensor(number)} for number in (3, 5))
    # integers are not interpolated
    assert interpolate(*counts, 0.5) == {"batches": torch.tensor(5)}


@pytest.mark.parametrize("bf16", [False, True])
def test_ensembling_evaluates_in_the_precision_of_the_run(bf16):
    """Both ends of the ensemble must match the run's own evaluations."""
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    for model, weight in zip(models, (1.001, 2.002), strict=True):  # bf16 rounds these to 1 and 2
        nn.init.constant_(model.weight, weight)
    task = LinearTask(models[0].state_dict())
    precision = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    step = SimpleNamespace(autocast=precision)
    sessions = [_Session(task, model, step, None, {"e": Ensembling()}) for model in models]
    found = sessions[1].measure()
    for alpha, session in zip(("0", "1"), sessions, strict=True):
        assert found[f"measure/e/alpha{alpha}/acc"] == session.evaluate()["eval/acc"]
    assert (found["measure/e/alpha1/acc"] == 6.0) == bf16


@pytest.mark.parametrize("alphas", [0.5, [], [0, 2]])
def test_invalid_alphas_are_rejected(alphas):
    with pytest.raises(ValueError, match=r"measures.ensembling.alphas"):
        Ensembling(alphas)


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


def row_of(cell: str, seed: int, shift: float, *, middle: float = 0.5) -> Row:
    """Returns a finished run with accuracies 60 + 10 alpha + shift and 50 + 5 alpha + shift."""
    values = {"step": 9}
    for alpha in (0.0, middle, 1.0):
        values[f"measure/ensembling/alpha{alpha:g}/acc"] = 60 + 10 * alpha + shift
        values[f"measure/ensembling/alpha{alpha:g}/acc_ood"] = 50 + 5 * alpha + shift
        values[f"measure/ensembling/alpha{alpha:g}/acc_blur"] = -1.0  # not in the figure
    return Row("clip_ood", cell, seed, status="done", record=logged(values))


def logged(values: dict) -> Record:
    return Record("", config={}, meta={}, done=None, failure="", history=lambda: [values])


def test_the_figure_averages_seeds_and_has_one_axis_per_model():
    table = load_table("clip_ood")
    rows = [row_of("b32", seed, shift=seed) for seed in (0, 2)]
    rows += [row_of("b32_ed", 0, shift=3.0), row_of("b16_ed", 0, shift=9.0)]
    axes = ensembling.draw(table, rows).axes
    assert len(axes) == 2  # one axis per model
    labels = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes]
    ends = [r"$\alpha = 0$, zero-shot", r"$\alpha = 1$, fine-tuned"]
    both = ["CLIP ViT-B/32, mean of 2 seeds", "CLIP ViT-B/32 + ED, 1 seed"]
    assert labels == [[*both, "one seed", *ends], ["CLIP ViT-B/16 + ED, 1 seed", *ends]]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes[0].lines}
    assert drawn[both[0]] == [[61, 51], [66, 53.5], [71, 56]]
    assert [drawn[end] for end in ends] == [[[61, 51], [63, 53]], [[71, 56], [73, 58]]]
    assert ensembling.draw(table, []) is None
    assert ensembling.draw(table, [replace(rows[1], status="stopped")]) is None
    without = logged({"step": 9, "measure/ensembling/alpha1/acc": 7})  # evaluated without shifts
    assert ensembling.draw(table, [replace(rows[0], record=without)]) is None


def test_seeds_with_different_alphas_cannot_be_averaged():
    rows = [row_of("b32", seed, 0.0, middle=middle) for seed, middle in ((0, 0.5), (1, 0.4))]
    with pytest.raises(ValueError, match=r"b32.*alphas"):
        ensembling.draw(load_table("clip_ood"), rows)


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


def test_logits_keep_float32_precision_under_autocast(towers):
    torch.manual_seed(0)
    model = ClipClassifier(nn.Identity(), 100 * F.normalize(torch.randn(5, 8), dim=-1))
    features = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside, rounded = model(features), model.head(F.normalize(features, dim=-1))
    assert torch.equal(inside, model(features))
    assert not torch.equal(rounded.float(), inside)
    outside = zero_shot_rows(towers.clip, towers.tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(zero_shot_rows(towers.clip, towers.tokens), outside)
        assert towers(torch.randn(2, 3, 32, 32)).dtype == torch.float32


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
