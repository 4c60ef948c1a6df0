"""Reads run folders into result rows, one per run.

`ed.analysis.store` reads committed results, and `ed.analysis.merging` merges the two.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from ed.analysis.markdown import plural
from ed.analysis.recipes import debug_settings, group_defaults, target_of
from ed.analysis.spec import Run, Table, expand, nested, parse_value
from ed.runtime import runs
from ed.runtime.runs import PLACES, Record, Status

UNKNOWN_CODE = "code state unknown"
JOINT = " + "  # between the names of a run that was resumed elsewhere
DAMAGED = "damaged"  # the status of a run whose folder cannot be read
MOST_CELLS = 4  # named in one warning
LATE = 0.9  # a metric late/x averages the evaluations after this share of the steps
NEEDS = {"task.crop_area": ("task.crop", "resized")}  # settings unused unless another has a value


class CollectError(ValueError):
    """Raised for invalid or inconsistent results; the message names the file."""


class NoHistory(LookupError):
    """Raised if a run has only final numbers and no logged values."""


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        deviations: settings that differ from the experiment file, separated by spaces.
        last: final value of each of the table's metrics; best: best value of the first one.
        source: the folder, or the file and line, that the row was read from.
        record: the run's config, sessions and logged values; None for rows read from a CSV file.
    """

    table: str
    cell: str
    seed: int
    deviations: str = ""
    status: str = Status.PENDING
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
    record: Record | None = field(default=None, compare=False)

    @property
    def home(self) -> tuple[str, str]:
        """The (table, cell) that the run belongs to."""
        return self.table, self.cell

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.table, self.cell, self.seed, self.deviations

    @property
    def code_state(self) -> str:
        """Describes uncommitted code changes; empty if the working tree was clean."""
        if self.dirty:
            return "uncommitted changes"
        return UNKNOWN_CODE if self.dirty is None or not self.commit else ""

    def history(self) -> list[dict]:
        """Returns the logged values, one dict per step; raises NoHistory if there is no record."""
        if self.record is None:
            raise NoHistory(f"{self.table}/{self.cell}/seed{self.seed}")
        return self.record.history()


def series(history: Iterable[dict], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of one metric."""
    rows = [row for row in history if key in row]
    return [row["step"] for row in rows], [row[key] for row in rows]


def finished(rows: Iterable[Row], metric: str) -> list[float]:
    """Returns the final values of a metric in the finished runs."""
    return [row.last[metric] for row in rows if row.status == Status.DONE and metric in row.last]


def evaluation(metric: str) -> str:
    """Returns the logged metric that a table's late/x or best/x summarises: eval/x."""
    return re.sub("^(late|best)/", "eval/", metric)


def collect(table: Table, roots: Sequence, *, warn: Callable[[str], None]) -> list[Row]:
    """Reads all runs of a table under these folders, including reduced runs.

    Args:
        warn: called with a message for each distinct reason to skip folders.
    """
    found = []
    for root in roots:
        check_root(root, table)
        found += [row_or_damage(run, table) for run in expand(table, root=root)]
        for path in sorted(root.glob(f"{table.name}@*/{runs.DEVIATIONS}")):
            try:
                reduced = expand(table, sets=runs.read_deviations(path), root=root)
            except ValueError as error:
                warn(str(error))
                continue
            rows = (row_or_damage(run, table) for run in reduced)
            found += [row for row in rows if row.status != Status.PENDING]
    for same in by_error(row for row in found if row.status == DAMAGED):
        warn(likewise(same[0].error, same))
    return [row for row in found if row.status != DAMAGED]


def check_root(root: Path, table: Table) -> None:
    """Raises if `root` is the table's own folder, where its runs would not be found."""
    root = root.absolute()
    if root.name == table.name and any((root / name).is_dir() for name in table.points):
        raise CollectError(f"--runs {root}: the folder of one table; use --runs {root.parent}")


def by_error(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows whose errors differ at most in the run folder."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.error.replace(row.source, ""), []).append(row)
    return list(groups.values())


def likewise(sentence: str, rows: Sequence[Row]) -> str:
    """Returns a sentence about the first row, with the number and cells of all others."""
    others = [f"{row.table}/{row.cell}" for row in rows[1:]]
    if not others:
        return sentence
    cells = list(dict.fromkeys(others))
    where = ", ".join(cells) if len(cells) <= MOST_CELLS else f"{len(cells)} cells"
    return f"{sentence}; likewise {plural(len(others), 'other run')} of {where}"


def row_or_damage(run: Run, table: Table) -> Row:
    """Like `collect_run`, but returns a row with status DAMAGED for an unreadable folder."""
    try:
        return collect_run(run, table)
    except (ValueError, OSError) as error:
        known = {"deviations": " ".join(run.deviations), "source": str(run.folder)}
        return Row(run.table, run.cell, run.seed, status=DAMAGED, error=str(error), **known)


def collect_run(run: Run, table: Table) -> Row:
    """Reads a run folder into a row."""
    if not runs.is_run(run.folder):
        if runs.is_done(run.folder):  # launching would take its results for this run's
            raise CollectError(
                f"{run.folder} has {runs.DONE}, but no {runs.CONFIG}; copy the whole folder, or "
                "move it away and launch again"
            )
        known = {"deviations": " ".join(run.deviations), "source": str(run.folder)}
        return Row(run.table, run.cell, run.seed, **known)
    status, record = runs.status(run.folder), runs.read_record(run.folder)
    other = None if runs.failed_at_once(run.folder) else other_run(run, table, record)
    if other is not None:
        raise CollectError(
            f"{run.folder / runs.CONFIG} has {other}; move {_in_the_way(run)} away and launch again"
        )
    return row_of(run, table, record, status)


def row_of(run: Run, table: Table, record: Record, status: Status) -> Row:
    """Converts a record to a row."""
    known = {"deviations": " ".join(run.deviations), "source": record.source, "record": record}
    known |= _surroundings(record.sessions)
    if record.done is not None:
        known |= {"status": Status.DONE, **_summary(record, table)}
        return Row(run.table, run.cell, run.seed, **known)
    known["status"] = status
    if status in runs.BROKEN:
        known["error"] = record.failure
    rows = record.history()
    if rows:
        known["steps"] = rows[-1]["step"]
        # no `best` yet: only the summary of a finished run records whether higher is better
        known["last"] = {
            key: row[key]
            for row in rows
            for key in table.metrics
            if math.isfinite(row.get(key, math.nan))
        } | _late_means(record, table)
    return Row(run.table, run.cell, run.seed, **known)


def seed_differences(rows: Iterable[Row], table: Table) -> list[str]:
    """Returns one message per setting that differs between the seeds of a cell."""
    configs: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        if row.record is not None:
            settings = runs.flat(row.record.config)
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


def missing_metrics(rows: Sequence[Row], table: Table) -> list[str]:
    """Returns the table's metrics that no finished run has, or [] if none has finished."""
    done = [row for row in rows if row.status == Status.DONE]
    return [name for name in table.metrics if done and not finished(done, name)]


def _may_differ(key: str, table: Table) -> bool:
    """Whether a setting may differ between seeds because it cannot change a result."""
    group, _, name = key.partition(".")
    if group == "measures":
        return not any(changes(name, metric) for metric in table.metrics)
    return key == "seed" or key in PLACES or table.is_incidental(key)


def changes(setting: str, metric: str) -> bool:
    """Whether a measure's setting affects a metric, e.g. ed.pairs and measure/ed_se.

    Chunk sizes do not affect results, and each radius has its own metric.
    """
    measure, _, name = setting.partition(".")
    ours = re.fullmatch(rf"measure/{re.escape(measure)}(_.*)?", metric)
    return ours is not None and name not in ("memory_gib", "batch_size", "radii")


def other_run(run: Run, table: Table, record: Record) -> str | None:
    """Returns the reason a record does not match the table's run, or None if it does."""
    command = next((session.get("command", "") for session in record.sessions), "")
    choices = dict(word.split("=", 1) for word in command.split() if "=" in word)
    wanted = dict(text.split("=", 1) for text in run.overrides)
    given = {text.split("=", 1)[0] for text in run.arguments}
    known = runs.flat(record.config)  # may lack settings that were added after the run
    defaults, debug = group_defaults(run.overrides).items(), debug_settings(run.overrides).items()
    unnamed = {key: text for key, text in defaults if key in known and key not in wanted}
    unnamed |= {key: text for key, text in debug if key in known and key not in given}
    for key, text in (wanted | unnamed).items():
        if key in (*PLACES, "debug", "measures") or key.startswith("hydra."):
            continue  # data may have moved; debug and measures each set several keys
        if table.is_incidental(key) or _is_unused(key, wanted):
            continue
        group, _, rest = key.partition(".")
        if group == "measures" and rest.split(".")[0] not in (record.config.get("measures") or {}):
            continue  # not measured yet
        found = _instead_of(key, text, record.config, choices)
        if found is not None:
            return f"{found}, but the table has {text}: it is another run"
    return None


def _is_unused(key: str, wanted: dict[str, str]) -> bool:
    """Whether a setting has no effect, because another does not have the value that it needs."""
    if key not in NEEDS:
        return False
    other, value = NEEDS[key]
    return wanted.get(other, value) != value


def _instead_of(key: str, text: str, config: dict, choices: dict[str, str]) -> str | None:
    """Returns the config's setting if it differs from key=text, else None."""
    if isinstance(config.get(key), dict):  # a group: choice and class must match
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


def _in_the_way(run: Run) -> str:
    """Returns the folder to move away; the cell's or table's if no run in it has started."""
    for folder in (run.folder.parents[1], run.folder.parent):
        if not runs.any_begun(folder):
            return f"{folder}, where no run has started,"
    return str(run.folder)


def _summary(record: Record, table: Table) -> dict:
    done = record.done
    best = {key.replace("eval/", "best/", 1): value for key, value in done["best"].items()}
    found = done["last"] | best | _late_means(record, table)
    last = {key: found[key] for key in table.metrics if key in found}
    if not last:
        raise CollectError(
            f"{record.source} has none of the table's metrics {', '.join(table.metrics)}; use one "
            f"of {', '.join(sorted(done['last']))} in {table.path.name}"
        )
    wild = [f"{key} is {value}" for key, value in last.items() if not math.isfinite(value)]
    if wild:
        raise CollectError(f"{record.source}: {', '.join(wild)}; move it away and launch again")
    return {
        "last": last,
        "best": done["best"].get(evaluation(table.primary)),
        "steps": done["steps"],
        "total_steps": done["steps"],
        "seconds": float(done["seconds"]),
    }


def _late_means(record: Record, table: Table) -> dict[str, float]:
    """Returns the table's metrics late/x: means of eval/x over the last tenth of the steps."""
    wanted = [metric for metric in table.metrics if metric.startswith("late/")]
    history = record.history() if wanted else []
    means = {}
    for metric in wanted:
        points = zip(*series(history, evaluation(metric)), strict=True)
        start = LATE * history[-1]["step"] if history else 0
        late = [value for step, value in points if step > start and math.isfinite(value)]
        means |= {metric: fmean(late)} if late else {}
    return means


def _surroundings(sessions: Sequence[dict]) -> dict:
    """Returns the devices, torch versions and commits of all sessions, in order."""

    def joined(values: Iterable) -> str:
        return JOINT.join(dict.fromkeys(" ".join(str(v).split()) for v in values if v))

    dirty = [s.get("dirty") for s in sessions]
    return {
        "device": joined(s.get("device") for s in sessions),
        "torch": joined((s.get("versions") or {}).get("torch") for s in sessions),
        "commit": joined(s.get("commit") for s in sessions),
        "dirty": True if any(dirty) else None if None in dirty or not dirty else False,
        "total_steps": sessions[-1].get("steps") if sessions else None,
    }
