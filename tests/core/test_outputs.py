"""Tests of outputs and labels: dense outputs, outputs by key, soft labels, invalid values."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ed
from ed.core.estimator import estimate_each
from ed.core.labels import check_labels, counted, targets
from ed.core.memory import _Probe
from ed.core.representation import anchor
from tests.helpers.core import small_network, uniform

FEW = {"pairs": 6, "resolution": 12, "degree": 5}


class Dense(nn.Module):
    """Maps images (N, 2, 3, 4) to a dict with class maps (N, 5, 3, 4)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 5, 1))

    def forward(self, x):
        return {"out": self.layers(x), "aux": None}


def slow_reference(outputs, x, ends, *, resolution, degree, **changes):
    """Computes ED with a numpy fit for each path and position; `outputs(points)` is (n, S, C)."""
    nodes = ed.ChebyshevNodes()(uniform(resolution))
    values = []
    for first, second in ends.T.tolist():
        shape = (-1, *[1] * (x.dim() - 1))
        alpha = nodes.view(shape)
        with torch.no_grad():
            along = outputs(alpha * x[first] + (1 - alpha) * x[second]).softmax(-1)
        degrees = []
        for position in along.unbind(1):
            fits = np.polynomial.chebyshev.chebfit(2 * nodes - 1, position.numpy(), degree)
            degrees.append((np.abs(fits) * np.arange(degree + 1)[:, None]).sum(0).mean())
        values.append(np.mean(degrees))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("class_dim", [1, -3])
def test_dense_outputs_have_a_softmax_and_a_fit_at_each_position(class_dim):
    model, x = Dense().double(), uniform(8, 2, 3, 4)
    found = ed.estimate(model, x, output="out", class_dim=class_dim, damping=0.0, **FEW)
    expected = slow_reference(
        lambda p: model(p)["out"].flatten(2).mT, x, found.ends, resolution=12, degree=5
    )
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=0)
    degrees = torch.arange(6, dtype=torch.float64)
    assert (found.spectrum @ degrees).item() == pytest.approx(found.mean, rel=1e-9)


@pytest.mark.parametrize(
    "settings",
    [{}, {"components": 2}, {"components": 2, "weighting": "normalised"}, {"scale": "classes"}],
    ids=str,
)
def test_dense_outputs_average_over_positions(settings):
    model, x = Dense().double(), uniform(8, 2, 3, 4)
    found = ed.estimate(model, x, output="out", class_dim=1, **FEW, **settings)
    each = [
        ed.estimate(lambda p, i=i, j=j: model(p)["out"][:, :, i, j], x, **FEW, **settings).values
        for i in range(3)
        for j in range(4)
    ]
    torch.testing.assert_close(found.values, torch.stack(each).mean(0))


def test_penalty_of_dense_outputs():
    """Anchors are label maps, given as class indices or as probabilities."""
    model, x = Dense().double(), uniform(8, 2, 3, 4)
    labels = torch.randint(5, (8, 3, 4))

    def penalty(model, labels, **how):
        return ed.penalty(model, x, labels, generator=torch.Generator().manual_seed(0), **how)

    dense = {"output": "out", "class_dim": 1}
    found = penalty(model, labels, **dense)
    each = [
        penalty(lambda p, i=i, j=j: model(p)["out"][:, :, i, j], labels[:, i, j])
        for i in range(3)
        for j in range(4)
    ]
    torch.testing.assert_close(found, torch.stack(each).mean())
    soft = nn.functional.one_hot(labels, 5).movedim(-1, 1).double()
    torch.testing.assert_close(penalty(model, soft, **dense), found)
    found.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_torchvision_segmentation_network_can_be_measured():
    segmentation = pytest.importorskip("torchvision").models.segmentation
    torch.manual_seed(0)
    kind = {"weights": None, "weights_backbone": None, "num_classes": 4}
    model = segmentation.lraspp_mobilenet_v3_large(**kind).double().eval()
    x, how = uniform(4, 3, 32, 32), {"resolution": 6, "degree": 3}
    found = ed.estimate(model, x, output="out", class_dim=1, pairs=2, damping=0.0, **how)
    expected = slow_reference(lambda p: model(p)["out"].flatten(2).mT, x, found.ends, **how)
    torch.testing.assert_close(found.values, expected, rtol=1e-7, atol=0)


def test_a_causal_language_model_can_be_measured():
    """The logits have shape (N, T, V) and come from word embeddings without padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=30, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids, how = torch.randint(30, (5, 6)), {"resolution": 10, "degree": 5}
    field = ed.Field.from_text(model, {"input_ids": ids}, class_dim=-1)
    found = ed.estimate(field, pairs=4, damping=0.0, **how)
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = slow_reference(
        lambda p: model(inputs_embeds=p).logits, embeddings, found.ends, **how
    )
    torch.testing.assert_close(found.values, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("model", "how", "key"),
    [
        (lambda x: x[:, :, None], {}, "class_dim"),
        (lambda x: x[:, :, None], {"class_dim": 0}, "class_dim=0"),
        (lambda x: x[:, :, None], {"class_dim": 3}, "class_dim=3"),
        (lambda x: {"out": x}, {"output": "outs"}, "output='outs'"),
        (lambda x: (x, x), {"output": 2}, "output=2"),
        (lambda x: {"loss": None, "out": x}, {}, "tensors: 'out'$"),
        (lambda x: (None, x), {}, "tensors: 1$"),
        (lambda x: SimpleNamespace(scores=x), {}, "tensors: 'scores'$"),
        (lambda x: {"out": {"inner": x}}, {"output": "out"}, "output='out'.*returns a tensor"),
        (lambda x: x, {"output": 0}, "output=0: .* leave output out"),
        (lambda x: x, {"output": "data"}, "output='data': .* leave output out"),
        (lambda x: None, {}, "NoneType"),
        (lambda x: x.numpy(), {}, "as_tensor"),
        (lambda x: {"out": x.numpy()}, {"output": "out"}, "as_tensor"),
    ],
)
def test_wrong_outputs_are_rejected(model, how, key):
    for function in (ed.estimate, ed.penalty):
        with pytest.raises(ValueError, match=key):
            function(model, torch.randn(6, 3), pairs=2, **how)


@pytest.mark.parametrize("how", [{"output": 1}, {"output": "state"}], ids=str)
def test_outputs_are_selected_by_index_and_key(how):
    x = torch.randn(9, 4)
    key = how["output"]
    returned = (lambda x: (None, x)) if key == 1 else (lambda x: {"loss": None, "state": x})
    found = ed.estimate(returned, x, **FEW, **how)
    assert torch.equal(found.values, ed.estimate(nn.Identity(), x, **FEW).values)


def test_soft_labels_are_anchors():
    """Soft labels are used in the order of Algorithm 1; one-hot labels match class indices."""
    x, hard = uniform(6, 4), torch.arange(6) % 4
    soft = uniform(6, 4, seed=1)
    soft = soft / soft.sum(-1, keepdim=True)
    field, representation = ed.Field.of(nn.Identity(), x), ed.Representation()
    paths = ed.Paths.draw(field, representation, 5, labels=soft)
    values = anchor(paths.field().softmax(-1).unflatten(0, (5, 2)), *paths.labels)
    expected = representation.degrees(representation.coefficients(values, paths.nodes))
    torch.testing.assert_close(paths.degrees(paths.field()), expected)
    one_hot = nn.functional.one_hot(hard, 4).double()
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    found, same = (
        ed.penalty(nn.Identity(), x, labels, generator=draw)
        for labels, draw in zip((hard, one_hot), draws, strict=True)
    )
    torch.testing.assert_close(found, same, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1, -100, 2, 0, 1]), "labels: -100"),
        (torch.tensor([0, 1, 7, 7, 7, 7]), "labels: 7"),
        (torch.tensor([0.0, 1.7, 1.0, 2.0, 0.0, 1.0]), "labels: .*float32"),
        (torch.tensor([True] * 6), "labels: .*bool"),
        (torch.full((6, 4), 0.25), "labels: .* 4 classes"),
        (torch.full((6, 3), 0.5), "labels: row 0 .*leave labels out"),
        (torch.randn(6, 3), "labels: row"),
    ],
)
def test_wrong_labels_are_rejected(labels, message):
    with pytest.raises(ValueError, match=message):
        ed.penalty(nn.Identity(), torch.randn(6, 3), labels, pairs=36)


@pytest.mark.parametrize("wrong", [-1, 255])
def test_positions_to_ignore_are_labelled_minus_100(wrong):
    x, labels = torch.randn(6, 5, 3), torch.randint(3, (6, 5))
    labels[0, 0] = wrong
    with pytest.raises(ValueError, match=f"labels: {wrong} .*-100"):
        ed.penalty(nn.Identity(), x, labels, pairs=36, class_dim=-1)


def test_a_wrong_label_is_rejected_even_if_no_path_ends_there():
    wrong = torch.eye(3)[torch.tensor([0, 1, 0, 2])]
    wrong[2] = 0.5
    for labels in (torch.tensor([0, 1, -100, 2]), wrong):
        with pytest.raises(ValueError, match="labels: "):
            check_labels(labels, 4)
    check_labels(torch.eye(4), 4)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([0, 1, -100, 2, 0, 1]),
        torch.tensor([0, 1, 7, 7, 0, 1]),
        torch.full((6, 3), 0.5),
    ],
    ids=["-100", "7", "rows that sum to 1.5"],
)
def test_compiled_code_rejects_wrong_labels_without_a_graph_break(wrong):
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    penalty = torch.compile(ed.penalty, backend="aot_eager", fullgraph=True)
    right = wrong.softmax(-1) if wrong.is_floating_point() else wrong.clamp(0, 2)
    penalty(model, x, right, pairs=36).backward()
    assert model.weight.grad.isfinite().all()
    with pytest.raises(RuntimeError, match="labels: "):
        penalty(model, x, wrong, pairs=36)


def test_wrong_labels_give_nan_on_devices_without_assertions(monkeypatch):
    monkeypatch.setattr("ed.core.labels.assert_on_device", lambda *_: None)
    monkeypatch.setattr("ed.core.labels.readable", lambda _: False)
    found = targets(torch.tensor([1, -100, 3]), 3)
    assert torch.equal(found[0], torch.tensor([0.0, 1.0, 0.0]))
    assert found[1:].isnan().all()
    assert not counted(*[torch.tensor([[1, -100, 3]])] * 2)[0, 1]
    assert counted(*[torch.tensor([[156]], dtype=torch.uint8)] * 2).all()
    found = targets(torch.tensor([[1, -100, 3]]), 3, class_dim=-1)[0]
    assert torch.equal(found[:2], torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert found[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ed_norm_rejects_components_that_cannot_vary(dtype):
    model, x = small_network().to(dtype), torch.randn(20, 6, dtype=dtype)
    how = {"weighting": "normalised", **FEW}
    with pytest.raises(ValueError, match="components=5"):
        ed.estimate(model, x, components=5, **how)
    with pytest.raises(ValueError, match="components=6"):
        ed.estimate(model, x, components=6, softmax=False, **how)
    with pytest.raises(ValueError, match="components=3"):
        ed.penalty(lambda x: x[:, :3], x, components=3, weighting="normalised")
    # constant components add nothing, but raw ED is divided by m
    four, five = (ed.estimate(model, x, components=m, **FEW).mean for m in (4, 5))
    assert five == pytest.approx(four * 4 / 5, rel=1e-4)


def test_rounding_error_does_not_count_as_a_component():
    """Four outputs span only a plane, so the third component is rounding error."""
    torch.manual_seed(0)
    mix = torch.randn(2, 4).double()
    x = uniform(30, 2)
    how = {"components": 3, "weighting": "normalised", "softmax": False, "pairs": 50}
    both = [
        ed.estimate(lambda p, d=d: (5 * p).sin() @ mix.to(d), x.to(d), **how).mean
        for d in (torch.float32, torch.float64)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-3)


def test_threads_that_share_a_model_wait_for_each_other():
    model, x = small_network().train(), torch.randn(30, 6)
    expected = ed.estimate(model, x, **FEW).values
    found, modes = [], set()

    def measure(part):
        field = ed.Field.of(lambda p: model(p), x, module=part)
        for _ in range(5):
            found.append(ed.estimate(field, **FEW).values)

    watch = model[1].register_forward_hook(lambda module, *_: modes.add(module.training))
    # half of the threads pass only a shared submodule as `module`
    threads = [threading.Thread(target=measure, args=(part,)) for part in (model, model[1]) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch.remove()
    assert len(found) == 20
    assert all(torch.equal(values, expected) for values in found)
    assert modes == {False}
    assert all(module.training for module in model.modules())


def test_an_estimate_can_be_printed_with_another_default_device():
    result = ed.estimate(small_network(), torch.randn(20, 6), **FEW)
    text = str(result)
    with torch.device("meta"):
        assert str(result) == text


@pytest.mark.parametrize(
    "settings", [{}, {"basis": "legendre"}, {"sampler": ed.RandomizedCosine()}]
)
def test_a_path_of_many_classes_is_fitted_in_pieces(settings):
    """The outputs for one path (300 nodes, 1000 classes) exceed the budget."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1000).double(), uniform(6, 4)
    how = {"pairs": 3, "resolution": 300, "degree": 4, **settings}
    whole = ed.estimate(model, x, **how)
    budget = 2**20
    assert budget < 300 * 1000 * 8
    with _Probe() as largest:
        pieces = ed.estimate(model, x, memory_gib=budget / 2**30, **how)
    assert largest.size <= budget
    torch.testing.assert_close(pieces.values, whole.values, rtol=1e-9, atol=0)
    assert [len(curve.values) for curve in pieces.curves] == [300] * 3


def test_a_fit_beyond_the_budget_is_rejected_before_the_first_path():
    seen = []

    def model(x):
        seen.append(len(x))
        return x

    x = uniform(6, 1000)
    for how in ({"components": 2, "degree": 4}, {"degree": 199}):
        with pytest.raises(ValueError, match="memory_gib="):
            ed.estimate(model, x, pairs=3, resolution=200, memory_gib=1e-3, **how)
    assert max(seen) == 2  # only the memory probe ran


def test_readings_in_pieces_match_whole_paths():
    readings = [(ed.Representation(40, 5, ed.ChebyshevNodes(), **how), True) for how in VARIANTS]
    x, model = uniform(8, 6), small_network().double()
    whole, pieces = (
        estimate_each(model, x, readings=readings, pairs=5, memory_gib=gib) for gib in (1, 1e-5)
    )
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one.values, other.values, rtol=1e-9, atol=0)


VARIANTS = ({}, {"basis": "legendre"}, {"components": 2}, {"weighting": "quadratic"})
