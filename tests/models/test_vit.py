"""Tests the vision transformer's options and which weights get weight decay."""

import math

import pytest
import torch
from hydra.utils import instantiate
from torch.nn import functional as F

from ed.engine.compose import compose_config
from ed.engine.optimizer import AdamW
from ed.models.vit import ACTIVATIONS, ViT, sincos_positions


def vit(**settings) -> ViT:
    small = {"classes": 10, "image_size": [32, 48], "patch": 16, "width": 16, "depth": 2}
    small |= {"heads": 2, "pool": "avg", "dropout": 0.0, "activation": "gelu"}
    return ViT(**(small | settings))


def test_sincos_positions_equal_the_formula():
    """Evaluates big_vision's formula for each row, column and channel."""
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
def test_fixed_positions_are_not_a_parameter_and_come_before_the_first_block(pool):
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


def test_attention_is_initialised_as_three_square_matrices():
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


def test_dropout_follows_positions_and_dense_layers_but_not_qkv():
    model = vit(dropout=0.1)
    rates = {n: m.p for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    wanted = {
        f"blocks.{b}.{n}" for b in (0, 1) for n in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    }
    assert {name for name, rate in rates.items() if rate} == wanted | {"pos_drop"}
    assert {rate for rate in rates.values() if rate} == {0.1}


def test_activations_match_their_names():
    x = torch.linspace(-3, 3, 13)
    expected = {
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "quick_gelu": x * torch.sigmoid(1.702 * x),
        "relu": x.clamp(min=0),
        "silu": x * torch.sigmoid(x),
        "tanh": x.tanh(),
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, values in expected.items():
        for block in vit(activation=name).blocks:
            torch.testing.assert_close(block.mlp.act(x.clone()), values)  # some change x in place


def test_vit_s16_has_the_published_size():
    """timm's model, with class token, learned positions and linear head, has 22.05 M parameters."""
    cfg = compose_config(["task=imagenet", "model=vit_s16"])
    assert sum(p.numel() for p in instantiate(cfg.model).parameters()) == 22_050_664


def test_weight_decay_applies_only_to_matrices():
    model = vit(pool="token")
    groups = AdamW(lr=0.1, weight_decay=0.5, decay="matrices").build(
        model.named_parameters(), torch.device("cpu")
    )
    decayed, others = groups.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= set(
        decayed["param_names"]
    )
    assert not [n for n in decayed["param_names"] if "norm" in n]
    assert all(
        "bias" in n or "norm" in n or n in ("cls_token", "pos_embed") for n in others["param_names"]
    )
    assert {"cls_token", "pos_embed", "head.bias"} <= set(others["param_names"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    with pytest.raises(ValueError, match=r"optimizer\.decay=none"):
        AdamW(lr=0.1, weight_decay=0.5, decay="none")
