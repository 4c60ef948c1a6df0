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
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

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

    def finish(self, summary: dict, taken: Collection[str] = ()) -> None:
        """Writes the summary to DONE and the measures to config.yaml.

        Args:
            taken: the metrics measured in this session; DONE keeps its values of the others.
        """
        if not self.writes:
            return
        stored, before = read_config(self.path / runs.CONFIG), runs.read_done(self.path)
        measures = OmegaConf.to_container(self.cfg.measures, resolve=True)
        if before is not None:  # not from metrics.jsonl, which may be lost or changed
            new = {k: v for k, v in summary["last"].items() if not _is_measure(k) or k in taken}
            old = {k: v for k, v in before["last"].items() if _is_measure(k) and k not in taken}
            summary["last"] = old | new
            measures = {**(stored.get("measures") or {}), **measures}
        runs.write_done(self.path, summary)
        stored.measures = measures
        write_atomic(self.path / runs.CONFIG, OmegaConf.to_yaml(stored))

    def open_session(self, device: str, steps: int, **details) -> None:
        """Adds this session to meta.json: command, hardware, versions and `details`."""
        if not self.writes:
            return
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
        runs.write_sessions(self.path, [*_earlier_sessions(self.path), session])


def _is_measure(metric: str) -> bool:
    return metric.startswith("measure/")


def _earlier_sessions(folder: Path) -> list[dict]:
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
