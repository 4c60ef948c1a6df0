"""Make samples for the report's explorer: python scripts/explorer_samples.py [--out FILE]

Writes the outputs of the demo's two models along paths between test images, as JSON. It trains the
models first unless `make demo` has already done so: minutes at first, seconds afterwards.
"""

import argparse
import base64
import io
import json
import sys
from pathlib import Path

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.engine.errors import or_explain
from ed.models.prompts import CIFAR10
from ed.runtime.files import APP, write_atomic
from scripts.demo import MEASURE, MODELS, PATHS, field_of_tests, train_and_measure

OUT = APP / "experiments" / "results" / "explorer.json"
MORE_PATHS = ((1, 12), (30, 77), (5, 90), (110, 64), (140, 201))  # in addition to the demo's
DIGITS = 6  # decimals of the probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    options = parser.parse_args()
    results = {name: train_and_measure(name) for name in MODELS}
    text = to_text(samples(results, (*PATHS, *MORE_PATHS)))
    write_atomic(options.out, text)
    print(f"{options.out}: {len(text) / 1024:.0f} KiB")


def samples(results: dict[str, dict], paths: tuple[tuple[int, int], ...]) -> dict:
    """Returns the content of explorer.json; the `values` of a path are (model, node, class)."""
    task = next(iter(results.values()))["task"]
    outputs = [outputs_on(result, paths) for result in results.values()]
    return {
        "degree": MEASURE.degree,
        "damping": MEASURE.damping,
        "classes": CIFAR10,
        "nodes": MEASURE.nodes(1, dtype=torch.float64).tolist(),
        "models": [describe(MODELS[name], result) for name, result in results.items()],
        "paths": [
            {
                "ends": [end(task, second), end(task, first)],  # alpha = 0, alpha = 1
                "values": [rounded(values[place]) for values in outputs],
            }
            for place, (first, second) in enumerate(paths)
        ],
    }


@torch.no_grad()
def outputs_on(result: dict, paths: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Returns probabilities at the nodes of each path: (paths, nodes, classes)."""
    field = field_of_tests(result)
    device = field.x.device
    first, second = (torch.tensor(ends, device=device) for ends in zip(*paths, strict=True))
    field = field.between(first, second, MEASURE.nodes(len(paths), device=device))
    return field().softmax(-1).unflatten(0, (len(paths), -1)).double().cpu()


def describe(label: str, result: dict) -> dict:
    last, estimate = result["summary"]["last"], result["estimate"]
    return {
        "label": label,
        "accuracy": round(last["eval/acc"], 2),
        "degree": round(estimate.mean, 4),
        "standard_error": round(estimate.standard_error, 4),
    }


def end(task, index: int) -> dict:
    """Returns the image at one end of a path."""
    pixels = task.test.pixels[index].permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    image = base64.b64encode(file.getvalue()).decode()
    label = CIFAR10[int(task.test.labels[index])]
    return {"label": label, "image": f"data:image/png;base64,{image}"}


def rounded(values: torch.Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in row] for row in values.tolist()]


def to_text(content: dict) -> str:
    """Formats compact JSON with one line per path, which keeps diffs readable."""
    lines = {key: json.dumps(value, separators=(",", ":")) for key, value in content.items()}
    paths = [json.dumps(path, separators=(",", ":")) for path in content["paths"]]
    lines["paths"] = "[\n" + ",\n".join(paths) + "\n]"
    return "{\n" + ",\n".join(f'"{key}":{line}' for key, line in lines.items()) + "\n}\n"


if __name__ == "__main__":
    or_explain(main)
