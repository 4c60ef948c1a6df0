"""Formats tables and counts as Markdown."""

from collections.abc import Sequence


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(_row, (header, ["---"] * len(header), *rows)))


def _row(fields: Sequence[str]) -> str:
    escaped = (field.replace("|", r"\|") for field in fields)
    return f"| {' | '.join(escaped)} |"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
