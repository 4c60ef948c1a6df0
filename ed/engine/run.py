"""The run folder: one per config and seed, found again by running the same command.

runs/adhoc/cifar10-vit_tiny-ed-1a2b3c4d/seed0/
    config.yaml    the resolved config; it is the truth
    metrics.jsonl  one row per log point      train.log   the same for people
    last.pt        newest checkpoint          previous.pt the one before
    model.safetensors  the trained weights, once the run is complete
    meta.json      commit, versions, hardware, command, one entry per session
    DONE           last and best metrics, once the run is complete
"""

import hashlib
import json
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
from ed.runtime.files import lock, read_json, sweep, write_atomic, write_json

# config groups that cannot change a result; measures only read a model, so a run is the same run
# with others, or with none; a regularizer that takes a sampler holds its settings as its own
INCIDENTAL = ("system", "logger", "measures", "sampler")
# files that only the holder of the lock writes; FAILED and slurm.json are the launcher's
OWN = ("config.yaml", "metrics.jsonl", "meta.json", "DONE", "wandb_id", "model.safetensors")
MOST_NAMED = 20  # changed files in a run's record
PACKAGES = ("torch", "torchvision", "timm", "transformers", "datasets", "hydra-core", "numpy")
PACKAGES += ("envpool",)  # its releases draw games differently
logger = logging.getLogger("ed")


class RunError(RuntimeError):
    """The run folder cannot be used as asked."""


def identity(cfg: DictConfig) -> dict:
    """The part of the config that determines the result."""
    resolved = OmegaConf.to_container(cfg, resolve=True)
    return {key: value for key, value in resolved.items() if key not in INCIDENTAL}


def digest(cfg: DictConfig) -> str:
    """Eight letters for everything that determines the result but the seed."""
    settings = {key: value for key, value in identity(cfg).items() if key != "seed"}
    text = json.dumps(_whole(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _whole(value):
    """7 for 7.0 all through a config: two ways to write one setting."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def default_folder(cfg: DictConfig, names: list[str]) -> Path:
    """Where an ad-hoc run lives: a function of its config, so no two collide."""
    return Path(cfg.system.runs) / "adhoc" / "-".join([*names, digest(cfg)]) / f"seed{cfg.seed}"


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
            self._lock = open(path / ".lock", "w")  # noqa: SIM115, held until the process ends
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
            for name in OWN:
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
        stored = self.path / "config.yaml"
        if not stored.exists():
            resolved = OmegaConf.to_container(self.cfg, resolve=True)
            write_atomic(stored, OmegaConf.to_yaml(OmegaConf.create(resolved)))
            return
        self.check_same(identity(read_config(stored)))

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
        return "; ".join(_differences(before, identity(self.cfg))) or None

    @property
    def done(self) -> dict | None:
        """The summary of a completed run."""
        marker = self.path / "DONE"
        if not marker.exists():
            return None
        try:
            summary = read_json(marker)
            if not _is_summary(summary):
                raise ValueError("not the summary of a run")
            return summary
        except ValueError as error:
            raise RunError(
                f"{marker} is damaged ({error}): remove it and run the same command again, which "
                "goes on from the last checkpoint"
            ) from None

    def finish(self, summary: dict) -> None:
        """Writes DONE. Measures may have changed since the run began: config.yaml has the last."""
        if not self.writes:
            return
        stored, before = read_config(self.path / "config.yaml"), self.done
        earlier = stored.measures if before is not None and "measures" in stored else {}
        if before is not None:  # measures of an earlier session, should metrics.jsonl be lost
            kept = {key: v for key, v in before["last"].items() if key.startswith("measure/")}
            summary["last"] = kept | summary["last"]
        write_json(self.path / "DONE", summary)
        now = OmegaConf.to_container(self.cfg.measures, resolve=True)
        stored.measures = {**earlier, **now}
        write_atomic(self.path / "config.yaml", OmegaConf.to_yaml(stored))

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
        path = self.path / "meta.json"
        sessions = _earlier_sessions(path) if path.exists() else []
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
        write_json(path, {"sessions": [*sessions, session]})


def _is_summary(value: dict) -> bool:
    """Whether it is what `train` returns: numbers by name, and how long it took."""
    numbers = [value.get("steps"), value.get("seconds")]
    for key in ("last", "best"):
        if not isinstance(value.get(key), dict):
            return False
        numbers += value[key].values()
    return all(isinstance(number, (int, float)) for number in numbers)


def _earlier_sessions(path: Path) -> list[dict]:
    """The sessions in meta.json. It is a record only, so damage to it does not end a run."""
    try:
        sessions = read_json(path).get("sessions")
        if isinstance(sessions, list) and all(isinstance(each, dict) for each in sessions):
            return sessions
        reason = f"{path} does not hold a list of sessions"
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning("%s: the record of earlier sessions is lost", reason)
    return []


def _differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    rows = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            rows += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            rows.append(f"{prefix}{key} is {old} there, {new} here")
    return rows


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
