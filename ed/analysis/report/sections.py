"""What the templates show of one experiment."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from ed.analysis.collect import Row
from ed.analysis.correlation import cell_means
from ed.analysis.findings import finding
from ed.analysis.outline import MISSING
from ed.analysis.pools import (
    CONTROLLED,
    CONTROLLED_TITLE,
    CORRELATION,
    CORRELATION_MEANING,
    controlled_fields,
    controlled_meaning,
    correlation_fields,
)
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
)
from ed.analysis.report.cells import anchor, cell_view
from ed.analysis.report.grids import Field, Grid, Interval, extent, grid, marks, value
from ed.analysis.report.images import embed
from ed.analysis.report.text import items, plural
from ed.analysis.spec import Cell, Paper, Table
from ed.analysis.stats import Ours, difference
from ed.analysis.store import FIGURE, results_folder
from ed.analysis.verdicts import Experiment, Verdict, command, gpu_hours


def section_id(table: Table) -> str:
    """Prefixed, so that no experiment's name meets an id of the page's own."""
    return f"experiment-{table.name}"


def section(experiment: Experiment, pool: dict[tuple, Row]) -> dict:
    """All of an experiment. `pool` has the rows of every table by key: a run that another table
    has collected is shown with the cell it belongs to."""
    table, found = experiment.table, finding(experiment)
    footnotes: list[str] = []
    image = results_folder(table) / f"{FIGURE}.png"
    done, planned = len(experiment.done), len(experiment.planned)
    view = {
        "id": section_id(table),
        "title": table.title,
        "place": table.place,
        "begun": experiment.begun,
        "finding": found or f"No finished run yet: {plural(planned, 'run')} planned.",
        "missing": MISSING.get(table.name),
        "command": command(table),
        "hours": hours_text(table),
        "done": done,
        "planned": planned,
        "how_to_run": header_comment(table.path),
        "glance": None,
        "tuning": [],
        "aggregate": None,
        "pool": None,
        "image": embed(image) if image.exists() else None,
    }
    if table.correlation is None:
        lines = [line for _, line in experiment.lines]
        view["glance"] = _glance(table, lines)
        view["comparison"] = comparison(experiment, footnotes)
        view["tuning"] = _tuning(experiment, footnotes)
        view["aggregate"] = _aggregate(experiment)
    else:
        view["pool"] = _pool(experiment)
    view["footnotes"], view["notes"] = footnotes, list(items(table.notes))
    view["cells"] = _cells(table, pool)
    return view


def hours_text(table: Table) -> str:
    hours = gpu_hours(table)
    if hours is None:
        return ""
    return f"{hours:.2g} GPU hours" if hours >= 1 else f"{round(60 * hours)} GPU minutes"


def _glance(table: Table, lines: Sequence[Line]) -> Grid | None:
    """Cells by metrics, before the numbers one by one; None where there is one metric."""
    _, *metrics = header = glance_header(table, lines)
    body = []
    for label, own in glance(lines).items():
        found = [own.get(metric) for metric in metrics]
        numbers = [Field(both(line, table), line and line.ours.mean) for line in found]
        body.append([Field(label, label), *numbers])
    return grid(list(header.values()), body) if body else None


def comparison(experiment: Experiment, footnotes: list[str]) -> Grid:
    """The paper's numbers beside ours; remarks become footnotes, numbered on."""
    verdicts = {(n.cell.name, n.metric): n.verdict for n in experiment.numbers}
    reference = Verdict.NOT_RUN if experiment.table.comparable else "reference only"
    judged = [
        (cell, line, _mark(verdicts.get((cell.name, line.metric)), line, reference))
        for cell, line in experiment.lines
    ]
    return _compared(experiment.table, judged, footnotes)


def _mark(verdict: Verdict | None, line: Line, reference: str) -> str:
    if verdict is None or not line.ours.count:
        return verdict or ""
    return verdict if reference == Verdict.NOT_RUN else reference


def _compared(table: Table, lines: Sequence[tuple[Cell, Line, str]], footnotes: list[str]) -> Grid:
    scales = {
        metric: extent([side for _, x, _ in lines if x.metric == metric for side in _sides(x)])
        for metric in table.metrics
    }
    header = ["cell", "metric", "paper □", "ours ●", "n", "difference", "verdict", "", "notes"]
    several = len(table.metrics) > 1
    body = []
    for cell, line, verdict in lines:
        ours, paper = line.ours, line.paper
        apart = difference(ours, paper)
        numbers = sorted(_numbered(remark, footnotes) for remark in line.remarks)
        shown = "" if apart is None else signed(apart, paper, table.digits)
        body.append(
            [
                Field(line.label, line.label, href=_cell_link(table, cell)),
                Field(table.metrics[line.metric] if several else "", table.metrics[line.metric]),
                Field(_mean_std(paper, table), paper.mean),
                Field(_mean_std(ours, table), ours.mean),
                Field(_count(ours, table), ours.count or None),
                Field(shown.replace("-", "\N{MINUS SIGN}"), apart),
                Field(verdict, verdict, style=f"verdict {verdict.replace(' ', '-')}"),
                Field(
                    key=ours.mean,
                    style=method(line.label),
                    strip=marks(_named(line), scales[line.metric]),
                ),
                Field(notes=numbers),
            ]
        )
    return grid(header, body)


def _count(ours: Ours, table: Table) -> str:
    """Seeds, and how many are planned while some are missing."""
    if not 0 < ours.count < len(table.seeds):
        return str(ours.count or "")
    return f"{ours.count} of {len(table.seeds)}"


def method(label: str) -> str:
    """The colour of a method: ED and the baseline have their own."""
    words = re.findall(r"[A-Za-z]+", label)
    if "baseline" in label.lower():
        return "base"
    return "ed" if "ED" in words else ""


def _sides(line: Line) -> list[Interval]:
    return list(_named(line).values())


def _named(line: Line) -> dict[str, Interval]:
    return {side: (getattr(line, side).mean, getattr(line, side).std) for side in ("paper", "ours")}


def _numbered(remark: str, footnotes: list[str]) -> int:
    if remark not in footnotes:
        footnotes.append(remark)
    return footnotes.index(remark) + 1


def _cell_link(table: Table, cell: Cell) -> str:
    if cell.best_of is not None:  # it has no runs of its own, its grid has
        return f"{table.name}--{cell.best_of}"
    return anchor(cell.home)


def _mean_std(side: Paper | Ours, table: Table) -> str:
    return "" if side.mean is None else mean_and_std(side.mean, side.std, table.digits)


def _tuning(experiment: Experiment, footnotes: list[str]) -> list[dict]:
    """Grids of settings; the paper does not print their numbers."""
    table = experiment.table
    lines = iter(grid_lines(table, experiment.rows))
    found = []
    for one in table.tuning.values():
        own = [(point, next(lines), "") for point in one.points]
        begun = sum(line.begun for _, line, _ in own)
        found.append(
            {
                "id": f"{table.name}--{one.name}",
                "name": one.name,
                "rule": one.rule,
                "count": f"{begun} of {plural(len(own), 'point')} begun",
                "grid": _compared(table, own, footnotes),
            }
        )
    return found


def _aggregate(experiment: Experiment) -> dict | None:
    """All games as one number, if the table has one."""
    body = aggregate_fields(experiment.table, experiment.plain)
    shown = grid(AGGREGATE, [[Field(text, text) for text in line] for line in body])
    title = aggregate_title(experiment.table) if body else ""
    return {"title": title, "grid": shown, "meaning": AGGREGATE_MEANING} if body else None


def _pool(experiment: Experiment) -> dict:
    """All variants of all measures, and the points that they were computed from."""
    table, found = experiment.table, experiment.correlations
    against = table.metrics[table.correlation.against]
    view = {
        "grid": grid([*CORRELATION[:-1], "variant shown"], [_whole(table, one) for one in found]),
        "meaning": f"Pearson correlation with the {against}. {CORRELATION_MEANING}",
        "points": _points(table, experiment.plain),
        "controlled": None,
    }
    if table.correlation.train is not None:
        view["title"] = CONTROLLED_TITLE
        view["controlled"] = grid(CONTROLLED, [_controlled(table, one) for one in found])
        view["controlled_meaning"] = controlled_meaning(table, experiment.plain)
    return view


def _whole(table: Table, one) -> list[Field]:
    *names, r, interval, points, chosen = correlation_fields(table, one)
    return [
        *(Field(name, name) for name in names),
        Field(r, one.whole.r),
        Field(interval, one.whole.low),
        Field(points, one.whole.points),
        Field(chosen, chosen),
    ]


def _controlled(table: Table, one) -> list[Field]:
    keys = [one.measure, table.metrics[one.metric]]
    for estimate in (one.fitted, one.partial):
        keys += [estimate.r, estimate.low, estimate.points]
    return [Field(*pair) for pair in zip(controlled_fields(table, one), keys, strict=True)]


def _points(table: Table, rows: Sequence[Row]) -> Grid:
    means = [cell_means(table, rows, metric) for metric in table.metrics]
    body = [
        [
            Field(cell.label, cell.label, href=anchor(cell.home)),
            *(value(own.get(name), 4) for own in means),
        ]
        for name, cell in table.cells.items()
    ]
    return grid(["cell", *table.metrics.values()], body)


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


def _cells(table: Table, pool: dict[tuple, Row]) -> list[dict]:
    """The cells whose runs belong to this table."""
    own = [cell for cell in table.points.values() if cell.home[0] == table.name]
    views = []
    for cell in own:
        rows = [row for row in pool.values() if row.home == cell.home]
        rows.sort(key=lambda row: (row.deviations, row.seed))
        views.append(cell_view(table, cell, rows))
    return views
