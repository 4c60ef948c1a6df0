"""Prepares one experiment for the templates."""

import re
from collections.abc import Sequence

from ed.analysis import costs, pools, render
from ed.analysis.collect import Row
from ed.analysis.correlation import cell_means
from ed.analysis.findings import finding
from ed.analysis.markdown import plural
from ed.analysis.numbers import mean_and_std, signed
from ed.analysis.outline import MISSING
from ed.analysis.report.cells import (
    anchor,
    as_yaml,
    cell_view,
    full_config,
    in_common,
    recorded,
)
from ed.analysis.report.grids import Field, Grid, Interval, extent, grid, marks, number
from ed.analysis.report.images import embed
from ed.analysis.report.text import markdown
from ed.analysis.spec import Cell, Paper, Table
from ed.analysis.stats import Ours, difference
from ed.analysis.store import FIGURE, NOTES, results_folder
from ed.analysis.verdicts import Experiment, command, gpu_hours, header_comment

SIDES = ("paper\N{NO-BREAK SPACE}□", "ours\N{NO-BREAK SPACE}●")  # with their symbols in the charts


def section_id(table: Table) -> str:
    """Returns the HTML id of a table's section; the prefix avoids clashes with other ids."""
    return f"experiment-{table.name}"


def section(experiment: Experiment, pool: dict[tuple, Row]) -> dict:
    """Returns the template data of an experiment.

    `pool` has the rows of every table by key, as another table may have collected a shared run.
    """
    table, found = experiment.table, finding(experiment)
    footnotes: list[str] = []
    image = results_folder(table) / f"{FIGURE}.png"
    done, planned = len(experiment.done), len(experiment.planned)
    view = {
        "id": section_id(table),
        "table": table,
        "begun": experiment.begun,
        "finding": found or f"No result yet: {done} of {plural(planned, 'run')} done.",
        "missing": MISSING.get(table.name),
        "command": command(table),
        "hours": hours_text(table),
        "done": done,
        "planned": planned,
        "how_to_run": header_comment(table.path),
        "glance": None,
        "tuning": [],
        "aggregate": None,
        "cost": None,
        "pool": None,
        "image": embed(image) if image.exists() else None,
    }
    if table.correlation is None:
        view["glance"] = _glance(table, experiment.lines)
        view["comparison"] = comparison(experiment, footnotes)
        view["tuning"] = _tuning(experiment, footnotes)
        view["aggregate"] = _aggregate(experiment)
        view["cost"] = _cost(experiment)
    else:
        view["pool"] = _pool(experiment)
    view["footnotes"], view["notes"] = footnotes, table.notes
    written = results_folder(table) / NOTES
    view["written"] = markdown(written.read_text("utf-8")) if written.exists() else ""
    return view | _cells(table, pool)


def hours_text(table: Table) -> str:
    hours = gpu_hours(table)
    if hours is None:
        return ""
    return f"{hours:.2g} GPU hours" if hours >= 1 else f"{round(60 * hours)} GPU minutes"


def _glance(table: Table, lines: Sequence[render.Line]) -> Grid | None:
    """Returns an overview with one column per metric; None if there is only one metric."""
    _, *metrics = header = render.glance_header(table, lines)
    body = []
    for label, own in render.glance(lines).items():
        fewest = min(own.values(), key=lambda line: line.ours.count)
        numbers = [render.both(own.get(metric), table) for metric in metrics]
        shown = ["" if text == "-" else text for text in numbers]
        body.append([label, *shown, fewest.runs])
    return grid([*header.values(), "n"], body) if body else None


def comparison(experiment: Experiment, footnotes: list[str]) -> Grid:
    """Compares the paper's numbers with ours; remarks are appended to `footnotes`."""
    comparable = experiment.table.comparable
    verdicts = {
        (n.cell.name, n.metric): n.verdict if comparable or not n.ours.count else "reference only"
        for n in experiment.numbers
    }
    judged = [(line, verdicts.get((line.cell.name, line.metric), "")) for line in experiment.lines]
    return _compared(experiment.table, judged, footnotes)


def _compared(table: Table, lines: Sequence[tuple[render.Line, str]], footnotes: list[str]) -> Grid:
    scales = {}
    for metric in table.metrics:
        own = (_named(line).values() for line, _ in lines if line.metric == metric)
        scales[metric] = extent([side for sides in own for side in sides])
    header = ["cell", "metric", *SIDES, "n", "difference", "verdict", "", "notes"]
    several = len(table.metrics) > 1
    body = []
    for line, verdict in lines:
        ours, paper = line.ours, line.paper
        apart = difference(ours, paper)
        numbers = sorted(render.footnote_numbers(line.remarks, footnotes))
        shown = "" if apart is None else signed(apart, paper, table.digits)
        strip = marks(_named(line), scales[line.metric])
        body.append(
            [
                Field(line.label, href=_cell_link(table, line.cell)),
                table.metrics[line.metric] if several else "",
                mean_std(paper, table),
                mean_std(ours, table),
                line.runs if ours.count or not verdict else "",
                shown,
                Field(verdict, style=verdict and f"verdict {verdict.replace(' ', '-')}"),
                Field(style=strip and method(line.label), strip=strip),
                Field(notes=numbers),
            ]
        )
    return grid(header, body)


def method(label: str) -> str:
    """Returns the CSS class that colours a method: ED, baseline or other."""
    words = re.findall(r"[A-Za-z]+", label)
    if "baseline" in label.lower():
        return "base"
    return "ed" if "ED" in words else ""


def _named(line: render.Line) -> dict[str, Interval]:
    return {side: (getattr(line, side).mean, getattr(line, side).std) for side in ("paper", "ours")}


def _cell_link(table: Table, cell: Cell) -> str:
    if cell.best_of is not None:  # its runs belong to the grid
        return f"{table.name}--{cell.best_of}"
    return anchor(cell.home)


def mean_std(side: Paper | Ours, table: Table) -> str:
    return "" if side.mean is None else mean_and_std(side.mean, side.std, table.digits)


def _tuning(experiment: Experiment, footnotes: list[str]) -> list[dict]:
    """Returns the tuning grids, whose numbers are not in the paper."""
    table = experiment.table
    lines = iter(render.grid_lines(table, experiment.rows))
    found = []
    for one in table.tuning.values():
        own = [(next(lines), "") for _ in one.points]
        begun = sum(line.begun for line, _ in own)
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
    """Returns the aggregate over games, if the table has one."""
    body = render.aggregate_fields(experiment.table, experiment.plain)
    shown = grid(render.AGGREGATE, body)
    title = render.aggregate_title(experiment.table) if body else ""
    return {"title": title, "grid": shown, "meaning": render.AGGREGATE_MEANING} if body else None


def _cost(experiment: Experiment) -> dict | None:
    """Returns the costs and gains, if the table has any."""
    body = costs.cost_fields(experiment.table, experiment.plain)
    if not body:
        return None
    meaning = costs.meaning(experiment.table, experiment.plain)
    return {"title": costs.TITLE, "grid": grid(costs.HEADER, body), "meaning": meaning}


def _pool(experiment: Experiment) -> dict:
    """Returns the correlations of all variants, and the points they are computed from."""
    table, found = experiment.table, experiment.correlations
    against = table.metrics[table.correlation.against]
    rows = [pools.correlation_fields(table, one) for one in found]
    view = {
        "grid": grid([*pools.CORRELATION[:-1], "variant shown"], rows),
        "meaning": f"Pearson correlation with the {against}. "
        + pools.correlation_meaning(table, experiment.plain),
        "points": _points(table, experiment.plain),
        "controlled": None,
    }
    if table.correlation.train is not None and experiment.begun:
        view["title"] = pools.CONTROLLED_TITLE
        rows = [pools.controlled_fields(table, one) for one in found]
        view["controlled"] = grid(pools.CONTROLLED, rows)
        view["controlled_meaning"] = pools.controlled_meaning(table, experiment.plain)
    return view


def _points(table: Table, rows: Sequence[Row]) -> Grid:
    means = [cell_means(table, rows, metric) for metric in table.metrics]
    body = [
        [
            Field(cell.label, href=anchor(cell.home)),
            *(number(own.get(name), 4) for own in means),
        ]
        for name, cell in table.cells.items()
    ]
    return grid(["cell", *table.metrics.values()], body)


def _cells(table: Table, pool: dict[tuple, Row]) -> dict:
    """Returns the template data of the cells whose runs belong to this table."""
    own = [cell for cell in table.points.values() if cell.home[0] == table.name]
    runs = {}
    for cell in own:
        rows = [row for row in pool.values() if row.home == cell.home]
        runs[cell.home] = sorted(rows, key=lambda row: (row.deviations, row.seed))
    stored = [found[0] for rows in runs.values() if (found := recorded(rows))]
    common = in_common([cell.settings for cell in own])
    config = in_common([full_config(row) for row in stored])
    views = [cell_view(table, cell, runs[cell.home], common, config) for cell in own]
    return {"cells": views, "common": common, "config": as_yaml(config)}
