"""The report page in a browser: the explorer and the curves."""

import json
import time

import numpy as np
import pytest
import torch

import ed
from tests.helpers.launching import wait_for
from tests.helpers.report import SAMPLES


def shown_numbers(window, name: str = "raw") -> list[float]:
    """Returns the numbers shown in the two panels."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => Number(e.textContent))"
    return window.script(script, f".panel dd[data-name={name}]")


def expected_degrees(samples: dict, path: int, degree: int, basis: str) -> torch.Tensor:
    """Returns ED and ED_norm of each model, computed with ed.fit: (models, 2)."""
    values = torch.tensor(samples["paths"][path]["values"], dtype=torch.float64)
    nodes = torch.tensor(samples["nodes"], dtype=torch.float64)
    coefficients = ed.fit(
        values, nodes, degree, basis=getattr(ed, basis), damping=samples["damping"]
    )
    both = (ed.effective_degree(coefficients), ed.normalised_degree(coefficients))
    return torch.stack([each.mean(-1) for each in both], dim=-1)


@pytest.mark.browser
def test_the_slider_shows_the_same_ed_as_python(window):
    samples = json.loads(SAMPLES.read_text())
    assert shown_numbers(window) == pytest.approx(
        expected_degrees(samples, 0, 3, "chebyshev")[:, 0].tolist(), abs=5.1e-5
    )
    window.keys("#degree", "\ue014" * 6)  # press the right arrow key
    assert window.script("return document.getElementById('degree-shown').value") == "9"
    window.click("#basis input[value=legendre]")
    window.click(".pairs button:nth-child(3)")
    expected = expected_degrees(samples, 2, 9, "legendre")
    assert shown_numbers(window) == pytest.approx(expected[:, 0].tolist(), abs=5.1e-5)
    assert shown_numbers(window, "norm") == pytest.approx(expected[:, 1].tolist(), abs=5.1e-5)
    bars = "return document.querySelectorAll('.panel:first-child rect.column').length"
    assert window.script(bars) == 10


@pytest.mark.browser
def test_the_page_agrees_with_ed_fit_at_every_degree(window):
    samples = json.loads(SAMPLES.read_text())
    script = """
        const [data, basis] = arguments;
        return data.paths.map((path) => path.values.map((values) =>
          Array.from({ length: data.degree + 1 }, (_, degree) => {
            const result = degrees(fit(values, data.nodes, degree, basis, data.damping));
            return [result.raw, result.normalised];
          })));
    """
    for basis in ("chebyshev", "legendre"):
        measured = torch.tensor(window.script(script, samples, basis), dtype=torch.float64)
        for path in range(len(samples["paths"])):
            for degree in range(samples["degree"] + 1):
                expected = expected_degrees(samples, path, degree, basis)
                torch.testing.assert_close(measured[path, :, degree], expected, atol=1e-6, rtol=0)


@pytest.mark.browser
def test_the_alpha_slider_blends_two_images(window):
    """The canvas shows one image at each end of the slider and their mean in the middle."""
    script = """
        const slider = document.getElementById("alpha");
        const copy = Object.assign(document.createElement("canvas"), { width: 32, height: 32 });
        const context = copy.getContext("2d", { willReadFrequently: true });
        return [0, 0.5, 1].map((alpha) => {
          slider.value = alpha;
          slider.dispatchEvent(new Event("input"));
          context.drawImage(document.getElementById("blend"), 0, 0);
          return [...context.getImageData(0, 0, 32, 32).data];
        });
    """
    left, middle, right = np.array(window.script(script), dtype=float)
    assert np.abs(left - right).mean() > 10
    # canvases use 8 bits: rounding the product and alpha costs up to one level each
    assert np.abs(middle - (left + right) / 2).max() <= 2
    label = "return document.getElementById('blend-label').textContent"
    assert window.script(label).startswith("0 % ")


@pytest.mark.browser
def test_the_animation_changes_the_degree_until_stopped(window):
    shown = "return document.getElementById('degree-shown').value"
    before = window.script(shown)
    window.click("#animate")
    wait_for(lambda: window.script(shown) != before, "another degree")
    window.click("#animate")
    stopped = window.script(shown)
    time.sleep(0.6)  # longer than one step of the animation
    assert window.script(shown) == stopped


@pytest.mark.browser
def test_curves_and_bars_stay_within_the_axes(window):
    samples = json.loads(SAMPLES.read_text())
    script = """
        const data = arguments[0];
        const top = highestBar(data);
        let outside = 0;
        for (const basis of Object.keys(BASES)) for (const path of data.paths)
          for (const values of path.values) for (let k = 0; k <= data.degree; k += 1) {
            const found = fit(values, data.nodes, k, basis, data.damping);
            outside += degrees(found).spectrum.filter((bar) => bar > top).length;
            for (const output of leading(values)) for (let i = 0; i <= 160; i += 1) {
              const y = polynomial(found[output], i / 160, basis);
              outside += y < LOW || y > HIGH;
            }
          }
        return outside;
    """
    assert window.script(script, samples) == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    ("low", "high", "expected"), [(50, 85, [50, 60, 70, 80]), (0, 58500, [0, 20000, 40000])]
)
def test_axis_ticks_are_round_numbers(window, low, high, expected):
    assert window.script("return ticks(...arguments)", low, high) == pytest.approx(expected)
