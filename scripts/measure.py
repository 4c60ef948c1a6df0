"""Measures the effective degree of a model: python scripts/measure.py --timm resnet50 --data IMAGES

The model is a finished run (--run), or a timm or transformers model by name; --weights FILE loads
your own state dict. The images come from a folder, a data set (hub id, or folder with parquet
files), or `embedded`, the CIFAR-10 subset that ships with ed. A run is measured on its own training
set. The script prints ED with its 95 % confidence interval and coefficients, and draws a few paths.
The defaults are the paper's protocol: 400 paths, r = 200, K = 40.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ed.core.estimator import Estimate, estimate
from ed.core.field import Field
from ed.datasets.images import as_rgb, load_table
from ed.engine.errors import or_explain
from ed.engine.main import choose_device, load_run
from ed.engine.settings import check_numbers
from ed.figures.paths import Portrait, draw_portraits, image_file
from ed.measures.base import fixed_subset
from ed.measures.degree import EffectiveDegree
from ed.models.named import check_timm_name, load_timm, unreachable
from ed.models.text import NO_CODE
from ed.models.weights import load_weights, read_weights
from ed.runtime import runs
from ed.runtime.hub import hub_or_cache
from ed.tasks.image_folder import SUFFIXES, image_files

DRAWN = 3  # paths
BAR_WIDTH, BAR_DECADES = 40, 5
NORMAL_95 = 1.96  # half-width of a 95 % interval in standard errors
OTHER_WEIGHTS = "use --weights FILE, or --random-weights to measure the untrained model"
OTHER_FOLDER = "use a folder with config.json, preprocessor_config.json and model.safetensors"


@dataclass(frozen=True)
class Subject:
    """The model and examples to measure.

    Attributes:
        field: the model in eval mode, with the examples that paths connect.
        image: returns the image of an example, (3, H, W) in [0, 1]; None if there are no images.
        titles: one per example.
    """

    name: str
    field: Field
    image: Callable[[int], Tensor] | None
    titles: list[str]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    measure = EffectiveDegree(
        pairs=options.pairs,
        resolution=options.resolution,
        degree=options.degree,
        basis=options.basis,
        components=options.components,
        weighting="normalised" if options.normalised else "raw",
        outputs="raw" if options.normalised or options.raw_outputs else "softmax",
        memory_gib=options.memory_gib,
        seed=options.seed,
    )
    device = choose_device(options.device, "--device ")
    subject = of_run(options, measure, device) if options.run else of_name(options, device)
    softmax = measure.outputs == "softmax"
    result = estimate(
        subject.field,
        pairs=measure.pairs,
        representation=measure.representation,
        softmax=softmax,
        memory_gib=measure.memory_gib,
        seed=measure.seed,
        progress=sys.stderr.isatty(),
    )
    report(subject, result)
    draw(subject, result, options.out, softmax=softmax, memory_gib=measure.memory_gib)
    print(f"figure: {options.out}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    models.add_argument("--run", type=Path, metavar="DIR", help="a run folder: runs/...")
    models.add_argument("--timm", metavar="NAME", help="a timm model, e.g. resnet50")
    models.add_argument(
        "--transformers", metavar="NAME", help="hub id or folder of an image classifier"
    )
    add = parser.add_argument
    add("--trust", action="store_true", help="allow classes outside ed in --run's config")
    weights = "your own state dict, for --timm or --transformers"
    add("--weights", type=Path, metavar="FILE", help=weights)
    add("--classes", type=int, metavar="N", help="number of classes in your --weights")
    add("--random-weights", action="store_true", help="measure the untrained model")
    add("--data", metavar="WHERE", help="images: folder, hub id, or embedded")
    add("--split", help="split of a data set (default: train)")
    protocol = parser.add_argument_group("protocol")
    add = protocol.add_argument
    add("--pairs", type=int, default=400, help="number of paths (default: 400)")
    add("--resolution", type=int, default=200, metavar="R", help="nodes per path (default: 200)")
    add("--degree", type=int, default=40, metavar="K", help="maximum degree (default: 40)")
    add("--basis", default="chebyshev", help="chebyshev or legendre")
    add("--components", type=int, metavar="M", help="principal components instead of all outputs")
    add("--normalised", action="store_true", help="the paper's ED_norm, on the logits")
    add("--raw-outputs", action="store_true", help="fit the outputs without softmax")
    add("--seed", type=int, default=0, help="seed for choosing paths (default: 0)")
    add("--memory-gib", type=float, default=1.0, help="memory for a forward pass (default: 1)")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    out = "image of a few paths (default: paths.png)"
    parser.add_argument(
        "--out", type=image_file, default=Path("paths.png"), metavar="PNG", help=out
    )
    options = parser.parse_args(arguments)
    for name in ("pairs", "resolution", "degree", "memory_gib"):
        check_numbers(f"--{name.replace('_', '-')}", getattr(options, name), name)
    if options.random_weights and (options.weights or options.run):
        parser.error("--random-weights: cannot be combined with --weights or --run")
    if options.classes is not None and options.classes < 1:
        parser.error(f"--classes {options.classes}: must be at least 1")
    if options.classes and (options.run or not (options.weights or options.random_weights)):
        parser.error("--classes: requires a model by name, with --weights or --random-weights")
    return options


def of_run(options: argparse.Namespace, measure: EffectiveDegree, device) -> Subject:
    if not runs.is_run(options.run):
        below = sorted(path.parent for path in options.run.glob(f"*/{runs.CONFIG}"))
        near = f"; did you mean {below[0]}?" if below else ""
        raise FileNotFoundError(f"--run {options.run}: not a run folder (no {runs.CONFIG}){near}")
    for option in ("data", "split"):
        if getattr(options, option):
            raise ValueError(f"--{option}: a run is measured on its own training set; remove it")
    trained = load_run(options.run, str(device), trust=options.trust)
    task, model = trained.task, trained.model
    if not task.num_examples:
        raise ValueError(f"--run {options.run}: {type(task).__name__} has no training examples")
    if measure.outputs == "softmax" and not task.has_logits:
        raise ValueError(
            f"--run {options.run}: {type(task).__name__} has no logits; add --raw-outputs, or "
            "--normalised"
        )
    if options.weights:
        read_into(model, options.weights)
    with torch.no_grad():
        field = measure.field(model, task)
    chosen = fixed_subset(task.num_examples, 2 * measure.pairs, measure.seed)
    batch = task.examples(chosen)
    kind, numbers = ("class", batch["label"]) if task.has_labels else ("example", chosen)
    titles = [f"{kind} {number}" for number in numbers.tolist()]

    def image(index: int) -> Tensor | None:
        found = task.images({name: value[index : index + 1] for name, value in batch.items()})
        return None if found is None else found[0].cpu()

    return Subject(str(options.run), field, None if image(0) is None else image, titles)


def of_name(options: argparse.Namespace, device) -> Subject:
    """Loads a model by name, and images with the model's preprocessing."""
    if not options.data:
        raise ValueError("--data: required; use a folder of images, a hub id, or embedded")
    files = list_images(options.data, options.split)  # before downloading weights
    build = timm_model if options.timm else transformers_model
    model, transform, (mean, std) = build(options)
    if options.weights:
        read_into(model, options.weights)
    # half-precision rounding would increase the effective degree
    model = model.to(device, torch.float32).eval()
    chosen = fixed_subset(len(files), 2 * options.pairs, options.seed).tolist()
    inputs = torch.stack([transform(opened(files[i])) for i in chosen])
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    own = options.weights.name if options.weights else "its own weights"
    kind = "random weights" if options.random_weights else own
    name = f"{options.timm or options.transformers} ({kind})"
    titles = [f"image {i}" for i in chosen]
    field = Field.of(model, inputs.to(device))

    def image(index: int) -> Tensor:
        return (inputs[index] * scale + shift).clamp(0, 1)

    return Subject(name, field, image, titles)


def list_images(source: str, split: str | None) -> list[partial]:
    """Returns, for each image of a folder or data set, a function that opens it."""
    from PIL import Image

    folder = Path(source).expanduser()
    if folder.is_dir() and not any(folder.rglob("*.parquet")):
        if split:
            raise ValueError(
                f"--split {split}: --data {source} is a folder of images, which are all used; "
                "remove it and pass the folder of the split as --data"
            )
        files = image_files(folder)
        if len(files) < 2:
            raise ValueError(
                f"--data {source}: {len(files)} images ({' '.join(SUFFIXES)}); paths need at least "
                "2"
            )
        return [partial(Image.open, path) for path in files]
    table = load_table(source, split or "train", "--data")
    column = next((name for name in ("img", "image") if name in table.column_names), None)
    if column is None:
        raise ValueError(f"--data {source}: no column img or image in {table.column_names}")
    from datasets import Image as Decoded

    table = table.cast_column(column, Decoded())
    return [partial(lambda index: table[index][column], index) for index in range(len(table))]


def opened(file: partial):
    """Opens an image as RGB; errors name the file."""
    from PIL.Image import DecompressionBombError

    try:
        return as_rgb(file())
    except (OSError, SyntaxError, ValueError, DecompressionBombError) as error:
        (name,) = file.args  # Pillow names the file only if its format is unknown
        reason = str(error).removesuffix(f" {str(name)!r}")
        raise ValueError(f"--data: {name}: {reason}; fix or remove it") from error


def timm_model(options: argparse.Namespace):
    """Loads a timm model; returns it with its image transform and the transform's mean and std."""
    import timm

    name, given = options.timm, f"--timm {options.timm}"
    check_timm_name(name, given)
    own = not (options.random_weights or options.weights)
    torch.manual_seed(options.seed)
    model = load_timm(name, given, OTHER_WEIGHTS, pretrained=own, num_classes=options.classes)
    settings = timm.data.resolve_data_config({}, model=model)
    transform = timm.data.create_transform(**settings)
    return model, transform, (settings["mean"], settings["std"])


def transformers_model(options: argparse.Namespace):
    """Like `timm_model`, for an image classifier from transformers."""
    import transformers

    name = options.transformers
    torch.manual_seed(options.seed)
    try:
        with hub_or_cache(name):
            processor = transformers.AutoImageProcessor.from_pretrained(name, **NO_CODE)
            model, missing = classifier_of(name, options)
    except Exception as error:
        raise unreachable(f"--transformers {name}", error, OTHER_FOLDER) from error
    if missing:  # transformers would silently initialise them at random
        raise ValueError(
            f"--transformers {name}: its weights lack {', '.join(missing)[:120]}; use a fine-tuned "
            "classifier, or --random-weights"
        )

    def transform(image) -> Tensor:
        return processor(image, return_tensors="pt")["pixel_values"][0]

    return model, transform, (processor.image_mean, processor.image_std)


def classifier_of(name: str, options: argparse.Namespace) -> tuple[nn.Module, list[str]]:
    """Returns the transformers model and the names of missing weights."""
    from transformers import AutoConfig
    from transformers import AutoModelForImageClassification as Classifier

    if options.random_weights or options.weights:
        classes = {"num_labels": options.classes} if options.classes else {}
        config = AutoConfig.from_pretrained(name, **classes, **NO_CODE)
        return Classifier.from_config(config, **NO_CODE), []
    model, loaded = Classifier.from_pretrained(name, output_loading_info=True, **NO_CODE)
    return model, sorted(loaded["missing_keys"])


def read_into(model: nn.Module, path: Path) -> None:
    given, into = f"--weights {path}", "the model; use --classes N for another number of classes"
    load_weights(model, read_weights(path, given), given, into=into)


def report(subject: Subject, result: Estimate) -> None:
    half = NORMAL_95 * result.standard_error
    settings = result.representation
    print(f"{subject.name}, r = {settings.resolution}, K = {settings.degree}")
    print(
        f"{result.symbol} {result.mean:.4g}, 95 % confidence interval "
        f"[{result.mean - half:.4g}, {result.mean + half:.4g}] "
        f"({len(result.values)} paths between {len(subject.field.x)} examples)"
    )
    print(f"\n  k  mean |c_k| (bars: logarithmic, {BAR_DECADES} decades)")
    print("\n".join(bars(result.spectrum)))


def bars(spectrum: Tensor) -> list[str]:
    """Returns one line per degree, with a logarithmic bar."""
    highest = spectrum.max().item() or 1.0
    lines = []
    for degree, value in enumerate(spectrum.tolist()):
        share = 1 + math.log10(value / highest) / BAR_DECADES if value > 0 else 0
        bar = "#" * round(BAR_WIDTH * share)  # empty if negative
        lines.append(f"{degree:3d}  {value:.3e}  {bar}".rstrip())
    return lines


def draw(
    subject: Subject, result: Estimate, path: Path, *, softmax: bool, memory_gib: float
) -> None:
    pairs = result.ends.T[:DRAWN].tolist()
    title = "/".join(subject.name.split("/")[-2:])
    portrait = Portrait.of(
        title, subject.field, pairs, result, softmax=softmax, memory_gib=memory_gib
    )
    ends = None
    if subject.image is not None:
        order = [index for first, second in pairs for index in (second, first)]
        ends = [(subject.image(i), subject.titles[i]) for i in order]
    reduced = result.representation.components is not None
    label = "PC {}" if reduced else "class {}" if softmax else "output {}"
    draw_portraits(path, [portrait], name=label.format, ends=ends)


if __name__ == "__main__":
    or_explain(main)
