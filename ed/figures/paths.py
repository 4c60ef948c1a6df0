"""Models on paths, like Figure 1 of the paper: outputs, fitted polynomials and coefficients."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ed.core.bases import BASES
from ed.core.estimator import Estimate, outputs_on_paths, points_per_chunk
from ed.core.field import Field
from ed.core.pca import principal_scores
from ed.figures.files import STYLE

CURVES = 3  # outputs drawn on a path: those that come highest
SUFFIXES = (".png", ".pdf", ".svg", ".jpg")


@dataclass(frozen=True)
class Portrait:
    """One model on a few paths, and its effective degree over many.

    Attributes:
        title: the model's name.
        values: (P, r, C), its outputs (or their principal components) at the nodes.
        nodes: (r,), alpha.
        coefficients: (P, C, K + 1).
        estimate: over many paths, with the settings that the drawn ones share.
        quantity: what the values are.
    """

    title: str
    values: Tensor
    nodes: Tensor
    coefficients: Tensor
    estimate: Estimate
    quantity: str = "probability"

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        title: str,
        field: Field,
        pairs: Sequence[tuple[int, int]],
        estimate: Estimate,
        *,
        softmax: bool = True,
        memory_gib: float = 1.0,
    ) -> Portrait:
        """Walks the paths between the given examples of `field`; shared nodes are needed."""
        device, representation = field.x.device, estimate.representation
        first, second = (torch.tensor(ends, device=device) for ends in zip(*pairs, strict=True))
        dtype = torch.promote_types(field.x.dtype, torch.float32)
        nodes = representation.nodes(len(pairs), device=device, dtype=dtype)
        points = points_per_chunk(field, memory_gib)
        values = outputs_on_paths(field, first, second, nodes, points).to(dtype)
        values = values.softmax(-1) if softmax else values
        quantity = "probability" if softmax else "output"
        if representation.components is not None:
            values = principal_scores(values, representation.components)
            quantity = "principal component"
        coefficients = replace(representation, components=None).coefficients(values, nodes)
        return cls(title, values.cpu(), nodes.cpu(), coefficients.cpu(), estimate, quantity)


@matplotlib.rc_context(STYLE)
def draw_portraits(
    path: Path,
    portraits: Sequence[Portrait],
    *,
    name: Callable[[int], str],
    ends: Sequence[tuple[Tensor, str]] | None = None,
) -> None:
    """Writes a picture: a row of paths per model, their coefficients on the right.

    Args:
        name: of an output.
        ends: (picture (3, H, W), title) of every path's x2, x1 in turn; None: nothing to show.
    """
    paths, rows = len(portraits[0].values), len(portraits)
    figure = Figure(figsize=(13, 1.2 + 2.5 * rows))
    grid = figure.add_gridspec(
        rows + 1,
        2 * paths + 2,
        height_ratios=[0.55 if ends else 0.01] + [1] * rows,
        width_ratios=[1] * 2 * paths + [1.6, 1.6],
    )
    for place, end in enumerate(ends or ()):
        draw_end(figure.add_subplot(grid[0, place]), *end)
    for row, portrait in enumerate(portraits, start=1):
        axes = [figure.add_subplot(grid[row, 2 * i : 2 * i + 2]) for i in range(paths)]
        draw_paths(axes, portrait, name, last=row == rows)
        # the name stands once, above all or beside its row: over each path it would not fit
        beside = f"{portrait.title}\n" if rows > 1 else ""
        axes[0].set_ylabel(beside + portrait.quantity)
    draw_spectra(figure.add_subplot(grid[:, -2:]), portraits)
    if rows == 1:
        figure.suptitle(portraits[0].title, fontsize=10)
    figure.savefig(path, dpi=150)


def picture_file(given: str) -> Path:
    """The type of an option for argparse: wrong ones are told now, not after the measurement."""
    path = Path(given)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{path}: a picture ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: no folder {path.parent}; make it first")
    return path


def draw_end(axis, picture: Tensor, title: str) -> None:
    """One end of a path; x2 (alpha = 0) stands on the left."""
    axis.imshow(picture.permute(1, 2, 0).numpy(), interpolation="bilinear")
    axis.set_title(title)
    axis.axis("off")


def draw_paths(axes, portrait: Portrait, name: Callable[[int], str], *, last: bool) -> None:
    """Outputs (dots) and fitted polynomials (lines) of the outputs that matter on a path."""
    representation = portrait.estimate.representation
    fine = torch.linspace(0, 1, 200, dtype=portrait.nodes.dtype)
    basis = BASES[representation.basis](2 * fine - 1, representation.degree)
    curves = portrait.coefficients @ basis.mT  # (P, C, 200)
    degrees = representation.degrees(portrait.coefficients)
    few = portrait.values.shape[-1] <= 10  # each output then has a colour of its own
    # an untrained model of 1000 classes stays near 0.001: the unit interval would show nothing
    unit = portrait.quantity == "probability" and portrait.values.max() > 0.3
    for axis, value, curve, degree in zip(axes, portrait.values, curves, degrees, strict=True):
        highest = value.amax(0).argsort(descending=True)[:CURVES].tolist()
        for place, output in enumerate(highest):
            color = f"C{output if few else place}"
            axis.plot(
                fine.numpy(), curve[output].numpy(), color=color, linewidth=1.5, label=name(output)
            )
            dots = portrait.nodes.numpy(), value[:, output].numpy()
            axis.plot(*dots, ".", color=color, markersize=3)
        low, high = axis.get_ylim()
        axis.set_ylim(*((-0.05, 1.05) if unit else (low, high + 0.15 * (high - low))))
        axis.ticklabel_format(useOffset=False)
        axis.set_title(f"{portrait.estimate.symbol} {number(degree.item(), 2)}")
        # narrow enough for three classes of a thousand
        tight = {"handlelength": 1, "handletextpad": 0.4, "columnspacing": 0.8}
        axis.legend(fontsize=7, loc="upper center", ncols=3, **tight)
        axis.set_xlabel(r"$\alpha$" if last else "")


def draw_spectra(axis, portraits: Sequence[Portrait]) -> None:
    width = 0.8 / len(portraits)
    for place, portrait in enumerate(portraits):
        estimate = portrait.estimate
        shift = width * (place - (len(portraits) - 1) / 2)
        degrees = torch.arange(1, len(estimate.spectrum)).numpy() + shift
        label = f"{portrait.title}: {estimate.symbol} {number(estimate.mean, 3)}"
        axis.bar(
            degrees, estimate.spectrum[1:].numpy(), width=width, label=label, color=f"C{3 * place}"
        )
    paths, outputs = len(estimate.values), portraits[0].values.shape[-1]
    axis.set_yscale("log")
    axis.set_xlabel("degree k")
    axis.set_ylabel(f"mean $|c_k|$ over {paths} paths and {outputs} outputs")
    axis.set_xticks(range(0, len(estimate.spectrum), 4 if len(estimate.spectrum) > 12 else 1))
    single = f", {estimate.symbol} {number(estimate.mean, 3)}" if len(portraits) == 1 else ""
    axis.set_title(f"coefficients of the fitted polynomials{single}")
    if not single:
        axis.legend(fontsize=8)


def number(value: float, digits: int) -> str:
    """With fixed decimals, unless they would all be zeros."""
    return f"{value:.{digits}f}" if abs(value) >= 10**-digits else f"{value:.1e}"
