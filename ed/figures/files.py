"""The files of a table's figure: found by name, drawn in one style, the same bytes every time.

An experiment file says `figure: ed.figures.NAME:draw`; what such a function is given and what it
returns is told in scripts/table.py.
"""

import importlib
import io
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.figure import Figure

from ed.analysis.collect import Row
from ed.analysis.spec import SpecError, Table, reduced_name

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text in the PDF stays text
}
UNDATED = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}

Draw = Callable[[Table, Sequence[Row]], Figure | None]


def figures(table: Table, rows: Sequence[Row]) -> dict[str, bytes]:
    """Name and content of every file: one figure of the table's own runs, one of each reduction."""
    draw = drawing(table)
    order = {cell.home: place for place, cell in enumerate(table.points.values())}
    done = sorted(
        (row for row in rows if row.status == "done"),
        key=lambda row: (order[row.table, row.cell], row.seed),
    )
    files = {}
    for deviations in sorted({row.deviations for row in done}):
        with matplotlib.rc_context(STYLE):
            figure = draw(table, [row for row in done if row.deviations == deviations])
            if figure is None:
                continue
            if deviations:
                figure.suptitle(f"Reduced: {deviations}", fontsize=8, color="tab:red")
            stem = reduced_name(table.name, deviations.split())
            files |= {f"{stem}.{kind}": _bytes(figure, kind) for kind in UNDATED}
    return files


def drawing(table: Table) -> Draw:
    """The function that the experiment file names."""
    module, _, function = table.figure.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"{table.path}: figure: {table.figure}: {error}") from None


def _bytes(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=UNDATED[kind])
    return file.getvalue()
