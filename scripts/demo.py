"""Trains a micro ViT on real images, without and with the ED penalty, and compares the two.

Prints a table and draws a figure like Figure 1 of the paper: outputs along a few paths with their
fitted polynomials, and the coefficients of both models. A second call reuses finished runs.
"""

import argparse
from pathlib import Path

import ed
from ed.core.field import Field
from ed.engine.compose import compose_config
from ed.engine.errors import or_explain
from ed.engine.main import load_run, run
from ed.figures.paths import Portrait, draw_portraits
from ed.models.prompts import CIFAR10

FOLDER = Path("demo")
MODELS = {"none": "plain training", "ed": "with effective degree"}
MEASURE = ed.Representation(resolution=64, degree=20, sampler=ed.ChebyshevNodes())
PATHS = ((3, 17), (8, 40), (25, 61))  # test images at the ends of the drawn paths


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    results = {name: train_and_measure(name) for name in MODELS}
    print(table(results))
    figure = FOLDER / "effective_degree.png"
    draw(results, figure)
    print(f"\nfigure: {figure}")


def train_and_measure(name: str) -> dict:
    print(f"\n{MODELS[name]} (regularizer={name})")
    folder = FOLDER / name
    summary = run(
        compose_config(["experiment=demo", f"regularizer={name}", f"system.run_dir={folder}"]),
        [name],
    )
    trained = load_run(folder)
    task, model = trained.task, trained.model
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


def draw(results: dict, path: Path) -> None:
    portraits = [
        Portrait.of(MODELS[name], field_of_tests(result), PATHS, result["estimate"])
        for name, result in results.items()
    ]
    test = next(iter(results.values()))["task"].test
    ends = [
        (test.pixels[index].cpu(), CIFAR10[test.labels[index]])
        for first, second in PATHS
        for index in (second, first)
    ]
    draw_portraits(path, portraits, name=CIFAR10.__getitem__, ends=ends)


def field_of_tests(result: dict) -> Field:
    task = result["task"]
    return Field.of(result["model"], task.normalise(task.test.pixels))


if __name__ == "__main__":
    or_explain(main)
