"""Tables whose columns can be sorted; wide ones scroll inside their own box."""

from collections.abc import Sequence

from ed.analysis.report.markup import Html, join, tag

Field = tuple[Html | str, float | str | None]  # what is shown, and what it is sorted by


def sortable(header: Sequence[str], rows: Sequence[Sequence[Field]]) -> Html:
    """A table of (shown, key) fields. Columns of numbers are set to the right; None sorts last."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
    # the first column names the row, so it stays on the left
    numeric = [place > 0 and _is_numeric(column) for place, column in enumerate(columns)]
    head = [_head_field(name, right) for name, right in zip(header, numeric, strict=True)]
    body = [tag("tr", *map(_field, row, numeric, range(len(row)))) for row in rows]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    # focusable, so that the keyboard can scroll it
    return tag("div", table, class_="wide", tabindex="0", role="region", aria_label="table")


def _is_numeric(column: Sequence[Field]) -> bool:
    keys = [key for _, key in column if key is not None and key != ""]
    return bool(keys) and all(isinstance(key, (int, float)) for key in keys)


def _head_field(name: str, right: bool) -> Html:
    button = tag("button", name or Html("&nbsp;"), type="button")
    return tag("th", button, scope="col", class_="number" if right else None)


def _field(field: Field, right: bool, place: int) -> Html:
    shown, key = field
    name, scope = ("th", "row") if place == 0 else ("td", None)
    key = None if key == "" else key
    return tag(
        name, join(shown), scope=scope, class_="number" if right else None, data_key=_text(key)
    )


def _text(key: float | str | None) -> str | None:
    return repr(float(key)) if isinstance(key, (int, float)) else key
