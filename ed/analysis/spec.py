"""The tables and figures of the paper, their cells and their runs.

The launcher and the collector both list runs with `expand`, so missing runs can be identified.
`ed.analysis.tables` reads tables from files.
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
from ed.runtime.runs import ENVIRONMENT, PLACES

EXPERIMENTS = APP / "experiments"
PROBES = "probes"  # folder of short side experiments that are not in the paper


@dataclass(frozen=True)
class Paper:
    """A number from the paper; None where the paper prints none."""

    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One entry of a table, with a number for each metric.

    Attributes:
        home: (table, cell) that owns its runs; differs for `same_as`, which may name a grid.
        overrides: all overrides, including the table's `fixed` and those of `experiment=`; empty
            for `best_of`.
        arguments: the overrides for train.py, with `experiment=` unexpanded.
        metrics: the metrics it is judged by.
        best_of: the grid under `tuning` whose best point it shows.
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

    @property
    def settings(self) -> dict[str, str]:
        """The overrides by key; later ones take precedence."""
        return dict(text.split("=", 1) for text in self.overrides)

    @property
    def task(self) -> dict[str, str]:
        """The settings of the task; only cells that share them are compared."""
        return {key: value for key, value in self.settings.items() if key.startswith("task.")}


@dataclass(frozen=True)
class Grid:
    """A tuning grid; its best point is chosen by the points' first metric."""

    name: str
    rule: str
    points: tuple[Cell, ...]
    lower_is_better: bool = False

    @property
    def metric(self) -> str:
        return self.points[0].metrics[0]


@dataclass(frozen=True)
class Study:
    """A correlation study: every variant (a metric) of every measure against one metric.

    `train` is the metric with the training accuracy (%), used to select fitted networks. Cells
    that differ only in the setting `replicates` can be near copies; intervals draw them together.
    """

    against: str
    measures: dict[str, tuple[str, ...]]
    train: str | None = None
    replicates: str | None = None


@dataclass(frozen=True)
class Cost:
    """The cells that gains are measured by: over `baseline`, as a share of `full`'s."""

    baseline: str
    full: str


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
    cost: Cost | None = None

    @property
    def primary(self) -> str:
        return next(iter(self.metrics))

    def is_incidental(self, key: str) -> bool:
        """Whether a setting has no effect on the results of this table."""
        measured = any(metric.startswith("measure/") for metric in self.metrics)
        group = key.partition(".")[0]
        return group in ENVIRONMENT or (group == "measures" and not measured)

    @property
    def argument(self) -> str:
        """The table's name on the command line: NAME, probes/NAME, or a file name."""
        path = self.path.resolve()
        if path.parent in (EXPERIMENTS, EXPERIMENTS / PROBES):
            return str(path.relative_to(EXPERIMENTS).with_suffix(""))
        return path.name

    @property
    def points(self) -> dict[str, Cell]:
        """All cells that have runs, including the points of the tuning grids."""
        plain = {name: cell for name, cell in self.cells.items() if cell.best_of is None}
        return plain | {p.name: p for grid in self.tuning.values() for p in grid.points}

    def first_point(self, cell: Cell) -> Cell:
        """Returns the first point of the grid that a cell shows, or the cell without a grid."""
        return cell if cell.best_of is None else self.tuning[cell.best_of].points[0]


@dataclass(frozen=True)
class Run:
    """One training run of a table.

    Attributes:
        table, cell: the table and cell that own the run.
        arguments: the overrides for train.py, with `experiment=` unexpanded.
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
    """Raised for an invalid experiment file or invalid options for its runs."""


def expand(
    table: Table,
    *,
    cells: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    sets: Sequence[str] = (),
    data: Sequence[str] = (),
    root: Path = Path("runs"),
) -> list[Run]:
    """Returns the runs of a table, in order.

    Runs with `sets` that can change a result have their own folders and list their deviations.

    Args:
        cells: names of cells, grids or grid points; None selects all.
        sets: `key=value` overrides, applied after those of the file.
        data: other locations of the same data (see `place_of`); these are not deviations.
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
    """Returns the override for a `--data` value; a plain folder or hub id sets task.data."""
    setting = text if re.match(r"\w+(\.\w+)+=", text) else f"task.data={text}"
    key, value = setting.split("=", 1)
    if key not in PLACES:
        raise SpecError(f"--data {text}: use {', '.join(PLACES)}; use --set for other settings")
    if value in ("embedded", "random", "openai"):
        raise SpecError(
            f"--data {text}: not the table's data; use --set {setting} to run it as a reduced table"
        )
    return setting


def deviations_of(sets: Sequence[str], table: Table) -> tuple[str, ...]:
    """Checks `--set` values and returns those that can change a result, sorted."""
    for text in sets:
        key, equals, value = text.partition("=")
        if (reason := misplaced(key)) is not None:
            raise SpecError(f"--set {text}: {reason}")
        if not (key and equals and value) or re.search(r"\s", text):
            raise SpecError(f"--set {text!r}: use key=value without spaces, e.g. task.epochs=20")
        if key == "experiment":
            raise SpecError(f"--set {text}: set by the table; set individual keys instead")
        if "${" in value:  # run folders store the resolved value, which would not match
            raise SpecError(f"--set {text}: use a value instead of an interpolation")
        if not _is_finite(parse_value(value)):
            raise SpecError(f"--set {text}: must be finite")
    keys = [text.split("=")[0] for text in sets]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise SpecError(f"--set {twice}: given twice")
    return tuple(sorted(s for s in sets if not table.is_incidental(s.split("=")[0])))


def misplaced(key: str) -> str | None:
    """Returns the reason why neither a table nor `--set` may contain this key, or None."""
    if key in ("seed", "system.run_dir"):
        return "set by the launcher; use --seeds, --runs, or `seeds` in the table"
    if key.startswith(("+", "~")):  # the collector looks up settings by plain key
        return f"write key=value, without {key[0]}; all keys already exist in the configs"
    return None


def reduced_name(table: str, deviations: Sequence[str]) -> str:
    """Returns the folder name for runs with these deviations; without any, the table's name."""
    return f"{table}@{_tag(deviations)}" if deviations else table


def nested(config: dict, key: str):
    """Returns the value at a dotted key; raises KeyError if it is missing."""
    for part in key.split("."):
        config = config[part]
    return config


@functools.cache
def parse_value(text: str):
    """Parses the value of an override with Hydra's own parser."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except OverrideParseException:  # not a valid value, so no run can match it
        return text


def _is_finite(value) -> bool:
    """Whether all numbers in a value are finite, including those in lists and mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _tag(deviations: Sequence[str]) -> str:
    """Returns a short, readable name that is unique to these deviations."""
    short = [re.sub(r"^[^=]*\.(?=[^.=]*=)", "", d) for d in deviations]  # e.g. clip=1.0
    words = [re.sub(r"[^A-Za-z0-9.+-]", "", text) for text in short]
    digest = hashlib.sha256("\n".join(deviations).encode()).hexdigest()[:6]
    return f"{'-'.join(words)[:30].strip('-.')}-{digest}"


def cells_named(table: Table, name: str) -> dict[str, Cell]:
    """Returns the cells with runs that a cell, grid or grid point stands for; {} if unknown."""
    grid = table.tuning.get(table.cells[name].best_of if name in table.cells else name)
    if grid is not None:
        return {point.name: point for point in grid.points}
    points = table.points
    if name in points:
        return {name: points[name]}
    return {key: cell for key, cell in points.items() if key.startswith(f"{name}-")}


def check_cells(tables: Sequence[Table], names: Iterable[str]) -> None:
    """Raises unless each name is in at least one of the tables."""
    for name in names:
        if not any(cells_named(table, name) for table in tables):
            known = [key for t in tables for key in (*t.cells, *t.tuning, *t.points)]
            where = ", ".join(table.name for table in tables)
            raise SpecError(f"--cells {name}: not in {where}; {nearest(name, known)}")


def _choose_cells(table: Table, names: Sequence[str] | None) -> list[Cell]:
    if names is None:
        return list(table.points.values())
    check_cells([table], names)
    chosen: dict[str, Cell] = {}
    for name in names:
        chosen |= cells_named(table, name)
    return list(chosen.values())


def _choose_seeds(table: Table, seeds: Sequence[int] | None) -> Sequence[int]:
    foreign = [seed for seed in seeds or () if seed not in table.seeds]
    if foreign:
        own = ", ".join(map(str, table.seeds))
        raise SpecError(f"--seeds {foreign[0]}: {table.path} has only {own}; add it there")
    return table.seeds if seeds is None else list(dict.fromkeys(seeds))


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggests known names similar to a mistyped one, for error messages."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"use one of {', '.join(known)}" if known else "there are none"
