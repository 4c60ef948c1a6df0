"""Plots outputs, fitted polynomials and coefficients on paths, as in Figure 1 of the paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ed.core.bases import basis_of
from ed.core.estimator import Estimate, outputs_on_paths, points_per_chunk
from ed.core.field import Field
from ed.core.fit import fit
from ed.core.pca import principal_scores
from ed.figures.style import BASELINE, CLASSES, ED, SERIES, STYLE, caption, save

CURVES = 3  # outputs drawn per path: those with the highest peaks
CAPTION = (
    "Top: {kind} of a network on straight paths, alpha x1 + (1 - alpha) x2 (dots), and the "
    "polynomials fitted to them (lines); the {shown} {kind} with the highest peaks. Bottom: mean "
    "size of the coefficients over {paths} paths and {count} {kind}. ED weights each "
    "coefficient with its degree k: the steeper the fall, the simpler the function."
)
SUFFIXES = (".png", ".pdf", ".svg", ".jpg")


@dataclass(frozen=True)
class Portrait:
    """The outputs of a model on a few paths, and its effective degree over many.

    Attributes:
        title: the model's name.
        values: (P, r, C), the outputs (or their principal components) at the nodes.
        nodes: (r,), the values of alpha.
        coefficients: (P, C, K + 1).
        estimate: effective degree over many paths; the drawn paths use the same settings.
        quantity: name of the values, for the axis label.
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
        """Evaluates a model between pairs of examples; all paths must use the same nodes."""
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
        how = {"basis": representation.basis, "damping": representation.damping}
        coefficients = fit(values, nodes, representation.degree, **how)
        return cls(title, values.cpu(), nodes.cpu(), coefficients.cpu(), estimate, quantity)


@matplotlib.rc_context(STYLE)
def draw_portraits(
    path: Path,
    portraits: Sequence[Portrait],
    *,
    name: Callable[[int], str],
    ends: Sequence[tuple[Tensor, str]] | None = None,
) -> None:
    """Writes an image with a row of paths per model, above the coefficients of all models.

    Args:
        name: returns the name of an output.
        ends: (image (3, H, W), title) of x2 and x1 for each path in turn; None shows no images.
    """
    paths, rows = len(portraits[0].values), len(portraits)
    figure = Figure(figsize=(8.4, 3.2 + 1.75 * rows + (0.9 if ends else 0)))
    heights = [0.55 if ends else 0.01] + [1] * rows + [1.15]
    grid = figure.add_gridspec(rows + 2, 2 * paths, height_ratios=heights)
    for place, end in enumerate(ends or ()):
        draw_end(figure.add_subplot(grid[0, place]), *end, side=("left", "right")[place % 2])
    for row, portrait in enumerate(portraits, start=1):
        axes = [figure.add_subplot(grid[row, 2 * i : 2 * i + 2]) for i in range(paths)]
        draw_paths(axes, portrait, name, last=row == rows)
        # with several models, the title goes beside the row: it would not fit above each path
        beside = f"{portrait.title}\n" if rows > 1 else ""
        axes[0].set_ylabel(beside + portrait.quantity)
    draw_spectra(figure.add_subplot(grid[-1, :]), portraits)
    if rows == 1:
        figure.suptitle(portraits[0].title, fontsize=10)
    first, count = portraits[0].estimate, portraits[0].values.shape[-1]
    kind = "outputs" if first.representation.components is None else "principal components"
    counts = {"shown": min(CURVES, count), "count": count, "paths": len(first.values)}
    caption(figure, CAPTION.format(kind=kind, **counts))
    save(figure, path)


def image_file(given: str) -> Path:
    """Argparse type for an image path; rejects invalid names before the measurement starts."""
    path = Path(given)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{path}: use a name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: no folder {path.parent}; make it first")
    return path


def draw_end(axis, image: Tensor, title: str, *, side: str) -> None:
    """Draws the image at one end of a path; x2 (alpha = 0) is on the left."""
    axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="bilinear")
    axis.set_title(title, loc=side)  # the layout ignores its width: centred, it may be cut off
    axis.axis("off")


def draw_paths(axes, portrait: Portrait, name: Callable[[int], str], *, last: bool) -> None:
    """Draws the largest outputs on each path (dots) with their fitted polynomials (lines)."""
    representation = portrait.estimate.representation
    fine = torch.linspace(0, 1, 200, dtype=portrait.nodes.dtype)
    basis = basis_of(representation.basis)(2 * fine - 1, representation.degree)
    curves = portrait.coefficients @ basis.mT  # (P, C, 200)
    degrees = representation.degrees(portrait.coefficients)
    few = portrait.values.shape[-1] <= 10  # few enough for one colour per output
    # an untrained model with 1000 classes stays near 0.001, too flat to see on [0, 1]
    unit = portrait.quantity == "probability" and portrait.values.max() > 0.3
    for axis, value, curve, degree in zip(axes, portrait.values, curves, degrees, strict=True):
        highest = value.amax(0).argsort(descending=True)[:CURVES].tolist()
        for place, output in enumerate(highest):
            color = CLASSES[output] if few else SERIES[place]
            axis.plot(
                fine.numpy(), curve[output].numpy(), color=color, linewidth=1.5, label=name(output)
            )
            dots = portrait.nodes.numpy(), value[:, output].numpy()
            axis.plot(*dots, ".", color=color, markersize=3)
        low, high = axis.get_ylim()
        axis.set_ylim(*((-0.05, 1.05) if unit else (low, high + 0.15 * (high - low))))
        axis.ticklabel_format(useOffset=False)
        axis.set_title(f"{portrait.estimate.symbol} {number(degree.item(), 2)}")
        # leaves room for three ImageNet class names
        tight = {"handlelength": 1, "handletextpad": 0.4, "columnspacing": 0.8}
        axis.legend(fontsize=6.5, loc="upper center", ncols=3, **tight)
        axis.set_xlabel(r"$\alpha$" if last else "")
        axis.tick_params(labelsize=8)


def draw_spectra(axis, portraits: Sequence[Portrait]) -> None:
    colours = (BASELINE, ED, *SERIES) if len(portraits) > 1 else SERIES
    width = 0.8 / len(portraits)
    for place, portrait in enumerate(portraits):
        estimate = portrait.estimate
        shift = width * (place - (len(portraits) - 1) / 2)
        degrees = torch.arange(1, len(estimate.spectrum)).numpy() + shift
        label = f"{portrait.title}: {estimate.symbol} {number(estimate.mean, 3)}"
        heights = estimate.spectrum[1:].numpy()
        axis.bar(degrees, heights, width=width, label=label, color=colours[place])
    axis.set(yscale="log", xlabel="degree k", ylabel="mean $|c_k|$")
    axis.set_xticks(range(0, len(estimate.spectrum), 4 if len(estimate.spectrum) > 12 else 1))
    axis.legend(loc="upper right")


def number(value: float, digits: int) -> str:
    """Formats a number with fixed decimals, or in scientific notation if all would be zero."""
    return f"{value:.{digits}f}" if abs(value) >= 10**-digits else f"{value:.1e}"
