"""Measuring leaves inputs, model and random states alone, whatever the network does in place."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ed
from tests.helpers.core import small_network

FEW = {"pairs": 10, "resolution": 12, "degree": 5}


class InPlace(nn.Linear):
    def forward(self, x):
        x -= 3
        x /= 2
        return super().forward(x)


@pytest.mark.parametrize("layer", [None, "1"])
def test_networks_that_work_in_place_do_not_change_the_inputs(layer):
    model, x = nn.Sequential(InPlace(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(20, 6)
    before = x.clone()
    for settings in (FEW, FEW | {"resolution": "auto"}):
        field = ed.Field.at_layer(model, layer, x) if layer else ed.Field.of(model, x)
        ed.estimate(field, **settings)
        assert torch.equal(x, before)


def test_features_are_read_before_an_activation_in_place():
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    x = torch.randn(20, 6)
    fields = [
        ed.Field.at_layer(nn.Sequential(first, nn.ReLU(inplace=inplace), last), "0", x)
        for inplace in (True, False)
    ]
    assert torch.equal(fields[0].x, fields[1].x)
    assert torch.equal(*(ed.estimate(field, **FEW).values for field in fields))


@pytest.mark.parametrize("resolution", [12, "auto"])
def test_features_are_measured_in_eval_mode(resolution):
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 3))
    x = torch.randn(20, 6) * 2 + 1
    model(x)  # gives the batch norm statistics of its own
    settings = FEW | {"resolution": resolution}
    expected = ed.estimate(ed.Field.at_layer(model.eval(), "2", x), **settings)
    before = copy.deepcopy(model.train().state_dict())
    field = ed.Field.at_layer(model, "2", x)
    assert torch.equal(ed.estimate(field, **settings).values, expected.values)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert field.x.requires_grad  # the penalty uses the features of train mode


def test_a_copied_field_measures_the_same_network():
    field = ed.Field.of(nn.Sequential(small_network(), nn.Dropout(0.5)), torch.randn(20, 6))
    found = [ed.estimate(one, **FEW).values for one in (field, copy.deepcopy(field))]
    assert torch.equal(*found)


@pytest.mark.parametrize("own_sampler", [False, True])
def test_generators_of_a_loader_are_restored(own_sampler):
    data, generator = TensorDataset(torch.randn(20, 6)), torch.Generator().manual_seed(0)
    order = {"shuffle": True, "generator": generator}
    if own_sampler:
        order = {"sampler": torch.utils.data.RandomSampler(data, generator=generator)}
    before = generator.get_state()
    ed.estimate(small_network(), DataLoader(data, batch_size=5, **order), **FEW)
    assert torch.equal(generator.get_state(), before)
