"""Summarises the results of each table in a sentence or two."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ed.analysis.correlation import Correlation
from ed.analysis.numbers import decimals, fixed, mean_and_std
from ed.analysis.render import Line
from ed.analysis.returns import METHODS, aggregates, runs_each
from ed.analysis.spec import Table
from ed.analysis.stats import Ours
from ed.analysis.verdicts import Experiment, Verdict, counts, gain, minus

MANY = 10  # with at least this many judged numbers, a finding counts the reproduced ones


@dataclass(frozen=True)
class Finding:
    """A headline result: a number, the sentence about it, and the table it comes from."""

    value: str
    text: str
    table: Table


def finding(experiment: Experiment) -> str:
    """Returns a summary of a table's results; empty until a run has finished."""
    text = minus(_finding(experiment))
    symbol = re.match(r"\w\b", text)  # as in "r=4" or "x * y"
    return text if symbol else text[:1].upper() + text[1:]


def _finding(experiment: Experiment) -> str:
    table = experiment.table
    if table.correlation is not None:
        return _pool(experiment)
    if table.aggregate and (games := aggregates(table, experiment.plain)):
        shown = ", ".join(f"{METHODS[one.method]} {one.mean:.3f}" for one in games)
        return f"Normalised return over {games[0].games}: {shown} ({runs_each(games)})."
    judged = [number for number in experiment.numbers if number.ours.count]
    if table.comparable and len(judged) >= MANY:
        return _tally(experiment)
    compared = pairs(experiment)
    if not compared:
        return _extremes(experiment)
    text = _comparison(table, *compared[0])
    if len(compared) > 1:
        ahead = sum(after.ours.mean > before.ours.mean for before, after in compared)
        text += f" ED is ahead in {ahead} of {len(compared)} comparisons."
    return text


def pairs(experiment: Experiment) -> list[tuple[Line, Line]]:
    """Returns pairs of lines (without ED, with ED), for the first metric that both have.

    Pairs are matched by cell name: baseline and ed, rte and rte_ed.
    """
    known: dict[str, dict[str, Line]] = {}
    for line in experiment.lines:
        if line.ours.count:
            known.setdefault(line.cell.name, {})[line.metric] = line
    found = []
    for name in experiment.table.cells:
        match = re.fullmatch(r"(?:(.+)_)?ed(?:_efficiency)?|efficiency", name)
        stem = match and match[1]
        plain = (stem, f"{stem}_baseline") if stem else ("baseline",)
        before = next((known[other] for other in plain if other in known), {})
        after = known.get(name, {}) if match else {}
        shared = next((metric for metric in before if metric in after), None)
        if shared is not None:
            found.append((before[shared], after[shared]))
    return found


def _shown(side: Ours, table: Table) -> str:
    return mean_and_std(side.mean, side.std, table.digits)


def _comparison(table: Table, before: Line, after: Line) -> str:
    apart, half = gain(before, after)
    places = decimals(before.ours.mean, 2, significant=2)  # at least as many as the mean has
    signed = partial(fixed, places=places, sign="+")
    interval = ""
    if half is not None:
        interval = f", 95 % interval {signed(apart - half)} to {signed(apart + half)}"
    runs = f"n = {after.ours.count}"
    if after.ours.count != before.ours.count:
        runs += f" and {before.ours.count}"
    return (
        f"{after.label}: {_shown(after.ours, table)} against {_shown(before.ours, table)} for "
        f"{before.label} ({signed(apart)}, {runs}{interval})."
    )


def _extremes(experiment: Experiment) -> str:
    """Compares the highest value of the first metric to the first cell with the same task."""
    table = experiment.table
    lines = [line for line in experiment.lines if line.metric == table.primary]
    known = [(table.first_point(line.cell).task, line) for line in lines if line.ours.count]
    if not known:
        return ""
    task, best = max(known, key=lambda entry: entry[1].ours.mean)
    first = next(line for other, line in known if other == task)
    if best is not first:
        return _comparison(table, first, best)
    paper = "" if best.paper.mean is None else f"; the paper has {best.paper.mean:.{table.digits}f}"
    others = "" if len(known) == len(lines) else f" {len(known)} of {len(lines)} cells have runs."
    return f"{best.label}: {_shown(best.ours, table)} (n = {best.ours.count}{paper}).{others}"


def _tally(experiment: Experiment) -> str:
    reproduced, total = _agreeing(experiment), len(experiment.numbers)
    return f"{reproduced} of the paper's {total} numbers are reproduced{_others(experiment)}."


def _agreeing(experiment: Experiment) -> int:
    return counts(experiment.numbers)[Verdict.REPRODUCED]


def _others(experiment: Experiment) -> str:
    found = counts(experiment.numbers).items()
    others = [f"{count} {word}" for word, count in found if count and word != Verdict.REPRODUCED]
    return f" ({', '.join(others)})" if others else ""


def strongest(found: Sequence[Correlation]) -> list[Correlation]:
    """Returns the selected variant of each measure, sorted by |r|, largest first."""
    return sorted((one for one in found if one.selected), key=lambda one: -abs(one.whole.r))


def _r(one: Correlation, table: Table) -> str:
    e = one.whole
    return f"{table.metrics[one.metric]} r = {e.r:+.2f} ({e.low:+.2f} to {e.high:+.2f})"


def _pool(experiment: Experiment) -> str:
    table = experiment.table
    chosen = strongest(experiment.correlations)
    if not chosen:
        return ""
    own = next((one for one in chosen if one.metric.startswith("measure/ed")), chosen[0])
    rest = [one for one in chosen if one is not own and not one.metric.startswith("measure/ed")]
    text = f"Over {own.whole.points} networks: {_r(own, table)}"
    text += f"; the strongest other measure is {_r(rest[0], table)}." if rest else "."
    if own.fitted.r is not None:
        text += f" Among the {own.fitted.points} that fit their training set, r = "
        text += f"{own.fitted.r:+.2f} ({own.fitted.low:+.2f} to {own.fitted.high:+.2f})."
    return text


def top_findings(experiments: Sequence[Experiment]) -> list[Finding]:
    """Returns up to three headline findings: accuracy, generalization gap, reproduced numbers."""
    candidates = (_accuracy(experiments), _gap(experiments), _reproduced(experiments))
    return [found for found in candidates if found is not None]


def _accuracy(experiments: Sequence[Experiment]) -> Finding | None:
    """Compares accuracy with and without ED, in the version of Table 1 with the most seeds."""
    known = [
        (pairs(experiment)[0], experiment.table)
        for experiment in experiments
        if experiment.table.name.startswith("table1") and pairs(experiment)
    ]
    if not known:
        return None
    (before, after), table = max(known, key=lambda entry: entry[0][1].ours.count)
    apart, _ = gain(before, after)
    return Finding(minus(f"{apart:+.2f} points"), minus(_comparison(table, before, after)), table)


def _gap(experiments: Sequence[Experiment]) -> Finding | None:
    known = [e for e in experiments if e.table.correlation is not None and _pool(e)]
    if not known:
        return None
    best = max(known, key=lambda e: (e.table.comparable, len(e.done)))
    shown = strongest(best.correlations)
    own = next((one for one in shown if one.metric.startswith("measure/ed")), None)
    return own and Finding(minus(f"r = {own.whole.r:+.2f}"), minus(_pool(best)), best.table)


def _reproduced(experiments: Sequence[Experiment]) -> Finding | None:
    """Counts reproduced numbers in the table with the most numbers to compare."""
    judged = {
        e: sum(n.ours.count > 0 for n in e.numbers) for e in experiments if e.table.comparable
    }
    best = max(judged, key=judged.get, default=None)
    if best is None or not judged[best]:
        return None
    value = f"{_agreeing(best)} of {len(best.numbers)}"
    return Finding(value, f"numbers of the paper are reproduced{_others(best)}.", best.table)
