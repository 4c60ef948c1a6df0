"""Models built from configs: sizes, feature spaces, shapes that match the task, memory format."""

import copy
import math

import pytest
import torch
from hydra.utils import instantiate

from ed.engine.compose import compose_config
from ed.engine.main import wants_channels_last
from ed.models.spaces import split


@pytest.mark.parametrize(
    ("name", "parameters"), [("vit_tiny", 5.36e6), ("resnet18", 11.17e6), ("vit_micro", 0.214e6)]
)
def test_models_have_their_published_sizes(name, parameters):
    model = instantiate(compose_config([f"model={name}"]).model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("space", ["embedding", "block1"])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_split_vit_equals_the_full_model(space, pool):
    model = instantiate(compose_config([f"model.pool={pool}"]).model).eval()
    before, after = split(model, space)
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(after(before(x)), model(x))


def test_field_of_a_feature_space_has_a_module():
    """Measures need the module to turn off dropout."""
    cfg = compose_config(["task.space=block1", "model.dropout=0.5"])
    task, model = instantiate(cfg.task), instantiate(cfg.model)
    field = task.field(model, {"x": torch.randn(2, 3, 32, 32)})
    assert field.module is model
    assert not torch.equal(field(), field())
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(task.field(model, {"x": x})(), model(x))


def test_models_without_feature_spaces_cannot_be_split():
    model = instantiate(compose_config(["model=resnet18"]).model)
    with pytest.raises(ValueError, match=r"task\.space=block1"):
        split(model, "block1")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model=resnet18", "model.classes=20"], r"task\.classes=10.* 20 "),
        (["model=impala"], "Impala.*3 x 32 x 32"),
        (["model=pnn"], "PolynomialNetwork.*3 x 32 x 32"),
        (["task=pnn", "model=pnn", "model.outputs=1"], "task=pnn.* 1 "),
        (["task=pnn", "model=pnn", "model.inputs=4"], "model=pnn"),
        (["task=grokking", "model=grokking", "model.length=9"], r"model\.length=4"),
    ],
)
def test_model_shapes_must_match_the_task(overrides, named):
    """With mismatched shapes, a loss might silently broadcast or ignore outputs."""
    cfg = compose_config(overrides)
    with pytest.raises(ValueError, match=named):
        instantiate(cfg.task).check_model(instantiate(cfg.model))


def test_check_model_does_not_change_the_model():
    """The dummy input of zeros must not affect batch-norm statistics."""
    cfg = compose_config(["model=resnet18"])
    model, random = instantiate(cfg.model), torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    instantiate(cfg.task).check_model(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_resnet18_has_no_early_downsampling_and_default_initialisation():
    torch.manual_seed(0)
    model = instantiate(compose_config(["model=resnet18"]).model)
    sizes = []
    for stage in (model.maxpool, model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda _, __, output: sizes.append(output.shape[-1]))
    model.eval()(torch.zeros(1, 3, 32, 32))
    assert sizes == [32, 32, 16, 8, 4]
    for part in model.modules():
        if isinstance(part, torch.nn.Conv2d):  # uniform, bounded by 1 / sqrt(fan-in)
            bound = 1 / math.sqrt(part.weight[0].numel())
            assert 0.98 * bound < part.weight.abs().max() <= bound


def test_only_convolutional_networks_on_a_gpu_use_channels_last():
    for name, expected in (("resnet18", True), ("impala", True), ("vit_tiny", False)):
        model = instantiate(compose_config([f"model={name}"]).model)
        assert wants_channels_last(model, torch.device("cuda"), "auto") == expected, name
        assert not wants_channels_last(model, torch.device("cpu"), "auto")
        assert wants_channels_last(model, torch.device("cpu"), True)
