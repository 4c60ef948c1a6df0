"""An open run folder: locked, with its config, sessions and summary. See `ed.runtime.runs`."""

import logging
import os
import platform
import subprocess
import sys
import time
import weakref
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ed.engine.trust import read_config
from ed.runtime import runs
from ed.runtime.files import lock, sweep, write_atomic
from ed.runtime.runs import RunError

MOST_NAMED = 20  # changed files in a run's record
PACKAGES = ("torch", "torchvision", "timm", "transformers", "datasets", "hydra-core", "numpy")
PACKAGES += ("envpool",)  # its releases draw games differently
logger = logging.getLogger("ed")


def resolved(cfg: DictConfig) -> dict:
    """The config as plain values, as `ed.runtime.runs` takes it."""
    return OmegaConf.to_container(cfg, resolve=True)


def default_folder(cfg: DictConfig, names: list[str]) -> Path:
    """Where an ad-hoc run lives: a function of its config, so no two collide."""
    name = "-".join([*names, runs.digest(resolved(cfg))])
    return Path(cfg.system.runs) / "adhoc" / name / f"seed{cfg.seed}"


class RunFolder:
    """An open run folder, locked for this process.

    Of several processes the first alone `writes`, and holds the lock for all.
    """

    def __init__(self, path: Path, cfg: DictConfig, *, writes: bool = True):
        self.path, self.cfg, self.writes = path, cfg, writes
        if not writes:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / runs.LOCK, "w")  # noqa: SIM115, held until the process ends
            self._folder = os.open(path, os.O_RDONLY)
            self._close_folder = weakref.finalize(self, os.close, self._folder)
            alone = lock(self._lock) and self._lock_folder()
        except OSError as error:
            key = "run_dir" if cfg.system.run_dir else "runs"
            raise RunError(
                f"system.{key}: there can be no run folder {path} ({error.strerror}: "
                f"{error.filename or self._lock.name}); give a place where you may write, and lock "
                "files, in scripts by --runs"
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
        """Locks the folder itself, too: a lock file can be deleted while it is held."""
        try:
            return lock(self._folder)
        except OSError:  # some network file systems lock files only
            return True

    def close(self) -> None:
        if self.writes:
            self._lock.close()
            self._close_folder()

    def _keep_config(self) -> None:
        stored = self.path / runs.CONFIG
        if not stored.exists():
            write_atomic(stored, OmegaConf.to_yaml(OmegaConf.create(resolved(self.cfg))))
            return
        self.check_same(runs.identity(resolved(read_config(stored))))

    def check_same(self, before: dict) -> None:
        """Refuses to go on with what another config has begun."""
        difference = self.difference(before)
        if difference is not None:
            raise RunError(
                f"{self.path} holds a run with another config: {difference}. "
                "Give the stored values or another system.run_dir, or move that folder away"
            )

    def difference(self, before: dict) -> str | None:
        """How the identity of a run differs from this one's."""
        now = runs.identity(resolved(self.cfg))
        return "; ".join(runs.differences(before, now)) or None

    @property
    def done(self) -> dict | None:
        """The summary of a completed run."""
        return runs.read_done(self.path)

    def finish(self, summary: dict) -> None:
        """Writes DONE. Measures may have changed since the run began: config.yaml has the last."""
        if not self.writes:
            return
        stored, before = read_config(self.path / runs.CONFIG), self.done
        earlier = stored.measures if before is not None and "measures" in stored else {}
        if before is not None:  # measures of an earlier session, should metrics.jsonl be lost
            kept = {key: v for key, v in before["last"].items() if key.startswith("measure/")}
            summary["last"] = kept | summary["last"]
        runs.write_done(self.path, summary)
        now = OmegaConf.to_container(self.cfg.measures, resolve=True)
        stored.measures = {**earlier, **now}
        write_atomic(self.path / runs.CONFIG, OmegaConf.to_yaml(stored))

    def open_session(
        self,
        device: str,
        steps: int,
        *,
        processes: int,
        provenance: dict[str, str],
        threads: int | None = None,
    ) -> None:
        """Notes this session in meta.json: what ran, where, with which code, `steps` to its end."""
        if not self.writes:
            return
        sessions = _earlier_sessions(self.path)
        changed = changed_files()
        session = {
            "command": " ".join(sys.argv),
            "commit": commit(),
            "dirty": None if changed is None else bool(changed),
            "changed": changed and changed[:MOST_NAMED],
            "device": device,
            "host": platform.machine(),
            "processes": processes,
            "python": platform.python_version(),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "steps": steps,
            "threads": threads,
            "versions": {name: _version(name) for name in PACKAGES},
            **provenance,
        }
        runs.write_sessions(self.path, [*sessions, session])


def _earlier_sessions(folder: Path) -> list[dict]:
    """The sessions so far. They are a record only, so damage to them does not end a run."""
    try:
        meta = runs.read_meta(folder)
        if not runs.has_begun(folder) or "sessions" in meta:
            return meta.get("sessions", [])
        reason = f"{folder / runs.META} does not hold a list of sessions"
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning("%s: the record of earlier sessions is lost", reason)
    return []


def commit() -> str | None:
    """The commit of the code that runs; ED_COMMIT says it for a copy without its repository."""
    return os.environ.get("ED_COMMIT") or _git("rev-parse", "HEAD")


def changed_files() -> list[str] | None:
    """Tracked files that differ from `commit()`; None if unknown.

    ED_CHANGED lists them, separated by spaces, for a copy of the code without its repository.
    """
    if "ED_CHANGED" in os.environ:
        return os.environ["ED_CHANGED"].split()
    named = commit()
    found = named and _git("diff", "--name-only", named, "--")
    return None if found is None else found.splitlines()


def _git(*arguments: str) -> str | None:
    """Git's answer about the code that runs; None where it is no repository."""
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
