"""Images of paths."""

import itertools

import pytest
import torch
from matplotlib.text import Text
from torch import nn

import ed
from ed.core.field import Field
from ed.figures import paths
from ed.figures.paths import Portrait, draw_portraits


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws three paths of a linear model between images, and returns the figure."""

    def draw(titles=("",) * 6, **settings):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Flatten(), nn.Linear(48, 1000)), torch.rand(6, 3, 4, 4)
        how = ed.Representation(resolution=8, degree=2, sampler=ed.ChebyshevNodes(), **settings)
        estimate = ed.estimate(model, x, pairs=3, representation=how)
        portrait = Portrait.of("linear", Field.of(model, x), [(1, 0), (3, 2), (5, 4)], estimate)
        figures = []
        monkeypatch.setattr(paths, "save", lambda figure, path: figures.append(figure))
        ends = list(zip(x, titles, strict=True))
        draw_portraits(tmp_path / "a.png", [portrait], name="output {}".format, ends=ends)
        return figures[0]

    return draw


def test_titles_of_images_are_neither_cut_off_nor_overlap(drawn):
    titles = [f"image {index}" for index in range(1281160, 1281166)]
    figure = drawn(titles)
    figure.draw_without_rendering()
    texts = {text.get_text(): text.get_window_extent() for text in figure.findobj(Text)}
    boxes = [texts[title] for title in titles]
    assert boxes[0].x0 >= 0
    assert boxes[-1].x1 <= figure.bbox.width
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_the_caption_names_principal_components(drawn):
    components, outputs = (drawn(components=m)._supxlabel.get_text() for m in (2, None))
    assert "principal component" in components
    assert "output" not in components
    assert "principal component" not in outputs
