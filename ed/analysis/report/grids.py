"""Tables of the page: fields with the keys that they sort by, and marks on a shared scale."""

from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float | None, float | None]  # mean and standard deviation


class Mark(NamedTuple):
    """A dot with its interval, in percent of the width of its strip."""

    kind: str
    x: float
    low: float
    high: float
    beyond: bool = False  # the dot lies left of the scale


class Field(NamedTuple):
    """One field: its text, its sort key (None sorts last), and how it is set."""

    text: str = ""
    key: float | str | None = None
    href: str = ""
    style: str = ""
    notes: Sequence[int] = ()
    strip: Sequence[Mark] = ()

    @property
    def empty(self) -> bool:
        return not (self.text or self.notes or self.strip)


class Column(NamedTuple):
    name: str
    numeric: bool


class Grid(NamedTuple):
    columns: list[Column]
    rows: list[list[Field]]


def grid(header: Sequence[str], rows: Sequence[Sequence[Field]]) -> Grid:
    """Leaves out columns without content. Columns of numbers are set to the right."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
    kept = [i for i, fields in enumerate(columns) if i == 0 or not all(f.empty for f in fields)]
    heads = [Column(header[i], i > 0 and _is_numeric(columns[i])) for i in kept]
    return Grid(heads, [[row[i] for i in kept] for row in rows])


def _is_numeric(fields: Sequence[Field]) -> bool:
    keys = [field.key for field in fields if field.key not in (None, "")]
    return bool(keys) and all(isinstance(key, (int, float)) for key in keys)


def extent(sides: Sequence[Interval]) -> tuple[float, float] | None:
    """The range of all intervals; None where there are no two to compare."""
    known = [(mean - (std or 0), mean + (std or 0)) for mean, std in sides if mean is not None]
    if len(known) < 2:
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    margin = 0.06 * ((high - low) or 1)
    return low - margin, high + margin


def marks(sides: dict[str, Interval], scale: tuple[float, float] | None) -> list[Mark]:
    """Dots of the given kinds on one scale. What lies below it is drawn at its edge."""
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


def value(number: float | None, significant: int = 6) -> Field:
    return Field("" if number is None else f"{number:.{significant}g}", number)
