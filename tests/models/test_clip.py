"""CLIP: captions, towers, the zero-shot head, and which models of open_clip are supported."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ed.engine.compose import compose_config
from ed.models.clip import ClipClassifier, Towers, build, classifier, tokenise, zero_shot_rows
from ed.models.prompts import captions
from ed.runtime.streams import generator
from tests.helpers.clip import ARCHITECTURE

open_clip = pytest.importorskip("open_clip")


@pytest.fixture(scope="module")
def towers() -> Towers:
    torch.manual_seed(0)
    return Towers(ARCHITECTURE, prompts="cifar10")


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


def test_captions_that_are_too_long_are_rejected():
    assert tokenise([["a photo of a cat."]], 8).shape == (1, 1, 8)
    with pytest.raises(ValueError, match="context_length=7"):
        tokenise([["a photo of a cat."]], 7)


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


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("ViT-B-16-SigLIP", "custom_text"),
        ("coca_ViT-B-32", "multimodal_cfg"),
        ("roberta-ViT-B-32", "hf_model_name, hf_tokenizer_name"),
        ("ViT-L-14-CLIPA", "hf_tokenizer_name, tokenizer_kwargs"),
        ({"embed_dim": 8, "text_cfg": {"tokenizer_mode": "bert"}}, "tokenizer_mode"),
    ],
)
def test_other_open_clip_models_are_rejected(architecture, why):
    """Such models would raise a TypeError or build a zero-shot head from wrong tokens."""
    with pytest.raises(ValueError, match=rf"model.architecture=.*{why}"):
        build(architecture)


@pytest.mark.parametrize("architecture", ["ViT-B-32-quickgelu", "RN50"])
def test_plain_models_are_built(architecture):
    with torch.device("meta"):
        assert isinstance(build(architecture), open_clip.CLIP)
