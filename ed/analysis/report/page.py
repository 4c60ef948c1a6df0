"""Builds the report page, a single HTML file that works offline."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ed.analysis import verdicts
from ed.analysis.collect import Row
from ed.analysis.findings import top_findings
from ed.analysis.markdown import plural
from ed.analysis.outline import MISSING, PARTS, PROBES, REST
from ed.analysis.report.cells import commit_text
from ed.analysis.report.grids import Grid, grid, marks
from ed.analysis.report.images import embed, image_files
from ed.analysis.report.sections import mean_std, method, section, section_id
from ed.analysis.report.text import inline, markdown
from ed.analysis.spec import EXPERIMENTS
from ed.analysis.verdicts import Experiment
from ed.runtime.files import read_json
from ed.runtime.runs import BROKEN, UNDER_WAY, Status

FURTHEST = (Status.DONE, *UNDER_WAY, *BROKEN, Status.PENDING)  # most advanced first
ASSETS = Path(__file__).parent
SPEED = "speed"  # results folder with the benchmark documents
FULL, SHORT = "table1", "table1_100"  # the tables in the hero figure
CAPTIONS = {
    "demo": "The demo: outputs of two small networks along paths between test images, plain and "
    "with ED, and the mean coefficient of each degree (make demo).",
    "procgen_play": "Frames of one StarPilot episode, played by a trained policy, with the next "
    "action and its probability. Letters are Procgen's buttons.",
}
SCALES = {FULL: (86.0, 91.5), SHORT: (78.0, 88.0)}  # accuracy axes (%) of its panels
TICKS = {FULL: range(86, 92), SHORT: range(78, 89, 2)}


def build_page(folder: Path = EXPERIMENTS) -> str:
    """Renders the page for the experiment files in `folder`, including probes."""
    experiments = verdicts.load_experiments(folder)
    results = folder / "results"
    pool = _pool(experiments)
    views = {e.table.path: section(e, pool) for e in experiments}
    parts = _parts(experiments, views)
    found = verdicts.numbers(experiments)
    explorer = results / "explorer.json"
    context = {
        "findings": [
            (one.value, one.text, one.table.title, section_id(one.table))
            for one in top_findings(experiments)
        ],
        "verdicts": verdicts.counts(found),
        "total": len(found),
        "hours": verdicts.hours_left(found),
        "missing": MISSING,
        "done": len(set().union(*(e.done for e in experiments))),  # shared runs count once
        "planned": len(set().union(*(e.planned for e in experiments))),
        "claims": [
            (claim, f"experiment-{claim.table}") for claim in verdicts.headline(experiments)
        ],
        "hero": [panel for name in (FULL, SHORT) for panel in _ranking(experiments, name)],
        "parts": {title: own for title, own in parts.items() if own},
        "waiting": [view for view in views.values() if not view["begun"]],
        "captions": CAPTIONS,
        "figures": [(path.stem, embed(path)) for path in image_files(results)],
        "documents": _documents(results),
        "provenance": _provenance(pool),
        "samples": read_json(explorer) if explorer.exists() else None,
    }
    return _environment().get_template("page.html").render(context)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ed.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"inline": inline, "plural": plural}
    environment.globals["asset"] = lambda name: Markup((ASSETS / name).read_text("utf-8"))
    return environment


def _pool(experiments: Sequence[Experiment]) -> dict[tuple, Row]:
    """Returns the rows of all tables by key.

    If two tables share a run, keeps the most advanced row; ties go to the run's own table.
    """
    rows = [
        (FURTHEST.index(row.status), row.table != e.table.name, row)
        for e in experiments
        for row in e.rows
    ]
    pool: dict[tuple, Row] = {}
    for *_, row in sorted(rows, key=lambda entry: entry[:2]):
        pool.setdefault(row.key, row)
    return pool


def _parts(experiments: Sequence[Experiment], views: dict[Path, dict]) -> dict[str, list[dict]]:
    """Groups the sections that have runs under the headings of the paper."""
    headings = {name: title for title, names in PARTS.items() for name in names}
    parts: dict[str, list[dict]] = {title: [] for title in (*PARTS, REST, PROBES)}
    for experiment in experiments:
        table = experiment.table
        title = headings.get(table.name, REST)
        if table.path.parent.name == "probes":
            title = PROBES
        if experiment.begun:
            parts[title].append(views[table.path])
    return parts


def _ranking(experiments: Sequence[Experiment], name: str) -> list[dict]:
    """Returns a panel of the hero figure: methods ranked by accuracy, the paper's and ours."""
    experiment = next((e for e in experiments if e.table.name == name and e.begun), None)
    if experiment is None:
        return []
    table, scale = experiment.table, SCALES[name]
    lines = [x for x in experiment.lines if x.ours.count or x.paper.mean is not None]
    lines.sort(key=lambda x: -(x.ours.mean if x.paper.mean is None else x.paper.mean))
    rows = []
    for line in lines:
        sides = {side: getattr(line, side) for side in ("paper", "ours")}
        shown = [mean_std(own, table) for own in sides.values()]
        dots = marks({side: (own.mean, own.std) for side, own in sides.items()}, scale)
        runs = f"n = {line.ours.count}" if line.ours.count else ""
        rows.append((line.label, method(line.label), dots, *shown, runs))
    ticks = [(t, 100 * (t - scale[0]) / (scale[1] - scale[0])) for t in TICKS[name]]
    return [{"id": section_id(table), "title": table.title, "rows": rows, "ticks": ticks}]


def _documents(results: Path) -> list[tuple[str, str, Markup]]:
    """Returns (name, title, content) of the Markdown documents about speed."""
    found = []
    for path in sorted((results / SPEED).glob("*.md")):
        text = path.read_text("utf-8")
        title = text.splitlines()[0].lstrip("# ") if text.startswith("#") else path.stem
        body = text.split("\n", 1)[1] if text.startswith("#") else text
        found.append((path.stem, title, markdown(body)))
    return found


def _provenance(pool: dict[tuple, Row]) -> tuple[int, Grid]:
    """Lists the hardware, versions and commits of all finished runs."""
    groups: dict[tuple, list[Row]] = {}
    for row in pool.values():
        if row.status == Status.DONE:
            where = (row.device, row.torch, row.commit, row.code_state)
            groups.setdefault(where, []).append(row)
    body = []
    for (device, torch, *_), rows in sorted(groups.items()):
        hours = sum(row.seconds or 0 for row in rows) / 3600
        body.append([device, torch, commit_text(rows[0]), str(len(rows)), f"{hours:.2f}"])
    total = sum(len(rows) for rows in groups.values())
    return total, grid(["device", "torch", "commit", "runs", "hours"], body)
