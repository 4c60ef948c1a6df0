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


def figure_files(
    table: Table, rows: Sequence[Row], deviations: str = "", *, available: bool = False
) -> dict[str, bytes]:
    """Name and content of each file of one figure, of the finished runs with these deviations.

    A figure that reads what runs logged raises NoHistory where the folder of one is missing, lest
    it take the place of one with more runs.

    Args:
        available: draw the runs whose folders are here, and say in the picture how many they are.
    """
    order = {cell.home: place for place, cell in enumerate(table.points.values())}
    done = sorted(
        (row for row in rows if row.status == "done" and row.deviations == deviations),
        key=lambda row: (order[row.table, row.cell], row.seed),
    )
    drawn = [row for row in done if row.folder is not None] if available else done
    with matplotlib.rc_context(STYLE):
        figure = drawing(table)(table, drawn)
        if figure is None:
            return {}
        remarks = _remarks(table, deviations, len(drawn), len(done))
        if remarks:
            figure.suptitle("\n".join(remarks), fontsize=8, color="tab:red")
        stem = reduced_name(table.name, deviations.split())
        return {f"{stem}.{kind}": _bytes(figure, kind) for kind in UNDATED}


def _remarks(table: Table, deviations: str, drawn: int, done: int) -> list[str]:
    """What must stand in the picture, as it travels without its table."""
    remarks = [f"Reduced: {deviations}"] if deviations else []
    if not deviations and not table.comparable:
        remarks.append(table.title)
    return remarks + ([f"{drawn} of {done} finished runs"] if drawn < done else [])


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
