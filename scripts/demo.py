"""Effective degree at work: a micro ViT on real pictures, trained without and with the penalty.

Prints a table and draws, like Figure 1 of the paper, outputs along a few paths with their fitted
polynomials, and the coefficients of both models. Run it again: finished runs are not repeated.
"""

import sys
from pathlib import Path

import torch

import ed
from ed.core.field import Field
from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.main import run, trained_model

FOLDER = Path("demo")
MODELS = {"none": "plain training", "ed": "with effective degree"}
MEASURE = ed.Representation(resolution=64, degree=20, sampler=ed.ChebyshevNodes())
CLASSES = ("airplane", "automobile", "bird", "cat", "deer")
CLASSES += ("dog", "frog", "horse", "ship", "truck")
PATHS = ((3, 17), (8, 40), (25, 61))  # test pictures between which the drawn paths run


def main() -> None:
    results = {name: train_and_measure(name) for name in MODELS}
    print(table(results))
    picture = FOLDER / "effective_degree.png"
    draw(results, picture)
    print(f"\npicture: {picture}")


def train_and_measure(name: str) -> dict:
    print(f"\n{MODELS[name]} (regularizer={name})")
    folder = FOLDER / name
    summary = run(compose_config([f"regularizer={name}", f"system.run_dir={folder}"]), [name])
    _, task, model = trained_model(folder)
    inputs = task.normalise(task.train.pixels)
    estimate = ed.estimate(model, inputs, pairs=200, representation=MEASURE)
    return {"summary": summary, "estimate": estimate, "task": task, "model": model}


def table(results: dict) -> str:
    lines = ["", f"{'':24}{'test accuracy':>15}{'test loss':>11}{'ED':>16}{'seconds':>9}"]
    for name, result in results.items():
        last, estimate = result["summary"]["last"], result["estimate"]
        degree = f"{estimate.mean:.3f} ± {estimate.standard_error:.3f}"
        lines.append(
            f"{MODELS[name]:24}{last['eval/acc']:>13.1f} %{last['eval/loss']:>11.3f}"
            f"{degree:>16}{result['summary']['seconds']:>9.0f}"
        )
    return "\n".join(lines)


@torch.no_grad()
def outputs_on_paths(result: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities at the nodes (P, r, C), the nodes (r,), and the coefficients (P, C, K + 1)."""
    task, model = result["task"], result["model"]
    first, second = (torch.tensor(ends, device=task.device) for ends in zip(*PATHS, strict=True))
    nodes = MEASURE.nodes(len(PATHS), device=task.device)
    field = Field.of(model, task.normalise(task.test.pixels)).between(first, second, nodes)
    values = field().softmax(-1).unflatten(0, (len(PATHS), -1))
    return values.cpu(), nodes.cpu(), MEASURE.coefficients(values, nodes).cpu()


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(13, 6.2), layout="constrained")
    grid = figure.add_gridspec(
        3,
        2 * len(PATHS) + 2,
        height_ratios=(0.55, 1, 1),
        width_ratios=[1] * 2 * len(PATHS) + [1.6, 1.6],
    )
    draw_ends(figure, grid, next(iter(results.values()))["task"])
    for row, (name, result) in enumerate(results.items(), start=1):
        axes = [figure.add_subplot(grid[row, 2 * i : 2 * i + 2]) for i in range(len(PATHS))]
        draw_paths(axes, outputs_on_paths(result), MODELS[name], last=row == len(results))
    draw_spectra(figure.add_subplot(grid[:, -2:]), results)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_ends(figure, grid, task) -> None:
    """The two pictures between which each path runs, x2 on the left (alpha = 0)."""
    for column, (first, second) in enumerate(PATHS):
        for side, index in enumerate((second, first)):
            axis = figure.add_subplot(grid[0, 2 * column + side])
            axis.imshow(task.test.pixels[index].permute(1, 2, 0).cpu(), interpolation="bilinear")
            axis.set_title(CLASSES[task.test.labels[index]], fontsize=9)
            axis.axis("off")


def draw_paths(axes, outputs, title: str, *, last: bool) -> None:
    """Probabilities (dots) and fitted polynomials (lines) of the classes that matter on a path."""
    values, nodes, coefficients = outputs
    fine = torch.linspace(0, 1, 200)
    curves = coefficients @ ed.chebyshev(2 * fine - 1, MEASURE.degree).mT  # (P, C, 200)
    degrees = MEASURE.degrees(coefficients)
    for axis, value, curve, degree in zip(axes, values, curves, degrees, strict=True):
        for label in value.amax(0).argsort(descending=True)[:3].tolist():
            axis.plot(fine, curve[label], color=f"C{label}", linewidth=1.5, label=CLASSES[label])
            axis.plot(nodes, value[:, label], ".", color=f"C{label}", markersize=3)
        axis.set_ylim(-0.05, 1.05)
        axis.set_title(f"{title}: ED {degree:.2f}", fontsize=9)
        axis.legend(fontsize=7, frameon=False, loc="upper center", ncols=3, columnspacing=0.8)
        axis.set_xlabel(r"$\alpha$" if last else "")
    axes[0].set_ylabel("probability")


def draw_spectra(axis, results: dict) -> None:
    for place, (name, result) in enumerate(results.items()):
        estimate = result["estimate"]
        degrees = torch.arange(1, len(estimate.spectrum)) + 0.4 * place - 0.2
        label = f"{MODELS[name]}: ED {estimate.mean:.3f}"
        axis.bar(degrees, estimate.spectrum[1:], width=0.4, label=label, color=f"C{3 * place}")
    axis.set_yscale("log")
    axis.set_xlabel("degree k")
    axis.set_ylabel("mean $|c_k|$ over 200 paths and 10 outputs")
    axis.set_xticks(range(0, len(estimate.spectrum), 4))
    axis.set_title("coefficients of the fitted polynomials", fontsize=9)
    axis.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(explain(error))
