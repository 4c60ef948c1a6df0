"""Does a network lean on the black borders of crops? python scripts/borders.py RUN [RUN ...]

Training crops (task.augment=true) have borders that are exactly black, blends of two seldom. A
penalty on paths between crops could therefore be evaded: be sure of a class only where a border is
exactly black. This shows how a trained network takes the test pictures as they are, cropped as in
training, in the same crops with other borders, and with a drawn border: its accuracy, and how the
largest probability falls on the way to another picture. A network that does not know the trick
takes all crops alike, and falls no faster from those with black borders.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout finds ed

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.streams import generator
from ed.engine.errors import or_explain
from ed.engine.main import load_run
from ed.files import write_atomic
from ed.tasks.crops import PADDING, crop_and_flip
from ed.tasks.images import PictureTask

SHARES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.5)  # of another picture in a blend
DRAWN = 2  # pixels
BORDERS = {
    "cropped as in training": {},
    "so cropped, borders not quite black": {"value": 3},  # of 255
    "so cropped, mirrored borders": {"mode": "reflect"},
}
CHUNK = 500


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="with a checkpoint")
    parser.add_argument("--count", type=int, default=10_000, help="of test pictures, at most")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    foreign = "build parts that are not ed's from a RUN's config"
    parser.add_argument("--trust", action="store_true", help=foreign)
    parser.add_argument("--out", type=Path, help="write the tables as Markdown")
    options = parser.parse_args(arguments)
    if options.count < 2:
        raise ValueError(f"--count {options.count}: blends need at least 2 pictures")
    if options.out and not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no such folder")
    tables = []
    for run in options.runs:
        tables.append(f"{run.parent.name}, {run.name}:\n\n" + "\n".join(table(run, options)) + "\n")
        print(tables[-1], flush=True)
    if options.out:
        write_atomic(options.out, "\n".join(tables))


def table(run: Path, options: argparse.Namespace) -> list[str]:
    trained = load_run(run, options.device, trust=options.trust)
    task, model = trained.task, trained.model
    if not (isinstance(task, PictureTask) and hasattr(task.test, "pixels")):  # else from files
        raise ValueError(f"{run} is a run of {type(task).__name__}, which crops no pictures")
    pixels, labels = task.test.pixels[: options.count], task.test.labels[: options.count]
    falls = " | ".join(f"{share:g} of another" for share in SHARES[1:])
    rows = [f"| test pictures | accuracy (%) | largest probability | {falls} |"]
    rows.append("| --- " * (len(SHARES) + 2) + "|")
    for name, view in views(pixels).items():
        accuracy, sure = look(model, task.normalise(view), labels)
        rows.append(f"| {name} | {accuracy:.1f} | " + " | ".join(f"{p:.3f}" for p in sure) + " |")
    return rows


def views(pixels: Tensor) -> dict[str, Tensor]:
    """The pictures as they are; as training takes them; with other borders; with a drawn one."""
    shown = {"as they are": pixels}
    for name, how in BORDERS.items():
        padded = F.pad(pixels.float(), [PADDING] * 4, **how).to(pixels.dtype)
        everything = torch.arange(len(pixels), device=pixels.device)
        draw = generator(0, "borders", device=pixels.device)  # the same crops each time
        shown[name] = crop_and_flip(padded, everything, PADDING, draw)
    drawn = pixels.clone()
    drawn[..., :DRAWN, :] = 0
    drawn[..., :DRAWN] = 0
    return shown | {"with a drawn border": drawn}


@torch.no_grad()
def look(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[float, list[float]]:
    """Accuracy in percent; mean largest probability at each share of the picture before."""
    sure = []
    for share in SHARES:
        blend = torch.lerp(x, x.roll(1, 0), share)
        p = torch.cat([model(part).float().softmax(-1) for part in blend.split(CHUNK)])
        sure.append(p.amax(-1).mean().item())
        if share == 0:
            accuracy = 100 * (p.argmax(-1) == labels).double().mean().item()
    return accuracy, sure


if __name__ == "__main__":
    or_explain(main)
