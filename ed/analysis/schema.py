"""The keys of an experiment file, experiments/<table>.yaml.

title, place     the title, and where the table is in the paper (optional)
metric(s)        one key, or a mapping of keys to column labels: eval/x at the last step;
                 late/x, its mean over the last tenth of training (for noisy evaluations); or
                 best/x, its best evaluation (if x is the task's own metric)
seeds            seeds of every cell; paper_seeds: how many the paper averages over
digits           decimals of the printed numbers (default 2); small numbers get more
comparable       false if the paper's numbers are for other settings (default true)
fixed            overrides of every cell, such as experiment=cifar10_vit_tiny; cells may change
                 them; hydra.searchpath=[file:///your/configs] adds your own configs
notes            remarks about the whole table
figure           ed.figures.NAME:draw, which draws it from its rows (see scripts/table.py)
correlation      {against: metric, measures: {name: [metric, ...]}}: correlates all variants
                 of each measure with one metric over all cells; train: metric of the training
                 accuracy (%), to correlate fitted networks separately; replicates: a setting
                 in which near copies differ, drawn together for intervals (both optional)
aggregate        metric whose normalised interquartile mean over games is shown (Procgen)
cost             {baseline: cell, full: cell}: shows step times, gains over the baseline and their
                 share of the full method's gain, for the first metric
cells            name: {label, paper, note}, all optional, and one of
                   overrides: [key=value, ...]   the settings of the cell
                   overrides + grid: {key: [values]}   one cell per combination
                   same_as: table/cell           reuses the runs of another table
                   best_of: grid                 the best point of a grid under `tuning`,
                                                 by the first metric under `paper`;
                                                 diverged points are skipped
tuning           name: {overrides, grid, rule}; `rule` states how the best point is chosen;
                 lower_is_better: true if the best has the lowest mean (default: the
                 highest), required if the metric is called loss or error
"""

import itertools
import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from ed.analysis.spec import misplaced, nearest
from ed.runtime.files import refuse_control

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# expected values, by pydantic's error type
NEEDED = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than_equal": "a whole number from 0",
    "greater_than": "a whole number from 1",
    "less_than_equal": "at most 10",
    "too_short": "at least one entry",
    "string_too_short": "a name",
    "string_pattern_mismatch": "ed.figures.NAME:draw, e.g. ed.figures.ranking:draw",
}


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("use only letters, digits and _ . + -, as it names a folder")
    return name


def _check_override(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}; use key=value")
    _check_key(key)
    refuse_control(text, repr(text))
    return text


def _check_key(key: str) -> str:
    if (reason := misplaced(key)) is not None:
        raise ValueError(f"{key}: {reason}")
    return key


def _check_distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{seeds}; seeds must differ")
    return seeds


def _by_metric(paper):
    """Assigns a plain {mean, std} to the key "", which stands for the table's first metric."""
    return {"": paper} if isinstance(paper, dict) and set(paper) <= {"mean", "std"} else paper


def _or_empty(value):
    """Replaces None, the value of an empty YAML key, with an empty mapping."""
    return {} if value is None else value


def _text_keys(value):
    """Converts keys to strings, as YAML reads a cell named 3 as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


class _Strict(BaseModel):
    """Rejects unknown keys and wrong types, as YAML reads 3 as a number and `no` as false."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Name = Annotated[str, AfterValidator(_check_name)]
Overrides = list[Annotated[str, AfterValidator(_check_override)]]
GridValues = Annotated[
    dict[Annotated[str, AfterValidator(_check_key)], Annotated[list, Field(min_length=1)]],
    Field(min_length=1),
]


class PaperNumber(_Strict):
    mean: float | None
    std: float | None = None


class CellKeys(_Strict):
    label: str = ""
    paper: Annotated[dict[str, PaperNumber] | None, BeforeValidator(_by_metric)] = None
    note: str | None = None
    overrides: Overrides | None = None
    grid: GridValues | None = None
    same_as: str | None = None
    best_of: str | None = None

    @model_validator(mode="after")
    def _has_one_source(self):
        if sum(value is not None for value in (self.overrides, self.same_as, self.best_of)) != 1:
            raise ValueError("use one of overrides, same_as, best_of")
        return self


class TuningKeys(_Strict):
    overrides: Overrides
    grid: GridValues
    rule: str
    lower_is_better: bool | None = None


class StudyKeys(_Strict):
    against: str
    measures: dict[str, list[str]]
    train: str | None = None
    replicates: str | None = None


class CostKeys(_Strict):
    baseline: str
    full: str


class TableKeys(_Strict):
    title: str
    place: str | None = None
    metric: Annotated[str, Field(min_length=1)] | None = None
    metrics: dict[str, str] | None = None
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_check_distinct)]
    paper_seeds: Annotated[int, Field(gt=0)] | None = None
    digits: Annotated[int, Field(ge=0, le=10)] = 2
    comparable: bool = True
    fixed: Overrides
    notes: list[str] | None = None
    figure: Annotated[str, Field(pattern=r"^ed\.figures\.\w+:draw$")] | None = None
    correlation: StudyKeys | None = None
    aggregate: str | None = None
    cost: CostKeys | None = None
    cells: Annotated[dict[Name, CellKeys], BeforeValidator(_text_keys), Field(min_length=1)]
    tuning: Annotated[dict[Name, TuningKeys], BeforeValidator(_or_empty)] = {}

    @model_validator(mode="after")
    def _metrics_are_known(self):
        if (self.metric is None) == (not self.metrics):
            raise ValueError("use either metric: KEY or metrics: {KEY: label, ...}")
        named = [("aggregate", self.aggregate)] if self.aggregate is not None else []
        if (study := self.correlation) is not None:
            metrics = itertools.chain([study.against], *study.measures.values(), [study.train])
            named += [("correlation", metric) for metric in metrics if metric is not None]
        for key, metric in named:
            if metric not in self.labels:
                raise ValueError(f"{key}: {metric}; {nearest(metric, self.labels)}")
        return self

    @property
    def labels(self) -> dict[str, str]:
        """Column labels by metric."""
        return self.metrics or {self.metric: self.metric}


def first_mistake(error: ValidationError) -> str:
    """Describes the first mistake in a file in one line: key, value and remedy."""
    found = error.errors()[0]
    where = [str(part) for part in found["loc"] if part not in ("[key]", "")]
    key, kind = ".".join(where), found["type"]
    if kind == "missing":
        return f"{key}: this key is missing"
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(where[-1], _keys_beside(where))}"
    if kind == "value_error":
        return f"{key}: {found['ctx']['error']}" if key else str(found["ctx"]["error"])
    if not key:
        what = "is empty" if found["input"] is None else f"contains {found['input']!r}"
        return f"the file {what}; use the keys listed in ed/analysis/schema.py"
    return f"{key}: {found['input']!r}; use {NEEDED.get(kind, found['msg'])}"


def _keys_beside(where: list[str]) -> list[str]:
    """Returns the valid keys of the mapping that contains an unknown key."""
    inner = {"cells": CellKeys, "tuning": TuningKeys, "correlation": StudyKeys, "cost": CostKeys}
    model = PaperNumber if "paper" in where[:-1] else inner.get(where[0], TableKeys)
    return list((model if len(where) > 1 else TableKeys).model_fields)
