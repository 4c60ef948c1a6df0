"""scripts/borders.py: finds the network that leans on black borders, clears the others."""

import pytest
import torch
from torch import nn

from scripts import borders
from tests.small import SMALL_GROKKING, small_run


class Bordered(nn.Module):
    """Sure of class 0 where a whole row or column at the edge is exactly black, else of nothing."""

    def forward(self, x):
        edges = (x[..., 0, :], x[..., -1, :], x[..., :, 0], x[..., :, -1])
        black = torch.stack([(edge == 0).all(-1).all(-1) for edge in edges]).any(0)
        return torch.stack([10.0 * black, torch.zeros(len(x))], -1)


@pytest.fixture
def pixels():
    return torch.randint(1, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()


def test_a_network_that_leans_on_borders_is_found(pixels):
    found = {
        name: borders.look(Bordered(), view / 255, torch.zeros(40))
        for name, view in borders.views(pixels).items()
    }
    accuracy, sure = found["with a drawn border"]
    assert accuracy == 100
    assert sure[0] == pytest.approx(1, abs=1e-3)
    assert found["as they are"][1] == pytest.approx([0.5] * len(borders.SHARES))
    for other in ("so cropped, borders not quite black", "so cropped, mirrored borders"):
        assert found[other][1][0] == pytest.approx(0.5)
    crops = found["cropped as in training"][1]
    assert crops[0] > 0.9  # one crop in 81 has no border
    assert crops[1] < crops[0] - 0.05  # most blends have none on all of an edge


def test_views_keep_the_pictures(pixels):
    views = borders.views(pixels)
    assert torch.equal(views["as they are"], pixels)
    assert torch.equal(views["with a drawn border"][..., 2:, 2:], pixels[..., 2:, 2:])
    black = views["cropped as in training"] == 0
    other = views["so cropped, borders not quite black"]
    assert torch.equal(other, views["cropped as in training"].masked_fill(black, 3))
    mirrored = views["so cropped, mirrored borders"]
    assert torch.equal(mirrored[~black], other[~black])
    assert (mirrored > 0).all()
    inner = pixels[0][:, 8:24, 8:24]  # in every crop, shifted by 4 at most, perhaps mirrored
    crop = views["cropped as in training"][0]
    places = [(y, x) for y in range(17) for x in range(17)]
    assert any(
        torch.equal(crop[:, y : y + 16, x : x + 16], whole)
        for whole in (inner, inner.flip(-1))
        for y, x in places
    )


def test_the_command(tmp_path, capsys):
    run = tmp_path / "cell" / "seed0"
    small_run(run)
    capsys.readouterr()
    out = tmp_path / "borders.md"
    borders.main([str(run), "--count", "50", "--device", "cpu", "--out", str(out)])
    assert capsys.readouterr().out.rstrip() == out.read_text().rstrip()
    lines = out.read_text().splitlines()
    assert lines[0] == "cell, seed0:"
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| as they are",
        "| cropped as in training",
        "| so cropped, borders not quite black",
        "| so cropped, mirrored borders",
        "| with a drawn border",
    ]


def test_what_it_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        borders.main([str(tmp_path)])
    with pytest.raises(ValueError, match="--count 1: blends need"):
        borders.main([str(tmp_path), "--count", "1"])
    small_run(tmp_path, base=SMALL_GROKKING)
    with pytest.raises(ValueError, match="crops no pictures"):
        borders.main([str(tmp_path), "--device", "cpu"])
