"""Judges whether our runs reproduce the paper's numbers and claims.

    reproduced          the means differ by at most two standard errors of the difference (for a
                        single run of ours, two of the paper's standard deviations). Where the
                        paper prints no standard deviation, they differ by at most 10 %; for an
                        accuracy, by at most 10 % of the accuracy or of the error rate, whichever
                        is smaller, but one point is always allowed
    direction only      not reproduced, but on the same side of the reference as the paper's number.
                        The reference is the table's first other cell with the same task, or else
                        its first other cell
    contradicted        on the other side of the reference, or there is none
    unclear             for claims only: the 95 % interval of our effect includes zero
    not run             no run has finished yet
    not runnable here   the data or weights are not available

Each printed number counts once. A verdict from fewer seeds than planned is preliminary;
`Number.ours.count` is the number of seeds.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from textwrap import dedent

from ed.analysis.collect import Row, evaluation
from ed.analysis.correlation import Correlation, common_seeds, correlations
from ed.analysis.grokking import highest, transition
from ed.analysis.numbers import mean_and_std
from ed.analysis.outline import CLAIMS, MISSING, PARTS, Claim
from ed.analysis.render import Line, table_lines
from ed.analysis.returns import Aggregate, aggregates, gain_over_games, runs_each
from ed.analysis.spec import EXPERIMENTS, PROBES, Cell, Paper, Table
from ed.analysis.stats import Ours, half_width, paired_half_width, tolerance
from ed.analysis.store import committed
from ed.analysis.tables import load_table, table_names
from ed.runtime.runs import Status

RELATIVE = 0.1  # allowed relative difference where the paper prints no standard deviation
POINTS = 1.0  # the same for accuracies near 100 %, in points
NEAR = 2.0  # largest ratio between the steps of two peaks that belong together
DURATION = re.compile(r"(\d[\d.,]*) (?:GPU )?(hours?|h|minutes?)\b")


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    CONTRADICTED = "contradicted"
    UNCLEAR = "unclear"
    NOT_RUN = "not run"
    NOT_RUNNABLE = "not runnable here"


@dataclass(frozen=True, eq=False)
class Experiment:
    """An experiment file with the rows of its runs; derived values are cached."""

    table: Table
    rows: list[Row]

    @property
    def planned(self) -> set[tuple]:
        table = self.table
        return {(*cell.home, seed) for cell in table.points.values() for seed in table.seeds}

    @property
    def done(self) -> set[tuple]:
        done = (row for row in self.plain if row.status == Status.DONE)
        return {(*row.home, row.seed) for row in done} & self.planned

    @property
    def begun(self) -> bool:
        return any(row.status != Status.PENDING for row in self.rows)

    @property
    def plain(self) -> list[Row]:
        """The runs without deviations from the file."""
        return [row for row in self.rows if not row.deviations]

    @cached_property
    def lines(self) -> list[Line]:
        return table_lines(self.table, self.rows)

    @cached_property
    def numbers(self) -> list["Number"]:
        """The lines for which the paper prints a number, with their verdicts."""
        printed = [line for line in self.lines if line.paper.mean is not None]
        return [
            Number(
                self.table, x.cell, x.metric, x.paper, x.ours, x.by_seed, self._verdict(x, printed)
            )
            for x in printed
        ]

    def _verdict(self, line: Line, printed: Sequence[Line]) -> Verdict:
        table = self.table
        if not line.ours.count:
            return Verdict.NOT_RUNNABLE if table.name in MISSING else Verdict.NOT_RUN
        others = [
            (table.first_point(x.cell).task, (x.ours, x.paper))
            for x in printed
            if x.metric == line.metric and x.ours.count and x is not line
        ]
        task = table.first_point(line.cell).task
        others.sort(key=lambda entry: entry[0] != task)  # stable: the same task first
        reference = others[0][1] if others else None
        how = {"paper_count": table.paper_seeds, "percent": "/acc" in line.metric}
        return judge(line.ours, line.paper, **how, reference=reference)

    @cached_property
    def correlations(self) -> list[Correlation]:
        """The correlations of every variant of every measure, for correlation tables."""
        return correlations(self.table, self.plain)


@dataclass(frozen=True)
class Number:
    """A number from the paper, with our result and the verdict."""

    table: Table
    cell: Cell
    metric: str
    paper: Paper
    ours: Ours
    by_seed: dict[int, float]
    verdict: Verdict


@dataclass(frozen=True)
class Headline:
    """A claim of the paper, ready to print."""

    claim: str
    paper: str
    ours: str
    verdict: Verdict
    command: str
    gpu_hours: float | None
    table: str


def load_experiments(folder: Path = EXPERIMENTS) -> list[Experiment]:
    """Loads all tables: in the paper's order, then others by name, then probes."""
    order = [name for names in PARTS.values() for name in names]
    ranks = {name: place for place, name in enumerate(order)}
    names = sorted(table_names(folder), key=lambda name: (ranks.get(name, len(order)), name))
    names += [f"{PROBES}/{name}" for name in table_names(folder / PROBES)]
    tables = [load_table(name, folder) for name in names]
    return [Experiment(table, committed(table)) for table in tables]


def judge(
    ours: Ours,
    paper: Paper,
    *,
    paper_count: int | None,
    reference: tuple[Ours, Paper] | None = None,
    percent: bool = False,
) -> Verdict:
    """Returns the verdict on a number; `reference` is the cell it is compared with."""
    limit = RELATIVE * abs(paper.mean)
    if percent:
        limit = max(RELATIVE * min(paper.mean, 100 - paper.mean), POINTS)
    if paper.std is not None:
        limit = tolerance(ours, paper, paper_count)
    if abs(ours.mean - paper.mean) <= limit:
        return Verdict.REPRODUCED
    if reference is None:
        return Verdict.CONTRADICTED
    sides = (ours.mean - reference[0].mean, paper.mean - reference[1].mean)
    return Verdict.DIRECTION if sides[0] * sides[1] > 0 else Verdict.CONTRADICTED


def numbers(experiments: Sequence[Experiment]) -> list[Number]:
    """Returns the numbers of the paper, each once, in the order of `experiments`.

    A number can appear several times: in several tables of the paper, as several interpretations
    of one row, or compared with both our last and our best epoch. The first entry that has runs
    is kept.
    """
    found: list[Number] = []
    places: dict[tuple, int] = {}
    for experiment in experiments:
        if not experiment.table.comparable:
            continue
        for number in experiment.numbers:
            keys = _identities(number)
            place = next((places[key] for key in keys if key in places), len(found))
            places |= dict.fromkeys(keys, place)
            if place == len(found):
                found.append(number)
            elif number.ours.count and not found[place].ours.count:
                found[place] = number
    return found


def _identities(number: Number) -> tuple[tuple, tuple]:
    """Returns two keys for a number; numbers that share either key count as the same.

    Such numbers share their runs, or are interpretations of the same row of the paper.
    """
    value = (evaluation(number.metric), number.paper)
    row = re.split(r" \(|, lambda ", number.cell.label)[0]
    return (number.cell.home, *value), (number.table.name, row, *value)


def gain(before: Line | Number, after: Line | Number) -> tuple[float, float | None]:
    """Returns the difference of two means and the half-width of its 95 % interval.

    Runs are paired by seed if both sides have the same seeds; otherwise, the interval is Welch's.
    The half-width is None if either side has a single run.
    """
    apart = after.ours.mean - before.ours.mean
    if before.by_seed.keys() != after.by_seed.keys():
        return apart, half_width(before.ours, after.ours)
    return apart, paired_half_width([after.by_seed[s] - x for s, x in before.by_seed.items()])


def counts(found: Sequence[Number]) -> dict[Verdict, int]:
    possible = (verdict for verdict in Verdict if verdict is not Verdict.UNCLEAR)
    return {verdict: sum(n.verdict == verdict for n in found) for verdict in possible}


def command(table: Table) -> str:
    return f"python scripts/launch.py {table.argument}"


def header_comment(path: Path) -> list[tuple[bool, str]]:
    """Returns the blocks of a file's first comment as (is_command, text) pairs.

    The comment describes how to run the table and how long it takes. Commands start with the
    program name or are indented.
    """
    lines = path.read_text("utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    texts = (re.sub("^# ?", "", line) for line in comment)
    blocks = itertools.groupby(texts, lambda text: text.startswith(("python ", "export ", "  ")))
    return [
        (is_command, dedent("\n".join(group)) if is_command else " ".join(group).strip())
        for is_command, group in blocks
    ]


def gpu_hours(table: Table) -> float | None:
    """Returns the first duration in the experiment file's header comment, or None."""
    prose = " ".join(text for is_command, text in header_comment(table.path) if not is_command)
    match = DURATION.search(prose)
    if match is None or "on one CPU core" in prose:
        return None
    value = float(match[1].replace(",", ""))
    return value / 60 if match[2].startswith("minute") else value


def hours_left(found: Sequence[Number]) -> float:
    """Returns the GPU hours of all tables with missing numbers, including runs already done."""
    tables = {n.table.name: n.table for n in found if n.verdict == Verdict.NOT_RUN}
    return sum(gpu_hours(table) or 0 for table in tables.values())


def headline(experiments: Sequence[Experiment] | None = None) -> list[Headline]:
    """Returns one row per claim of the paper, for the README and the report."""
    every = load_experiments() if experiments is None else experiments
    known = {experiment.table.name: experiment for experiment in every}
    return [_headline(claim, known) for claim in CLAIMS if claim.table in known]


def _headline(claim: Claim, known: dict[str, Experiment]) -> Headline:
    own = used = known[claim.table]
    paper, ours, verdict = _judged(claim, own)
    if verdict is None and claim.stand_in in known:
        used = known[claim.stand_in]
        paper, ours, verdict = _judged(claim, used)
        ours += ", shortened" if verdict is not None else ""
    if verdict is None:
        verdict = Verdict.NOT_RUNNABLE if claim.table in MISSING else Verdict.NOT_RUN
    hours, name = gpu_hours(own.table), used.table.name
    return Headline(claim.text, paper, minus(ours), verdict, command(own.table), hours, name)


def _judged(claim: Claim, experiment: Experiment) -> tuple[str, str, Verdict | None]:
    """Returns the paper's numbers, ours, and the verdict; None for too few runs."""
    if experiment.table.correlation is not None:
        return claim.paper, *_correlation(experiment)
    if experiment.table.aggregate is not None:
        return claim.paper, *_games(experiment)
    if claim.treated:
        return _contrast(claim, experiment)
    return claim.paper, *_transition(experiment)


def _contrast(claim: Claim, experiment: Experiment) -> tuple[str, str, Verdict | None]:
    """Compares two cells; reproduced if all seeds are done, and both numbers and the sign agree."""
    table = experiment.table
    metric = claim.metric or table.primary
    by_cell = {n.cell.name: n for n in experiment.numbers if n.metric == metric}
    before = by_cell[claim.reference]
    treated = [by_cell[name] for name in claim.treated]
    after = next((number for number in treated if number.ours.count), treated[0])
    pair = (before, after)
    shown = [mean_and_std(n.paper.mean, n.paper.std, table.digits) for n in pair]
    paper = " → ".join(shown)
    if not all(number.ours.count for number in pair):
        return paper, "", None
    ours = [mean_and_std(n.ours.mean, n.ours.std, table.digits) for n in pair]
    count = min(number.ours.count for number in pair)
    complete = count >= len(table.seeds)
    variant = re.search(r"\((.*)\)$", after.cell.label)
    text = f"{' → '.join(ours)} ({_seeds(count, table)}{f', {variant[1]}' if variant else ''})"
    apart, half = gain(before, after)
    effect = apart if after.paper.mean >= before.paper.mean else -apart
    both = all(number.verdict == Verdict.REPRODUCED for number in pair)
    if complete and both and effect > 0:
        return paper, text, Verdict.REPRODUCED
    half = half or 0.0
    return paper, text, _by_effect(effect, effect - half, effect + half)


def _correlation(experiment: Experiment) -> tuple[str, Verdict | None]:
    found = experiment.correlations
    own = next((c for c in found if c.selected and c.metric.startswith("measure/ed")), None)
    if own is None or own.whole.points < len(experiment.table.cells):
        return "", None
    e, seeds = own.whole, common_seeds(experiment.table, experiment.plain)
    text = f"r = {e.r:+.2f} ({e.low:+.2f} to {e.high:+.2f}), {e.points} networks"
    if len(seeds) < len(experiment.table.seeds):
        text += f" ({_seeds(len(seeds), experiment.table)})"
    if own.fitted.r is not None:
        text += f"; {own.fitted.r:+.2f} among the {own.fitted.points} fitted"
    return text, _by_effect(e.r, e.low, e.high)


def _games(experiment: Experiment) -> tuple[str, Verdict | None]:
    games = aggregates(experiment.table, experiment.plain)
    if len(games) < 2:
        return "", None
    shown = " → ".join(map(_with_interval, games))
    text = f"{shown} normalised return ({games[0].games}, {runs_each(games)})"
    return text, _by_effect(*gain_over_games(*games[:2]))


def _with_interval(one: Aggregate) -> str:
    mean = f"{one.mean:.3f}"
    return mean if one.low is None else f"{mean} ({one.low:.3f} to {one.high:.3f})"


def _transition(experiment: Experiment) -> tuple[str, Verdict | None]:
    """Compares the steps at which ED and the validation loss peak, from the logged values.

    This uses the first cell in which all runs reach the transition; without one, the lowest
    accuracy of the first cell is reported.
    """
    table, done = experiment.table, [row for row in experiment.plain if row.status == Status.DONE]
    cells = {c.label: [row for row in done if row.home == c.home] for c in table.cells.values()}
    cells = {f"{label}, {_seeds(len(own), table)}": own for label, own in cells.items() if own}
    if not cells:
        return "", None
    if any(row.record is None for own in cells.values() for row in own):
        return "runs lack their logged values", None
    for about, own in cells.items():
        runs = [row.history() for row in own]
        if all(map(transition, runs)):
            return _peaks(about, runs)
    about, own = next(iter(cells.items()))
    accuracy = min(row.last[table.primary] for row in own)
    return f"no transition: {accuracy:.1f} % validation accuracy ({about})", Verdict.CONTRADICTED


def _peaks(about: str, runs: Sequence[list[dict]]) -> tuple[str, Verdict | None]:
    degrees = [highest(history, "measure/ed_validation") for history in runs]
    losses = [highest(history, "eval/loss") for history in runs]
    pairs = [(ed[0], loss[0]) for ed, loss in zip(degrees, losses, strict=True) if ed and loss]
    if len(pairs) < len(runs):
        return f"runs lack ED on validation equations ({about})", None
    steps = (" and ".join(f"{step:,}" for step in side) for side in zip(*pairs, strict=True))
    text = "on validation equations, ED peaks at steps {}, the loss at {}".format(*steps)
    text += f" ({about})"
    return text, _by_effect(min(NEAR - max(ed / loss, loss / ed) for ed, loss in pairs))


def _seeds(count: int, table: Table) -> str:
    """Formats the number of runs, with the planned number while some are missing."""
    return f"n = {count}" if count >= len(table.seeds) else f"n = {count} of {len(table.seeds)}"


def minus(text: str) -> str:
    """Replaces hyphens before numbers with minus signs."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\N{MINUS SIGN}", text)


def _by_effect(effect: float, low: float | None = None, high: float | None = None) -> Verdict:
    """Judges an effect, positive for the paper's sign, by its sign and its 95 % interval."""
    if None not in (low, high) and low <= 0 <= high:
        return Verdict.UNCLEAR
    return Verdict.DIRECTION if effect > 0 else Verdict.CONTRADICTED
