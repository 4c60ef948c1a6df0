"""Gradient checkpointing: less is kept, and not a bit of the result changes."""

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
def test_training_is_bitwise_the_same(name, make):
    models = []
    for recompute in (False, True):
        model = make()
        torch.manual_seed(1)  # dropout
        run(training(instantiate(config(name)), model, recompute=recompute), 0, 3)
        models.append(model)
    assert_same_weights(*models)


def test_a_cut_model_recomputes_too():
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
    """Paths run in eval mode; their second run comes when the model trains again."""

    def field(self, model, batch):
        return Field.of(model, batch["x"], aside=partial(evaluating, model))


def test_the_second_run_has_the_modes_of_the_first():
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
    """What a forward pass keeps for the backward pass."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)  # alive, so that no storage comes twice
    assert outputs.requires_grad
    return sum(sizes.values())


def test_less_is_kept():
    x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    plain, small = vit(), vit()
    recompute_blocks(small)
    assert kept_bytes(small, x) < 0.2 * kept_bytes(plain, x)


def test_a_model_keeps_its_names_and_its_outputs():
    model = vit()
    names = list(model.state_dict())
    recompute_blocks(model)
    assert list(model.state_dict()) == names
    with torch.no_grad(), evaluating(model):
        outputs = model(first_batch()["x"])
    assert torch.equal(outputs, vit().eval()(first_batch()["x"]))


def test_a_copy_runs_on_weights_of_its_own():
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


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(ValueError, match=r"system\.activation_checkpointing=true: Linear has"):
        recompute_blocks(nn.Linear(2, 2))
    cfg = compose_config(["regularizer=jacobian", "system.activation_checkpointing=true"])
    with pytest.raises(ValueError, match=r"system\.activation_checkpointing=true: .*jacobian"):
        check(cfg, instantiate(cfg.task), instantiate(cfg.regularizer))
