"""Tables of the report, and small charts that share a scale."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ed.analysis.verdicts import minus

Interval = tuple[float | None, float | None]  # mean and standard deviation
NUMBER = re.compile(r"[-+\N{MINUS SIGN}]?[\d.,]+(e[-+]?\d+)?( ?(±|%|of|to|\[).*)?")


class Mark(NamedTuple):
    """A dot with its interval; positions are percentages of the chart's width."""

    kind: str
    x: float
    low: float
    high: float
    beyond: bool = False  # whether the mean is below the scale


class Field(NamedTuple):
    """A table field with a link, style, footnotes or chart."""

    text: str = ""
    href: str = ""
    style: str = ""
    notes: Sequence[int] = ()
    strip: Sequence[Mark] = ()


class Column(NamedTuple):
    name: str
    numeric: bool


class Grid(NamedTuple):
    columns: list[Column]
    rows: list[list[Field]]


def grid(header: Sequence[str], rows: Sequence[Sequence[Field | str]]) -> Grid:
    """Builds a table without its empty columns; columns of numbers are marked as numeric."""
    fields = [[_text(one) if isinstance(one, str) else one for one in row] for row in rows]
    columns = list(zip(*fields, strict=True)) if rows else [()] * len(header)
    kept = [i for i, own in enumerate(columns) if i == 0 or any(map(any, own))]
    heads = [Column(header[i], i > 0 and _is_numeric(columns[i])) for i in kept]
    return Grid(heads, [[row[i] for i in kept] for row in fields])


def _text(text: str) -> Field:
    return Field(minus(text) if NUMBER.fullmatch(text) else text)


def _is_numeric(fields: Sequence[Field]) -> bool:
    texts = [field.text for field in fields if field.text not in ("", "-")]
    return bool(texts) and all(map(NUMBER.fullmatch, texts))


def extent(sides: Sequence[Interval]) -> tuple[float, float] | None:
    """Returns the range of all intervals, with a margin; None for fewer than two."""
    known = [(mean - (std or 0), mean + (std or 0)) for mean, std in sides if mean is not None]
    if len(known) < 2:
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    margin = 0.06 * ((high - low) or 1)
    return low - margin, high + margin


def marks(sides: dict[str, Interval], scale: tuple[float, float] | None) -> list[Mark]:
    """Places dots and intervals on one scale, clipped to its ends."""
    if scale is None:
        return []
    low, high = scale

    def place(value: float) -> float:
        return round(100 * min(1, max(0, (value - low) / (high - low))), 2)

    return [
        Mark(kind, place(mean), place(mean - (std or 0)), place(mean + (std or 0)), mean < low)
        for kind, (mean, std) in sides.items()
        if mean is not None
    ]


def number(value: float | None, significant: int = 6) -> str:
    return "" if value is None else f"{value:.{significant}g}"
