"""What a run is: the files in its folder, what identifies it, and where it stands.

runs/adhoc/cifar10-vit_tiny-ed-1a2b3c4d/seed0/
    config.yaml        the resolved config, written before training starts
    metrics.jsonl      one row per log point      train.log    the same for people
    last.pt            newest checkpoint          previous.pt  the one before
    model.safetensors  trained weights, once the run is complete
    meta.json          commit, versions, hardware, command, one entry per session
    DONE               last and best metrics, once the run is complete
    FAILED             exit code and last line of output, if the launcher saw the run fail
    output.log         what the process printed, if the launcher started it
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from ed.runtime.files import read_json, read_rows, write_atomic, write_json, yaml_text

CONFIG, METRICS, META = "config.yaml", "metrics.jsonl", "meta.json"
DONE, FAILED = "DONE", "FAILED"
LAST, PREVIOUS = "last.pt", "previous.pt"
UNNAMED = f"{LAST}.tmp"  # a kill between two renames leaves it; then it is the newest checkpoint
CHECKPOINTS = (LAST, UNNAMED, PREVIOUS)
WEIGHTS, WANDB_ID = "model.safetensors", "wandb_id"
LOG, OUTPUT = "train.log", "output.log"
SLURM = "slurm.json"  # the array task of a run
DEVIATIONS = "deviations.json"  # in a folder of reduced runs: what they change
LOCK = ".lock"  # held while a process trains in the folder
CLAIM = ".launch"  # held by the launcher, from the start of a run until it has ended
# files that only the holder of the lock writes; the launcher writes FAILED and SLURM
OWN = (CONFIG, METRICS, META, DONE, WANDB_ID, WEIGHTS)

DIVERGED = "diverged: "  # starts the error of a run whose numbers became NaN or infinite
ENVIRONMENT = ("system", "logger")  # groups that can never change a number
# groups that do not identify a run: measures only read the model, and a regularizer that takes a
# sampler holds the sampler's settings as its own
INCIDENTAL = (*ENVIRONMENT, "measures", "sampler")


class RunError(ValueError):
    """A run folder that cannot be used as requested, or a damaged file in it."""


class Status(StrEnum):
    """Where a run stands."""

    PENDING = "pending"  # nothing has been trained
    RUNNING = "running"  # a process holds the lock
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"  # failed with NaN or infinity: another attempt would end the same way
    STOPPED = "stopped"  # has a checkpoint or metrics, and no process holds the lock


UNDER_WAY = (Status.RUNNING, Status.STOPPED)
BROKEN = (Status.FAILED, Status.DIVERGED)


@dataclass(frozen=True)
class Record:
    """Everything a run leaves except its weights.

    Attributes:
        source: the folder or file it was read from.
        meta: one entry per session, as in meta.json.
        done: the summary of a finished run.
        failure: why the run failed; empty if it did not.
        history: reads every logged row, each with its `step`.
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
        """The status of a run that no process works on."""
        if self.done is not None:
            return Status.DONE
        if self.failure:
            return _failed_or_diverged(self.failure)
        return Status.STOPPED if self.history() else Status.PENDING


def identity(config: dict) -> dict:
    """The part of a resolved config that determines the result."""
    return {key: value for key, value in config.items() if key not in INCIDENTAL}


def digest(config: dict) -> str:
    """Eight hex digits for everything that determines the result except the seed."""
    settings = {key: value for key, value in identity(config).items() if key != "seed"}
    text = json.dumps(_whole(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _whole(value):
    """Writes 7.0 as 7 throughout a config: both are the same setting."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """Settings in which two configs differ: 'optimizer.lr is 0.1 there, 0.2 here'."""
    rows = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            rows += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            rows.append(f"{prefix}{key} is {old} there, {new} here")
    return rows


def flat(config: dict, prefix: str = "") -> dict:
    """The settings of a config by dotted key."""
    found = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def status(folder: Path) -> Status:
    """Where the run in a folder stands; RunError if the system hides whether it is running."""
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


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def is_done(folder: Path) -> bool:
    return (folder / DONE).exists()


def has_begun(folder: Path) -> bool:
    """Whether a process has started to train there."""
    return (folder / META).exists()


def failed_at_once(folder: Path) -> bool:
    """Whether the run failed before it trained, e.g. for lack of data: its config means nothing."""
    return (folder / FAILED).exists() and not has_begun(folder)


def any_begun(folder: Path) -> bool:
    """Whether a run in the folder or below it has left traces."""
    return any(any(folder.glob(f"**/{name}")) for name in (META, METRICS, DONE))


def is_busy(folder: Path) -> bool:
    """Whether a process trains in the folder or a launcher has claimed it."""
    # the engine also locks the folder, because its lock file can be deleted
    own = folder / LOCK
    return _is_locked(folder / CLAIM) or _is_locked(own if own.exists() else folder)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
        try:  # a shared lock: NFS grants exclusive ones only on files opened for writing
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(file)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        raise RunError(f"{reason}, so whether this run is running is unknown") from None
    return False


def read_record(folder: Path) -> Record:
    """What a run folder holds; RunError names a damaged file."""
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
        config = yaml.safe_load(yaml_text(path)) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise RunError(" ".join(str(error).split())) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise RunError(f"{path} is not the config of a run; restore or remove it")
    return config


def read_done(folder: Path) -> dict | None:
    """The summary of a finished run; None if it has none."""
    path = folder / DONE
    if not path.exists():
        return None
    try:
        summary = read_json(path)
        if not _is_summary(summary):
            raise ValueError("not the summary of a run")
    except ValueError as error:
        raise RunError(
            f"{path} is damaged ({error}): remove it and run the same command again, which "
            "continues from the last checkpoint"
        ) from None
    return summary


def _is_summary(value: dict) -> bool:
    """Whether it is what `train` returns: numbers by name, steps and seconds."""
    numbers = [value.get("steps"), value.get("seconds")]
    for key in ("last", "best"):
        if not isinstance(value.get(key), dict):
            return False
        numbers += value[key].values()
    return all(isinstance(number, (int, float)) for number in numbers)


def write_done(folder: Path, summary: dict) -> None:
    write_json(folder / DONE, summary)


def read_meta(folder: Path) -> dict:
    """The record of each session of a run; empty if it has none."""
    path = folder / META
    if not path.exists():
        return {}
    try:
        meta = read_json(path)
    except ValueError as error:
        raise RunError(str(error)) from None
    sessions = meta.get("sessions", [])
    if not isinstance(sessions, list) or not all(_is_session(session) for session in sessions):
        raise RunError(f"{path} is not the record of a run: restore or remove it")
    return meta


def _is_session(value) -> bool:
    if not isinstance(value, dict):
        return False
    command, versions = value.get("command", ""), value.get("versions") or {}
    return isinstance(command, str) and isinstance(versions, dict)


def write_sessions(folder: Path, sessions: list[dict]) -> None:
    write_json(folder / META, {"sessions": sessions})


def read_failure(folder: Path) -> str:
    """Why the run failed, in the launcher's words; empty if it did not."""
    path = folder / FAILED
    return path.read_text(errors="replace").strip() if path.exists() else ""


def write_failure(folder: Path, reason: str) -> None:
    write_atomic(folder / FAILED, f"{reason}\n")


def read_metrics(folder: Path) -> list[dict]:
    """The logged rows: numbers by name, with steps that never decrease."""
    path, before = folder / METRICS, 0
    try:
        rows = read_rows(path)
    except ValueError as error:
        raise RunError(str(error)) from None
    for number, row in enumerate(rows, start=1):
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or not all(isinstance(v, (int, float)) for v in row.values()):
            shown = json.dumps(row)[:60]
            raise RunError(f"{path}, line {number} is not a row of metrics: {shown!r}")
        if step < before:
            raise RunError(f"{path}, line {number}: step {step} after step {before}")
        before = step
    return rows


def read_deviations(path: Path) -> list[str]:
    """The settings of a reduced version of a table that was launched."""
    try:
        sets = read_json(path, list)
    except ValueError as error:
        raise RunError(str(error)) from None
    if not all(isinstance(text, str) and "=" in text for text in sets):
        raise RunError(f"{path} does not hold a list of key=value; restore or remove it")
    return sets


def write_deviations(folder: Path, deviations: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DEVIATIONS, deviations)
