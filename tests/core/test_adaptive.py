"""Tests of adaptive resolution: points, error estimate, agreement with the fixed protocol."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ed
from ed.core.adaptive import (
    _interleaved,
    _Walk,
    interpolation,
    ladder,
    points_of_second_kind,
    truncation_error,
)
from ed.core.estimator import PROTOCOL
from ed.core.result import standard_error
from tests.core.test_estimator import polynomial_map
from tests.helpers.core import uniform


def test_points_are_nested_and_interpolate_polynomials_exactly():
    assert ladder(PROTOCOL) == [10, 20, 40, 80]
    assert ladder(ed.Representation(degree=3)) == [2, 4, 8, 16]
    assert ladder(ed.Representation(degree=3, components=3)) == [3, 6, 12, 24]
    coarse, fine = points_of_second_kind(10), points_of_second_kind(20)
    torch.testing.assert_close(coarse, fine[::2], rtol=0, atol=1e-15)
    torch.testing.assert_close(_interleaved(coarse[:, None], fine[1::2, None])[:, 0], fine)
    coefficients = uniform(21)
    values = ed.chebyshev(2 * fine - 1, 20) @ coefficients
    torch.testing.assert_close(interpolation(20) @ values, coefficients, rtol=0, atol=1e-12)


def test_truncation_error_of_kinks_and_smooth_functions():
    """If |c_k| = k^-2, degrees N + 1 to K add sum(1/k) to ED; if |c_k| = 0.3^k, almost nothing."""
    k = torch.arange(21, dtype=torch.float64)
    kink = k.clamp_min(1) ** -2
    missing = sum(1 / j for j in range(21, 41))
    assert truncation_error(kink[None], 40).item() == pytest.approx(missing, rel=0.15)
    geometric = truncation_error(0.3 ** k[None], 40).item()
    exact = sum(j * 0.3**j for j in range(21, 41))
    assert exact <= geometric < 1e-6
    assert truncation_error(torch.zeros(1, 21, dtype=torch.float64), 40).item() == 0


@pytest.mark.parametrize("degree", [12, 20, 40])
def test_truncation_error_follows_the_power_law_through_the_last_two_quarters(degree):
    """Of k = 0..20, the third quarter (11..15) has mean 0.3, and the fourth (16..20) has 0.1."""
    power = math.log(0.3 / 0.1) / math.log(18 / 13)
    third, fourth = [0.5, 0.4, 0.3, 0.2, 0.1], [0.12, 0.11, 0.1, 0.09, 0.08]
    seen = [2.0, *[1 / k for k in range(1, 11)], *third, *fourth]
    beyond = {k: 0.1 * (k / 18) ** -power for k in range(21, 41)}
    missing = sum(k * beyond[k] for k in range(21, degree + 1))
    folded = sum(
        k * (seen[k] - math.sqrt(max(seen[k] ** 2 - beyond[40 - k] ** 2, 0)))
        for k in range(1, min(degree, 19) + 1)
    )
    found = truncation_error(torch.tensor([seen, [0.0] * 21], dtype=torch.float64), degree)
    assert found.tolist() == pytest.approx([missing + folded, 0], rel=1e-10)


@pytest.mark.parametrize("settings", [{}, {"components": 2}, {"weighting": "normalised"}], ids=str)
def test_every_level_measures_the_same_degree_as_the_fit(settings):
    """On polynomials of degree 5, the first of which is 0, neither has an error."""
    nodes = points_of_second_kind(20)
    held = ed.chebyshev(2 * nodes - 1, 5) @ uniform(4, 6, 3)
    held[0] = 0
    field = ed.Field.of(nn.Identity(), uniform(5, 3))
    walk = _Walk(field, replace(PROTOCOL, **settings), False, 0.02, chunk=1, pairs=4)
    degrees, errors = walk._resolved(held, 20)
    fitted = ed.Representation(resolution=21, degree=5, damping=0.0, **settings)
    expected = fitted.degrees(fitted.coefficients(held, nodes))
    torch.testing.assert_close(degrees, expected, rtol=1e-9, atol=1e-9)
    assert (errors < 1e-9).all()


def test_the_first_twelve_and_every_fifth_rough_path_are_refined():
    """The count continues in the next block; the other paths keep their 21 points."""
    field = ed.Field.of(nn.Identity(), uniform(5, 3))
    walk = _Walk(field, PROTOCOL, False, 0.02, chunk=1, pairs=40)
    chosen = []
    for start, count in ((0, 32), (32, 8)):
        walk._append(count)
        paths = torch.arange(start, start + count)
        refined = walk._choose(uniform(count, 21, 3), 20, paths)
        chosen += paths[refined].tolist()
    assert chosen == [*range(12), 15, 20, 25, 30, 35]
    assert walk.predicted.logical_not().nonzero().flatten().tolist() == chosen
    assert walk.points[walk.predicted].unique().tolist() == [21]


def test_values_are_regressed_on_the_refined_paths_only():
    """Of 30 paths, 10 need no more points, 12 are refined, and 8 are predicted."""
    field = ed.Field.of(nn.Identity(), uniform(5, 3))
    walk = _Walk(field, PROTOCOL, True, 0.02, chunk=1, pairs=30)
    walk.coarse, walk.values = uniform(30), uniform(30, seed=1)
    walk.coarse[:10] = math.nan
    walk.predicted = torch.arange(30) >= 22
    known, slope, variance = walk._regression()
    x, y = walk.coarse[10:22].numpy(), walk.values[10:22].numpy()
    line = np.polyfit(x, y, 1)
    assert known.nonzero().flatten().tolist() == list(range(10, 22))
    assert slope == pytest.approx(line[0], rel=1e-9)
    # the unbiased variance of the residuals of a line with two coefficients
    assert variance == pytest.approx(np.sum((y - np.polyval(line, x)) ** 2) / (12 - 2), rel=1e-9)
    walk._predict()
    expected = torch.from_numpy(np.polyval(line, walk.coarse[22:].numpy()))
    torch.testing.assert_close(walk.values[22:], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [{}, {"basis": "legendre"}, {"components": 2}, {"weighting": "normalised"},
     {"weighting": "quadratic"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("task", [1, 2, 3])
def test_polynomial_maps_need_few_points(task, settings):
    """The maps have degree at most 5, so both protocols agree up to rounding and damping."""
    x = 4 * uniform(200, 3) - 2
    how = {"softmax": False, "pairs": 60, **settings}
    fixed = ed.estimate(polynomial_map(task), x, **how)
    auto = ed.estimate(polynomial_map(task), x, resolution="auto", **how)
    torch.testing.assert_close(auto.values, fixed.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(auto.spectrum, fixed.spectrum, rtol=1e-5, atol=1e-6)
    assert torch.equal(auto.ends, fixed.ends)
    assert auto.passes == 60 * 21


def vit():
    timm = pytest.importorskip("timm")
    model = timm.models.VisionTransformer(16, 4, embed_dim=24, depth=2, num_heads=2, num_classes=10)
    return ed.Field.of(model, 2 * torch.randn(80, 3, 16, 16))


def resnet18():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    return ed.Field.of(model, torch.randn(80, 3, 16, 16))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        vocab_size=50, num_labels=3, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return ed.Field.from_text(model, {"input_ids": torch.randint(50, (80, 6))})


def impala():
    from ed.models.impala import Impala

    model = Impala(actions=15, channels=[4, 8], hidden=32, image_size=[16, 16])
    return ed.Field.of(model, torch.rand(80, 3, 16, 16))


def relu():
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=2 / math.sqrt(layer.in_features))
    return ed.Field.of(model, torch.randn(80, 20))


@pytest.mark.parametrize("make", [vit, resnet18, bert, impala, relu])
def test_networks_agree_with_the_fixed_protocol_in_a_fifth_of_the_passes(make):
    torch.manual_seed(0)
    field = make()
    fixed = ed.estimate(field, pairs=100)
    auto = ed.estimate(field, pairs=100, resolution="auto")
    assert abs(auto.mean - fixed.mean) <= fixed.standard_error
    assert auto.passes == auto.points.sum() <= fixed.passes / 5


def test_standard_error_covers_predicted_values():
    """Errors over 20 networks, in units of their standard error, have a mean square near 1."""
    ratios = []
    for seed in range(20):
        torch.manual_seed(seed)
        field = relu()
        fixed = ed.estimate(field, pairs=60)
        auto = ed.estimate(field, pairs=60, resolution="auto")
        assert auto.standard_error > standard_error(auto.values, auto.ends)
        ratios.append((auto.mean - fixed.mean) / auto.prediction_error)
        degrees = torch.arange(41.0) @ auto.spectrum
        assert degrees.item() == pytest.approx(auto.mean, rel=1e-4)
        torch.testing.assert_close(auto.spectrum, fixed.spectrum, rtol=0.2, atol=1e-3)
        assert auto.spectrum[0].item() == pytest.approx(fixed.spectrum[0].item(), rel=0.01)
    mean_square = torch.tensor(ratios).square().mean().item()
    assert 0.3 < mean_square < 2.5  # 95 % of chi squared with 20 degrees is within 0.48 and 1.7


@pytest.mark.parametrize("settings", [{"degree": 250}, {"components": 3, "degree": 220}])
def test_the_default_resolution_does_not_limit_the_degree(settings):
    field = ed.Field.of(lambda x: x, torch.randn(30, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = ed.estimate(field, pairs=4, resolution="auto", **settings)
    assert len(found.spectrum) == settings["degree"] + 1


def test_a_representation_without_a_sampler_is_accepted():
    field = ed.Field.of(lambda x: x, torch.randn(30, 5))
    found = [
        ed.estimate(field, pairs=4, resolution="auto", **settings).values
        for settings in ({"representation": ed.Representation(degree=3)}, {"degree": 3})
    ]
    assert torch.equal(*found)


def test_every_path_is_refined_if_there_are_few():
    field = relu()
    auto = ed.estimate(field, pairs=12, resolution="auto")
    assert auto.prediction_error == 0
    assert (auto.points > 21).sum() > 6


def test_rough_paths_get_more_points_than_smooth_ones():
    """Along a path of length w, sin has frequency w and a degree of about w / 2."""
    x = torch.tensor([[0.0], [1.0], [60.0]], dtype=torch.float64)
    result = ed.estimate(torch.sin, x, pairs=3, softmax=False, resolution="auto")
    near = (result.ends < 2).all(0)
    assert result.points[near].item() == 21
    assert (result.points[~near] >= 41).all()
    fixed = ed.estimate(torch.sin, x, pairs=3, softmax=False)
    torch.testing.assert_close(result.values, fixed.values, rtol=0.02, atol=0)


@pytest.mark.parametrize("components", [None, 2])
def test_torchs_random_state_does_not_change(components):
    before = torch.get_rng_state()
    how = {"softmax": False, "pairs": 5, "components": components, "resolution": "auto"}
    ed.estimate(polynomial_map(1), uniform(20, 3), **how)
    assert torch.equal(torch.get_rng_state(), before)


def test_paths_are_added_until_the_target_error_is_reached():
    x, how = uniform(300, 3), {"softmax": False, "resolution": "auto", "pairs": 1000}
    model = polynomial_map(2)
    whole = ed.estimate(model, x, **how)
    target = 2 * whole.standard_error
    some = ed.estimate(model, x, target_se=target, **how)
    assert some.standard_error <= target
    assert 50 <= len(some.values) < 1000
    assert torch.equal(some.values, whole.values[: len(some.values)])
    with pytest.warns(UserWarning, match="target_se"):
        ed.estimate(model, x, target_se=1e-9, **how)


def test_dense_outputs_do_not_depend_on_the_memory_budget():
    def model(p):
        return torch.stack([p, p.square(), p.sin()], dim=1)  # (N, 3, 4)

    x, how = uniform(20, 4), {"class_dim": 1, "pairs": 9, "resolution": "auto"}
    whole, pieces = (ed.estimate(model, x, memory_gib=gib, **how) for gib in (1, 5e-5))
    fixed = ed.estimate(model, x, class_dim=1, pairs=9)
    for result in (whole, pieces):
        torch.testing.assert_close(result.values, fixed.values, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"resolution": "auto", "sampler": ed.RandomizedCosine()}, "sampler"),
        ({"resolution": "auto", "tolerance": 0}, "tolerance=0"),
        ({"resolution": "auto", "target_se": math.nan}, "target_se=nan"),
        ({"target_se": 0.1}, "target_se"),
        ({"tolerance": 0.1}, "tolerance"),
        ({"resolution": "auto", "memory_gib": 1e-9}, "memory_gib"),
        ({"resolution": "auto", "weighting": "normalised", "components": 3}, "components=3"),
    ],
)
def test_impossible_settings_are_rejected(settings, key):
    with pytest.raises(ValueError, match=key):
        ed.estimate(nn.Identity(), uniform(9, 3), pairs=4, **settings)
