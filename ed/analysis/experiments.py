"""Experiment files, experiments/<table>.yaml: one for each table and data figure of the paper.

Keys of a file:

    title, place     what it is, and where it is in the paper (optional)
    metric(s)        one key, or a mapping of keys to column labels: eval/x at the last step,
                     best/x the best evaluation of it (where x is the task's own metric)
    seeds            seeds of every cell; paper_seeds: how many the paper averages over
    digits           decimals of the printed numbers (default 2); small ones get more
    comparable       false where the paper's numbers stand for other settings (default true)
    fixed            overrides of every cell, such as experiment=cifar10_vit_tiny, which they may
                     change; hydra.searchpath=[file:///your/configs] lets them choose parts and
                     experiments of your own
    notes            remarks about the whole table
    figure           module:function that draws it from its rows (see scripts/table.py)
    correlation      {against: metric, measures: {name: [metric, ...]}}: each measure, in several
                     variants, against one metric over all cells
    aggregate        metric whose interquartile mean over games is shown, normalised (Procgen)
    cells            name: {label, paper, note}, all optional, and one of
                       overrides: [key=value, ...]   what it changes
                       overrides + grid: {key: [values]}   one cell per combination
                       same_as: table/cell           the very runs of another table
                       best_of: grid                 the best point of a grid under `tuning`,
                                                     by the first metric that `paper` names; one
                                                     that diverged is not waited for
    tuning           name: {overrides, grid, rule}; `rule` says how the best point is chosen;
                     lower_is_better: true where the best has the lowest mean (default: the
                     highest), to be said either way where the metric is called loss or error
"""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import yaml

from ed.analysis.recipes import expanded
from ed.analysis.spec import EXPERIMENTS, Cell, Grid, Paper, SpecError, Study, Table, nearest
from ed.runtime.files import refuse_control, yaml_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
REQUIRED = ("title", "seeds", "fixed", "cells")
OPTIONAL = ("place", "metric", "metrics", "paper_seeds", "digits", "comparable", "notes", "figure")
OPTIONAL += ("correlation", "aggregate", "tuning")
CELL_KEYS = ("label", "paper", "note", "overrides", "grid", "same_as", "best_of")
GRID_KEYS = ("overrides", "grid", "rule")
LOWER = ("loss", "error")  # so called, a metric is hardly meant to be high
# what a value must be, by its key: YAML reads 3 as a number, and no as false
KINDS = {"title": str, "place": str, "comparable": bool, "digits": int, "paper_seeds": int}
KINDS |= {"lower_is_better": bool}
KINDS |= {"notes": list, "tuning": dict, "metric": str, "metrics": dict, "label": str, "note": str}
KINDS |= {"best_of": str, "same_as": str, "rule": str, "mean": (int, float), "std": (int, float)}
MAY_BE_NULL = ("paper_seeds", "notes", "note", "tuning", "mean", "std")
WORDS = {str: "text", bool: "true or false", int: "a whole number", list: "a list"}
WORDS |= {dict: "a mapping", (int, float): "a number"}


def load_table(name: str, folder: Path = EXPERIMENTS) -> Table:
    """The table called `name`, or the one in the file of that path."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise SpecError(f"unknown table {name!r}; {nearest(path.stem, known)}")
    return _Reader(path).table()


def table_names(folder: Path = EXPERIMENTS) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


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
        if not NAME.fullmatch(path.stem):
            self.fail("letters, digits and _ . + - only in its name, as it names a folder")
        text = self.checked(yaml_text, path)
        try:
            self.raw = yaml.load(text, _UniqueKeys)  # safe: a SafeLoader
        except (yaml.YAMLError, SpecError) as error:
            self.fail(re.sub(r"\s+", " ", str(error)))
        if not isinstance(self.raw, dict):
            self.fail("a mapping is needed: title, place, metric, seeds, fixed, cells")

    def fail(self, message: str):
        raise SpecError(f"{self.path}: {message}")

    def table(self) -> Table:
        raw = self.raw
        self.check_keys(raw, "the table", required=REQUIRED, optional=OPTIONAL)
        self.metrics = self.read_metrics()
        self.fixed = self.strings(raw["fixed"], "fixed")
        cells = self.read_cells()
        shown = {cell.best_of: cell.metrics for cell in cells.values()}
        for cell in cells.values():
            if cell.best_of is not None and cell.metrics[0] != shown[cell.best_of][0]:
                self.fail(
                    f"cell {cell.name}: best_of: {cell.best_of}, which another cell judges by "
                    f"{shown[cell.best_of][0]}, this one by {cell.metrics[0]}; give it its own grid"
                )
        tuning = {
            name: self.grid(name, grid, shown.get(name, tuple(self.metrics)))
            for name, grid in (raw.get("tuning") or {}).items()
        }
        for cell in cells.values():
            if cell.best_of is not None and cell.best_of not in tuning:
                self.fail(f"cell {cell.name}: best_of: {cell.best_of}; {nearest('', tuning)}")
            if cell.best_of is not None:
                self.check_direction(tuning[cell.best_of])
        table = Table(
            name=self.path.stem,
            path=self.path,
            title=raw["title"],
            place=raw.get("place"),
            metrics=self.metrics,
            seeds=self.read_seeds(),
            paper_seeds=raw.get("paper_seeds"),
            digits=raw.get("digits", 2),
            comparable=raw.get("comparable", True),
            notes=self.read_notes(),
            cells=cells,
            tuning=tuning,
            figure=self.read_figure(),
            correlation=self.read_correlation(),
            aggregate=self.read_aggregate(),
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
                self.fail(f"{where}: unknown key {key!r}; {nearest(key, (*required, *optional))}")
            if key in KINDS and not (raw[key] is None and key in MAY_BE_NULL):
                self.check_kind(raw[key], f"{where}: {key}", KINDS[key])

    def check_kind(self, value, where: str, kind) -> None:
        number = isinstance(value, bool) and kind is not bool  # to Python
        if number or not isinstance(value, kind):
            self.fail(f"{where}: {value}; {WORDS[kind]} is needed")

    def read_metrics(self) -> dict[str, str]:
        if ("metric" in self.raw) == ("metrics" in self.raw):
            self.fail("give either metric: KEY or metrics: {KEY: label, ...}")
        metrics = self.raw.get("metrics") or {self.raw["metric"]: self.raw["metric"]}
        for text in (*metrics, *metrics.values()):
            self.check_kind(text, "metrics", str)
        return metrics

    def read_notes(self) -> tuple[str, ...]:
        notes = tuple(self.raw.get("notes") or ())
        for note in notes:
            self.check_kind(note, "notes", str)
        return notes

    def read_figure(self) -> str | None:
        name = self.raw.get("figure")
        if name is not None and not re.fullmatch(r"[\w.]+:\w+", str(name)):
            self.fail(f"figure: {name}; write module:function, e.g. ed.figures.correlation:draw")
        return name

    def read_correlation(self) -> Study | None:
        raw = self.raw.get("correlation")
        if raw is None:
            return None
        self.check_keys(raw, "correlation", required=("against", "measures"))
        measures = raw["measures"]
        if not isinstance(measures, dict) or not all(
            isinstance(v, list) for v in measures.values()
        ):
            self.fail("correlation: measures: name: [metric, ...] is needed")
        for metric in (raw["against"], *itertools.chain(*measures.values())):
            if metric not in self.metrics:
                self.fail(f"correlation: {metric}; {nearest(metric, self.metrics)}")
        return Study(raw["against"], {name: tuple(v) for name, v in measures.items()})

    def read_aggregate(self) -> str | None:
        metric = self.raw.get("aggregate")
        if metric is not None and metric not in self.metrics:
            self.fail(f"aggregate: {metric}; {nearest(metric, self.metrics)}")
        return metric

    def read_seeds(self) -> tuple[int, ...]:
        seeds = self.raw["seeds"]
        if not isinstance(seeds, list) or not seeds:
            self.fail(f"seeds: {seeds}; a list of different whole numbers is needed")
        if any(type(seed) is not int or seed < 0 for seed in seeds):
            self.fail(f"seeds: {seeds}; whole numbers from 0 on are needed")
        if len(set(seeds)) < len(seeds):
            self.fail(f"seeds: {seeds}; different ones are needed")
        return tuple(seeds)

    def checked(self, check, *given):
        """What `check` returns; its complaint as ours."""
        try:
            return check(*given)
        except ValueError as error:
            raise SpecError(str(error).replace(f"{self.path} ", f"{self.path}: ", 1)) from None

    def strings(self, raw, where: str) -> tuple[str, ...]:
        listed = isinstance(raw, list)
        wrong = [s for s in raw if not isinstance(s, str) or "=" not in s] if listed else [raw]
        if wrong:
            self.fail(f"{where}: a list of key=value is needed, not {wrong[0]!r}")
        for text in raw:
            self.checked(refuse_control, text, f"{self.path}: {where}: {text!r}")
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
        self.check_keys(raw, where, optional=CELL_KEYS)
        if not NAME.fullmatch(name):
            self.fail(f"{where}: letters, digits and _ . + - only, as it names a folder")
        kinds = [kind for kind in ("overrides", "same_as", "best_of") if kind in raw]
        if len(kinds) != 1:
            self.fail(f"{where}: give one of overrides, same_as, best_of")
        paper = self.paper(raw.get("paper"), where)
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
            return self.borrowed(cell, raw["same_as"])
        if kinds == ["best_of"]:
            return [cell]
        cell = self.given(cell, self.fixed + self.strings(raw["overrides"], where), where)
        return self.product(cell, raw["grid"], where) if "grid" in raw else [cell]

    def given(self, cell: Cell, overrides: tuple[str, ...], where: str) -> Cell:
        """The cell with its overrides, `experiment=` expanded for those who read them."""
        try:
            return replace(cell, overrides=expanded(overrides), arguments=overrides)
        except ValueError as error:
            self.fail(f"{where}: {error}")

    def borrowed(self, cell: Cell, target: str) -> list[Cell]:
        table, _, name = str(target).partition("/")
        path = self.path.with_name(f"{table}.yaml")
        if not path.is_file() or path == self.path:
            self.fail(f"cell {cell.name}: same_as: {target}; write table/cell of another table")
        other = _Reader(path)
        home = (other.raw.get("cells") or {}).get(name)
        if not isinstance(home, dict) or "overrides" not in home:
            self.fail(f"cell {cell.name}: same_as: {target} is no cell with runs of its own there")
        overrides = other.strings(other.raw.get("fixed"), "fixed")
        overrides += other.strings(home["overrides"], f"cell {name}")
        cell = other.given(replace(cell, home=(table, name)), overrides, f"cell {name}")
        return other.product(cell, home["grid"], f"cell {name}") if "grid" in home else [cell]

    def grid(self, name: str, raw: dict, metrics: tuple[str, ...]) -> Grid:
        where = f"tuning {name}"
        self.check_keys(raw, where, required=GRID_KEYS, optional=("lower_is_better",))
        seed_cell = Cell(
            name=name,
            label=name,
            home=(self.path.stem, name),
            overrides=(),
            metrics=metrics,
            paper={},
        )
        overrides = self.fixed + self.strings(raw["overrides"], where)
        points = tuple(self.product(self.given(seed_cell, overrides, where), raw["grid"], where))
        return Grid(name, raw["rule"], points, raw.get("lower_is_better", False))

    def check_direction(self, grid: Grid) -> None:
        said = "lower_is_better" in self.raw["tuning"][grid.name]
        if grid.metric.endswith(LOWER) and not said:
            self.fail(
                f"tuning {grid.name}: the best by {grid.metric}: is that the lowest? Add "
                "lower_is_better: true, or false"
            )

    def product(self, cell: Cell, grid: dict, where: str) -> list[Cell]:
        if not isinstance(grid, dict) or not all(isinstance(v, list) and v for v in grid.values()):
            self.fail(f"{where}: grid: key: [value, ...] is needed")
        points = []
        for values in itertools.product(*grid.values()):
            words = ["null" if value is None else str(value) for value in values]
            pairs = list(zip(grid, words, strict=True))
            settings = [f"{key}={word}" for key, word in pairs]
            shown = ", ".join(f"{key.rpartition('.')[2]}={word}" for key, word in pairs)
            suffix = "-".join(["", *words])
            if not NAME.fullmatch(cell.name + suffix):
                self.fail(
                    f"{where}: grid: {', '.join(settings)}: letters, digits and _ . + - only, as "
                    "it names a folder; write a cell for each instead"
                )
            points.append(
                replace(
                    cell,
                    name=cell.name + suffix,
                    label=f"{cell.label}, {shown}",
                    home=(cell.home[0], cell.home[1] + suffix),
                    overrides=(*cell.overrides, *settings),
                    arguments=(*cell.arguments, *settings),
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
                self.fail(f"{where}: paper: {metric}; {nearest(metric, self.metrics)}")
            self.check_keys(value, f"{where}, paper", required=("mean",), optional=("std",))
        return {metric: Paper(v["mean"], v.get("std")) for metric, v in raw.items()}

    def check_whole(self, table: Table) -> None:
        stds = [paper.std for cell in table.cells.values() for paper in cell.paper.values()]
        if table.paper_seeds is None and any(std is not None for std in stds):
            self.fail("paper_seeds: needed, as the paper prints standard deviations")
        names = [*table.cells, *(p.name for g in table.tuning.values() for p in g.points)]
        twice = {name for name in names if names.count(name) > 1}
        twice |= table.cells.keys() & table.tuning.keys()
        if twice:
            self.fail(f"{min(twice)} stands twice")
        labels = [(cell.label, metric) for cell in table.cells.values() for metric in cell.metrics]
        label, metric = next((pair for pair in labels if labels.count(pair) > 1), (None, None))
        if label is not None:
            self.fail(f"two cells have the label {label!r} and {metric}; tell them apart")
        by_overrides: dict[tuple, str] = {}
        for cell in table.points.values():
            same = by_overrides.setdefault(cell.overrides, cell.name)
            if same != cell.name:
                self.fail(f"cells {same} and {cell.name} have the same overrides")
