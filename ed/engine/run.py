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
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ed.files import lock, sweep, write_atomic, write_json

# config groups that cannot change a result; measures only read a model, so a run is the same run
# with others, or with none; a regularizer that takes a sampler holds its settings as its own
INCIDENTAL = ("system", "logger", "measures", "sampler")
# files that only the holder of the lock writes; FAILED and slurm.json are the launcher's
OWN = ("config.yaml", "metrics.jsonl", "meta.json", "DONE", "wandb_id", "model.safetensors")
MOST_NAMED = 20  # changed files in a run's record
PACKAGES = ("torch", "torchvision", "timm", "transformers", "datasets", "hydra-core", "numpy")
PACKAGES += ("envpool",)  # its releases draw games differently


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
            alone = lock(self._lock)
        except OSError as error:
            key = "run_dir" if cfg.system.run_dir else "runs"
            raise RunError(
                f"system.{key}: there can be no run folder {path} ({error.strerror}: "
                f"{error.filename or self._lock.name}); give a place where you may write, and lock "
                "files, in scripts by --runs"
            ) from error
        if not alone:
            raise RunError(f"another process is training in {path}: wait for it, or stop it")
        for name in OWN:
            sweep(path / name)
        self._keep_config()

    def close(self) -> None:
        if self.writes:
            self._lock.close()

    def _keep_config(self) -> None:
        stored = self.path / "config.yaml"
        if not stored.exists():
            resolved = OmegaConf.to_container(self.cfg, resolve=True)
            write_atomic(stored, OmegaConf.to_yaml(OmegaConf.create(resolved)))
            return
        self.check_same(identity(OmegaConf.load(stored)))

    def check_same(self, before: dict) -> None:
        """Refuses to go on with what another config has begun."""
        differences = _differences(before, identity(self.cfg))
        if differences:
            raise RunError(
                f"{self.path} holds a run with another config: {'; '.join(differences)}. "
                "Give the stored values or another system.run_dir, or move that folder away"
            )

    @property
    def done(self) -> dict | None:
        """The summary of a completed run."""
        marker = self.path / "DONE"
        try:
            return json.loads(marker.read_text()) if marker.exists() else None
        except ValueError as error:
            raise RunError(
                f"{marker} is damaged ({error}): remove it and run the same command again, which "
                "goes on from the last checkpoint"
            ) from None

    def finish(self, summary: dict) -> None:
        """Writes DONE. Measures may have changed since the run began: config.yaml has the last."""
        if not self.writes:
            return
        stored = OmegaConf.load(self.path / "config.yaml")
        earlier = stored.measures if self.done is not None and "measures" in stored else {}
        write_json(self.path / "DONE", summary)
        now = OmegaConf.to_container(self.cfg.measures, resolve=True)
        stored.measures = {**earlier, **now}
        write_atomic(self.path / "config.yaml", OmegaConf.to_yaml(stored))

    def open_session(
        self, device: str, steps: int, *, processes: int, provenance: dict[str, str]
    ) -> None:
        """Notes this session in meta.json: what ran, where, with which code, `steps` to its end."""
        if not self.writes:
            return
        path = self.path / "meta.json"
        try:
            sessions = json.loads(path.read_text())["sessions"]
        except (OSError, ValueError, KeyError):
            sessions = []
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
            "versions": {name: _version(name) for name in PACKAGES},
            **provenance,
        }
        write_json(path, {"sessions": [*sessions, session]})


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
    """Tracked files that are not as in `commit()`; None where its history is not at hand."""
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
