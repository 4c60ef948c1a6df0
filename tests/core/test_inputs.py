"""Tests of inputs, spaces inside a network, and merged contexts along a path."""

import json
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ed
from tests.helpers.core import small_network, uniform

FEW = {"pairs": 6, "resolution": 12, "degree": 5}


def test_several_inputs_are_interpolated_together():
    """A tuple or dict of inputs gives the same result as one concatenated input."""
    a, b = uniform(9, 4), uniform(9, 2, 3, seed=1)

    def model(a, b):
        return torch.cat([a, b.flatten(1).square()], dim=1)

    both = torch.cat([a, b.flatten(1)], dim=1)
    expected = ed.estimate(lambda x: torch.cat([x[:, :4], x[:, 4:].square()], 1), both, **FEW)
    for inputs in ((a, b), {"a": a, "b": b}, (a.numpy(), b.numpy())):
        assert torch.equal(ed.estimate(model, inputs, **FEW).values, expected.values)
    assert ed.penalty(model, (a, b), torch.arange(9)).isfinite()


def test_arrays_and_loaders_match_tensors():
    model, x = small_network(), torch.randn(40, 6)
    expected = ed.estimate(model, x[:12], **FEW).values
    loader = DataLoader(TensorDataset(x, torch.zeros(40)), batch_size=5)
    state = torch.get_rng_state()
    for inputs in (x[:12].double().numpy(), loader, iter([x[:7], x[7:]])):
        torch.testing.assert_close(ed.estimate(model, inputs, **FEW).values, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.randn(9, 6), torch.randn(8, 6)), "inputs: .*examples"),
        ((torch.randn(9, 6), torch.ones(9, 6).bool()), "inputs.*context"),
        (iter([{"pixel_values": torch.randn(9, 6)}]), "inputs: .*dict"),
        (iter([]), "inputs: .*loader"),
    ],
)
def test_wrong_inputs_are_rejected(inputs, message):
    with pytest.raises(ValueError, match=message):
        ed.estimate(small_network(), inputs, **FEW)


def test_numbers_and_tables_of_other_libraries_are_accepted():
    pandas = pytest.importorskip("pandas")
    model, x = small_network(), torch.randn(20, 6)
    numbers = {"seed": np.int64(1), "degree": np.int64(5)}
    found = ed.estimate(model, pandas.DataFrame(x.numpy()), **FEW | numbers)
    assert torch.equal(found.values, ed.estimate(model, x, **FEW, seed=1).values)
    assert json.loads(json.dumps(found.to_dict()))["degree"] == 5


def test_compare_accepts_the_inputs_of_estimate():
    class Net(nn.Linear):
        def forward(self, image, state=None):
            return super().forward(image if state is None else image * state)

    first, second, x = Net(6, 3), Net(6, 3).double(), torch.randn(20, 6)
    batch = UserDict(image=x.numpy(), state=(x + 1).numpy())  # like transformers' BatchFeature
    for inputs in (x.numpy(), batch):
        found = ed.compare(first, second, inputs, **FEW)
        for model, side in ((first, found.first), (second, found.second)):
            assert torch.equal(side.values, ed.estimate(model, inputs, **FEW).values)


def test_contexts_are_passed_as_keyword_arguments():
    x, mask = uniform(9, 4), torch.ones(9, 4).bool()
    field = ed.Field.of(lambda x, keep: x * keep, x, context={"keep": mask})
    assert torch.equal(ed.estimate(field, **FEW).values, ed.estimate(lambda x: x, x, **FEW).values)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("src_key_padding_mask", torch.zeros(9, 4).bool()),
        ("position_ids", torch.arange(36).view(9, 4)),
        ("time", torch.rand(9, 1)),
    ],
)
def test_contexts_without_a_meaningful_maximum_are_rejected(name, context):
    field = ed.Field(lambda p, c: p, uniform(9, 4), {name: context})
    for measure in (lambda: ed.estimate(field, **FEW), lambda: ed.penalty(field)):
        with pytest.raises(ValueError, match=f"context '{name}'"):
            measure()


def test_compiled_code_rejects_contexts_without_a_meaningful_maximum():
    x, keep = uniform(9, 4), torch.ones(9, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def penalty(context):
        return ed.penalty(ed.Field(lambda p, c: p * c["time"], x, {"time": context}))

    assert penalty(keep) > 0
    penalty(torch.zeros(9, 4).fill_diagonal_(-torch.inf))
    with pytest.raises(RuntimeError, match="context 'time'"):
        penalty(keep * torch.arange(9).view(9, 1))


def test_contexts_shared_by_all_examples_are_accepted():
    field = ed.Field(lambda p, c: p, uniform(9, 4), {"position_ids": torch.arange(4).repeat(9, 1)})
    assert ed.estimate(field, **FEW).mean > 0


def test_layer_field_equals_the_rest_of_the_network():
    model, x = small_network().double().train(), uniform(20, 6)
    found = ed.estimate(ed.Field.at_layer(model, "1", x), **FEW)
    model.eval()
    features = model[1](model[0](x)).detach()
    expected = ed.estimate(lambda h: model[3](model[2](h)), features, **FEW)
    torch.testing.assert_close(found.values, expected.values)
    ed.penalty(ed.Field.at_layer(model, "1", x)).backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_layers_that_cannot_split_a_network_are_rejected():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.again = nn.Linear(6, 6), nn.Tanh()
            self.pixels, self.several = nn.Flatten(0), Several()

        def forward(self, x):
            x = self.several(self.pixels(x).view(x.shape))["x"]
            return self.again(self.again(x + self.layer(x)))

    class Several(nn.Module):
        def forward(self, x):
            return {"x": x}

    messages = {
        "layer": "bypasses", "again": "ran 2 times", "layr": "'layer'", "several": "dict",
        "pixels": r"\(54,\) for 9 inputs",
    }  # fmt: skip
    for layer, message in messages.items():
        with pytest.raises(ValueError, match=f"at_layer.*{message}"):
            ed.Field.at_layer(Skip(), layer, torch.randn(9, 6))
    with pytest.raises(ValueError, match="at_layer: got a function"):
        ed.Field.at_layer(lambda x: x, "layer", torch.randn(9, 6))


def test_features_of_a_loader_equal_those_of_its_examples():
    model, x = small_network(), torch.randn(20, 6)
    field = ed.Field.at_layer(model, "0", DataLoader(x, batch_size=5), examples=10)
    assert torch.equal(field.x, model[0](x[:10]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_may_follow_the_layer_but_not_contain_it(reentrant):
    """A block's second forward pass, during backward, would not see the points."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    plain, x = nn.Sequential(*layers).double(), uniform(9, 6)
    model = nn.Sequential(*layers[:2], Checkpointed(*layers[2:4]), layers[4])

    def gradients(network, layer):
        network.zero_grad()
        field = ed.Field.at_layer(network, layer, x)
        ed.penalty(field, generator=torch.Generator().manual_seed(0)).backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    for layer, same in (("1", "1"), ("2", "3")):
        torch.testing.assert_close(gradients(model, layer), gradients(plain, same))
    field = ed.Field.at_layer(model, "2.0", x)
    with pytest.raises(ValueError, match=r"at_layer: '2\.0' runs under activation checkpointing"):
        ed.penalty(field)
    found, expected = ed.estimate(field, **FEW), ed.Field.at_layer(plain, "2", x)
    torch.testing.assert_close(found.values, ed.estimate(expected, **FEW).values)


@pytest.mark.parametrize("wrapped", [True, False])
def test_layers_of_compiled_networks_can_be_named(wrapped):
    model, x, generator = small_network().double().eval(), uniform(20, 6), torch.Generator()

    def measure(network, layer: str):
        field = ed.Field.at_layer(network, layer, x)
        penalty = ed.penalty(field, generator=generator.manual_seed(0))
        return penalty.item(), ed.estimate(field, **FEW).mean

    expected = measure(model, "1")
    if not wrapped:
        model.compile(backend="eager")
    network = torch.compile(model, backend="eager") if wrapped else model
    outputs = network(x)  # compiles the network before it has hooks
    found = measure(network, "_orig_mod.1" if wrapped else "1")
    assert found == pytest.approx(expected)
    torch.testing.assert_close(network(x), outputs)


def test_a_compiled_step_starts_at_a_layer():
    field = ed.Field.at_layer(small_network(), "1", torch.rand(20, 6))

    def penalty(field):
        torch.manual_seed(0)
        return ed.penalty(field)

    compiled = torch.compile(penalty, backend="eager")
    torch.testing.assert_close(compiled(field), penalty(field))


def test_text_fields_use_embeddings_and_masks():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=50, num_labels=3,
    )  # fmt: skip
    bert = transformers.BertForSequenceClassification(config).train()
    ids, mask = torch.randint(50, (12, 7)), (torch.arange(7) < torch.randint(3, 8, (12, 1))).long()
    field = ed.Field.from_text(bert, {"input_ids": ids, "attention_mask": mask})
    own = ed.Field(
        lambda x, context: bert(inputs_embeds=x, attention_mask=context["mask"]),
        bert.get_input_embeddings()(ids), {"mask": mask}, module=bert,
    )  # fmt: skip
    found = ed.estimate(field, **FEW)
    assert torch.equal(found.values, ed.estimate(own, **FEW).values)
    wrapped = nn.DataParallel(bert)  # as DDP, it has no get_input_embeddings
    field = ed.Field.from_text(wrapped, {"input_ids": ids, "attention_mask": mask})
    assert field.module is wrapped
    assert torch.equal(ed.estimate(field, **FEW).values, found.values)
    inner = ed.Field.at_layer(bert, "bert.embeddings", field)
    assert ed.estimate(inner, **FEW).mean > 0
    with pytest.raises(ValueError, match="get_input_embeddings"):
        ed.Field.from_text(nn.Linear(3, 2), {"input_ids": ids})
    with pytest.raises(ValueError, match="position_ids"):
        ed.Field.from_text(bert, {"input_ids": ids, "position_ids": ids})


@pytest.mark.parametrize("masked", [True, False])
def test_decoders_that_read_the_last_token_need_padding_on_the_left(masked):
    transformers = pytest.importorskip("transformers")
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "initializer_range": 0.5}
    config = transformers.GPT2Config(vocab_size=50, pad_token_id=0, **size)
    torch.manual_seed(0)
    model = transformers.GPT2ForSequenceClassification(config)
    keep = (torch.arange(6) < torch.tensor([[6], [2], [3], [5]])).long()
    for side, kept in (("right", keep), ("left", keep.flip(1))):
        batch = {"input_ids": torch.randint(2, 50, (4, 6)) * kept}
        batch |= {"attention_mask": kept} if masked else {}
        if side == "left":
            ed.Field.from_text(model, batch)
            continue
        with pytest.raises(ValueError, match=r"from_text: in padded.*GPT2For.*other side"):
            ed.Field.from_text(model, batch)
    assert model.training


def test_outputs_at_padding_may_depend_on_token_ids():
    """RoBERTa numbers positions by token ids, so padding has other positions without them."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(vocab_size=50, intermediate_size=16, **size)
    model = transformers.RobertaForTokenClassification(config)
    keep = (torch.arange(6) < torch.tensor([[6], [2], [3], [5]])).long()
    ids = torch.where(keep == 1, torch.randint(2, 50, (4, 6)), config.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": keep}
    assert ed.Field.from_text(model, batch, class_dim=-1)().shape == (4, 6, 2)


def test_integer_arrays_are_rejected():
    with pytest.raises(ValueError, match=r"^inputs"):
        ed.estimate(small_network(), np.arange(12).reshape(2, 6), pairs=1)


@pytest.mark.parametrize("batch", [torch.ones(2, 3), {"ids": 1}, {"input_ids": [[1, 2]]}])
def test_texts_need_token_ids(batch):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**size))
    with pytest.raises(ValueError, match="input_ids"):
        ed.Field.from_text(model, batch)


def test_layers_of_a_transformer_with_padding_can_be_named():
    """In eval mode, torch would pack the sentences into nested tensors."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x, keep):
            return (self.encoder(x, src_key_padding_mask=~keep) * keep.unsqueeze(-1)).sum(1)

    torch.manual_seed(0)
    model, x = Encoder(), torch.rand(20, 5, 4)
    keep = torch.arange(5) < torch.randint(2, 6, (20, 1))
    field = ed.Field.at_layer(model, "encoder.layers.0", x, context={"keep": keep})
    assert ed.estimate(field, **FEW).mean > 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_may_have_two_names():
    model, x = small_network(), torch.rand(20, 6)
    model.alias = model[1]
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    fields = [ed.Field.at_layer(model.eval(), name, x) for name in ("1", "alias")]
    assert torch.equal(fields[0].x, fields[1].x)


def test_layers_are_named_by_text():
    with pytest.raises(ValueError, match="at_layer: no layer 1; use one such as '1'"):
        ed.Field.at_layer(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 1, torch.randn(8, 3))
