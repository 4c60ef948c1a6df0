"""Grokking: the decoder equals references; its size, dropout and variants."""

import math

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F

from ed.engine.compose import compose_config
from ed.models.grokking import causal_attention
from tests.helpers.grokking import KOKER, built


def test_attention_equals_its_definition():
    torch.manual_seed(0)
    given = [torch.randn(3, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    seen = []
    for y in (causal_attention(*given), F.scaled_dot_product_attention(*given, is_causal=True)):
        seen.append([y, *torch.autograd.grad(y, given, upstream)])
    torch.testing.assert_close(*seen)


def test_no_output_depends_on_later_tokens():
    _, model = built("task.modulus=7")
    ids = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 2:] = (other[:, 2:] + 1) % 9
    with torch.no_grad():
        ours, theirs = (model.blocks(model.embed(rows)) for rows in (ids, other))
    assert torch.equal(ours[:, :2], theirs[:, :2])
    assert (ours[:, 2:] - theirs[:, 2:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_decoder_equals_a_reference(norm):
    """The reference is torch's layer with a causal mask and explicit positions."""
    _, model = built("model.width=16", "task.modulus=7", f"model.norm={norm}")
    ids = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor(
        [
            [(math.cos if i % 2 else math.sin)(p / 10_000 ** ((i - i % 2) / 16)) for i in range(16)]
            for p in range(4)
        ]
    )
    x = model.tokens.weight[ids] + positions
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    for block in model.blocks:
        how = {"dropout": 0, "batch_first": True, "bias": False, "norm_first": norm == "pre"}
        layer = nn.TransformerEncoderLayer(16, 4, 64, **how)
        layer.self_attn.in_proj_weight = block.attend.weight
        layer.self_attn.out_proj.weight = block.mix.weight
        layer.linear1.weight, layer.linear2.weight = block.widen.weight, block.narrow.weight
        x = layer(x, src_mask=mask)
    x = nn.functional.layer_norm(x, (16,)) if norm == "pre" else x
    expected = x[:, -1] @ model.output.weight.T
    torch.testing.assert_close(model(model.embed(ids)), expected, rtol=1e-4, atol=1e-5)


def koker_logits(model, ids):
    """Computes the logits of teddykoker/grokking with torch's attention module."""
    width, length = model.tokens.weight.shape[1], ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = model.tokens.weight[ids] + model.positions[:length]
    for block in model.blocks:
        attention = nn.MultiheadAttention(width, block.heads, batch_first=True, dtype=x.dtype)
        attention.in_proj_weight, attention.in_proj_bias = block.attend.weight, block.attend.bias
        attention.out_proj = block.mix
        x = block.norm_attention(x)  # the residual connection also uses the normalised input
        x = x + attention(x, x, x, attn_mask=later, need_weights=False)[0]
        hidden = F.linear(block.norm_layers(x), block.widen.weight, block.widen.bias)
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + F.linear(hidden, block.narrow.weight, block.narrow.bias)
    return model.norm(x)[:, -1] @ model.output.weight.T


def test_the_koker_variant_equals_the_published_network():
    _, model = built("model.width=16", "task.modulus=7", *KOKER)
    model.double()
    draw_weights = torch.Generator().manual_seed(1)
    with torch.no_grad():  # initial norms (ones) and biases (zeros) would hide errors
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw_weights, dtype=torch.float64)
            weight.add_(0.1 * noise)
    ids = torch.randint(9, (3, 4), generator=draw_weights)
    ours, expected = model(model.embed(ids)), koker_logits(model, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    gradients = [
        torch.autograd.grad(logits.square().sum(), [*model.parameters()])
        for logits in (ours, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_the_experiment_uses_the_published_network():
    cfg = compose_config(["experiment=grokking_koker"])
    model = instantiate(cfg.model)
    block = 12 * 128**2 + 9 * 128 + 4 * 128  # matrices, biases, two norms
    expected = 2 * 99 * 128 + 4 * 128 + 2 * block + 2 * 128  # plus embeddings, output and last norm
    assert sum(weight.numel() for weight in model.parameters()) == expected
    assert model.output.bias is None
    assert (cfg.task.warmup_steps, cfg.task.batch_size, cfg.task.steps) == (10, 512, 300_000)
    assert (list(cfg.optimizer.betas), cfg.optimizer.weight_decay) == ([0.9, 0.98], 0)


def test_dropout_applies_to_residual_branches_in_training_only():
    _, model = built("task.modulus=7", "model.dropout=0.5")
    x = model.embed(torch.tensor([[1, 7, 2, 8]]))
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert [part.p for part in model.modules() if isinstance(part, nn.Dropout)] == [0.5, 0.5]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropping_everything_leaves_only_the_residual_stream(norm):
    block = built("task.modulus=7", f"model.norm={norm}")[1].blocks[0].train()
    block.dropout.p = 1.0
    x = torch.randn(2, 4, 128)
    expected = x if norm == "pre" else block.norm_layers(block.norm_attention(x))
    torch.testing.assert_close(block(x), expected)


def test_parameter_count_equals_the_paper():
    """Embeddings, output, and two blocks with 12 width^2 weights and two norms each."""
    _, model = built()
    expected = 2 * 99 * 128 + 2 * (12 * 128**2 + 4 * 128)
    assert sum(weight.numel() for weight in model.parameters()) == expected
