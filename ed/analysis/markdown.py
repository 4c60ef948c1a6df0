"""Formats Markdown tables."""

from collections.abc import Sequence


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(_row, (header, ["---"] * len(header), *rows)))


def _row(fields: Sequence[str]) -> str:
    escaped = (field.replace("|", r"\|") for field in fields)
    return f"| {' | '.join(escaped)} |"
