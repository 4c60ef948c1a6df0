"""Tests of the penalty: gradient, precision, compilation, many kinds of models, errors."""

import pytest
import torch
from torch import nn

import ed
from ed.core.field import Field
from ed.core.penalty import Paths
from tests.helpers.core import small_network, uniform


def test_there_are_half_as_many_paths_as_examples():
    """As in the paper, each path has four nodes; anchored nodes need no forward pass."""
    seen = []

    def forward(x):
        seen.append(len(x))
        return x

    ed.penalty(forward, torch.randn(12, 3))
    ed.penalty(forward, torch.randn(12, 3), torch.arange(12) % 3)
    assert seen == [6 * 4, 6 * 2]


def test_penalty_gradient_equals_finite_differences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, labels = uniform(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])

    def value(weight, components):
        def forward(points):
            return model[2](torch.tanh(points @ weight.mT))

        generator = torch.Generator().manual_seed(3)
        return ed.penalty(forward, x, labels, generator=generator, components=components)

    weight = model[0].weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: value(w, None), weight)
    assert torch.autograd.gradcheck(lambda w: value(w, 2), weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"components": 2}, {"components": 2, "detach_pca": True}, {"weighting": "normalised"},
     {"weighting": "quadratic"}],
    ids=str,
)  # fmt: skip
def test_autocast_does_not_affect_the_penalty(settings, dtype, device):
    """Value and gradient do not change, even for probabilities as small as 1e-45."""
    x = (40 * torch.randn(32, 5, generator=torch.Generator().manual_seed(0))).to(device)
    labels = torch.arange(32, device=device) % 5

    def value_and_gradient():
        inputs = x.clone().requires_grad_()
        generator = torch.Generator(device).manual_seed(1)
        with torch.autocast(device, dtype, enabled=inside):
            value = ed.penalty(nn.Identity(), inputs, labels, generator=generator, **settings)
        return value, *torch.autograd.grad(value, inputs)

    inside = False
    expected = value_and_gradient()
    inside = True
    found = value_and_gradient()
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bf16_logits_have_float32_probabilities():
    draw = torch.Generator().manual_seed(0)
    field = Field.of(nn.Identity(), torch.zeros(8, 5))
    paths = Paths.draw(field, ed.Representation(), 6, generator=draw)
    logits = torch.randn(6 * 4, 5, generator=draw).bfloat16()
    assert torch.equal(paths.degrees(logits), paths.degrees(logits.float()))


def test_outputs_at_other_points_are_rejected():
    """With shared nodes, outputs at extra points could be mistaken for additional paths."""
    field = Field.of(nn.Identity(), torch.randn(8, 5))
    paths = Paths.draw(field, ed.Representation(sampler=ed.ChebyshevNodes()), 6)
    with pytest.raises(ValueError, match=r"^outputs: .*32.*24"):
        paths.degrees(field.join(paths.field)())


def test_penalty_compiles_without_a_graph_break():
    """Random numbers come from torch.rand, because torch.compile cannot trace generators."""
    nodes = ed.RandomizedCosine()(torch.rand(8, 4), anchored=True)
    values = torch.randn(8, 4, 10, requires_grad=True)

    def degree(values, nodes, representation):
        return representation.degrees(representation.coefficients(values, nodes)).mean()

    for components in (None, 3):
        representation = ed.Representation(components=components)
        explanation = torch._dynamo.explain(degree)(values, nodes, representation)
        assert explanation.graph_break_count == 0, explanation.break_reasons
    explanation = torch._dynamo.explain(lambda u: ed.RandomizedCosine()(u, True))(torch.rand(8, 4))
    assert explanation.graph_break_count == 0, explanation.break_reasons


def test_a_compiled_step_accepts_other_batch_sizes():
    """The last batch of an epoch may be smaller; torch then traces symbolic sizes."""
    model = nn.Linear(6, 3)

    def loss(x, labels):
        return model(x).square().mean() + ed.penalty(model, x, labels, components=2)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for size in (8, 5):
        x, labels = torch.randn(size, 6), torch.arange(size) % 3
        torch.manual_seed(0)
        expected = torch.autograd.grad(loss(x, labels), model.weight)
        torch.manual_seed(0)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, labels), model.weight), expected)


@pytest.mark.parametrize(
    ("model", "labels", "settings", "message"),
    [
        (nn.Linear(6, 3), torch.zeros(4).long(), {}, r"labels: .*\(4,\)"),
        (nn.Linear(6, 3), torch.zeros(8, 3).long(), {}, r"labels: .*\(8, 3\)"),
        (nn.Linear(6, 3), torch.zeros(8), {}, "labels: .*float32"),
        (nn.Linear(6, 3), torch.zeros(8).long(), {"resolution": 2, "degree": 1}, "^resolution=2"),
        (nn.Linear(6, 3), [0] * 8, {}, "labels: .*list"),
        (nn.Linear(6, 3), torch.zeros(8, device="meta").long(), {}, "labels: on meta, .*cpu"),
        (nn.Linear(6, 3), 4, {}, "labels: .*int"),
        (nn.Linear(6, 3), None, {"pairs": 0}, "^pairs=0"),
        (nn.Linear(6, 3), None, {"softmax": "none"}, "^softmax=none"),
        (nn.Linear(6, 3), None, {"pairs": 8 / 2}, r"^pairs=4\.0"),
        (nn.Linear(6, 1), None, {}, "outputs: .*softmax=False"),
        (nn.Linear(6, 1), torch.arange(8) % 2, {"softmax": False}, "^labels: "),
        (lambda x: x.mean(0, keepdim=True), None, {}, "^outputs: "),
        (lambda x: x.sum(1), None, {}, r"^outputs: .*\(16,\)"),
    ],
)
def test_penalty_rejects_wrong_arguments(model, labels, settings, message):
    with pytest.raises(ValueError, match=message):
        ed.penalty(model, torch.randn(8, 6), labels, **settings)


def test_penalty_keeps_the_statistics_of_batch_norm():
    """Path points are normalised like data but do not change the running statistics."""
    model, twin, x = small_network().train(), small_network().train(), torch.randn(12, 6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    labels, draws = torch.randint(5, (12,)), [torch.Generator().manual_seed(0) for _ in range(2)]
    value = ed.penalty(model, x, labels, generator=draws[0])
    assert torch.equal(value, ed.penalty(lambda p: twin(p), x, labels, generator=draws[1]))
    value.backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert model[1].track_running_stats
    assert all(weight.grad is not None for weight in model.parameters())


def test_penalty_keeps_the_statistics_of_instance_norm():
    layers = [nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(24, 5)]
    model, x = nn.Sequential(*layers).train(), torch.randn(12, 4, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ed.penalty(model, x, torch.randint(5, (12,))).backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model(x)
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])


def test_logits_are_found_by_key_and_attribute():
    """Models from transformers return logits this way; the penalty is the same as for a tensor."""
    linear, x = nn.Linear(6, 3), torch.randn(12, 6)

    class Returned:
        def __init__(self, logits):
            self.logits = logits

    def value(model):
        return ed.penalty(model, x, generator=torch.Generator().manual_seed(0))

    for wrap in (Returned, lambda logits: {"logits": logits, "loss": None}):
        assert torch.equal(value(lambda x, wrap=wrap: wrap(linear(x))), value(linear))


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1, 2] * 4)], ids=["free", "anchored"])
def test_penalty_of_a_model_with_its_own_softmax(labels):
    """With softmax=False, value and gradient equal those of the model without softmax."""
    linear, x = nn.Linear(6, 3), torch.randn(12, 6)

    def value_and_gradient(model, **how):
        generator = torch.Generator().manual_seed(0)
        value = ed.penalty(model, x, labels, generator=generator, **how)
        return value, *torch.autograd.grad(value, linear.weight)

    expected = value_and_gradient(linear)
    found = value_and_gradient(nn.Sequential(linear, nn.Softmax(-1)), softmax=False)
    torch.testing.assert_close(found, expected)


def test_penalty_of_a_regression():
    """f(x) = x^2 on a path of length d has c_1 = d (x1 + x2) / 2 and c_2 = d^2 / 8."""
    x = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    found = {
        round(ed.penalty(lambda p: p.square(), x, pairs=1, softmax=False, damping=0.0).item(), 9)
        for _ in range(30)
    }
    assert found == {0.0, 3 * 5 / 2 + 2 * 9 / 8}


def test_settings_can_be_keywords_or_one_object():
    model, x = small_network().eval(), torch.randn(40, 6)
    settings = {"resolution": 12, "degree": 5, "basis": "legendre"}
    whole = ed.Representation(**settings)

    def penalty(**how):
        return ed.penalty(model, x, generator=torch.Generator().manual_seed(0), **how)

    assert torch.equal(penalty(representation=whole), penalty(**settings))
    result = ed.estimate(model, x, pairs=20, **settings)
    assert result.representation == ed.Representation(sampler=ed.ChebyshevNodes(), **settings)
    with pytest.raises(TypeError, match="resolutoin"):
        ed.estimate(model, x, resolutoin=12)


def test_paths_reject_contexts_that_cannot_be_merged():
    context = {"key_padding_mask": torch.zeros(9, 4).bool()}
    field = Field.of(lambda x, key_padding_mask: x, uniform(9, 4), context=context)
    with pytest.raises(ValueError, match="marks padding"):
        Paths.draw(field, ed.Representation(), 3)
    for value in (None, [1] * 9):
        field = Field.of(lambda x, keep: x, uniform(9, 4), context={"keep": value})
        with pytest.raises(ValueError, match=r"'keep' is a .*: pass a tensor"):
            ed.penalty(field)


@pytest.mark.parametrize("shape", [(8, 16, 16), (8,), (8, 10, 4)], ids=["large", "none", "turned"])
def test_labels_need_one_entry_per_position(shape):
    model, x = nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.randn(8, 3, 8, 20)
    indices = torch.randint(4, shape)
    with pytest.raises(ValueError, match=r"^labels: got .* positions \(4, 10\)"):
        ed.penalty(model, x, indices, class_dim=1)
    soft = nn.functional.one_hot(indices, 4).float().movedim(-1, 1)
    with pytest.raises(ValueError, match=r"^labels: got .* positions \(4, 10\)"):
        ed.penalty(model, x, soft, class_dim=1)


def test_labels_per_position_need_a_class_dim():
    model, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(8, 3, 5, 6)
    with pytest.raises(ValueError, match=r"^labels: got \(8, 5, 6\) .* set class_dim"):
        ed.penalty(model, x, torch.randint(4, (8, 5, 6)))
    with pytest.raises(ValueError, match=r"^labels: got \(8,\) .* per position"):
        ed.penalty(model, x, torch.rand(8), class_dim=1)


@pytest.mark.parametrize("components", [None, 2])
def test_positions_labelled_minus_100_do_not_count(components):
    """Each path averages the positions with labels at both ends; paths without any give 0."""
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    labels = torch.randint(4, (6, 5))
    labels[0, 1:4], labels[1] = -100, -100
    settings = ed.Representation(components=components)

    def degrees(points, labels, **how):
        field = ed.Field.of(nn.Identity(), points, **how)
        draw = torch.Generator().manual_seed(0)
        paths = Paths.draw(field, settings, 36, labels=labels, generator=draw)
        return paths.degrees(paths.field()), paths.labels

    leaf = x.clone().requires_grad_()
    found, ends = degrees(leaf, labels, class_dim=-1)
    alone = torch.stack([degrees(x[:, s], labels[:, s].clamp(min=0))[0] for s in range(5)], 1)
    both = (ends[0] >= 0) & (ends[1] >= 0)
    assert {0, 2, 5} <= set(both.sum(1).tolist())
    expected = (alone * both).sum(1) / both.sum(1).clamp(min=1)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[0, 1:4].any()  # no path counts these positions of the first example


def test_labels_may_be_flat():
    model, x = nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.randn(8, 3, 8, 20)
    labels = torch.randint(4, (8, 4, 10))
    found = [
        ed.penalty(model, x, some, class_dim=1, generator=torch.Generator().manual_seed(0))
        for some in (labels, labels.flatten(1))
    ]
    assert torch.equal(*found)


def test_complex_outputs_are_rejected():
    for measure in (ed.penalty, ed.estimate):
        with pytest.raises(ValueError, match=r"complex64.*view_as_real"):
            measure(lambda x: torch.complex(x, x), torch.randn(40, 3), pairs=4, softmax=False)
