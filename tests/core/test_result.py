"""Tests of Estimate objects, comparisons of two models, and scale="classes"."""

import json
import math

import pytest
import torch
from torch import nn

import ed
from tests.helpers.core import small_network, uniform

FEW = {"pairs": 30, "resolution": 12, "degree": 5}


def test_an_estimate_converts_to_float_string_and_dict():
    result = ed.estimate(small_network(), torch.randn(40, 6), **FEW)
    assert float(result) == result.mean
    assert f"{result:.3f}" == f"{result.mean:.3f}"
    assert f"{result}" == str(result)
    assert repr(result) == f"<Estimate: {result}>"
    low, high = result.interval
    assert high - low == pytest.approx(2 * 1.96 * result.standard_error)
    assert result.passes == 30 * 12
    assert result == result
    assert result != ed.estimate(small_network(), torch.randn(40, 6), **FEW)
    record = json.loads(json.dumps(result.to_dict()))
    assert record["mean"] == result.mean
    assert len(record["values"]) == record["paths"] == 30


class Named:
    """A basis of one's own, equal to a named one."""

    def __call__(self, t, degree):
        return ed.legendre(t, degree)


@pytest.mark.parametrize("how", [{}, {"components": 2}, {"resolution": "auto"}], ids=str)
def test_a_basis_of_your_own_is_measured_like_a_named_one(how, tmp_path):
    pytest.importorskip("matplotlib")
    x = torch.randn(40, 6)
    found, expected = (
        ed.estimate(small_network(), x, basis=basis, **FEW | how) for basis in (Named(), "legendre")
    )
    assert torch.equal(found.values, expected.values)
    assert json.loads(json.dumps(found.to_dict()))["basis"] == "Named"
    found.plot(tmp_path / "paths.png")


@pytest.mark.parametrize("how", [{}, {"components": 2}, {"resolution": "auto"}], ids=str)
def test_an_estimate_plots_its_paths_fits_and_spectrum(how, tmp_path):
    pytest.importorskip("matplotlib")
    result = ed.estimate(small_network(), torch.randn(40, 6), **FEW | how)
    figure = result.plot(tmp_path / "paths.png")
    assert len(figure.axes) == 4
    assert (tmp_path / "paths.png").stat().st_size > 0
    for curve in result.curves:  # the network is smooth, so fits are close to the points
        fits = ed.chebyshev(2 * curve.nodes.double() - 1, 5) @ curve.coefficients.double().mT
        torch.testing.assert_close(fits, curve.values.double(), rtol=0, atol=0.1)


def test_two_models_are_compared_on_the_same_paths():
    """Doubling the outputs doubles ED, so the difference on each path is the original ED."""
    x = uniform(40, 6)

    def model(x):
        return x.square()

    found = ed.compare(lambda x: 2 * model(x), model, x, softmax=False, **FEW)
    one = ed.estimate(model, x, softmax=False, **FEW)
    torch.testing.assert_close(found.values, one.values)
    assert found.mean == pytest.approx(one.mean)
    assert found.standard_error == pytest.approx(one.standard_error)
    same = ed.compare(model, model, x, softmax=False, **FEW)
    assert same.interval == (0, 0)
    assert "95 % interval" in str(found)
    assert repr(found) == f"<Comparison: {found}>"
    assert f"{found:.3f}" == f"{found.mean:.3f}"
    with pytest.raises(ValueError, match="examples"):
        ed.compare(ed.Field.of(model, x), ed.Field.of(model, x[:30]), **FEW)


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("components", [None, 1])
def test_a_straight_line_between_classes_has_scaled_ed_one(classes, components):
    x = torch.eye(classes, dtype=torch.float64)
    how = {"softmax": False, "scale": "classes", "damping": 0.0, "components": components}
    assert ed.estimate(nn.Identity(), x, pairs=1, **how).mean == pytest.approx(1)
    paths = ed.Paths.draw(ed.Field.of(nn.Identity(), x), ed.Representation(scale="classes"), 4)
    degrees = paths.degrees(paths.field(), softmax=False)
    assert ((degrees < 1e-4) | ((degrees - 1).abs() < 1e-4)).all()


def test_scale_classes_requires_raw_ed():
    for settings in ({"scale": "classes", "weighting": "normalised"}, {"scale": "log"}):
        with pytest.raises(ValueError, match="scale"):
            ed.Representation(**settings)


def test_the_docstring_table_of_strengths_is_correct():
    rows = [line.split("|")[2:6] for line in ed.Representation.__doc__.splitlines() if "| " in line]
    for classes, components, strength, unit in rows[1:]:
        m = components.strip()
        factor = 1 / int(classes) if m == "-" else 1 / (math.sqrt(2) * int(m))
        for one, other in zip(strength.split(";"), unit.split(";"), strict=True):
            assert float(other) == pytest.approx(float(one) * factor, rel=0.02)
