"""Means, standard deviations, and the verdict on a reproduced number.

With our mean a (n runs, std s) and the paper's mean b (n', s'):

    match            |a - b| <= 2 sqrt(s^2/n + s'^2/n'), two standard errors of the difference;
                     for a single run of ours, which has no std, |a - b| <= 2 s'
    differs          otherwise
    no std: +3 %     the paper prints no std: the relative difference (a - b) / |b|, no verdict
    reference only   the runs differ from the paper's on purpose (shorter schedule, reductions)
    pending k of n   only k of the n planned runs are done
    not in paper     the paper prints no number here

Standard deviations divide by n - 1.

The difference a - b has Welch's 95 % interval, a - b ± t sqrt(s^2/n + s'^2/n'), if both sides have
a std. t is the quantile of Student's t with the Welch-Satterthwaite degrees of freedom; with three
runs on each side it is 2.8 to 4.3, so an interval may include 0 although the verdict is `differs`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ed.analysis.spec import Paper

ROUNDING = 1e-9  # a smaller relative std is rounding error


@dataclass(frozen=True)
class Ours:
    """Summary of our runs: `std` is None for fewer than two runs, `mean` for none."""

    mean: float | None
    std: float | None
    count: int


def summarise(values: Sequence[float]) -> Ours:
    mean = statistics.fmean(values) if values else None
    std = statistics.stdev(values) if len(values) > 1 else None
    return Ours(mean, std, len(values))


def difference(ours: Ours, paper: Paper) -> float | None:
    if ours.mean is None or paper.mean is None:
        return None
    return ours.mean - paper.mean


def student(degrees: float) -> float:
    """Returns the 97.5 % quantile of Student's t, for two-sided 95 % intervals."""
    from scipy.special import stdtrit  # slow to import, and few callers need it

    return float(stdtrit(degrees, 0.975))


def half_width(one: Ours, other: Ours) -> float | None:
    """Returns the half-width of the 95 % interval of a difference of means (Welch).

    None if a side has no standard deviation, or if both are 0.
    """
    sides = (one, other)
    if any(side.std is None or side.count < 2 for side in sides) or not (one.std or other.std):
        return None
    parts = [side.std**2 / side.count for side in sides]
    spread = sum(part**2 / (side.count - 1) for part, side in zip(parts, sides, strict=True))
    return student(sum(parts) ** 2 / spread) * math.sqrt(sum(parts))


def paired_half_width(differences: Sequence[float]) -> float | None:
    """Returns the half-width of the 95 % interval of a mean of differences (t test).

    None for fewer than two differences, or if all are equal.
    """
    found = summarise(differences)
    if not found.std or found.std <= ROUNDING * max(map(abs, differences)):
        return None
    return student(found.count - 1) * found.std / math.sqrt(found.count)


def tolerance(ours: Ours, paper: Paper, paper_count: int) -> float:
    """Returns the largest difference that counts as a match, given the paper's std."""
    if ours.std is None:
        return 2 * paper.std
    return 2 * math.sqrt(ours.std**2 / ours.count + paper.std**2 / paper_count)


def verdict(
    ours: Ours,
    paper: Paper,
    *,
    paper_count: int | None,
    done: int,
    planned: int,
    comparable: bool = True,
) -> str:
    if done < planned:
        return f"pending {done} of {planned}"
    apart = difference(ours, paper)
    if apart is None:
        return "not in paper"
    if not comparable:
        return "reference only"
    if paper.std is None:
        return f"no std: {_percent(100 * apart / abs(paper.mean))}" if paper.mean else "no std"
    return "match" if abs(apart) <= tolerance(ours, paper, paper_count) else "differs"


def _percent(value: float) -> str:
    """Formats a percentage without decimals, or with up to two if it is below 1 %."""
    digits = 0 if abs(value) >= 1 else 1 if abs(value) >= 0.1 else 2
    return f"{value:+z.{digits}f} %"
