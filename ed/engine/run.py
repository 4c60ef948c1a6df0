"""Locks a run folder and writes its config, sessions and summary. See `ed.runtime.runs`."""

import logging
import os
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Collection
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ed.engine.checkpoint import check_exists
from ed.engine.trust import read_config
from ed.runtime import runs
from ed.runtime.files import lock, open_in_run, sweep, write_atomic
from ed.runtime.runs import RunError

MOST_NAMED = 20  # changed files listed in meta.json
PACKAGES = ("torch", "torchvision", "timm", "transformers", "datasets", "hydra-core", "numpy")
PACKAGES += ("envpool",)  # games differ between its releases
logger = logging.getLogger("ed")


def resolved(cfg: DictConfig) -> dict:
    """Returns the config as a plain dict with all references resolved."""
    return OmegaConf.to_container(cfg, resolve=True)


class RunFolder:
    """An open run folder. Only rank 0 locks it and writes to it."""

    def __init__(self, path: Path, cfg: DictConfig, *, writes: bool = True):
        self.path, self.cfg, self.writes = path, cfg, writes
        if not writes:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open_in_run(path / runs.LOCK, "a")
            self._folder = os.open(path, os.O_RDONLY)
            self._close_folder = weakref.finalize(self, os.close, self._folder)
            alone = lock(self._lock) and self._lock_folder()
        except OSError as error:
            key = "run_dir" if cfg.system.run_dir else "runs"
            raise RunError(
                f"system.{key}: cannot create or lock {path} ({error.strerror}: "
                f"{error.filename or self._lock.name}); use a folder that you can write to and "
                "lock (scripts: --runs)"
            ) from error
        if not alone:
            self.close()
            raise RunError(f"another process is training in {path}: wait for it, or stop it")
        try:
            for name in runs.OWN:
                sweep(path / name)
            self._keep_config()
        except BaseException:
            self.close()
            raise

    def _lock_folder(self) -> bool:
        """Also locks the folder itself, because the lock file could be deleted."""
        try:
            return lock(self._folder)
        except OSError:  # some network file systems cannot lock folders
            return True

    def close(self) -> None:
        if self.writes:
            self._lock.close()
            self._close_folder()

    def _keep_config(self) -> None:
        stored, now = self.path / runs.CONFIG, resolved(self.cfg)
        if not stored.exists():
            write_atomic(stored, OmegaConf.to_yaml(OmegaConf.create(now)))
            return
        before = runs.identity(resolved(read_config(stored)))
        if found := runs.differences(before, runs.identity(now)):
            raise RunError(
                f"{self.path} holds a run with another config: {'; '.join(found)}. "
                "Use the stored values, use another system.run_dir, or move that folder"
            )

    def withdraw(self, taken: Collection[str]) -> None:
        """Removes measures from config.yaml whose settings change, before storing new values.

        After a kill in between, config.yaml names no settings for them, so they are taken again.

        Args:
            taken: the names of the measures taken in this session.
        """
        if not self.writes:
            return
        check_exists(self.path)
        stored, now, done = *self._measures(), runs.is_done(self.path)
        kept = {
            name: leaf
            for name, leaf in stored.items()
            if now.get(name) == leaf or (done and name not in taken)
        }
        if kept != stored:
            self._keep_measures(kept)

    def finish(self, summary: dict, taken: Collection[str] = ()) -> None:
        """Writes the summary to DONE and the measures to config.yaml.

        Args:
            taken: the names of the measures taken in this session; DONE keeps its other values.
        """
        if not self.writes:
            return
        stored, now = self._measures()
        before = runs.read_done(self.path)
        if before is not None:  # not from metrics.jsonl, which may be lost or changed
            names = {*stored, *now}
            last = before["last"].items()
            old = {k: v for k, v in last if _is_measure(k) and _measure_of(k, names) not in taken}
            summary["last"] = old | summary["last"]
            now = stored | now
        runs.write_done(self.path, summary)
        self._keep_measures(now)

    def _measures(self) -> tuple[dict, dict]:
        """Returns the settings of the measures in config.yaml and in this session's config."""
        stored = resolved(read_config(self.path / runs.CONFIG)).get("measures") or {}
        return stored, OmegaConf.to_container(self.cfg.measures, resolve=True)

    def _keep_measures(self, measures: dict) -> None:
        path = self.path / runs.CONFIG
        stored = read_config(path)
        stored.measures = measures
        write_atomic(path, OmegaConf.to_yaml(stored))

    def open_session(self, device: str, steps: int, **details) -> None:
        """Adds this session to meta.json: command, hardware, versions and `details`."""
        if not self.writes:
            return
        earlier = earlier_sessions(self.path)
        check_classes(self.path, earlier, details)
        changed = changed_files()
        session = {
            "command": " ".join(sys.argv),
            "commit": commit(),
            "dirty": None if changed is None else bool(changed),
            "changed": changed and changed[:MOST_NAMED],
            "device": device,
            "host": platform.machine(),
            "python": platform.python_version(),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "steps": steps,
            "versions": {name: _version(name) for name in PACKAGES},
            **details,
        }
        runs.write_sessions(self.path, [*earlier, session])


def _is_measure(metric: str) -> bool:
    return metric.startswith("measure/")


def _measure_of(metric: str, names: Collection[str]) -> str | None:
    """Returns which measure a metric belongs to, e.g. ed_norm for measure/ed_norm_se."""
    owners = (name for name in names if f"{metric}_".startswith(f"measure/{name}_"))
    return max(owners, key=len, default=None)


def earlier_sessions(folder: Path) -> list[dict]:
    """Returns the earlier sessions, or [] with a warning if meta.json is damaged."""
    try:
        meta = runs.read_meta(folder)
        if not runs.has_begun(folder) or "sessions" in meta:
            return meta.get("sessions", [])
        reason = f"{folder / runs.META} has no list of sessions"
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning("%s: the record of earlier sessions is lost", reason)
    return []


def check_classes(folder: Path, sessions: list[dict], details: dict) -> None:
    """Raises ValueError if classes were renamed, because the order of names numbers the labels.

    Args:
        sessions: earlier sessions of the run in `folder`.
        details: from `Task.provenance` now; without class names, nothing is compared.
    """
    now = details.get("class_names")
    for before in (session.get("class_names") for session in sessions):
        # only text, because the task may be a user's own, and meta.json damaged
        if isinstance(before, str) and isinstance(now, str) and before != now:
            pairs = enumerate(zip_longest(before.split(", "), now.split(", ")))
            label, old, new = next((n, old, new) for n, (old, new) in pairs if old != new)
            raise ValueError(
                f"task.data: class {label} is {new}, but was {old} in an earlier session of "
                f"{folder}; restore the names of the classes"
            )


def commit() -> str | None:
    """Returns the current commit; without a git repository, set ED_COMMIT."""
    return os.environ.get("ED_COMMIT") or _git("rev-parse", "HEAD")


def changed_files() -> list[str] | None:
    """Returns the tracked files that differ from `commit()`, or None if unknown.

    Without a git repository, set ED_CHANGED to a space-separated list.
    """
    if "ED_CHANGED" in os.environ:
        return os.environ["ED_CHANGED"].split()
    named = commit()
    found = named and _git("diff", "--name-only", named, "--")
    return None if found is None else found.splitlines()


def _git(*arguments: str) -> str | None:
    """Returns the output of git in ed's repository, or None if git fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
