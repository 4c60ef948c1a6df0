"""Committed records of runs: what the engine wrote, without the weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from ed.analysis.collect import CollectError, Row, read_metrics
from ed.analysis.spec import reduced_name


@dataclass(frozen=True)
class Record:
    """Attributes: config, the resolved one as YAML text; metrics, rows with `step`; sessions."""

    config: str
    metrics: list[dict]
    sessions: list[dict]


def read_record(row: Row, root: Path) -> Record | None:
    """The record of a run under `root`; None where none was committed."""
    home = root / reduced_name(row.table, row.deviations.split())
    folder = home / row.cell / f"seed{row.seed}"
    config = folder / "config.yaml"
    if not config.is_file():
        return None
    return Record(
        config=config.read_text(),
        metrics=read_metrics(folder / "metrics.jsonl"),
        sessions=_sessions(folder / "meta.json"),
    )


def series(record: Record, metric: str) -> list[tuple[float, float]]:
    """(step, value) of one metric."""
    return [(row["step"], row[metric]) for row in record.metrics if metric in row]


def _sessions(path: Path) -> list[dict]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())["sessions"])
    except (ValueError, KeyError, TypeError) as error:
        raise CollectError(f"{path} is not a run's meta.json ({error})") from None
