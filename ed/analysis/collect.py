"""Rows of results: one per run, from its folder or from a committed CSV file.

A run folder holds what the engine wrote (config.yaml, metrics.jsonl, meta.json, DONE) and, after a
failure, the launcher's FAILED with the error. Several sources of one run: ed.analysis.merging.
"""

import csv
import functools
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ed.analysis.spec import (
    EXPERIMENTS,
    PLACES,
    Run,
    Table,
    expand,
    nested,
    parse_value,
)
from ed.runtime import files
from ed.runtime.files import from_csv_text, read_rows, yaml_text

STATUSES = ("done", "partial", "failed", "pending")
COLUMNS = ("table", "cell", "seed", "deviations", "status", "steps", "total_steps")
DIVERGED = "diverged: "  # how the engine's error of a run that left the numbers begins
TRACES = ("meta.json", "metrics.jsonl", "DONE")  # of a run that has begun
PROVENANCE = ("seconds", "device", "torch", "commit", "dirty", "error")


class CollectError(ValueError):
    """Results that cannot be trusted; the message names the file, and the line where it has one."""


class NoHistory(LookupError):
    """What a run logged is asked for, and only its numbers are here."""


@dataclass(frozen=True)
class Row:
    """What is known of one run.

    Attributes:
        deviations: settings that differ from the experiment file, separated by spaces.
        last: the value of each metric of the table at the end; best: the best of its first metric.
        source: the folder, or the file and line, it was read from.
        folder: of the run, where there is one: a line of a CSV file alone has none.
    """

    table: str
    cell: str
    seed: int
    deviations: str = ""
    status: str = "pending"
    steps: int | None = None
    total_steps: int | None = None
    last: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    seconds: float | None = None
    device: str = ""
    torch: str = ""
    commit: str = ""
    dirty: bool | None = None
    error: str = ""
    source: str = field(default="", compare=False)
    folder: Path | None = field(default=None, compare=False)

    @property
    def home(self) -> tuple[str, str]:
        """As a cell's: where its folders are."""
        return self.table, self.cell

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.table, self.cell, self.seed, self.deviations

    @property
    def diverged(self) -> bool:
        """An outcome, unlike an accident: it would end so again."""
        return DIVERGED in self.error

    def history(self) -> list[dict]:
        """Every row of metrics the run wrote, each with its `step`; NoHistory without a folder."""
        if self.folder is None:
            raise NoHistory(f"{self.table}/{self.cell}/seed{self.seed}")
        return read_metrics(self.folder / "metrics.jsonl")


def series(history: Iterable[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    rows = [row for row in history if key in row]
    return [row["step"] for row in rows], [row[key] for row in rows]


def columns(table: Table) -> list[str]:
    """Header of the table's CSV file."""
    values = [f"last:{metric}" for metric in table.metrics]
    return [*COLUMNS, *values, f"best:{table.primary}", *PROVENANCE]


def collect(
    table: Table, roots: Sequence[Path], *, warn: Callable[[str], None] | None = None
) -> list[Row]:
    """Rows of all runs of a table under these folders, the reduced ones that exist included.

    Args:
        warn: called for each damaged folder, which is left out; None: the first one is an error.
    """
    found = []
    for root in roots:
        found += [row_or_damage(run, table) for run in expand(table, root=root)]
        for path in sorted(root.glob(f"{table.name}@*/deviations.json")):
            try:
                runs = expand(table, sets=_reduction(path), root=root)
            except ValueError as error:
                if warn is None:
                    raise
                warn(str(error))
                continue
            rows = (row_or_damage(run, table) for run in runs)
            found += [row for row in rows if row.status != "pending"]
    damaged = [row for row in found if row.status == "damaged"]
    if damaged and warn is None:
        raise CollectError(damaged[0].error)
    for row in damaged:
        warn(row.error)
    return [row for row in found if row.status != "damaged"]


def row_or_damage(run: Run, table: Table) -> Row:
    """As `collect_run`; a folder that cannot be read has the status "damaged", and why."""
    try:
        return collect_run(run, table)
    except (ValueError, OSError) as error:
        known = {"deviations": " ".join(run.deviations), "source": str(run.folder)}
        return Row(run.table, run.cell, run.seed, status="damaged", error=str(error), **known)


def collect_run(run: Run, table: Table) -> Row:
    """What the run's folder says."""
    known = {"deviations": " ".join(run.deviations), "source": str(run.folder)}
    if not (run.folder / "config.yaml").exists():
        return Row(run.table, run.cell, run.seed, **known)
    if not failed_at_once(run):
        _check_config(run, table)
    known["folder"] = run.folder
    rows = read_metrics(run.folder / "metrics.jsonl")
    done = read_json(run.folder / "DONE")
    known |= _surroundings(read_sessions(run.folder))
    failed = run.folder / "FAILED"
    if done is not None:
        known |= {"status": "done", **_summary(run.folder / "DONE", done, table)}
    elif failed.exists():
        known |= {"status": "failed", "error": failed.read_text().strip()}
    elif rows:
        known["status"] = "partial"
    if done is None and rows:
        known["steps"] = rows[-1]["step"]
        # no best yet: which direction is better, only the summary of a finished run knows
        known["last"] = {
            key: row[key]
            for row in rows
            for key in table.metrics
            if math.isfinite(row.get(key, math.nan))
        }
    return Row(run.table, run.cell, run.seed, **known)


def failed_at_once(run: Run) -> bool:
    """Before it began to train, e.g. without its data: nothing there depends on its settings."""
    return (run.folder / "FAILED").exists() and not (run.folder / "meta.json").exists()


def read_metrics(path: Path) -> list[dict]:
    """Rows of metrics.jsonl, which must be ours: numbers by name, and steps that never fall."""
    rows, before = read_rows(path), 0
    for number, row in enumerate(rows, start=1):
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or not all(isinstance(v, (int, float)) for v in row.values()):
            shown = json.dumps(row)[:60]
            raise CollectError(f"{path}, line {number} is not a row of metrics: {shown!r}")
        if step < before:
            raise CollectError(f"{path}, line {number}: step {step} after step {before}")
        before = step
    return rows


def read_results(path: Path, table: Table) -> list[Row]:
    """Rows of a committed CSV file; a line that is not one of ours is an error with its number."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    if header != columns(table):
        wrong = sorted(set(header) ^ set(columns(table))) or header
        raise CollectError(
            f"{path}, line 1: not the header of table {table.name} ({', '.join(wrong)}); "
            f"needed is {','.join(columns(table))}"
        )
    rows = [_csv_row(values, table, f"{path}, line {reader.line_num}") for values in reader]
    if not text.endswith("\n"):
        raise CollectError(f"{path}, line {reader.line_num}: cut short; restore the file")
    return rows


def _reduction(path: Path) -> list[str]:
    """The settings of a reduced version of the table that was launched."""
    sets = read_json(path, kind=list)
    if not all(isinstance(text, str) and "=" in text for text in sets):
        raise CollectError(f"{path} does not hold a list of key=value; restore or remove it")
    return sets


def seed_differences(rows: Iterable[Row], table: Table) -> list[str]:
    """Cells whose seeds have different settings in their folders, and in what they differ."""
    configs: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        if row.folder is not None:
            settings = flat(_read_config(row.folder))
            kept = {k: v for k, v in settings.items() if not _may_differ(k, table)}
            configs.setdefault((*row.home, row.deviations), {})[row.seed] = kept
    found = []
    for (home, cell, deviations), seeds in configs.items():
        reduced = f" ({deviations})" if deviations else ""
        for key in sorted(set.intersection(*(set(config) for config in seeds.values()))):
            values = {seed: config[key] for seed, config in sorted(seeds.items())}
            if any(value != next(iter(values.values())) for value in values.values()):
                each = ", ".join(f"{value} (seed {seed})" for seed, value in values.items())
                found.append(f"{home}/{cell}{reduced}: seeds differ in {key}: {each}")
    return found


def _may_differ(key: str, table: Table) -> bool:
    """Settings in which the seeds of a cell may differ: they cannot change a result."""
    group, _, name = key.partition(".")
    if group == "measures":
        return not any(changes(name, metric) for metric in table.metrics)
    return key == "seed" or key in PLACES or table.is_incidental(key)


def changes(setting: str, metric: str) -> bool:
    """Whether a setting of a measure changes a metric: ed.pairs does measure/ed, measure/ed_se."""
    measure, _, name = setting.partition(".")
    ours = re.fullmatch(rf"measure/{re.escape(measure)}(_.*)?", metric)
    return ours is not None and name not in ("memory_gib", "batch_size")  # how much at once


def flat(config: dict, prefix: str = "") -> dict:
    """The settings of a config by dotted key."""
    found = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def _read_config(folder: Path) -> dict:
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(yaml_text(path)) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise CollectError(" ".join(str(error).split())) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise CollectError(f"{path} is not the config of a run: restore or remove it")
    return config


def _check_config(run: Run, table: Table) -> None:
    """The folder must hold the run the table means: same seed, same values where it names any."""
    path, config = run.folder / "config.yaml", _read_config(run.folder)
    command = next((session.get("command", "") for session in read_sessions(run.folder)), "")
    choices = dict(word.split("=", 1) for word in command.split() if "=" in word)
    for key, text in dict(o.split("=", 1) for o in run.overrides).items():
        if key in (*PLACES, "debug", "measures") or key.startswith("hydra."):
            continue  # the same data may lie elsewhere by now; these two choose several things
        found = None if table.is_incidental(key) else _instead_of(key, text, config, choices)
        if found is not None:
            raise CollectError(
                f"{path} has {found}, but the table says {text}: it is another run; move "
                f"{_in_the_way(run)} away and launch again"
            )


def _instead_of(key: str, text: str, config: dict, choices: dict[str, str]) -> str | None:
    """What a folder has in the place of key=text; None where they agree."""
    if isinstance(config.get(key), dict):  # a group's choice: it, and what it builds, must agree
        if choices.get(key, text) != text:
            return f"{key}={choices[key]}"
        key, text = f"{key}._target_", target_of(key, text)
        if text is None:
            return None
    try:
        stored = nested(config, key)
    except (KeyError, TypeError):
        return f"no {key}"
    wanted = parse_value(text)
    both_nan = stored != stored and wanted != wanted
    return None if stored == wanted or both_nan else f"{key}={stored}"


@functools.cache
def target_of(group: str, choice: str) -> str | None:
    """What a group's choice builds; None where it is not ours to know: a list, or a user's own."""
    path = EXPERIMENTS.with_name("configs") / group / f"{choice}.yaml"
    if not path.is_file():
        return None
    config = yaml.safe_load(path.read_bytes()) or {}
    parents = [name for name in config.get("defaults", ()) if isinstance(name, str)]
    inherited = [target_of(group, name) for name in parents if name != "_self_"]
    return config.get("_target_") or next(iter(inherited), None)


def _in_the_way(run: Run) -> str:
    """The run's folder; that of its cell or table where all in it were launched and none begun."""
    for folder in (run.folder.parents[1], run.folder.parent):
        if not any(any(folder.glob(f"**/{name}")) for name in TRACES):
            return f"{folder}, where no run has begun,"
    return str(run.folder)


def read_json(path: Path, kind: type = dict):
    """As `ed.runtime.files.read_json`; None where there is no such file."""
    if not path.exists():
        return None
    try:
        return files.read_json(path, kind)
    except ValueError as error:
        raise CollectError(str(error)) from None


def _summary(path: Path, done: dict, table: Table) -> dict:
    try:
        best = done["best"].get(table.primary)
        best_epoch = {_best_name(key): value for key, value in done["best"].items()}
        found = done["last"] | best_epoch
        last = {key: found[key] for key in table.metrics if key in found}
        steps, seconds = done["steps"] + 0, done["seconds"] + 0.0  # numbers, or TypeError
    except (KeyError, AttributeError, TypeError) as error:
        raise CollectError(f"{path} is not the summary of a run ({error} is missing)") from None
    if not last:
        raise CollectError(
            f"{path} has none of the table's metrics {', '.join(table.metrics)}, only "
            f"{', '.join(sorted(done['last']))}"
        )
    numbers = (value for value in (*last.values(), best or 0))
    if not all(isinstance(value, (int, float)) for value in numbers):
        raise CollectError(f"{path} is not the summary of a run: a metric is no number")
    wild = [f"{key} is {value}" for key, value in last.items() if not math.isfinite(value)]
    if wild:
        raise CollectError(f"{path}: {', '.join(wild)}; move the folder away and launch again")
    values = {"last": last, "best": best, "seconds": seconds}
    return values | {"steps": steps, "total_steps": steps}


def _best_name(key: str) -> str:
    """How a table asks for the best evaluation of a metric: best/acc, for that of eval/acc."""
    return key.replace("eval/", "best/", 1)


def read_sessions(folder: Path) -> list[dict]:
    """What the engine noted of each time that the run was started or went on."""
    path = folder / "meta.json"
    sessions = (read_json(path) or {}).get("sessions", [])
    if not isinstance(sessions, list) or not all(_is_session(session) for session in sessions):
        raise CollectError(f"{path} is not the record of a run: restore or remove it")
    return sessions


def _is_session(value) -> bool:
    if not isinstance(value, dict):
        return False
    command, versions = value.get("command", ""), value.get("versions") or {}
    return isinstance(command, str) and isinstance(versions, dict)


def _surroundings(sessions: Sequence[dict]) -> dict:
    """Where the run ran, with what: sessions that differ are all named, in their order."""

    def joined(values: Iterable) -> str:
        return " + ".join(dict.fromkeys(str(value) for value in values if value))

    dirty = [s.get("dirty") for s in sessions]
    return {
        "device": joined(s.get("device") for s in sessions),
        "torch": joined((s.get("versions") or {}).get("torch") for s in sessions),
        "commit": joined(s.get("commit") for s in sessions),
        "dirty": True if any(dirty) else None if None in dirty or not dirty else False,
        "total_steps": sessions[-1].get("steps") if sessions else None,
    }


def _csv_row(values: list[str], table: Table, where: str) -> Row:
    if len(values) != len(columns(table)):
        raise CollectError(
            f"{where}: {len(values)} fields instead of {len(columns(table))}; the line is cut "
            "short or foreign"
        )
    raw = dict(zip(columns(table), map(from_csv_text, values), strict=True))
    homes = {cell.home for cell in table.points.values()}
    if (raw["table"], raw["cell"]) not in homes:
        raise CollectError(f"{where}: table {table.name} has no cell {raw['table']}/{raw['cell']}")
    if raw["seed"] not in map(str, table.seeds):
        raise CollectError(f"{where}: table {table.name} has no seed {raw['seed']}")
    if raw["status"] not in STATUSES or raw["dirty"] not in ("", "yes", "no"):
        raise CollectError(
            f"{where}: status {raw['status']!r}, dirty {raw['dirty']!r} make no sense"
        )
    try:
        return Row(
            table=raw["table"],
            cell=raw["cell"],
            seed=int(raw["seed"]),
            deviations=raw["deviations"],
            status=raw["status"],
            steps=_number(raw["steps"], int),
            total_steps=_number(raw["total_steps"], int),
            last={m: _number(raw[f"last:{m}"]) for m in table.metrics if raw[f"last:{m}"]},
            best=_number(raw[f"best:{table.primary}"]),
            seconds=_number(raw["seconds"]),
            dirty=None if raw["dirty"] == "" else raw["dirty"] == "yes",
            source=where,
            **{name: raw[name] for name in ("device", "torch", "commit", "error")},
        )
    except ValueError as error:
        raise CollectError(f"{where}: {error}") from None


def _number(text: str, kind: type = float):
    if text == "":
        return None
    value = kind(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
