"""What a table or figure of the paper is: cells, each of them some runs.

`expand` lists the runs of a table; launcher and collector both use it, so that a table knows which
of its runs are missing. `ed.analysis.tables` reads tables from their files.
"""

import difflib
import functools
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ed.runtime.files import APP
from ed.runtime.runs import ENVIRONMENT

EXPERIMENTS = APP / "experiments"
PROBES = "probes"  # below it: tables of reduced runs, not in the paper
# where data and weights lie: another place of the same is no deviation either
PLACES = ("task.data", "task.mnist", "task.shifts", "model.weights")


@dataclass(frozen=True)
class Paper:
    """What the paper prints; None where it prints nothing."""

    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One number (per metric) of a table.

    Attributes:
        home: (table, cell) whose folders hold its runs; another table's for `same_as`, which may
            name a whole grid there.
        overrides: all of them, the table's fixed ones and those of `experiment=` included; empty
            for `best_of`.
        arguments: the same as train.py is given them, with `experiment=` unexpanded.
        metrics: the keys it is judged by.
        best_of: name of the grid under `tuning` whose best point it shows.
    """

    name: str
    label: str
    home: tuple[str, str]
    overrides: tuple[str, ...]
    metrics: tuple[str, ...]
    paper: dict[str, Paper]
    note: str | None = None
    best_of: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """Settings to choose from, by the first metric of its points."""

    name: str
    rule: str
    points: tuple[Cell, ...]
    lower_is_better: bool = False

    @property
    def metric(self) -> str:
        return self.points[0].metrics[0]


@dataclass(frozen=True)
class Study:
    """What is correlated: every variant (a metric) of every measure, against one metric.

    `train`, the metric of the training accuracy in percent, tells fitted networks from others.
    """

    against: str
    measures: dict[str, tuple[str, ...]]
    train: str | None = None


@dataclass(frozen=True)
class Table:
    name: str
    path: Path
    title: str
    place: str | None
    metrics: dict[str, str]
    seeds: tuple[int, ...]
    paper_seeds: int | None
    digits: int
    comparable: bool
    notes: tuple[str, ...]
    cells: dict[str, Cell]
    tuning: dict[str, Grid]
    figure: str | None = None
    correlation: Study | None = None
    aggregate: str | None = None

    @property
    def primary(self) -> str:
        return next(iter(self.metrics))

    def is_incidental(self, key: str) -> bool:
        """Whether a setting cannot change a result here; measures change those they are."""
        measured = any(metric.startswith("measure/") for metric in self.metrics)
        group = key.partition(".")[0]
        return group in ENVIRONMENT or (group == "measures" and not measured)

    @property
    def argument(self) -> str:
        """How scripts find it: its name, probes/NAME, or the name of a file elsewhere."""
        path = self.path.resolve()
        if path.parent in (EXPERIMENTS, EXPERIMENTS / PROBES):
            return str(path.relative_to(EXPERIMENTS).with_suffix(""))
        return path.name

    @property
    def points(self) -> dict[str, Cell]:
        """Everything that runs: plain cells and the points of the grids."""
        plain = {name: cell for name, cell in self.cells.items() if cell.best_of is None}
        return plain | {p.name: p for grid in self.tuning.values() for p in grid.points}


@dataclass(frozen=True)
class Run:
    """One training run of a table.

    Attributes:
        table, cell: its home, which is another table for a cell that is `same_as` one there.
        arguments: the overrides as train.py is given them, with `experiment=` unexpanded.
        deviations: settings given at launch that differ from the file, sorted.
    """

    table: str
    cell: str
    seed: int
    overrides: tuple[str, ...]
    folder: Path
    arguments: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()


class SpecError(ValueError):
    """An experiment file, or a choice from one, that makes no sense."""


def expand(
    table: Table,
    *,
    cells: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    sets: Sequence[str] = (),
    data: Sequence[str] = (),
    root: Path = Path("runs"),
) -> list[Run]:
    """The runs of a table, in its order.

    Cells and seeds only choose: those runs are the table's own. `sets` change what is trained, so
    such runs live in folders of their own and carry their deviations.

    Args:
        cells: names of cells, grids or grid points; None: all.
        sets: `key=value` overrides on top of the file's.
        data: other places of the same data sets, as `place_of` reads them; no deviations.
    """
    deviations = deviations_of(sets, table)
    extra = (*sets, *map(place_of, data))
    return [
        Run(
            table=cell.home[0],
            cell=cell.home[1],
            seed=seed,
            overrides=(*cell.overrides, *extra, f"seed={seed}"),
            arguments=(*cell.arguments, *extra, f"seed={seed}"),
            folder=root / reduced_name(cell.home[0], deviations) / cell.home[1] / f"seed{seed}",
            deviations=deviations,
        )
        for cell in _choose_cells(table, cells)
        for seed in _choose_seeds(table, seeds)
    ]


def place_of(text: str) -> str:
    """The setting that `--data` stands for: a folder or hub id alone is that of task.data."""
    setting = text if re.match(r"\w+(\.\w+)+=", text) else f"task.data={text}"
    key, value = setting.split("=", 1)
    if key not in PLACES:
        raise SpecError(f"--data {text}: use {', '.join(PLACES)}; other settings go by --set")
    if value in ("embedded", "random", "openai"):
        raise SpecError(
            f"--data {text}: that is no other place of the table's own, so its runs are not the "
            f"table's; with --set {setting} they are kept apart, as reduced"
        )
    return setting


def deviations_of(sets: Sequence[str], table: Table) -> tuple[str, ...]:
    """Those of the given settings that can change a result, in one order."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not (key and equals and value) or re.search(r"\s", text):
            raise SpecError(f"--set {text!r}: write key=value without spaces, e.g. task.epochs=20")
        if key == "seed" or key == "system.run_dir":
            raise SpecError(f"--set {text}: the table decides this; choose with --seeds, --runs")
        if key == "experiment":
            raise SpecError(f"--set {text}: the table chooses its experiment; set single keys")
        if "${" in value:  # folders hold what it refers to, so it would look like another run
            raise SpecError(f"--set {text}: write the value itself, not a reference to another")
        number = parse_value(value)
        if isinstance(number, float) and not math.isfinite(number):
            raise SpecError(f"--set {text}: a finite number is needed")
    keys = [text.split("=")[0] for text in sets]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise SpecError(f"--set {twice} is given twice; give it once")
    return tuple(sorted(s for s in sets if not table.is_incidental(s.split("=")[0])))


def reduced_name(table: str, deviations: Sequence[str]) -> str:
    """What the runs of a table with these deviations go by; the table's own name without any."""
    return f"{table}@{_tag(deviations)}" if deviations else table


def nested(config: dict, key: str):
    """The value at a dotted key; KeyError where there is none."""
    for part in key.split("."):
        config = config[part]
    return config


@functools.cache
def parse_value(text: str):
    """The value an override sets, by Hydra's own parser: 010 and on are words, nan a number."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except OverrideParseException:  # no run can have it
        return text


def _tag(deviations: Sequence[str]) -> str:
    """Readable, short, and different for different deviations."""
    short = [re.sub(r"^[^=]*\.(?=[^.=]*=)", "", d) for d in deviations]  # clip=1.0
    words = [re.sub(r"[^A-Za-z0-9.+-]", "", text) for text in short]
    digest = hashlib.sha256("\n".join(deviations).encode()).hexdigest()[:6]
    return f"{'-'.join(words)[:30].strip('-.')}-{digest}"


def _choose_cells(table: Table, names: Sequence[str] | None) -> list[Cell]:
    points = table.points
    if names is None:
        return list(points.values())
    chosen: dict[str, Cell] = {}
    for name in names:
        grid = table.tuning.get(table.cells[name].best_of if name in table.cells else name)
        if grid is not None:
            chosen |= {point.name: point for point in grid.points}
        elif name in points:
            chosen[name] = points[name]
        else:
            known = [*table.cells, *table.tuning, *points]
            raise SpecError(f"table {table.name} has no cell {name!r}; {nearest(name, known)}")
    return list(chosen.values())


def _choose_seeds(table: Table, seeds: Sequence[int] | None) -> Sequence[int]:
    foreign = [seed for seed in seeds or () if seed not in table.seeds]
    if foreign:
        own = ", ".join(map(str, table.seeds))
        raise SpecError(f"--seeds {foreign[0]}: {table.path} has seeds {own}; add it there")
    return table.seeds if seeds is None else list(dict.fromkeys(seeds))


def nearest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, for an error message."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known are {', '.join(known)}" if known else "there are none there"
