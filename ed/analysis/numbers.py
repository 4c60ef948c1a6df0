"""Formats means, standard deviations and differences."""

import math

from ed.analysis.spec import Paper

MOST_DECIMALS = 6  # beyond this, numbers are shown in scientific notation
ROUNDING = 1e-6  # a smaller relative std is rounding error


def mean_and_std(mean: float, std: float | None, digits: int) -> str:
    """Formats `0.67 ± 0.02` with `digits` decimals.

    Small values get more: at least two significant digits of the mean and one of the std.
    """
    places = decimals(mean, digits, significant=2)
    if std is None:
        return fixed(mean, places)
    if std > ROUNDING * abs(mean) and not float(fixed(std, places)):
        places = decimals(std, places, significant=1)
    return f"{fixed(mean, places)} ± {fixed(std, places)}"


def signed(apart: float, paper: Paper, digits: int) -> str:
    """Formats a signed difference with as many decimals as the paper's number."""
    return fixed(apart, decimals(paper.mean, digits, significant=2), sign="+")


def decimals(value: float, least: int, *, significant: int) -> int:
    """Returns at least `least` decimals, more if a value has fewer significant digits."""
    if not value or not math.isfinite(value):
        return least
    return max(least, significant - 1 - math.floor(math.log10(abs(value))))


def fixed(value: float, places: int, *, sign: str = "-") -> str:
    """Formats a number with these decimals, or in scientific notation if there are too many."""
    kind = f".{places}f" if places <= MOST_DECIMALS else ".1e"
    return f"{value:{sign}z{kind}}"  # the z option avoids -0.00
