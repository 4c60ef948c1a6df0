# ruff: noqa: NPY002, tests numpy's global state
"""Measuring leaves inputs, model and random states alone, whatever the network does in place."""

import copy
import random
import threading
import time

import numpy
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

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


def test_measuring_features_does_not_change_the_random_state():
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3)).train()
    before = torch.get_rng_state()
    field = ed.Field.at_layer(model, "1", torch.randn(20, 6, generator=torch.Generator()))
    ed.estimate(field, **FEW)
    assert torch.equal(torch.get_rng_state(), before)
    assert (field.x == 0).any()  # the penalty uses features after dropout


@pytest.mark.parametrize("resolution", [12, "auto"])
def test_weights_get_gradients_after_measuring_under_autocast(resolution):
    """In torch 2.6, autocast's cache would keep weights cast without gradients."""
    model, x = small_network().float(), torch.randn(20, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(match="bfloat16"):
            ed.estimate(model, x, **FEW | {"resolution": resolution})
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(weight.grad.any() for weight in model.parameters())


class Scaled(nn.Module):
    """Divides its inputs by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x):
        return self.linear(x).sin() * (x / self.scale).sum(1, keepdim=True)


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_penalty_does_not_broadcast_the_buffers_of_ddp():
    """In torch 2.6, a broadcast changes buffers that the backward pass of the loss needs."""
    x = torch.randn(20, 6, requires_grad=True)  # so that autograd keeps the buffer
    model, broadcast = DistributedDataParallel(Scaled()), []
    model.module.register_forward_hook(
        lambda *_: broadcast.append(model.will_sync_module_buffers())
    )
    loss = model(x).square().mean()
    (loss + ed.penalty(model, x)).backward()
    assert broadcast == [True, False]


@pytest.mark.parametrize("shared", [True, False])
def test_fields_at_a_layer_can_be_measured_in_threads(shared):
    x, found = torch.randn(20, 6), []
    models = [small_network().train()] * 4 if shared else [small_network() for _ in range(4)]
    expected = ed.estimate(ed.Field.at_layer(models[0], "0", x), **FEW).values
    for model in models:
        model[0].register_forward_hook(lambda *_: time.sleep(0.002))

    def measure(model):
        found.append((model, ed.estimate(ed.Field.at_layer(model, "0", x), **FEW).values))

    threads = [threading.Thread(target=measure, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(values, expected) for model, values in found if model is models[0])
    assert all(module.training for model in models for module in model.modules())
    # torch's switches are global
    assert torch.backends.mha.get_fastpath_enabled()
    compiled = []
    torch.compile(torch.sin, backend=lambda graph, _: compiled.append(graph) or graph)(x)
    assert compiled


def test_a_copied_field_measures_the_same_network():
    field = ed.Field.of(nn.Sequential(small_network(), nn.Dropout(0.5)), torch.randn(20, 6))
    found = [ed.estimate(one, **FEW).values for one in (field, copy.deepcopy(field))]
    assert torch.equal(*found)


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + random.random() + numpy.random.rand()


@pytest.mark.parametrize("owner", ["loader", "sampler", "batch sampler"])
def test_random_states_are_restored_after_reading_a_loader(owner):
    data, generator = Augmented(torch.randn(20, 6)), torch.Generator().manual_seed(0)
    sampler = RandomSampler(data, generator=generator)
    order = {
        "loader": {"shuffle": True, "generator": generator, "batch_size": 5},
        "sampler": {"sampler": sampler, "batch_size": 5},
        "batch sampler": {"batch_sampler": BatchSampler(sampler, 5, drop_last=False)},
    }[owner]

    def states() -> list:
        return [generator.get_state().tolist(), random.getstate(), numpy.random.rand()]

    numpy.random.seed(0)
    before = states()
    numpy.random.seed(0)
    ed.estimate(small_network(), DataLoader(data, **order), **FEW)
    assert states() == before


def test_a_layers_points_are_not_changed_by_the_next_layer():
    model = nn.Sequential(nn.Linear(6, 5), InPlace(5, 3)).eval()
    field = ed.Field.at_layer(model, "0", torch.randn(20, 6))
    before = field.x.clone()
    field()
    assert torch.equal(field.x, before)


def test_features_are_recomputed_after_the_weights_change():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x = torch.randn(20, 6)
    field = ed.Field.at_layer(model, "1", x)
    with torch.no_grad():
        model[0].weight.mul_(3)
    expected = ed.estimate(ed.Field.at_layer(model, "1", x), **FEW)
    assert torch.equal(ed.estimate(field, **FEW).values, expected.values)


@pytest.mark.parametrize("layer", [None, "bert.encoder.layer.0"])
def test_embeddings_are_recomputed_after_the_weights_change(layer):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**size)).eval()
    batch = {"input_ids": torch.randint(50, (20, 5))}

    def sentences() -> ed.Field:
        words = ed.Field.from_text(bert, batch)
        return words if layer is None else ed.Field.at_layer(bert, layer, words)

    field = sentences()
    with torch.no_grad():
        bert.get_input_embeddings().weight.mul_(20)
    expected = ed.estimate(sentences(), **FEW)
    assert torch.equal(ed.estimate(field, **FEW).values, expected.values)


def test_only_layers_after_the_named_one_see_the_points_of_paths():
    """Batch norms before it would otherwise record copies of one example."""
    norms = nn.BatchNorm1d(5), nn.BatchNorm1d(4)
    model = nn.Sequential(
        nn.Linear(6, 5), norms[0], nn.Tanh(), nn.Linear(5, 4), norms[1], nn.Linear(4, 3)
    ).train()
    field = ed.Field.at_layer(model, "2", torch.randn(20, 6))
    before = [norm.running_mean.clone() for norm in norms]
    field()
    assert torch.equal(norms[0].running_mean, before[0])
    assert not torch.equal(norms[1].running_mean, before[1])
    assert all(norm.track_running_stats for norm in norms)
