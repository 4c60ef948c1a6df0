"""Tests of the common figure style: colours, captions, small files without dates."""

import io

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from ed.analysis.spec import EXPERIMENTS
from ed.figures.style import BASELINE, ED, METHODS, SERIES, STYLE, caption, method_colour, save_png

COMMITTED = sorted(EXPERIMENTS.glob("**/results/**/*.p[nd][gf]"))


def test_methods_have_different_colours():
    assert method_colour("ed") == method_colour("ed_performance") == ED
    assert method_colour("none") == BASELINE
    assert ED not in SERIES
    assert len({to_hex(colour) for colour in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize("width", [4, 8])
def test_a_caption_wraps_to_the_width_of_its_figure(width):
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 2))
        figure.add_subplot()
        caption(figure, "Outputs of a network on straight paths, and polynomials. " * 4)
        figure.draw_without_rendering()
        box = figure._supxlabel.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_a_palette_keeps_size_resolution_and_colours():
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2, 1), facecolor=ED)
        file = io.BytesIO()
        save_png(figure, file)
    with Image.open(file) as image:
        assert image.size == (400, 200)
        # PNG files store whole pixels per metre
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        assert to_hex([value / 255 for value in image.convert("RGB").getpixel((9, 9))]) == ED


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_figures_are_small_and_undated(path):
    content = path.read_bytes()
    assert len(content) < 200_000
    assert b"CreationDate" not in content
    assert b"Software" not in content
