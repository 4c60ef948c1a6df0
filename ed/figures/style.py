"""The common style of all figures.

Colours show methods: ED always has the same colour, and the baseline is grey. Thin lines are
seeds, thick lines are their mean, and bands are intervals. The colours are from Okabe and Ito's
palette, which is safe for colour-blind readers.
"""

import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

WIDTH = 7.2  # inches; keeps text readable at the width of a README
ED, BASELINE, INK, FAINT = "#d55e00", "#7a7a7a", "#222222", "#666666"
METHODS = {
    "none": BASELINE,
    "mixup": "#0072b2",
    "sam": "#56b4e9",
    "asam": "#009e73",
    "jacobian": "#cc79a7",
    "ed": ED,
}
# for series other than methods
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#222222")
CLASSES = ("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255")
CLASSES += ("#aa4499", "#222222")  # Paul Tol's muted colours, for ten outputs
SEED = {"linewidth": 0.7, "alpha": 0.5}
MEAN = {"linewidth": 1.8}
BAND = {"alpha": 0.18, "linewidth": 0}
LETTERS_PER_INCH = 15  # for small text

STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # embeds fonts, so that text in the PDF can be selected
}


def method_colour(regularizer: str) -> str:
    """Returns the colour of a regularizer; variants such as ed_performance share it."""
    return METHODS.get(regularizer.split("_")[0], INK)


def legend_handles(looks: Mapping[str, dict]) -> list[Line2D]:
    """Returns one handle per label, dark unless its look has a colour."""
    return [Line2D([], [], label=label, **{"color": INK} | look) for label, look in looks.items()]


def caption(figure: Figure, text: str) -> None:
    """Adds small grey text below a figure, wrapped to its width."""
    wrapped = textwrap.fill(text, int(1.05 * LETTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=8, color=FAINT)


def save(figure: Figure, path: Path) -> None:
    """Writes an image in the format given by the file extension."""
    if path.suffix == ".png":
        save_png(figure, path)
    else:
        figure.savefig(path)


def save_png(figure: Figure, file: IO[bytes] | Path) -> None:
    """Writes a PNG with a colour palette, about a third of the usual size."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        resolution = image.info["dpi"]
        image.convert("RGB").quantize().save(file, format="png", optimize=True, dpi=resolution)
