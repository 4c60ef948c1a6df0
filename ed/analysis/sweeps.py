"""Summarises runs outside tables, such as sweeps: the settings that differ, and the results."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ed.analysis.collect import CollectError, changes
from ed.analysis.recipes import choice_of
from ed.analysis.spec import nested
from ed.analysis.stats import summarise
from ed.runtime.runs import CONFIG, INCIDENTAL, flat, read_config, read_done

# settings that do not distinguish runs
IGNORED = {"seed", *INCIDENTAL} - {"sampler"}
DIGITS = 4


@dataclass(frozen=True)
class SweepRun:
    """One run: settings and measures by dotted key, and final values (None if unfinished)."""

    settings: dict[str, str]
    measures: dict[str, object]
    seed: int
    last: dict[str, float] | None


def read_runs(roots: Sequence[Path]) -> list[SweepRun]:
    """Reads each run under the given folders once, sorted by path within each folder."""
    seen: set[Path] = set()
    paths = [path for root in roots for path in sorted(_configs(root, seen))]
    if not paths:
        names = ", ".join(map(str, roots))
        raise CollectError(f"{names}: no run folders (folders with a {CONFIG})")
    return [_read(path.parent) for path in paths]


def _configs(root: Path, seen: set[Path]) -> Iterator[Path]:
    """Yields the config files under `root`, following links and skipping folders in `seen`."""
    for name, folders, files in os.walk(root, followlinks=True):
        folder = Path(name)
        if folder.resolve() in seen:  # already visited through another link
            folders.clear()
            continue
        seen.add(folder.resolve())
        if CONFIG in files:
            yield folder / CONFIG
            if "wandb" in folders:  # wandb writes its own config.yaml
                folders.remove("wandb")


def _read(folder: Path) -> SweepRun:
    config, done = read_config(folder), read_done(folder)
    seed, measures = config.get("seed"), config.get("measures") or {}
    targets = [value for key, value in flat(config).items() if key.endswith("_target_")]
    texts = all(isinstance(value, str) for value in targets)
    if not isinstance(seed, int) or not isinstance(measures, dict) or not texts:
        raise CollectError(
            f"{folder / CONFIG} is not the config of a run: check its seed, measures and _target_ "
            "values, or remove it"
        )
    kept = {key: value for key, value in config.items() if key not in IGNORED}
    return SweepRun(dict(_settings(kept)), flat(measures), seed, done and done["last"])


def _settings(config: dict) -> Iterator[tuple[str, str]]:
    for key, value in flat(config).items():
        group, _, last = key.rpartition(".")
        if group and last == "_target_":  # shown as the name of its config file or class
            part = nested(config, group)
            yield group, choice_of(group.rpartition(".")[2], part) or value.rsplit(".", 1)[-1]
        else:
            yield key, str(value)


def differing(runs: Sequence[SweepRun]) -> list[str]:
    """Returns the keys whose values differ between runs.

    The sampler is listed under the regularizer that uses it.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "sampler")
    return [
        key for key in keys if len({run.settings[key] for run in runs if key in run.settings}) > 1
    ]


def summary_rows(runs: Sequence[SweepRun], metrics: Sequence[str]) -> list[list[str]]:
    """Returns a header and one row per group of runs that differ only in their seed.

    Columns: the differing keys, the number of runs, and mean ± std at the last step. Duplicate
    seeds, such as copies of a run, are counted and listed.

    Args:
        metrics: the metrics to show; if empty, all evaluation metrics and measures.
    """
    keys, shown = differing(runs), _metrics(runs, metrics)
    groups: dict[tuple, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    rows = [[*keys, "runs", *shown]]
    for group in groups.values():
        done = [run for run in group if run.last is not None]
        count = f"{len(done)} of {len(group)}" if len(done) < len(group) else str(len(done))
        values = [_mean(done, name) for name in shown]
        rows.append([*_values(group[0], keys), count + _repeated(group), *values])
    return rows


def _repeated(group: Sequence[SweepRun]) -> str:
    """Lists duplicate seeds, e.g. ' (seed 0 twice)'."""
    counts = Counter(run.seed for run in group)
    words = [f"seed {s} {'twice' if n == 2 else f'{n} times'}" for s, n in counts.items() if n > 1]
    return f" ({', '.join(words)})" if words else ""


def run_rows(runs: Sequence[SweepRun], metrics: Sequence[str]) -> list[list[str]]:
    """Returns a header and one row per finished run, with unrounded values."""
    keys, shown = differing(runs), _metrics(runs, metrics)
    rows = [[*keys, "seed", *shown]]
    for run in runs:
        if run.last is not None:
            numbers = [str(run.last.get(name, "")) for name in shown]
            rows.append([*_values(run, keys), str(run.seed), *numbers])
    return rows


def _values(run: SweepRun, keys: Sequence[str]) -> list[str]:
    return [run.settings.get(key, "") for key in keys]


def _metrics(runs: Sequence[SweepRun], wanted: Sequence[str]) -> list[str]:
    found = dict.fromkeys(name for run in runs for name in run.last or {})
    for name in wanted:
        if found and name not in found:
            raise CollectError(f"--metrics {name}: no run has it; use {', '.join(found)}")
    return list(wanted) or [name for name in found if not name.endswith("_se")]


def _mean(runs: Sequence[SweepRun], metric: str) -> str:
    """Formats the mean and std, with the number of runs if some lack the metric."""
    known = [run for run in runs if run.last.get(metric) is not None]
    ways = [{k: v for k, v in run.measures.items() if changes(k, metric)} for run in known]
    if any(way != ways[0] for way in ways):
        return "measured differently"
    ours = summarise([run.last[metric] for run in known])
    if ours.mean is None:
        return ""
    spread = "" if ours.std is None else f" ± {ours.std:.{DIGITS // 2}g}"
    count = f" ({len(known)})" if len(known) < len(runs) else ""
    return f"{ours.mean:.{DIGITS}g}{spread}{count}"


def aligned(rows: Sequence[Sequence[str]], sides: str | None = None) -> str:
    """Aligns columns of text; `sides` has one character per column, < (left) or > (right)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides or "<" * len(widths)
    places = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    lines = ["  ".join(map(format, row, places)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
