"""Renders result rows as Markdown and LaTeX; equal rows give equal text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ed.analysis import costs, provenance, returns
from ed.analysis.collect import Row, finished
from ed.analysis.markdown import plain_table
from ed.analysis.numbers import decimals, fixed, mean_and_std, signed
from ed.analysis.pools import pool_sections
from ed.analysis.spec import Cell, Paper, Table
from ed.analysis.stats import Ours, difference, half_width, summarise, verdict
from ed.runtime.runs import Status

AGGREGATE = ("", "interquartile mean", "95 % interval", "runs")
AGGREGATE_MEANING = (
    "Returns are normalised: 0 is a blind policy, 1 the maximum (Cobbe et al., 2020, hard mode). "
    f"Intervals: bootstrap over the seeds of each game, {returns.RESAMPLES:,} resamples; none if a "
    "game has one seed. With few seeds they are too narrow: with three, they cover about 80 %."
)
HTML = re.compile(r"<(?=[A-Za-z/!?])")  # escaped in labels, notes and errors, which are plain text
LATEX = {"\\": r"\textbackslash{}"} | {c: rf"\{c}{{}}" for c in "^~"}
LATEX = str.maketrans(LATEX | {c: rf"\{c}" for c in "&%_#${}"})
HEADER = ("", "paper", "ours (n)", "difference", "verdict", "notes")
INTERVAL = "difference [95 % interval]"  # the column's title if a line has an interval


@dataclass(frozen=True)
class Line:
    """One line of a rendered table, for one metric of a cell."""

    cell: Cell
    metric: str
    paper: Paper
    ours: Ours
    verdict: str
    begun: bool  # whether any of its runs has started
    runs: str  # number of finished runs, with the planned number while some are missing
    remarks: list[str]
    by_seed: dict[int, float]  # our values

    @property
    def label(self) -> str:
        return self.cell.label


def to_markdown(
    table: Table,
    rows: Sequence[Row],
    *,
    figures: Mapping[str, str] | None = None,
    notes: str = "",
) -> str:
    """Renders the table: the paper's numbers beside ours, with figures and notes.

    Args:
        figures: names of image files, keyed by the deviations of their runs.
        notes: hand-written Markdown to add.
    """
    footnotes: list[str] = []
    place = [f"{table.place}."] if table.place else []
    parts = [f"# {table.title}", *place, *_sections(table, rows, footnotes)]
    for deviations, figure in (figures or {}).items():
        reduced = f"; reduced: {deviations}" if deviations else ""
        parts.append(f"![{table.title}{reduced}]({figure})")
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    parts += [notes.strip()] if notes.strip() else []
    parts.append(provenance.footer(table, rows))
    if footnotes:
        parts.append("\n".join(f"[^{i}]: {note}" for i, note in enumerate(footnotes, start=1)))
    return HTML.sub("&lt;", "\n\n".join(parts)) + "\n"


def to_latex(table: Table, rows: Sequence[Row]) -> str:
    """Renders the main table with booktabs rules, without reduced runs and tuning grids."""
    lines = table_lines(table, rows)
    body = [
        " & ".join(
            (
                _escape(_label(table, line)),
                _latex_number(line.paper, table),
                _latex_number(line.ours, table),
                str(line.ours.count),
                _escape(line.verdict),
            )
        )
        + r" \\"
        for line in lines
    ]
    # keep the title with the numbers if the table's settings differ from the paper's
    mark = [] if table.comparable else [rf"\multicolumn{{5}}{{l}}{{{_escape(table.title)}}} \\"]
    head = (
        r"\begin{tabular}{lcccl}",
        r"\toprule",
        *mark,
        r" & paper & ours & $n$ & verdict \\",
        r"\midrule",
    )
    caption = f"% {table.title} (python scripts/table.py {table.argument} --latex)"
    return "\n".join((caption, *head, *body, r"\bottomrule", r"\end{tabular}")) + "\n"


def table_lines(table: Table, rows: Sequence[Row], deviations: str = "") -> list[Line]:
    """Returns the lines of the table's cells, for the runs with these deviations."""
    cells = table.cells.values()
    shown = [(cell, metric) for cell in cells for metric in cell.metrics]
    return [_line(table, cell, metric, rows, deviations) for cell, metric in shown]


def grid_lines(table: Table, rows: Sequence[Row], deviations: str = "") -> list[Line]:
    """Returns one line per point of the tuning grids."""
    grids = table.tuning.values()
    shown = [(point, grid.metric) for grid in grids for point in grid.points]
    return [_line(table, point, metric, rows, deviations) for point, metric in shown]


def _line(table: Table, cell: Cell, metric: str, rows: Sequence[Row], deviations: str) -> Line:
    here = [row for row in rows if row.deviations == deviations]
    chosen, remarks = runs_of(table, cell, here)
    homes = _homes(table, cell)
    own = [row for row in here if row.home in homes]
    done, planned = len(finished(own, metric)), len(table.seeds) * len(homes)
    if cell.best_of is not None and chosen:  # a diverged grid run counts as done
        done += sum(row.status == Status.DIVERGED for row in own)
    ours, paper = summarise(finished(chosen, metric)), cell.paper.get(metric, Paper())
    judged = verdict(
        ours,
        paper,
        paper_count=table.paper_seeds,
        done=done,
        planned=planned,
        comparable=table.comparable and not deviations,
    )
    begun = any(row.status != Status.PENDING for row in own)
    runs = str(ours.count) if done >= planned else f"{done} of {planned}"
    by_seed = {row.seed: value for row in chosen for value in finished([row], metric)}
    return Line(cell, metric, paper, ours, judged, begun, runs, remarks, by_seed)


def glance(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Groups lines by cell and metric, for a table with one column per metric.

    Empty if there is only one cell or metric, or if we have no numbers yet.
    """
    cells: dict[str, dict[str, Line]] = {}
    for line in lines:
        cells.setdefault(line.label, {})[line.metric] = line
    several = min(len(cells), len({line.metric for line in lines})) > 1
    return cells if several and any(line.ours.count for line in lines) else {}


def glance_header(table: Table, lines: Sequence[Line]) -> dict[str, str]:
    """Returns the column titles by metric; the key of the first column is ""."""
    first = "ours [paper]" if _in_paper(lines) else ""
    used = {line.metric for line in lines}
    return {"": first} | {key: label for key, label in table.metrics.items() if key in used}


def both(line: Line | None, table: Table) -> str:
    """Formats our number, with the paper's in brackets if there is one."""
    if line is None:
        return ""
    ours, paper = (_number(side, table) for side in (line.ours, line.paper))
    return ours if line.paper.mean is None else f"{ours} [{paper}]"


def _glance_table(table: Table, lines: Sequence[Line]) -> list[str]:
    _, *metrics = header = glance_header(table, lines)
    body = [
        (label, *(both(own.get(metric), table) for metric in metrics))
        for label, own in glance(lines).items()
    ]
    shown = body and _in_paper(lines)
    return [plain_table(list(header.values()), body), "## Number by number"] if shown else []


def _sections(table: Table, rows: Sequence[Row], footnotes: list[str]) -> list[str]:
    if table.correlation is not None:
        return pool_sections(table, rows)
    lines = table_lines(table, rows)
    parts = [*_glance_table(table, lines), _numbers(table, lines, footnotes)]
    parts += _aggregate_section(table, rows, "") + _cost_section(table, rows)
    if table.tuning:
        rules = [f"- {grid.name}: {grid.rule}" for grid in table.tuning.values()]
        parts += ["## Tuning", "\n".join(rules)]
        parts.append(_numbers(table, grid_lines(table, rows), footnotes))
    for deviations in sorted({row.deviations for row in rows} - {""}):
        lines = table_lines(table, rows, deviations) + grid_lines(table, rows, deviations)
        begun = [line for line in lines if line.begun]
        parts += [f"## Reduced: {deviations}", _numbers(table, begun, footnotes)]
        parts += _aggregate_section(table, rows, deviations)
    return parts


def _aggregate_section(table: Table, rows: Sequence[Row], deviations: str) -> list[str]:
    fields = aggregate_fields(table, [row for row in rows if row.deviations == deviations])
    if not fields:
        return []
    title = f"{'###' if deviations else '##'} {aggregate_title(table)}"
    return [title, plain_table(AGGREGATE, fields), AGGREGATE_MEANING]


def aggregate_title(table: Table) -> str:
    return f"Games together: normalised return, {table.metrics[table.aggregate]}"


def aggregate_fields(table: Table, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns one row per method, on the games they share; the columns are AGGREGATE."""
    if table.aggregate is None:
        return []
    return [
        (
            f"{returns.METHODS[found.method]}, {found.games}",
            f"{found.mean:.3f}",
            "-" if found.low is None else f"{found.low:.3f} to {found.high:.3f}",
            str(found.runs),
        )
        for found in returns.aggregates(table, rows)
    ]


def _cost_section(table: Table, rows: Sequence[Row]) -> list[str]:
    fields = costs.cost_fields(table, rows)
    if not fields:
        return []
    meaning = costs.meaning(table, rows)
    return [f"## {costs.TITLE}", plain_table(costs.HEADER, fields), meaning]


def runs_of(table: Table, cell: Cell, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Returns the rows of a cell and remarks about them."""
    remarks = [cell.note] if cell.note else []
    if cell.best_of is not None:
        chosen, how = _best_point(table, cell.best_of, rows)
        return chosen, remarks + how + provenance.remarks(chosen)
    chosen = [row for row in rows if row.home == cell.home]
    if cell.home[0] != table.name:
        remarks.append(f"the runs of {'/'.join(cell.home)}")
    return chosen, remarks + provenance.remarks(chosen)


def _best_point(table: Table, name: str, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Returns the rows of the best grid point with all seeds, and a remark on the choice."""
    grid = table.tuning[name]
    points, metric = grid.points, grid.metric
    complete = {}
    for point in points:
        own = [row for row in rows if row.home == point.home]
        if len(finished(own, metric)) == len(table.seeds):
            complete[point.name] = own
    if not complete:
        return [], []
    choose = min if grid.lower_is_better else max
    best = choose(complete, key=lambda p: summarise(finished(complete[p], metric)).mean)
    wild = {row.home for row in rows if row.status == Status.DIVERGED}
    lost = [point.name for point in points if point.home in wild]
    without = f" ({', '.join(lost)} diverged)" if lost else ""
    by = f", by the lowest {table.metrics[metric]}" if grid.lower_is_better else ""
    found = f"{best}: the best of {len(complete)} of {len(points)} grid points{without}{by}"
    return complete[best], [found]


def _homes(table: Table, cell: Cell) -> set[tuple[str, str]]:
    if cell.best_of is None:
        return {cell.home}
    return {point.home for point in table.tuning[cell.best_of].points}


def _in_paper(lines: Sequence[Line]) -> bool:
    return any(line.paper.mean is not None for line in lines)


def _numbers(table: Table, lines: Sequence[Line], footnotes: list[str]) -> str:
    """Renders our numbers, beside the paper's if it has any of them."""
    show = _compared if _in_paper(lines) else _ours_alone
    return show(table, lines, footnotes)


def _ours_alone(table: Table, lines: Sequence[Line], footnotes: list[str]) -> str:
    """Renders one row per cell, with a column per metric; one row per metric of a single cell."""
    cells = glance(lines)
    metrics = {key: title for key, title in glance_header(table, lines).items() if key}
    if len(table.cells) == 1 and len(lines) > 1:
        cells = {table.metrics[line.metric]: {"": line} for line in lines}
        metrics = {"": lines[0].label}
    elif not any(len(own) > 1 for own in cells.values()):
        cells = {_label(table, line): {"": line} for line in lines}
        metrics = {"": "ours"}
    body = []
    for label, own in cells.items():
        fewest = min(own.values(), key=lambda line: line.ours.count)
        numbers = [both(own.get(metric), table) for metric in metrics]
        body.append((label, *numbers, fewest.runs, _marks(fewest.remarks, footnotes)))
    return plain_table(("", *metrics.values(), "runs", "notes"), body)


def footnote_numbers(remarks: Sequence[str], footnotes: list[str]) -> list[int]:
    """Returns the numbers of the remarks; new ones are added to `footnotes`."""
    footnotes += [remark for remark in remarks if remark not in footnotes]
    return [footnotes.index(remark) + 1 for remark in remarks]


def _marks(remarks: Sequence[str], footnotes: list[str]) -> str:
    return " ".join(f"[^{number}]" for number in footnote_numbers(remarks, footnotes))


def _compared(table: Table, lines: Sequence[Line], footnotes: list[str]) -> str:
    body = []
    for line in lines:
        count = f" ({line.ours.count})" if line.ours.count else ""
        body.append(
            (
                _label(table, line),
                _number(line.paper, table),
                _number(line.ours, table) + count,
                _difference(table, line),
                line.verdict,
                _marks(line.remarks, footnotes),
            )
        )
    bracketed = any(fields[3].endswith("]") for fields in body)
    header = [INTERVAL if bracketed and name == "difference" else name for name in HEADER]
    return plain_table(header, body)


def _difference(table: Table, line: Line) -> str:
    """Formats our difference to the paper, with its 95 % interval if both sides have a std.

    The interval has two significant digits of its half-width, but no more decimals than the
    difference.
    """
    apart, paper = difference(line.ours, line.paper), line.paper
    if apart is None:
        return ""
    shown = signed(apart, paper, table.digits)
    half = half_width(line.ours, Ours(paper.mean, paper.std, table.paper_seeds or 0))
    if half is None:
        return shown
    most = decimals(paper.mean, table.digits, significant=2)
    places = min(most, decimals(half, 0, significant=2))
    low, high = (fixed(end, places, sign="+") for end in (apart - half, apart + half))
    return f"{shown} [{low}, {high}]"


def _label(table: Table, line: Line) -> str:
    return line.label if len(table.metrics) == 1 else f"{line.label}, {table.metrics[line.metric]}"


def _number(side: Ours | Paper, table: Table) -> str:
    return "-" if side.mean is None else mean_and_std(side.mean, side.std, table.digits)


def _latex_number(side: Ours | Paper, table: Table) -> str:
    if side.mean is None:
        return "--"
    text = mean_and_std(side.mean, side.std, table.digits).replace("±", r"\pm")
    text = re.sub(r"e([+-]\d+)", lambda found: rf" \cdot 10^{{{int(found[1])}}}", text)
    return f"${text}$"


def _escape(text: str) -> str:
    return text.translate(LATEX)
