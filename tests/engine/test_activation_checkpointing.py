"""Activation checkpointing saves memory without changing results, bit for bit."""

import copy
from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from ed.core.field import Field
from ed.core.model_state import evaluating
from ed.engine.activation_checkpointing import recompute_blocks
from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.models.vit import ViT
from tests.helpers.toy import (
    CLASSES,
    Toy,
    assert_same_weights,
    config,
    convolution,
    first_batch,
    run,
    training,
)


def vit(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    size = {"image_size": [8, 8], "patch": 4, "width": 16, "depth": 3, "heads": 2}
    return ViT(classes=CLASSES, **size, pool="token", dropout=dropout, activation="gelu").double()


@pytest.mark.parametrize("make", [vit, convolution], ids=["dropout", "batch norm"])
@pytest.mark.parametrize("name", ["none", "mixup", "sam", "asam", "ed"])
def test_training_is_bitwise_identical(name, make):
    models = []
    for recompute in (False, True):
        model = make()
        torch.manual_seed(1)  # seeds dropout
        run(training(instantiate(config(name)), model, recompute=recompute), 0, 3)
        models.append(model)
    assert_same_weights(*models)


def test_split_model_supports_recomputation():
    batch, outputs, gradients = first_batch(), [], []
    for recompute in (False, True):
        model = vit(dropout=0.0)
        if recompute:
            recompute_blocks(model)
        features = model.to_space(batch["x"], "block1")
        outputs.append(model.from_space(features, "block1"))
        outputs[-1].square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(*outputs)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class PathsWithoutDropout(Toy):
    """A task whose paths run in eval mode, although the backward pass runs in training mode."""

    def field(self, model, batch):
        return Field.of(model, batch["x"], aside=partial(evaluating, model))


def test_recomputation_uses_the_original_modes():
    gradients = []
    for recompute in (False, True):
        model = vit()
        torch.manual_seed(1)
        step = training(instantiate(config("ed")), model, recompute=recompute)
        step.task = PathsWithoutDropout()
        run(step, 0, 1)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Returns the number of bytes a forward pass stores for the backward pass."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)  # keep a reference so that its memory is not reused
    assert outputs.requires_grad
    return sum(sizes.values())


def test_less_memory_is_used():
    x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    plain, small = vit(), vit()
    recompute_blocks(small)
    assert kept_bytes(small, x) < 0.2 * kept_bytes(plain, x)


def test_parameter_names_and_outputs_do_not_change():
    model = vit()
    names = list(model.state_dict())
    recompute_blocks(model)
    assert list(model.state_dict()) == names
    with torch.no_grad(), evaluating(model):
        outputs = model(first_batch()["x"])
    assert torch.equal(outputs, vit().eval()(first_batch()["x"]))


def test_copy_uses_its_own_weights():
    model = vit(dropout=0.0)
    recompute_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.blocks.parameters():
            weight.mul_(2)
    x = first_batch()["x"]
    assert not torch.equal(twin(x), model(x))
    twin(x).sum().backward()
    assert all(weight.grad is not None for weight in twin.blocks.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_unsupported_models_and_regularizers_raise():
    with pytest.raises(ValueError, match=r"system\.activation_checkpointing=true: Linear"):
        recompute_blocks(nn.Linear(2, 2))
    cfg = compose_config(["regularizer=jacobian", "system.activation_checkpointing=true"])
    with pytest.raises(ValueError, match=r"system\.activation_checkpointing=true: .*jacobian"):
        check(cfg, instantiate(cfg.task), instantiate(cfg.regularizer))
