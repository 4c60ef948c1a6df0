"""The files of a run folder, the identity of a run, and its status.

runs/adhoc/cifar10-vit_tiny-ed-1a2b3c4d/seed0/
    config.yaml        the resolved config, written before training starts
    metrics.jsonl      one row per log point      train.log    the same values as text
    last.pt            newest checkpoint          previous.pt  the one before it
    model.safetensors  trained weights, once the run is complete
    meta.json          commit, versions, hardware, command, one entry per session
    DONE               last and best metrics, once the run is complete
    FAILED             exit code and last line of output, if the run failed under the launcher
    output.log         output of the process, if the launcher started it
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType

import yaml

from ed.runtime.files import (
    YAML_LOADER,
    read_bytes,
    read_json,
    read_rows,
    write_atomic,
    write_json,
    yaml_text,
)

CONFIG, METRICS, META = "config.yaml", "metrics.jsonl", "meta.json"
DONE, FAILED = "DONE", "FAILED"
LAST, PREVIOUS = "last.pt", "previous.pt"
UNNAMED = f"{LAST}.tmp"  # the newest checkpoint if a kill occurred between two renames
CHECKPOINTS = (LAST, UNNAMED, PREVIOUS)
WEIGHTS, WANDB_ID = "model.safetensors", "wandb_id"
LOG, OUTPUT = "train.log", "output.log"
SLURM = "slurm.json"  # job and task ids of a run
DEVIATIONS = "deviations.json"  # the settings that a reduced version of a table changes
DIGEST = "sha256"  # key in DONE: digest of its other keys
LOCK = ".lock"  # locked while a process trains in the folder
CLAIM = ".launch"  # locked by the launcher while its process runs
# written only by the process that holds the lock; the launcher writes FAILED and SLURM
OWN = (CONFIG, METRICS, META, DONE, WANDB_ID, WEIGHTS)

LARGEST = 1e150  # maximum size of a metric; a run in float32 stays below 1e39
DIVERGED = "diverged: "  # prefix of the error if a value becomes NaN or infinite
ENVIRONMENT = ("system", "logger")  # groups that never affect results
# groups that do not identify a run: measures do not change the model, and regularizers include the
# settings of their sampler
INCIDENTAL = (*ENVIRONMENT, "measures", "sampler")
# locations of data and weights, which may differ between machines
PLACES = ("task.data", "task.mnist", "task.shifts", "model.weights")


class RunError(ValueError):
    """Raised if a run folder cannot be used as requested."""


class Status(StrEnum):
    PENDING = "pending"  # has not been trained yet
    RUNNING = "running"  # a process holds the lock
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"  # failed with NaN or infinity; training again would also fail
    STOPPED = "stopped"  # has a checkpoint or metrics, and no process holds the lock


UNDER_WAY = (Status.RUNNING, Status.STOPPED)
BROKEN = (Status.FAILED, Status.DIVERGED)


@dataclass(frozen=True)
class Record:
    """Everything that a run stores except its weights.

    Attributes:
        source: the folder or file it was read from.
        meta: the contents of meta.json.
        done: the summary of a finished run.
        failure: why the run failed; empty if it did not.
        history: returns the logged rows.
    """

    source: str
    config: dict
    meta: dict
    done: dict | None
    failure: str
    history: Callable[[], list[dict]]

    @property
    def sessions(self) -> list[dict]:
        return self.meta.get("sessions", [])

    @property
    def status(self) -> Status:
        """Returns the status, assuming that no process is running it."""
        if self.done is not None:
            return Status.DONE
        if self.failure:
            return _failed_or_diverged(self.failure)
        return Status.STOPPED if self.history() else Status.PENDING


def identity(config: dict) -> dict:
    """Returns the part of a resolved config that determines the result."""
    return {key: value for key, value in config.items() if key not in INCIDENTAL}


def digest(config: dict) -> str:
    """Returns a hash of the identity without the seed, as eight hex digits."""
    settings = {key: value for key, value in identity(config).items() if key != "seed"}
    return _sha256(_whole(settings))[:8]


def _sha256(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _whole(value):
    """Replaces floats such as 7.0 in a config with integers, as both are the same setting."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """Lists the differences between two configs, e.g. 'optimizer.lr is 0.1 there, 0.2 here'."""
    rows = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if old.get("_target_") != new.get("_target_"):  # other classes have other settings
                old, new = ({"_target_": part.get("_target_")} for part in (old, new))
            rows += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            rows.append(f"{prefix}{key} is {old} there, {new} here")
    return rows


def flat(config: dict, prefix: str = "") -> dict:
    """Returns the settings of a config by dotted key."""
    found = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def status(folder: Path) -> Status:
    """Returns the status of a run; raises RunError if its lock cannot be read."""
    if is_done(folder):
        return Status.DONE
    if is_busy(folder):
        return Status.RUNNING
    if (folder / FAILED).exists():
        return _failed_or_diverged(read_failure(folder))
    metrics = folder / METRICS
    begun = metrics.exists() and metrics.stat().st_size > 0
    begun = begun or any((folder / name).exists() for name in CHECKPOINTS)
    return Status.STOPPED if begun else Status.PENDING


def _failed_or_diverged(failure: str) -> Status:
    return Status.DIVERGED if DIVERGED in failure else Status.FAILED


def silence(folder: Path) -> float:
    """Returns the seconds since the run last started or wrote a line; 0 if it did neither."""
    files = [folder / name for name in (LOG, OUTPUT, META) if (folder / name).exists()]
    written = max((file.stat().st_mtime for file in files), default=math.inf)
    return max(0.0, time.time() - written)  # clocks of several machines differ


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def is_done(folder: Path) -> bool:
    return (folder / DONE).exists()


def has_begun(folder: Path) -> bool:
    """Returns whether training has started in this folder."""
    return (folder / META).exists()


def failed_at_once(folder: Path) -> bool:
    """Returns whether the run failed before training, e.g. because its data is missing."""
    return (folder / FAILED).exists() and not has_begun(folder)


def any_begun(folder: Path) -> bool:
    """Returns whether any run in the folder or its subfolders has started."""
    return any(any(folder.glob(f"**/{name}")) for name in (META, METRICS, DONE))


def is_busy(folder: Path) -> bool:
    """Returns whether a process is training in the folder or a launcher has claimed it."""
    if _is_locked(folder / CLAIM) or _is_locked(folder / LOCK):
        return True
    # the folder is locked, too, because the lock file could be deleted or replaced
    with contextlib.suppress(RunError):  # some network file systems cannot lock folders
        return _is_locked(folder)
    return False


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe may block
        try:  # shared, because NFS needs write access for exclusive locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(file)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; cannot tell whether it is running") from None
    return False


def read_record(folder: Path) -> Record:
    """Reads a run folder; raises ValueError if a file is damaged."""
    rows = read_metrics(folder)
    return Record(
        source=str(folder),
        config=read_config(folder),
        meta=read_meta(folder),
        done=read_done(folder),
        failure=read_failure(folder),
        history=lambda: rows,
    )


def read_config(folder: Path) -> dict:
    path = folder / CONFIG
    try:
        config = yaml.load(yaml_text(path), YAML_LOADER) or {}
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict) or not is_plain(config):
        raise ValueError(f"{path} is not the config of a run; restore or remove it")
    return config


def is_plain(value) -> bool:
    """Returns whether a value has only mappings with text keys, lists, text, numbers and null."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return isinstance(value, (str, int, float, NoneType))


def read_done(folder: Path) -> dict | None:
    """Returns the summary of a finished run, or None if it has not finished."""
    path = folder / DONE
    if not path.exists():
        return None
    try:
        summary = read_json(path)
        stored = summary.pop(DIGEST, None)  # older versions stored none
        if not _is_summary(summary):
            raise ValueError("not the summary of a run")
        if stored not in (None, _sha256(summary)):
            raise ValueError("its contents do not match the digest")
    except ValueError as error:
        raise RunError(
            f"{path} is damaged ({error}): remove it and run the same command again, which "
            "resumes from the last checkpoint"
        ) from None
    return summary


def _is_summary(value: dict) -> bool:
    """Returns whether a value has the form of a summary that `train` returns."""
    last, best = value.get("last"), value.get("best")
    if not isinstance(last, dict) or not isinstance(best, dict):
        return False
    numbers = [value.get("steps"), value.get("seconds"), *last.values(), *best.values()]
    return all(map(_is_number, numbers))


def _is_number(value) -> bool:
    """Returns whether a value is a number whose square, needed for spreads, fits in a float."""
    if isinstance(value, float):
        return not LARGEST < abs(value) < math.inf
    return isinstance(value, int) and abs(value) < 2**63


def write_done(folder: Path, summary: dict) -> None:
    write_json(folder / DONE, summary | {DIGEST: _sha256(summary)})


def read_meta(folder: Path) -> dict:
    """Returns the contents of meta.json, or {} if the run has not started."""
    path = folder / META
    if not path.exists():
        return {}
    meta = read_json(path)
    sessions = meta.get("sessions", [])
    if not isinstance(sessions, list) or not all(_is_session(session) for session in sessions):
        raise ValueError(f"{path} is not the record of a run; restore or remove it")
    return meta


def _is_session(value) -> bool:
    if not isinstance(value, dict):
        return False
    kinds = {"command": str, "versions": dict, "steps": int}
    return all(isinstance(value.get(key), (kind, NoneType)) for key, kind in kinds.items())


def write_sessions(folder: Path, sessions: list[dict]) -> None:
    write_json(folder / META, {"sessions": sessions})


def read_failure(folder: Path) -> str:
    """Returns in one line why the run failed, as recorded by the launcher; "" if it did not."""
    path = folder / FAILED
    text = read_bytes(path).decode(errors="replace") if path.exists() else ""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())


def write_failure(folder: Path, reason: str) -> None:
    write_atomic(folder / FAILED, f"{reason}\n")


def read_metrics(folder: Path) -> list[dict]:
    """Reads the logged rows; raises ValueError unless values are numbers and steps ascend."""
    path, before = folder / METRICS, 0
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or not all(map(_is_number, row.values())):
            shown = json.dumps(row)[:60]
            raise ValueError(f"{path}, line {number} is not a row of metrics: {shown!r}")
        if step < before:
            raise ValueError(f"{path}, line {number}: step {step} after step {before}")
        before = step
    return rows


def read_deviations(path: Path) -> list[str]:
    """Reads the settings that a reduced version of a table changes."""
    sets = read_json(path, list)
    if not all(isinstance(text, str) and "=" in text for text in sets):
        raise ValueError(f"{path} is not a list of key=value settings; restore or remove it")
    return sets


def write_deviations(folder: Path, deviations: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DEVIATIONS, deviations)
