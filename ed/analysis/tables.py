"""Reads and checks the YAML files of tables, and expands cells and grids."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ValidationError

from ed.analysis.recipes import expanded
from ed.analysis.schema import NAME, CellKeys, StudyKeys, TableKeys, TuningKeys, first_mistake
from ed.analysis.spec import EXPERIMENTS, Cell, Cost, Grid, Paper, SpecError, Study, Table, nearest
from ed.runtime.files import YAML_LOADER, yaml_text

LOWER = ("loss", "error")  # metrics for which lower is usually better
UNCHANGED = ("title", "place", "paper_seeds", "digits", "comparable", "figure", "aggregate")


def load_table(name: str, folder: Path = EXPERIMENTS) -> Table:
    """Loads a table by name, or by the path of its YAML file."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise SpecError(f"unknown table {name!r}; {nearest(path.stem, known)}")
    keys = read_keys(path)
    try:
        return _Builder(path, keys).table()
    except SpecError:
        raise  # is about another file and already names it
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None


def table_names(folder: Path = EXPERIMENTS) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_keys(path: Path) -> TableKeys:
    """Reads and checks an experiment file; SpecError names the file and the key."""
    if not NAME.fullmatch(path.stem):
        raise SpecError(f"{path}: use only letters, digits and _ . + -, as it names a folder")
    try:
        raw = yaml.load(yaml_text(path), _UniqueKeys)  # safe: builds only plain values
        return TableKeys.model_validate(raw)
    except ValidationError as error:
        raise SpecError(f"{path}: {first_mistake(error)}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = re.sub(r"\s+", " ", str(error)).removeprefix(f"{path} ")
        raise SpecError(f"{path}: {reason}") from None


class _UniqueKeys(YAML_LOADER):
    """A YAML loader that rejects duplicate keys; others keep only the last."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise ValueError(f"line {key.start_mark.line + 1}: duplicate key {key.value!r}")
        seen.add(key.value)
    return YAML_LOADER.construct_mapping(loader, node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


class _Builder:
    """Builds the table of a file; raises a ValueError that names the invalid cell."""

    def __init__(self, path: Path, keys: TableKeys):
        self.path, self.keys, self.metrics = path, keys, keys.labels

    def table(self) -> Table:
        keys, cells, study = self.keys, self.cells(), self.keys.correlation
        table = Table(
            name=self.path.stem,
            path=self.path,
            metrics=self.metrics,
            seeds=tuple(keys.seeds),
            notes=tuple(keys.notes or ()),
            cells=cells,
            tuning=self.tuning(cells),
            correlation=study and _study(study),
            cost=keys.cost and Cost(keys.cost.baseline, keys.cost.full),
            **{name: getattr(keys, name) for name in UNCHANGED},
        )
        _check_whole(table)
        return table

    def cells(self) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        for name, keys in self.keys.cells.items():
            for cell in self.cell(name, keys):
                if cell.name in found:
                    raise ValueError(f"duplicate cell {cell.name}")
                found[cell.name] = cell
        return found

    def cell(self, name: str, keys: CellKeys) -> list[Cell]:
        paper = self.paper(name, keys)
        cell = Cell(
            name=name,
            label=keys.label or name,
            home=(self.path.stem, name),
            overrides=(),
            metrics=tuple(paper),
            paper=paper,
            note=keys.note,
            best_of=keys.best_of,
        )
        if keys.same_as is not None:
            return self.borrowed(cell, keys.same_as)
        return [cell] if keys.best_of is not None else self.points(cell, keys)

    def paper(self, name: str, keys: CellKeys) -> dict[str, Paper]:
        """Returns the paper's numbers by metric; each is empty if the paper prints none."""
        if keys.paper is None:
            return {metric: Paper() for metric in self.metrics}
        first = next(iter(self.metrics))
        numbers = {metric or first: number for metric, number in keys.paper.items()}
        for metric in numbers:
            if metric not in self.metrics:
                raise ValueError(f"cell {name}: paper: {metric}; {nearest(metric, self.metrics)}")
        return {metric: Paper(number.mean, number.std) for metric, number in numbers.items()}

    def borrowed(self, cell: Cell, target: str) -> list[Cell]:
        table, _, name = target.partition("/")
        path = self.path.with_name(f"{table}.yaml")
        if not path.is_file() or path == self.path:
            raise ValueError(f"cell {cell.name}: same_as: {target}; use OTHER_TABLE/CELL")
        other = _Builder(path, read_keys(path))
        home = other.keys.cells.get(name)
        if home is None or home.overrides is None:
            raise ValueError(f"cell {cell.name}: same_as: {target} has no runs of its own")
        return other.points(replace(cell, home=(table, name)), home)

    def points(self, cell: Cell, keys: CellKeys | TuningKeys) -> list[Cell]:
        """Returns the cell with its overrides, or one cell per point of its grid."""
        arguments = (*self.keys.fixed, *keys.overrides)
        try:
            cell = replace(cell, overrides=expanded(arguments), arguments=arguments)
        except ValueError as error:
            raise ValueError(f"cell {cell.name}: {error}") from None
        return [cell] if keys.grid is None else _product(cell, keys.grid)

    def tuning(self, cells: dict[str, Cell]) -> dict[str, Grid]:
        judged: dict[str, Cell] = {}  # maps each grid to the first cell that shows its best point
        for cell in (cell for cell in cells.values() if cell.best_of is not None):
            first = judged.setdefault(cell.best_of, cell)
            if cell.best_of not in self.keys.tuning:
                known = nearest("", self.keys.tuning)
                raise ValueError(f"cell {cell.name}: best_of: {cell.best_of}; {known}")
            if cell.metrics[0] != first.metrics[0]:
                raise ValueError(
                    f"cell {cell.name}: best_of: {cell.best_of} uses {first.metrics[0]} for cell "
                    f"{first.name}, but {cell.metrics[0]} here; add another grid"
                )
        return {name: self.grid(name, keys, judged) for name, keys in self.keys.tuning.items()}

    def grid(self, name: str, keys: TuningKeys, judged: dict[str, Cell]) -> Grid:
        metrics = judged[name].metrics if name in judged else tuple(self.metrics)
        if name in judged and keys.lower_is_better is None and metrics[0].endswith(LOWER):
            raise ValueError(
                f"tuning {name}: lower_is_better: set it to true or false for {metrics[0]}"
            )
        cell = Cell(name, name, (self.path.stem, name), overrides=(), metrics=metrics, paper={})
        points = tuple(self.points(cell, keys))
        return Grid(name, keys.rule, points, bool(keys.lower_is_better))


def _study(keys: StudyKeys) -> Study:
    measures = {name: tuple(variants) for name, variants in keys.measures.items()}
    return Study(keys.against, measures, keys.train, keys.replicates)


def _product(cell: Cell, grid: dict[str, list]) -> list[Cell]:
    points = []
    for values in itertools.product(*grid.values()):
        words = ["null" if value is None else str(value) for value in values]
        pairs = list(zip(grid, words, strict=True))
        settings = [f"{key}={word}" for key, word in pairs]
        shown = ", ".join(f"{key.rpartition('.')[2]}={word}" for key, word in pairs)
        suffix = "-".join(["", *words])
        if not NAME.fullmatch(cell.name + suffix):
            raise ValueError(
                f"cell {cell.name}: grid: {', '.join(settings)}: values become folder names; "
                "use only letters, digits and _ . + -, or write a cell for each"
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


def _check_cost(table: Table) -> None:
    cost = table.cost
    if table.correlation is not None:
        raise ValueError("cost: a table with `correlation` has no costs; remove one of the two")
    _check_untuned(table, "cost")
    for key, name in (("baseline", cost.baseline), ("full", cost.full)):
        if name not in table.cells:
            raise ValueError(f"cost.{key}: {name}; {nearest(name, table.cells)}")
    if cost.baseline == cost.full:
        raise ValueError(f"cost.full: {cost.full} is also cost.baseline; use another cell")


def _check_untuned(table: Table, key: str) -> None:
    tuned = next((cell.name for cell in table.cells.values() if cell.best_of is not None), None)
    if tuned is not None:
        raise ValueError(f"{key}: cell {tuned} uses best_of; write its settings as overrides")


def _check_replicates(table: Table, key: str) -> None:
    settings = [text.partition("=")[0] for cell in table.cells.values() for text in cell.overrides]
    if key not in settings:
        raise ValueError(f"correlation.replicates: {key}; {nearest(key, settings)}")


def _check_whole(table: Table) -> None:
    if table.cost is not None:
        _check_cost(table)
    if table.correlation is not None:
        _check_untuned(table, "correlation")
        if table.correlation.replicates is not None:
            _check_replicates(table, table.correlation.replicates)
    stds = [paper.std for cell in table.cells.values() for paper in cell.paper.values()]
    if table.paper_seeds is None and any(std is not None for std in stds):
        raise ValueError("paper_seeds: required for the paper's standard deviations")
    names = [*table.cells, *(p.name for g in table.tuning.values() for p in g.points)]
    twice = {name for name in names if names.count(name) > 1}
    twice |= table.cells.keys() & table.tuning.keys()
    if twice:
        raise ValueError(f"duplicate name {min(twice)}")
    labels = [(cell.label, metric) for cell in table.cells.values() for metric in cell.metrics]
    label, metric = next((pair for pair in labels if labels.count(pair) > 1), (None, None))
    if label is not None:
        raise ValueError(f"two cells have the label {label!r} for {metric}; rename one")
    by_overrides: dict[tuple, str] = {}
    for cell in table.points.values():
        same = by_overrides.setdefault(cell.overrides, cell.name)
        if same != cell.name:
            raise ValueError(f"cells {same} and {cell.name} have the same overrides")
