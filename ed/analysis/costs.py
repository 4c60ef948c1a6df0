"""Cost and gain of methods: step time, accuracy, and the share of a full method's gain.

A table with `cost: {baseline: CELL, full: CELL}` shows these for each cell. Step times are read
from ../speed/steps.csv beside the table's results (see ed.analysis.steps).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ed.analysis import provenance
from ed.analysis.collect import Row
from ed.analysis.numbers import fixed, mean_and_std
from ed.analysis.spec import Cell, Table
from ed.analysis.stats import Ours, student, summarise
from ed.analysis.steps import FILE, RATIO, read_steps
from ed.runtime.runs import Status

TITLE = "Cost and gain"
HEADER = ("", "step time (x plain)", "ours (n)", "gain", "share (%)", "common seeds")
ROUNDING = 1e-9  # a smaller sum of gains is rounding error


@dataclass(frozen=True)
class Share:
    """A cell's part of the full method's gain, 1 for all of it.

    Attributes:
        interval: its 95 % interval; None for a single seed.
        bounded: False if the interval is unbounded, as the full gain is not significant.
    """

    value: float
    interval: tuple[float, float] | None = None
    bounded: bool = True


@dataclass(frozen=True)
class Gain:
    """Cost and gain of a cell.

    Attributes:
        step: the measured step; None if there is none.
        values: the first metric of all seeds of the cell.
        seeds: how many seeds the cell, the baseline and the full method have in common.
        gain: mean difference to the baseline over these seeds; None if there are none, and for
            the baseline.
        share: None if the full method does not gain, and for the baseline.
    """

    cell: Cell
    step: dict[str, str] | None
    values: tuple[float, ...]
    seeds: int
    gain: float | None
    share: Share | None

    @property
    def ours(self) -> Ours:
        return summarise(self.values)

    @property
    def ratio(self) -> float | None:
        """The step time relative to a plain step."""
        return None if self.step is None else float(self.step[RATIO])


def gains(table: Table, rows: Sequence[Row]) -> list[Gain]:
    """Returns the cells that have a measured step or a finished run, in the table's order.

    Reduced runs are left out, as their steps are not measured.
    """
    steps = read_steps(table.path.parent / FILE)
    values = {cell.name: _by_seed(table, cell, rows) for cell in table.cells.values()}
    found = [_gain(table, cell, values, steps) for cell in table.cells.values()]
    return [one for one in found if one.step is not None or one.values]


def fieller(gain: Sequence[float], full: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % interval of mean(gain) / mean(full), paired by seed (Fieller, 1954).

    It contains every ratio q for which mean(gain - q full) does not differ significantly from 0,
    by a t test on n - 1 degrees of freedom:

        (x - q y)^2 <= t^2 (s_xx - 2 q s_xy + q^2 s_yy) / n.

    None if this set is unbounded, because y does not differ significantly from 0.
    """
    count = len(gain)
    x, y = np.mean(gain), np.mean(full)
    (xx, xy), (_, yy) = student(count - 1) ** 2 * np.cov(gain, full) / count
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    if a <= 0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    return float((b - root) / a), float((b + root) / a)


def cost_fields(table: Table, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns one row per cell with a measured step or a finished run; the columns are HEADER."""
    if table.cost is None:
        return []
    return [
        (
            one.cell.label,
            "-" if one.ratio is None else f"{one.ratio:.2f}",
            _accuracy(one.ours, table.digits),
            "-" if one.gain is None else fixed(one.gain, table.digits, sign="+"),
            _share_text(one.share),
            str(one.seeds or "-"),
        )
        for one in gains(table, rows)
    ]


def meaning(table: Table, rows: Sequence[Row]) -> str:
    """Explains the columns, and where the steps were measured."""
    plain, full = (table.cells[name].label for name in (table.cost.baseline, table.cost.full))
    steps = [one.step for one in gains(table, rows) if one.step is not None]
    return (
        f'Gain over "{plain}", and share of the gain of "{full}" with Fieller\'s 95 % interval, '
        "from the seeds that a cell has in common with these two. One seed gives no interval; the "
        "interval is unbounded if the full gain is not significantly above 0, and there is no "
        f"share if it is not above 0 at all. {provenance.measured(steps)}"
    )


def _accuracy(ours: Ours, digits: int) -> str:
    return f"{mean_and_std(ours.mean, ours.std, digits)} ({ours.count})" if ours.count else "-"


def _share_text(share: Share | None) -> str:
    if share is None:
        return "-"
    shown = f"{100 * share.value:z.0f}"
    if not share.bounded:
        return f"{shown} [unbounded]"
    if share.interval is None:
        return shown
    low, high = (f"{100 * end:z.0f}" for end in share.interval)
    return f"{shown} [{low}, {high}]"


def _by_seed(table: Table, cell: Cell, rows: Sequence[Row]) -> dict[int, float]:
    return {
        row.seed: row.last[table.primary]
        for row in rows
        if row.home == cell.home and row.status == Status.DONE and not row.deviations
        if table.primary in row.last
    }


def _gain(table: Table, cell: Cell, values: dict[str, dict[int, float]], steps: dict) -> Gain:
    own, plain, full = (values[name] for name in (cell.name, table.cost.baseline, table.cost.full))
    seeds = sorted(own.keys() & plain.keys() & full.keys())
    judged = bool(seeds) and cell.name != table.cost.baseline
    gained = [own[seed] - plain[seed] for seed in seeds]
    whole = [full[seed] - plain[seed] for seed in seeds]
    return Gain(
        cell=cell,
        step=steps.get(cell.home),
        values=tuple(own.values()),
        seeds=len(seeds),
        gain=math.fsum(gained) / len(seeds) if judged else None,
        share=_share(gained, whole) if judged else None,
    )


def _share(gained: Sequence[float], whole: Sequence[float]) -> Share | None:
    total = math.fsum(whole)
    if total <= ROUNDING:
        return None
    value = math.fsum(gained) / total
    if len(whole) < 2 or gained == whole:  # the full method itself has the share 1, exactly
        return Share(value)
    interval = fieller(gained, whole)
    return Share(value, interval, bounded=interval is not None)
