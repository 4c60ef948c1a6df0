"""Illustrates the theory: convergence of ED, degree preservation, and stability of the fit.

For the exact polynomial maps of the paper (inputs uniform in [-2, 2]^3, no training):

    row 1   ED against the number of paths, and its standard error, which falls as 1 / sqrt(paths)
    row 2   degree preservation: on random paths, coefficients above the map's degree are zero, and
            the leading one is 2 P_D(x1 - x2) / 4^D, nonzero almost surely

Without a map:

    row 3   stability of the fit: the largest change in ED when the output at one inner node
            changes by 1, with labels at both ends
    row 4   how damping stabilises the fit, and how it biases the ED of a straight line
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import ed
from ed.core.degree import effective_degree
from ed.core.field import Field
from ed.core.fit import DAMPING, fit_matrix
from ed.core.nodes import Sampler
from ed.engine.errors import or_explain
from ed.figures.paths import image_file
from ed.figures.style import BAND, SERIES, STYLE, caption, save
from ed.tasks.pnn import target_map, uniform_inputs

MAPS = {1: "map 1, degree 1", 2: "map 2, degree 2", 3: "map 3, degree 5"}
DEGREES = {1: (1, 1, 1), 2: (2, 2, 2), 3: (3, 5, 4)}  # of each output
SAMPLERS = {
    "fixed Chebyshev": ed.ChebyshevNodes(),
    "randomized cosine": ed.RandomizedCosine(),
    "equally spaced": ed.UniformNodes(even=True),
    "stratified uniform": ed.StratifiedNodes(),
    "independent uniform": ed.UniformNodes(),
}
MOST_DRAWS = 2000  # of random nodes in rows 3 and 4
DAMPINGS = [10.0**power for power in range(-8, 1)]
CAPTION = (
    "Row 1: ED is a mean over random paths; its standard error falls with their number. Row 2: on "
    "a path, a polynomial map keeps its degree, and its leading coefficient is almost never zero. "
    "Rows 3 and 4: stability of the fit, measured by the largest change of ED when one inner "
    "output changes by 1. Cosine-spaced nodes stay stable at high degree; damping stabilises the "
    "others, but biases ED."
)
SETTINGS = ed.Representation(resolution=32, degree=8, sampler=ed.ChebyshevNodes(), damping=0.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    paths = "number of paths (default: 20000)"
    parser.add_argument("--paths", type=int, default=20_000, help=paths)
    parser.add_argument("--seed", type=int, default=0, help="seed of the paths (default: 0)")
    out = "image to write (default: theory.png)"
    parser.add_argument(
        "--out", type=image_file, default=Path("theory.png"), metavar="PNG", help=out
    )
    options = parser.parse_args(arguments)
    if options.paths < 100:
        raise ValueError(f"--paths {options.paths}: must be at least 100")
    inputs = uniform_inputs(2 * options.paths, torch.Generator().manual_seed(options.seed))
    coefficients = {number: on_paths(number, inputs) for number in MAPS}
    for number, found in coefficients.items():
        values = SETTINGS.degrees(found)
        error = values.std() / len(values) ** 0.5
        print(f"{MAPS[number]}: ED {values.mean():.4f} +- {error:.4f} ({len(values)} paths)")
    draw(coefficients, leading_parts(inputs), options.out)
    print(f"figure: {options.out}")


def on_paths(number: int, inputs: Tensor) -> Tensor:
    """Returns the coefficients of a map on random paths: (P, 3, K + 1)."""
    # paths share no ends, so they are independent
    first, second = torch.arange(len(inputs)).view(2, -1)
    nodes = SETTINGS.nodes(1, dtype=inputs.dtype)
    field = Field.of(lambda x: target_map(number, x), inputs).between(first, second, nodes)
    return SETTINGS.coefficients(field().unflatten(0, (len(first), -1)), nodes)


def leading_parts(inputs: Tensor) -> dict[int, Tensor]:
    """Returns the leading |c_D| = 2 |P_D(x1 - x2)| / 4^D from the lemma, (P, 3) for each map."""
    first, second = torch.arange(len(inputs)).view(2, -1)
    v1, v2, v3 = direction = (inputs[first] - inputs[second]).unbind(-1)
    parts = {
        1: direction[::-1],
        2: (v1 * v2, v2 * v3, v1 * v3),
        3: (v1 * v2 * v3, v1**2 * v2 * v3**2, v1**2 * v2 * v3),
    }
    scales = {number: torch.tensor([2 / 4.0**d for d in DEGREES[number]]) for number in MAPS}
    return {number: torch.stack(parts[number], -1).abs() * scales[number] for number in MAPS}


def anchored_nodes(sampler: Sampler, resolution: int, paths: int = MOST_DRAWS) -> Tensor:
    """Returns nodes (paths, r), or (r,) if all paths share them."""
    generator = torch.Generator().manual_seed(0)
    return sampler(torch.rand(paths, resolution, dtype=torch.float64, generator=generator), True)


def strongest_answers(nodes: Tensor, degree: int, damping: float = DAMPING) -> Tensor:
    """Returns the largest change in ED when the output at one inner node changes by 1.

    The shape is (paths,), or () if all paths share their nodes.
    """
    inner = fit_matrix(nodes, degree, damping=damping)[..., 1:-1]
    return effective_degree(inner.mT).amax(-1)


def straight_line(nodes: Tensor, degree: int, damping: float) -> Tensor:
    """Returns the ED of y = alpha, which is 1/2 without damping: (paths,) or ()."""
    matrix = fit_matrix(nodes, degree, damping=damping)
    return effective_degree((matrix @ nodes.unsqueeze(-1)).squeeze(-1))


@matplotlib.rc_context(STYLE)
def draw(coefficients: dict[int, Tensor], leading: dict[int, Tensor], path: Path) -> None:
    figure = Figure(figsize=(10.5, 12.5))
    axes = figure.subplots(4, 3)
    draw_convergence(axes[0, 0], axes[0, 1], coefficients)
    draw_distribution(axes[0, 2], coefficients)
    draw_spectra(axes[1, 0], coefficients)
    draw_leading(axes[1, 1], coefficients, leading)
    draw_least(axes[1, 2], leading)
    paths = min(len(leading[1]), MOST_DRAWS)
    draw_answers(axes[2, 0], range(3, 17), None, paths)
    draw_answers(axes[2, 1], range(4, 33), 3, paths)
    draw_answers(axes[2, 2], range(8, 33), 7, paths)
    axes[2, 1].legend(loc="upper right")
    for axis, resolution in zip(axes[3], (4, 15), strict=False):
        draw_against_damping(axis, resolution, strongest_answers, paths)
        axis.set_ylabel("largest change of ED")
        axis.set_title(f"r = {resolution}, K = {resolution - 1}: damping stabilises the fit")
    draw_against_damping(axes[3, 2], 15, straight_line, paths)
    axes[3, 2].set(ylabel="ED of a straight line (exact: 0.5)", ylim=(0.3, 10))
    axes[3, 2].set_title("r = 15, K = 14: damping biases a straight line")
    caption(figure, CAPTION)
    save(figure, path)


def draw_convergence(mean_axis, error_axis, coefficients: dict[int, Tensor]) -> None:
    for number, found in coefficients.items():
        values = SETTINGS.degrees(found)
        counts = torch.logspace(1, torch.tensor(len(values)).log10().item(), 40).long()
        means = torch.stack([values[:count].mean() for count in counts])
        errors = torch.stack([values[:count].std() / count**0.5 for count in counts])
        color = SERIES[number - 1]
        mean_axis.fill_between(counts, means - errors, means + errors, color=color, **BAND)
        mean_axis.plot(counts, means, color=color, label=MAPS[number])
        mean_axis.axhline(values.mean(), color=color, linewidth=0.6, linestyle=":")
        error_axis.plot(counts, errors, ".", color=color, markersize=4)
        error_axis.plot(counts, values.std() / counts**0.5, color=color, linewidth=1)
    mean_axis.set(xscale="log", xlabel="paths", ylabel="ED ± standard error", ylim=(0, None))
    mean_axis.set_title("ED converges with the number of paths")
    mean_axis.legend()
    error_axis.set(xscale="log", yscale="log", xlabel="paths", ylabel="standard error of ED")
    error_axis.set_title(r"the error (dots) falls as $1/\sqrt{\mathrm{paths}}$ (lines)")


def draw_distribution(axis, coefficients: dict[int, Tensor]) -> None:
    for number, found in coefficients.items():
        values = SETTINGS.degrees(found)
        color, bins = SERIES[number - 1], {"bins": 100, "range": (0, 12), "density": True}
        axis.hist(values.numpy(), histtype="step", color=color, **bins)
        axis.axvline(values.mean(), color=color, linewidth=0.8, linestyle=":")
    axis.set(xlabel="ED of a single path", ylabel="density", xlim=(0, 12))
    axis.set_title("single paths vary, means (dotted) less")


def draw_spectra(axis, coefficients: dict[int, Tensor]) -> None:
    """Draws the mean |c_k|; above a map's degree there is only rounding error."""
    for place, (number, found) in enumerate(coefficients.items()):
        spectrum = found.abs().mean((0, 1)).clamp(min=1e-18).numpy()
        degrees = torch.arange(len(spectrum)).numpy() + 0.27 * (place - 1)
        axis.bar(degrees, spectrum, width=0.27, color=SERIES[number - 1], label=MAPS[number])
    axis.set(yscale="log", xlabel="degree k", ylabel="mean $|c_k|$", ylim=(1e-18, 1e5))
    axis.set_title("only rounding error above the degree of a map")
    axis.legend(loc="upper right")


def draw_leading(axis, coefficients: dict[int, Tensor], leading: dict[int, Tensor]) -> None:
    """Draws the fitted c_D of every output against the lemma's value, for 300 paths each."""
    for number, found in coefficients.items():
        index = torch.tensor(DEGREES[number]).view(1, 3, 1).expand(len(found), 3, 1)
        fitted = found.gather(-1, index).squeeze(-1).abs()[:300]
        color, size = SERIES[number - 1], 10 - 3 * number  # smaller dots on top stay visible
        expected = leading[number][:300].flatten()
        axis.plot(expected, fitted.flatten(), ".", markersize=size, color=color, label=MAPS[number])
    axis.axline((1e-3, 1e-3), (1, 1), color="grey", linewidth=0.6, zorder=0)
    axis.set(xscale="log", yscale="log", xlim=(1e-5, 10), ylim=(1e-5, 10))
    axis.set_xlabel(r"lemma: $2\,|P_D(x_1 - x_2)| / 4^D$")
    axis.set_ylabel("fitted $|c_D|$")
    axis.set_title("leading coefficients agree with the lemma")
    axis.legend(loc="lower right")


def draw_least(axis, leading: dict[int, Tensor]) -> None:
    """Draws the fraction of leading coefficients below a bound, against the bound."""
    bounds = torch.logspace(-6, 1, 60, dtype=torch.float64)
    for number, values in leading.items():
        part = torch.stack([(values < bound).double().mean() for bound in bounds])
        axis.plot(bounds, part.where(part > 0, torch.nan), color=SERIES[number - 1])
    axis.set(xscale="log", yscale="log", xlabel="bound", ylabel="fraction of paths")
    axis.set_title("few paths have $|c_D|$ near zero")


def draw_answers(axis, resolutions: range, degree: int | None, paths: int) -> None:
    """Draws the mean change in ED against the number of nodes; degree None means K = r - 1."""
    for color, (name, sampler) in zip(SERIES, SAMPLERS.items(), strict=False):
        means = [
            strongest_answers(
                anchored_nodes(sampler, r, paths), r - 1 if degree is None else degree
            ).mean()
            for r in resolutions
        ]
        axis.plot(resolutions, means, ".-", markersize=4, linewidth=1, color=color, label=name)
    axis.set(yscale="log", xlabel="nodes r on a path", ylabel="largest change of ED")
    axis.xaxis.get_major_locator().set_params(integer=True)
    through_all = "K = r - 1: only cosine-spaced nodes stay stable"
    axis.set_title(through_all if degree is None else f"K = {degree}: more nodes stabilise the fit")


def draw_against_damping(axis, resolution: int, what: Callable[..., Tensor], paths: int) -> None:
    """Draws the mean over paths of `what(nodes, K, damping)` against damping, for K = r - 1."""
    for color, sampler in zip(SERIES, SAMPLERS.values(), strict=False):
        nodes = anchored_nodes(sampler, resolution, paths)
        means = [what(nodes, resolution - 1, damping).mean() for damping in DAMPINGS]
        axis.plot(DAMPINGS, means, ".-", markersize=4, linewidth=1, color=color)
    axis.axvline(DAMPING, color="grey", linewidth=0.6, linestyle=":")
    axis.set(xscale="log", yscale="log", xlabel="damping (dotted: our default)")


if __name__ == "__main__":
    or_explain(main)
