"""One section per experiment file: the paper's numbers beside ours."""

import base64
import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from ed.analysis.collect import Row
from ed.analysis.render import (
    AGGREGATE,
    AGGREGATE_MEANING,
    Line,
    aggregate_fields,
    aggregate_title,
    both,
    glance,
    glance_header,
    grid_lines,
    mean_and_std,
    signed,
    table_lines,
)
from ed.analysis.report.cells import anchor, cell_details
from ed.analysis.report.charts import interval_strip
from ed.analysis.report.markdown import inline
from ed.analysis.report.markup import Html, join, plural, tag
from ed.analysis.report.pools import pool as pool_table
from ed.analysis.report.sortable import Field, sortable
from ed.analysis.spec import Cell, Paper, Table, expand
from ed.analysis.stats import Ours, difference
from ed.analysis.store import FIGURE, results_folder
from ed.runtime.runs import Status

KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Experiment:
    """An experiment file with what is known of its runs."""

    table: Table
    rows: list[Row]

    @property
    def planned(self) -> set[tuple]:
        return {(run.table, run.cell, run.seed) for run in expand(self.table)}

    @property
    def done(self) -> set[tuple]:
        plain = (row for row in self.rows if row.status == Status.DONE and not row.deviations)
        return {(row.table, row.cell, row.seed) for row in plain} & self.planned

    @property
    def lines(self) -> list[Line]:
        return table_lines(self.table, self.rows)

    @property
    def verdicts(self) -> list[str]:
        """The first word of each, on the numbers that the paper prints; once where ours of the last
        and of the best epoch stand beside the same one."""
        told = [line for line in self.lines if line.paper.mean is not None]
        last = [(line.label, line.metric) for line in told if line.metric.startswith("eval/")]
        twins = [(label, metric.replace("eval/", "best/")) for label, metric in last]
        kept = (line for line in told if (line.label, line.metric) not in twins)
        return [line.verdict.split()[0] for line in kept]


def section_id(table: Table) -> str:
    """Prefixed, so that no experiment's name meets an id of the page's own."""
    return f"experiment-{table.name}"


def section(experiment: Experiment, pool: dict[tuple, Row]) -> Html:
    """All of an experiment. `pool` has the rows of every table by key: a run that another table
    has collected is shown with the cell it belongs to."""
    table, rows = experiment.table, experiment.rows
    footnotes: list[str] = []
    cells = [(cell, metric) for cell in table.cells.values() for metric in cell.metrics]
    if table.correlation is None:
        main = comparison(table, cells, experiment.lines, footnotes)
        if grid := _glance(table, experiment.lines):
            title = tag("summary", "Number by number: differences, verdicts, notes")
            main = join(grid, tag("details", title, main))
    else:
        main = pool_table(table, [row for row in rows if not row.deviations])
    folds = _tuning(table, rows, footnotes)
    image = results_folder(table) / f"{FIGURE}.png"
    parts = [
        tag("h3", table.title),
        tag("p", inline(f"{table.place}."), class_="place") if table.place else None,
        main,
        _aggregate(table, rows),
        _footnotes(table, footnotes),
        figure(image, title=table.title, named=False) if image.exists() else None,
        _notes(table),
        _pending(experiment),
        *folds,
        _all_cells(table, pool),
    ]
    return tag("section", *parts, id=section_id(table), class_="experiment")


def _glance(table: Table, lines: Sequence[Line]) -> Html | None:
    """Cells by metrics, before the numbers one by one; nothing where there is one metric."""
    _, *metrics = header = glance_header(table, lines)
    body = []
    for label, own in glance(lines).items():
        found = [own.get(metric) for metric in metrics]
        numbers = [(both(line, table), line and line.ours.mean) for line in found]
        body.append([(label, label), *numbers])
    return sortable(list(header.values()), body) if body else None


def comparison(
    table: Table,
    cells: Sequence[tuple[Cell, str]],
    lines: Sequence[Line],
    footnotes: list[str],
) -> Html:
    """The sortable table of the given lines; remarks become footnotes, numbered on."""
    several = len(table.metrics) > 1
    extents = {
        metric: _extent([x for x in lines if x.metric == metric]) for metric in table.metrics
    }
    sides = {"paper ■": any(x.paper.mean is not None for x in lines)}
    sides["ours ●"] = any(x.ours.mean is not None for x in lines)
    header = ["cell", *(["metric"] if several else []), "paper", "ours", "n", "difference"]
    header += ["verdict", " ".join(side for side, there in sides.items() if there), "notes"]
    body = []
    for (cell, metric), line in zip(cells, lines, strict=True):
        fields: list[Field] = [(_cell_link(table, cell), line.label)]
        if several:
            fields.append((table.metrics[metric], table.metrics[metric]))
        body.append(fields + _line_fields(table, line, extents[metric], footnotes))
    kept = [i for i in range(len(header)) if i == 0 or any(row[i][0] for row in body)]
    return sortable([header[i] for i in kept], [[row[i] for i in kept] for row in body])


def _line_fields(
    table: Table, line: Line, extent: tuple[float, float] | None, footnotes: list[str]
) -> list[Field]:
    paper, ours = line.paper, line.ours
    apart = difference(ours, paper)
    strip = ""
    if extent is not None and (paper.mean is not None or ours.mean is not None):
        strip = interval_strip((paper.mean, paper.std), (ours.mean, ours.std), extent)
    return [
        (_mean_std(paper, table), paper.mean),
        (_mean_std(ours, table), ours.mean),
        (str(ours.count or ""), ours.count or None),
        ("" if apart is None else _difference(apart, paper, table), apart),
        (verdict_mark(line.verdict), line.verdict),
        (strip, ours.mean if ours.mean is not None else paper.mean),
        (_references(table, line.remarks, footnotes), None),
    ]


def _cell_link(table: Table, cell: Cell) -> Html:
    if cell.best_of is not None:  # it has no runs of its own, its grid has
        return tag("a", cell.label, href=f"#{table.name}--{cell.best_of}")
    return tag("a", cell.label, href=f"#{anchor(cell.home)}")


def _extent(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The range of all intervals of one metric; None where there are no two to compare."""
    found = [
        (mean - (std or 0), mean + (std or 0))
        for line in lines
        for mean, std in ((line.paper.mean, line.paper.std), (line.ours.mean, line.ours.std))
        if mean is not None
    ]
    if len(found) < 2:
        return None
    return min(low for low, _ in found), max(high for _, high in found)


def _mean_std(side: Paper | Ours, table: Table) -> str:
    return "" if side.mean is None else mean_and_std(side.mean, side.std, table.digits)


def _difference(apart: float, paper: Paper, table: Table) -> str:
    return signed(apart, paper, table.digits).replace("-", "\N{MINUS SIGN}")


def verdict_mark(text: str) -> Html:
    return tag("span", text, class_=f"verdict {text.split()[0]}")


def _references(table: Table, remarks: Sequence[str], footnotes: list[str]) -> Html | str:
    for remark in remarks:
        if remark not in footnotes:
            footnotes.append(remark)
    numbers = sorted(footnotes.index(remark) + 1 for remark in remarks)
    links = [tag("a", str(n), href=f"#{section_id(table)}-note-{n}") for n in numbers]
    return tag("sup", *_separated(links)) if links else ""


def _separated(links: Sequence[Html]) -> list[Html]:
    return [part for link in links for part in (Html(", "), link)][1:]


def _tuning(table: Table, rows: Sequence[Row], footnotes: list[str]) -> list[Html]:
    """Grids, each in a fold: the paper does not print their numbers."""
    every = grid_lines(table, rows)
    folds, place = [], 0
    for grid in table.tuning.values():
        lines = every[place : place + len(grid.points)]
        place += len(grid.points)
        begun = sum(line.begun for line in lines)
        count = f"{begun} of {plural(len(lines), 'point')} begun"
        title = tag("summary", f"Tuning: {grid.name} ", tag("span", count, class_="quiet"))
        cells = [(point, point.metrics[0]) for point in grid.points]
        shown = comparison(table, cells, lines, footnotes)
        rule = tag("p", f"Chosen is {grid.rule}.")
        folds.append(tag("details", title, rule, shown, id=f"{table.name}--{grid.name}"))
    return folds


def _aggregate(table: Table, rows: Sequence[Row]) -> Html | None:
    """All games as one number, if the table has one."""
    body = aggregate_fields(table, [row for row in rows if not row.deviations])
    if not body:
        return None
    shown = sortable(AGGREGATE, [[(text, text) for text in line] for line in body])
    return join(tag("h4", aggregate_title(table)), shown, tag("p", AGGREGATE_MEANING))


def _footnotes(table: Table, footnotes: Sequence[str]) -> Html | None:
    items = [
        tag("li", inline(note), id=f"{section_id(table)}-note-{i}")
        for i, note in enumerate(footnotes, start=1)
    ]
    return tag("ol", *items, class_="footnotes") if items else None


def _notes(table: Table) -> Html | None:
    notes = [tag("li", inline(note)) for note in table.notes]
    return tag("ul", *notes, class_="notes") if notes else None


def _pending(experiment: Experiment) -> Html:
    """What is done, what is left, what it costs."""
    done, planned = len(experiment.done), len(experiment.planned)
    if done == planned:
        state = f"Complete: {plural(done, 'run')}"
    else:
        state = f"Pending: {planned - done:,} of {plural(planned, 'run')}"
    parts = [
        tag("pre", text) if is_command else tag("p", inline(text))
        for is_command, text in header_comment(experiment.table.path)
    ]
    return tag("div", tag("p", tag("strong", state, ".")), *parts, class_="pending-note")


def header_comment(path: Path) -> list[tuple[bool, str]]:
    """The file's first comment, which says how to run it and what that costs: (is it a command,
    text) in turn. Commands begin with their program or are indented."""
    lines = path.read_text("utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    texts = (re.sub("^# ?", "", line) for line in comment)
    blocks = itertools.groupby(texts, lambda text: text.startswith(("python ", "export ", "  ")))
    return [
        (is_command, dedent("\n".join(group)) if is_command else " ".join(group).strip())
        for is_command, group in blocks
    ]


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in KINDS)


def figure(path: Path, *, title: str | None = None, named: bool = True) -> Html:
    """An embedded image, `named` if nothing above it says what it is. SVG is embedded as an image,
    too, so that it cannot run scripts."""
    content = base64.b64encode(path.read_bytes()).decode()
    source = f"data:{KINDS[path.suffix.lower()]};base64,{content}"
    title = title or path.stem.replace("_", " ")
    caption = tag("figcaption", title) if named else None
    picture = tag("img", src=source, alt=title, width=print_width(path.read_bytes()))
    return tag("figure", tag("div", picture, class_="card"), caption, class_="picture")


def print_width(content: bytes) -> int | None:
    """Of a PNG that knows its resolution, the width on paper in CSS pixels (96 to the inch): so
    its letters are as large as those around it. None: as many as the picture has."""
    place = content.find(b"pHYs")
    if not content.startswith(b"\x89PNG") or place < 0:
        return None
    (width,) = struct.unpack(">I", content[16:20])
    per_metre, _, unit = struct.unpack(">IIB", content[place + 4 : place + 13])
    return round(width / per_metre / 0.0254 * 96) if unit == 1 else None


def _all_cells(table: Table, pool: dict[tuple, Row]) -> Html | None:
    """A fold with the cells whose runs belong to this table."""
    own = [cell for cell in table.points.values() if cell.home[0] == table.name]
    if not own:
        return None
    by_home: dict[tuple[str, str], list[Row]] = {}
    for row in pool.values():
        by_home.setdefault(row.home, []).append(row)
    entries = []
    for cell in own:
        rows = sorted(by_home.get(cell.home, []), key=lambda row: (row.deviations, row.seed))
        entries.append(cell_details(table, cell, rows))
    title = tag("summary", f"Settings and runs of {plural(len(own), 'cell')}")
    return tag("details", title, join(*entries), class_="cells")
