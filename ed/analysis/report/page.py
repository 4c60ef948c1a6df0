"""The page as a whole: one HTML file that loads nothing and works from the file system."""

import json
from collections.abc import Sequence
from pathlib import Path

from ed.analysis.collect import Row
from ed.analysis.report.markdown import render_markdown
from ed.analysis.report.markup import Html, code, join, plural, tag
from ed.analysis.report.sortable import sortable
from ed.analysis.report.tables import (
    Experiment,
    figure,
    image_files,
    section,
    section_id,
    verdict_mark,
)
from ed.analysis.spec import EXPERIMENTS, PROBES
from ed.analysis.store import committed
from ed.analysis.tables import load_table, table_names
from ed.runtime.files import read_json
from ed.runtime.runs import BROKEN, UNDER_WAY, Status

FURTHEST = (Status.DONE, *UNDER_WAY, *BROKEN, Status.PENDING)  # first
ASSETS = Path(__file__).parent
TITLE = "Effective degree: the paper's numbers beside ours"
FIRST = "table1"  # the paper's main table opens the list
# the browser itself refuses whatever would leave the page
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
ABOUT = (
    "A network is simple where its outputs change little and smoothly from one example to the "
    "next. To put a number on that, walk along the straight line between two examples, fit "
    "orthogonal polynomials to the outputs met on the way, and weigh each coefficient by its "
    "degree: the effective degree, "
)
ABOUT_NEXT = (
    ". It is differentiable, so it can be measured on a trained network and lowered while one is "
    "trained. This page sets every number in the tables of the paper “Quantifying and Optimizing "
    "Simplicity via Polynomial Representations” beside what this code measured. A number matches "
    "if the two means lie within two standard errors of their difference."
)
VERDICTS = {
    "match": "the means differ by at most two standard errors of their difference; a single run of "
    "ours, by at most two of the paper's standard deviations",
    "differs": "they differ by more",
    "no std: +3 %": "the paper prints no standard deviation, so there is no scale to judge by: the "
    "relative difference",
    "reference only": "the runs differ from the paper's on purpose, such as a shorter schedule",
    "pending k of n": "k of the n planned runs are done",
    "not in paper": "the paper prints no number here",
}
SPEED = "speed"  # the folder of measured times among the results
DOCUMENTS = {"benchmark": "Benchmark", "step_time": "Step time"}  # those the bar leads to
FORMULA = tag("span", "ED = Σ", tag("sub", "k"), " k |c", tag("sub", "k"), "|", class_="formula")


def build_page(folder: Path = EXPERIMENTS) -> str:
    """The page of the experiment files in `folder`, its probes and their results."""
    names = sorted(table_names(folder), key=lambda name: (not name.startswith(FIRST), name))
    names += [f"{PROBES}/{name}" for name in table_names(folder / PROBES)]
    tables = [load_table(name, folder) for name in names]
    experiments = [Experiment(table, committed(table)) for table in tables]
    results = folder / "results"
    pool = _pool(experiments)
    body = [
        _header(experiments, results),
        tag(
            "main",
            _explorer(results / "explorer.json"),
            _overview(experiments),
            *[section(experiment, pool) for experiment in experiments],
            *_loose_images(results),
            *_documents(results),
            _provenance(pool),
        ),
        tag("footer", "Made by ", code("make report"), " from experiments/ and its results."),
        _inline("script", "page.js"),
        _inline("script", "explorer.js"),
    ]
    return "<!doctype html>\n" + tag("html", _head(), tag("body", *body), lang="en") + "\n"


def _pool(experiments: Sequence[Experiment]) -> dict[tuple, Row]:
    """Rows of all tables by key. A table may have collected another's run: the row that got
    furthest is taken, and among equal ones that of the table the run belongs to."""
    rows = [
        (FURTHEST.index(row.status), row.table != e.table.name, row)
        for e in experiments
        for row in e.rows
    ]
    pool: dict[tuple, Row] = {}
    for *_, row in sorted(rows, key=lambda entry: entry[:2]):
        pool.setdefault(row.key, row)
    return pool


def _head() -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", TITLE),
        tag("link", rel="icon", href="data:,"),
        _inline("style", "page.css"),
        _inline("script", "theme.js"),
    )


def _inline(kind: str, name: str) -> Html:
    return Html(f"<{kind}>\n{(ASSETS / name).read_text('utf-8')}</{kind}>\n")


def _header(experiments: Sequence[Experiment], results: Path) -> Html:
    links = [tag("a", label, href=f"#{name}") for name, label in _targets(results).items()]
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="theme", value=value, checked=value == "auto"),
            tag("span", value),
        )
        for value in ("auto", "light", "dark")
    ]
    legend = tag("legend", "theme", class_="hidden")
    switch = tag("fieldset", legend, *choices, id="theme", class_="switch")
    return tag(
        "header",
        tag("div", tag("nav", *links, aria_label="sections"), switch, class_="bar"),
        tag("h1", TITLE),
        tag("p", ABOUT, FORMULA, ABOUT_NEXT, class_="about"),
        _headline(experiments),
    )


def _targets(results: Path) -> dict[str, str]:
    """The parts of the page that the bar leads to."""
    targets = {"explorer": "Explorer"} if (results / "explorer.json").exists() else {}
    targets |= {"overview": "Results"}
    for name, label in DOCUMENTS.items():
        if (results / SPEED / f"{name}.md").exists():
            targets |= {f"document-{name}": label}
    return targets | {"provenance": "Hardware and versions"}


def _headline(experiments: Sequence[Experiment]) -> Html:
    """Where the whole reproduction stands, in numbers; shared runs count once."""
    planned = set().union(*(e.planned for e in experiments))
    done = set().union(*(e.done for e in experiments))
    verdicts = [word for e in experiments if e.table.comparable for word in e.verdicts]
    counts = {word: verdicts.count(word) for word in ("match", "differs", "pending")}
    other = len(verdicts) - sum(counts.values())
    figures = {
        "runs done": f"{len(done):,} of {len(planned):,}",
        "numbers in the paper": f"{len(verdicts):,}",
        "match": str(counts["match"]),
        "differ": str(counts["differs"]),
        "pending": str(counts["pending"]),
    }
    if other:
        figures["without a judgement"] = str(other)
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items()]
    return tag("dl", *items, class_="headline")


def _overview(experiments: Sequence[Experiment]) -> Html:
    rows = []
    for experiment in experiments:
        table, words = experiment.table, experiment.verdicts
        done, planned = len(experiment.done), len(experiment.planned)
        rows.append(
            [
                (tag("a", table.title, href=f"#{section_id(table)}"), table.title),
                (_progress(done, planned), done / planned),
                (str(len(words)), len(words)),
                *((str(words.count(w)), words.count(w)) for w in ("match", "differs")),
            ]
        )
    header = ["experiment", "runs done", "numbers", "match", "differ"]
    intro = (
        "One row per table or data figure of the paper. Cells lead to their runs: settings, "
        "learning curves, hardware. Click a column's head to sort by it."
    )
    parts = (tag("h2", "Results"), tag("p", intro), sortable(header, rows), _meaning())
    return tag("section", *parts, id="overview")


def _meaning() -> Html:
    terms = [
        join(tag("dt", verdict_mark(word)), tag("dd", text)) for word, text in VERDICTS.items()
    ]
    title = tag("summary", "What the verdicts mean")
    return tag("details", title, tag("dl", *terms, class_="session"))


def _progress(done: int, planned: int) -> Html:
    width = f"width:{100 * done / planned:.1f}%"
    bar = tag("span", tag("span", style=width), class_="progress", aria_hidden="true")
    count = tag("span", f"{done} of {planned}", class_="count")
    return tag("span", bar, count, class_="progress-field")


def _loose_images(results: Path) -> list[Html]:
    """Images that belong to no table."""
    images = [figure(path) for path in image_files(results)]
    return [tag("section", tag("h2", "Figures"), *images, id="figures")] if images else []


def _documents(results: Path) -> list[Html]:
    """Measured times, written by hand or by the benchmark."""
    return [
        tag(
            "section",
            render_markdown(path.read_text("utf-8")),
            id=f"document-{path.stem}",
            class_="document",
        )
        for path in sorted((results / SPEED).glob("*.md"))
    ]


def _provenance(pool: dict[tuple, Row]) -> Html:
    """Hardware, versions and commits of all finished runs."""
    groups: dict[tuple, list[Row]] = {}
    for row in pool.values():
        if row.status == Status.DONE:
            where = (row.device, row.torch, row.commit, row.code_state)
            groups.setdefault(where, []).append(row)
    body = []
    for (device, torch, commit, state), rows in sorted(groups.items()):
        hours = sum(row.seconds or 0 for row in rows) / 3600
        named = code(commit[:8]) if commit else "commit unknown"
        shown = join(named, f", {state}" if state else "")
        body.append(
            [
                (device, device),
                (torch, torch),
                (shown, commit),
                (str(len(rows)), len(rows)),
                (f"{hours:.2f}", hours),
            ]
        )
    header = ["device", "torch", "commit", "runs", "hours"]
    total = plural(sum(len(rows) for rows in groups.values()), "finished run")
    intro = f"{total}. Versions of the other packages stand with each run that has a record."
    parts = (tag("h2", "Hardware and versions"), tag("p", intro))
    return tag("section", *parts, sortable(header, body) if body else None, id="provenance")


def _explorer(path: Path) -> Html | None:
    """The explorer's frame; its script fills it from the samples that stand beside it."""
    if not path.exists():
        return None
    data = json.dumps(read_json(path), separators=(",", ":")).replace("<", "\\u003c")
    script = Html(f'<script type="application/json" id="samples">{data}</script>')
    intro = (
        "A small ViT, trained on 2,000 pictures without and with the penalty (make demo). Dots "
        "are its probabilities at 64 points between two test pictures; lines, the polynomial "
        "fitted to them; bars, its coefficients. Drag the degree, or pick another pair. "
        "Everything is computed here, from stored outputs."
    )
    frame = (ASSETS / "explorer.html").read_text("utf-8")
    parts = (tag("h2", "Explorer"), tag("p", intro), Html(frame), script)
    return tag("section", *parts, id="explorer")
