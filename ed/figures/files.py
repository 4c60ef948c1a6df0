"""Renders the figure of a table to files that are identical on every call.

An experiment file names the drawing function, `figure: ed.figures.NAME:draw`; scripts/table.py
documents its arguments and result.
"""

import importlib
import io
import textwrap
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.figure import Figure

from ed.analysis.collect import Row
from ed.analysis.spec import SpecError, Table
from ed.analysis.store import figure_stem
from ed.figures.style import INK, LETTERS_PER_INCH, STYLE, save_png
from ed.runtime.runs import UNDER_WAY, Status

UNDATED = {"CreationDate": None, "Producer": None}

Draw = Callable[[Table, Sequence[Row]], Figure | None]


def figure_files(
    table: Table,
    rows: Sequence[Row],
    deviations: str = "",
    *,
    available: bool = False,
    kinds: Sequence[str] = ("png",),
) -> dict[str, bytes]:
    """Draws the runs with these deviations; returns the content of the files by name.

    Raises NoHistory if the logged values of a finished run are missing, so that the existing
    figure is not replaced by one with fewer runs.

    Args:
        available: draw only runs with logged values, and include unfinished runs in cells
            without a finished run; the image states how many.
        kinds: the formats to render, png or pdf.
    """
    order = {cell.home: place for place, cell in enumerate(table.points.values())}
    here = sorted(
        (row for row in rows if row.deviations == deviations),
        key=lambda row: (order[row.home], row.seed),
    )
    done = [row for row in here if row.status == Status.DONE]
    drawn = _available(here) if available else done
    with matplotlib.rc_context(STYLE):
        figure = drawing(table)(table, drawn)
        if figure is None:
            return {}
        remarks = _remarks(table, deviations, drawn, done)
        if remarks:
            letters = int(LETTERS_PER_INCH * figure.get_figwidth())
            lines = [textwrap.fill(remark, letters) for remark in remarks]
            figure.suptitle("\n".join(lines), fontsize=8, color=INK)
        stem = figure_stem(deviations)
        return {f"{stem}.{kind}": _bytes(figure, kind) for kind in kinds}


def _available(rows: Sequence[Row]) -> list[Row]:
    """Returns the finished runs of each cell, or its unfinished runs if none has finished.

    The two are not mixed, because a mean curve would stop at the shortest run.
    """
    recorded = [row for row in rows if row.record is not None]
    finished = {row.home for row in recorded if row.status == Status.DONE}
    return [
        row
        for row in recorded
        if row.status == Status.DONE or (row.status in UNDER_WAY and row.home not in finished)
    ]


def _remarks(table: Table, deviations: str, drawn: Sequence[Row], done: Sequence[Row]) -> list[str]:
    """Returns the remarks to print on the image: deviations and missing runs."""
    under_way = sum(row.status in UNDER_WAY for row in drawn)
    finished = len(drawn) - under_way
    changes = [text.rpartition(".")[2].replace("=", " ") for text in deviations.split()]
    remarks = [f"Reduced runs: {', '.join(changes)}"] if deviations else []
    if not deviations and not table.comparable:
        remarks.append(table.title)
    if finished < len(done):
        remarks.append(f"{finished} of {len(done)} finished runs")
    if under_way:
        remarks.append(f"{under_way} of these {len(drawn)} runs are not finished")
    return remarks


def drawing(table: Table) -> Draw:
    """Returns the drawing function that the experiment file names."""
    module, _, function = table.figure.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"{table.path}: figure: {table.figure}: {error}") from None


def _bytes(figure: Figure, kind: str) -> bytes:
    """Renders the figure without dates or versions, so that equal figures give equal bytes."""
    file = io.BytesIO()
    if kind == "pdf":
        figure.savefig(file, format=kind, metadata=UNDATED)
    else:
        save_png(figure, file)
    return file.getvalue()
