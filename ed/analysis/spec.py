"""Experiment files: a table or figure of the paper as a list of runs.

`load_table` reads `experiments/<table>.yaml`; `expand` lists its runs, and the launcher and the
collector both use it, so that a table knows which of its runs are missing. Keys of a file:

    title, place     what it is, and where it stands in the paper
    status           `planned` while its task is not there yet (default: ready)
    metric(s)        one key, or a mapping of keys to column labels; the first decides tuning
    seeds            seeds of every cell; paper_seeds: how many the paper averages over
    digits           decimals of the printed numbers (default 2)
    comparable       false where the paper's numbers stand for other settings (default true)
    fixed            overrides of every cell
    notes            remarks about the whole table
    figure           module:function that draws it from its rows (see ed/figures/files.py)
    cells            name: {label, paper, note} and one of
                       overrides: [key=value, ...]   what it changes
                       overrides + grid: {key: [values]}   one cell per combination
                       same_as: table/cell           the very runs of another table
                       best_of: grid                 the best point of a grid under `tuning`
    tuning           name: {overrides, grid, rule}; `rule` says how the best point is chosen
"""

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
INCIDENTAL = (
    "system",
    "logger",
    "measures",
)  # settings that cannot change a result, so no deviations
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
REQUIRED = ("title", "place", "seeds", "fixed", "cells")
OPTIONAL = ("metric", "metrics", "status", "paper_seeds", "digits", "comparable", "notes", "figure")
OPTIONAL += ("tuning",)
CELL_KEYS = ("label", "paper", "note", "overrides", "grid", "same_as", "best_of")
GRID_KEYS = ("overrides", "grid", "rule")
STATUSES = ("ready", "planned")


@dataclass(frozen=True)
class Paper:
    """What the paper prints; None where it prints nothing."""

    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One number (per metric) of a table.

    Attributes:
        home: (table, cell) whose folders hold its runs; another table's for `same_as`.
        overrides: all of them, the table's fixed ones included; empty for `best_of`.
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


@dataclass(frozen=True)
class Grid:
    name: str
    rule: str
    points: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    name: str
    path: Path
    title: str
    place: str
    status: str
    metrics: dict[str, str]
    seeds: tuple[int, ...]
    paper_seeds: int | None
    digits: int
    comparable: bool
    notes: tuple[str, ...]
    cells: dict[str, Cell]
    tuning: dict[str, Grid]
    figure: str | None = None

    @property
    def primary(self) -> str:
        return next(iter(self.metrics))

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
        deviations: settings given at launch that differ from the file, sorted.
    """

    table: str
    cell: str
    seed: int
    overrides: tuple[str, ...]
    folder: Path
    deviations: tuple[str, ...] = ()


class SpecError(ValueError):
    """An experiment file, or a choice from one, that makes no sense."""


def load_table(name: str, folder: Path = EXPERIMENTS) -> Table:
    """The table called `name`, or the one in the file of that path."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise SpecError(f"unknown table {name!r}; {_nearest(path.stem, known)}")
    return _Reader(path).table()


def table_names(folder: Path = EXPERIMENTS) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def expand(
    table: Table,
    *,
    cells: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    sets: Sequence[str] = (),
    data: str | None = None,
    root: Path = Path("runs"),
) -> list[Run]:
    """The runs of a table, in its order.

    Cells and seeds only choose: those runs are the table's own. `sets` change what is trained, so
    such runs live in folders of their own and carry their deviations.

    Args:
        cells: names of cells, grids or grid points; None: all.
        sets: `key=value` overrides on top of the file's.
        data: another place of the same data set (task.data); not a deviation.
    """
    deviations = deviations_of(sets)
    extra = (*sets, *([] if data is None else [f"task.data={data}"]))
    return [
        Run(
            table=cell.home[0],
            cell=cell.home[1],
            seed=seed,
            overrides=(*cell.overrides, *extra, f"seed={seed}"),
            folder=root / reduced_name(cell.home[0], deviations) / cell.home[1] / f"seed{seed}",
            deviations=deviations,
        )
        for cell in _choose_cells(table, cells)
        for seed in _choose_seeds(table, seeds)
    ]


def deviations_of(sets: Sequence[str]) -> tuple[str, ...]:
    """Those of the given settings that can change a result, in one order."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not (key and equals and value) or re.search(r"\s", text):
            raise SpecError(f"--set {text!r}: write key=value without spaces, e.g. task.epochs=20")
        if key == "seed" or key == "system.run_dir":
            raise SpecError(f"--set {text}: the table decides this; choose with --seeds, --runs")
    keys = [text.split("=")[0] for text in sets]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise SpecError(f"--set {twice} is given twice; give it once")
    return tuple(sorted(s for s in sets if re.split(r"[.=]", s)[0] not in INCIDENTAL))


def reduced_name(table: str, deviations: Sequence[str]) -> str:
    """What the runs of a table with these deviations go by; the table's own name without any."""
    return f"{table}@{_tag(deviations)}" if deviations else table


def nested(config: dict, key: str):
    """The value at a dotted key; KeyError where there is none."""
    for part in key.split("."):
        config = config[part]
    return config


def parse_value(text: str):
    """The value an override sets: YAML, and floats such as 1e-5, which YAML takes for words."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _tag(deviations: Sequence[str]) -> str:
    """Readable, short, and different for different deviations."""
    words = [re.sub(r"[^A-Za-z0-9.+-]", "", d.split(".")[-1].replace("=", "")) for d in deviations]
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
            raise SpecError(f"table {table.name} has no cell {name!r}; {_nearest(name, known)}")
    return list(chosen.values())


def _choose_seeds(table: Table, seeds: Sequence[int] | None) -> Sequence[int]:
    foreign = [seed for seed in seeds or () if seed not in table.seeds]
    if foreign:
        own = ", ".join(map(str, table.seeds))
        raise SpecError(f"--seeds {foreign[0]}: {table.path} has seeds {own}; add it there")
    return table.seeds if seeds is None else list(dict.fromkeys(seeds))


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known are {', '.join(known)}" if known else "there are none in that folder"


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a mapping with the same key twice, where plain YAML keeps the last."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise SpecError(f"line {key.start_mark.line + 1}: {key.value!r} stands there twice")
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


class _Reader:
    """One experiment file, every complaint of which names the file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.raw = yaml.load(path.read_text(), _UniqueKeys)  # safe: a SafeLoader
        except (yaml.YAMLError, SpecError) as error:
            self.fail(re.sub(r"\s+", " ", str(error)))
        if not isinstance(self.raw, dict):
            self.fail("a mapping is needed: title, place, metric, seeds, fixed, cells")

    def fail(self, message: str):
        raise SpecError(f"{self.path}: {message}")

    def table(self) -> Table:
        raw = self.raw
        self.check_keys(raw, "the table", required=REQUIRED, optional=OPTIONAL)
        status = raw.get("status", "ready")
        if status not in STATUSES:
            self.fail(f"status: {status!r}; use {' or '.join(STATUSES)}")
        self.metrics = self.read_metrics()
        self.fixed = self.strings(raw["fixed"], "fixed")
        cells = self.read_cells()
        tuning = {name: self.grid(name, g) for name, g in (raw.get("tuning") or {}).items()}
        for cell in cells.values():
            if cell.best_of is not None and cell.best_of not in tuning:
                self.fail(f"cell {cell.name}: best_of: {cell.best_of}; {_nearest('', tuning)}")
        table = Table(
            name=self.path.stem,
            path=self.path,
            title=raw["title"],
            place=raw["place"],
            status=status,
            metrics=self.metrics,
            seeds=self.read_seeds(),
            paper_seeds=raw.get("paper_seeds"),
            digits=raw.get("digits", 2),
            comparable=raw.get("comparable", True),
            notes=tuple(raw.get("notes") or ()),
            cells=cells,
            tuning=tuning,
            figure=self.read_figure(),
        )
        self.check_whole(table)
        return table

    def check_keys(self, raw: dict, where: str, *, required=(), optional=()) -> None:
        if not isinstance(raw, dict):
            self.fail(f"{where}: a mapping is needed, not {raw!r}")
        for key in required:
            if key not in raw:
                self.fail(f"{where}: the key {key!r} is missing")
        for key in raw:
            if key not in (*required, *optional):
                self.fail(f"{where}: unknown key {key!r}; {_nearest(key, (*required, *optional))}")

    def read_metrics(self) -> dict[str, str]:
        if ("metric" in self.raw) == ("metrics" in self.raw):
            self.fail("give either metric: KEY or metrics: {KEY: label, ...}")
        return self.raw.get("metrics") or {self.raw["metric"]: self.raw["metric"]}

    def read_figure(self) -> str | None:
        name = self.raw.get("figure")
        if name is not None and not re.fullmatch(r"[\w.]+:\w+", str(name)):
            self.fail(f"figure: {name}; write module:function, e.g. ed.figures.correlation:draw")
        return name

    def read_seeds(self) -> tuple[int, ...]:
        seeds = self.raw["seeds"]
        if not isinstance(seeds, list) or not seeds or len(set(seeds)) < len(seeds):
            self.fail(f"seeds: {seeds}; a list of different whole numbers is needed")
        if any(not isinstance(seed, int) or seed < 0 for seed in seeds):
            self.fail(f"seeds: {seeds}; whole numbers from 0 on are needed")
        return tuple(seeds)

    def strings(self, raw, where: str) -> tuple[str, ...]:
        wrong = [s for s in raw if not isinstance(s, str) or "=" not in s] if raw else []
        if not isinstance(raw, list) or wrong:
            self.fail(f"{where}: a list of key=value is needed, not {wrong[0] if wrong else raw!r}")
        return tuple(raw)

    def read_cells(self) -> dict[str, Cell]:
        if not isinstance(self.raw["cells"], dict) or not self.raw["cells"]:
            self.fail("cells: a mapping of names to cells is needed")
        found: dict[str, Cell] = {}
        for name, raw in self.raw["cells"].items():
            for cell in self.cell(str(name), raw):
                if cell.name in found:
                    self.fail(f"cell {cell.name} stands there twice")
                found[cell.name] = cell
        return found

    def cell(self, name: str, raw: dict) -> list[Cell]:
        where = f"cell {name}"
        self.check_keys(raw, where, optional=CELL_KEYS, required=("paper",))
        if not NAME.fullmatch(name):
            self.fail(f"{where}: letters, digits and _ . + - only, as it names a folder")
        kinds = [kind for kind in ("overrides", "same_as", "best_of") if kind in raw]
        if len(kinds) != 1:
            self.fail(f"{where}: give one of overrides, same_as, best_of")
        paper = self.paper(raw["paper"], where)
        cell = Cell(
            name=name,
            label=raw.get("label", name),
            home=(self.path.stem, name),
            overrides=(),
            metrics=tuple(paper),
            paper=paper,
            note=raw.get("note"),
            best_of=raw.get("best_of"),
        )
        if kinds == ["same_as"]:
            return [self.borrowed(cell, raw["same_as"])]
        if kinds == ["best_of"]:
            return [cell]
        cell = replace(cell, overrides=self.fixed + self.strings(raw["overrides"], where))
        return self.product(cell, raw["grid"], where) if "grid" in raw else [cell]

    def borrowed(self, cell: Cell, target: str) -> Cell:
        table, _, name = str(target).partition("/")
        path = self.path.with_name(f"{table}.yaml")
        if not path.is_file() or path == self.path:
            self.fail(f"cell {cell.name}: same_as: {target}; write table/cell of another table")
        other = _Reader(path)
        home = (other.raw.get("cells") or {}).get(name)
        if not isinstance(home, dict) or "overrides" not in home or "grid" in home:
            self.fail(f"cell {cell.name}: same_as: {target} is no cell with runs of its own there")
        overrides = other.strings(other.raw.get("fixed"), "fixed")
        overrides += other.strings(home["overrides"], f"cell {name}")
        return replace(cell, home=(table, name), overrides=overrides)

    def grid(self, name: str, raw: dict) -> Grid:
        where = f"tuning {name}"
        self.check_keys(raw, where, required=GRID_KEYS)
        seed_cell = Cell(
            name=name,
            label=name,
            home=(self.path.stem, name),
            overrides=self.fixed + self.strings(raw["overrides"], where),
            metrics=tuple(self.metrics),
            paper={},
        )
        return Grid(name, raw["rule"], tuple(self.product(seed_cell, raw["grid"], where)))

    def product(self, cell: Cell, grid: dict, where: str) -> list[Cell]:
        if not isinstance(grid, dict) or not all(isinstance(v, list) and v for v in grid.values()):
            self.fail(f"{where}: grid: key: [value, ...] is needed")
        points = []
        for values in itertools.product(*grid.values()):
            settings = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
            name = "-".join([cell.name, *map(str, values)])
            points.append(
                replace(
                    cell,
                    name=name,
                    label=f"{cell.label}, {', '.join(settings)}",
                    home=(self.path.stem, name),
                    overrides=(*cell.overrides, *settings),
                )
            )
        return points

    def paper(self, raw, where: str) -> dict[str, Paper]:
        """Printed numbers by metric: {mean, std}, {metric: {mean, std}}, or null for none."""
        if raw is None:
            return {metric: Paper() for metric in self.metrics}
        if isinstance(raw, dict) and set(raw) <= {"mean", "std"}:
            raw = {next(iter(self.metrics)): raw}
        if not isinstance(raw, dict):
            self.fail(f"{where}: paper: {{mean: ..., std: ...}} is needed, or null")
        for metric, value in raw.items():
            if metric not in self.metrics:
                self.fail(f"{where}: paper: {metric}; {_nearest(metric, self.metrics)}")
            self.check_keys(value, f"{where}, paper", required=("mean",), optional=("std",))
        return {metric: Paper(v["mean"], v.get("std")) for metric, v in raw.items()}

    def check_whole(self, table: Table) -> None:
        stds = [paper.std for cell in table.cells.values() for paper in cell.paper.values()]
        if table.paper_seeds is None and any(std is not None for std in stds):
            self.fail("paper_seeds: needed, as the paper prints standard deviations")
        names = [*table.cells, *(p.name for g in table.tuning.values() for p in g.points)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or set(table.cells) & set(table.tuning):
            self.fail(f"{(twice or sorted(set(table.cells) & set(table.tuning)))[0]} stands twice")
        by_overrides: dict[tuple, str] = {}
        for cell in table.points.values():
            same = by_overrides.setdefault(cell.overrides, cell.name)
            if same != cell.name:
                self.fail(f"cells {same} and {cell.name} have the same overrides")
