"""The files, identity and status of a run."""

import ast
import fcntl
import json
from pathlib import Path

import pytest

from ed.runtime import runs
from ed.runtime.runs import Status, differences, digest, identity, read_done, status

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 0, "optimizer": {"lr": 7.0}, "system": {"workers": 1}, "measures": {}}


def strings(path: Path) -> set[str]:
    """Returns a module's string literals, including parts of f-strings but not docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documentation = {ast.get_docstring(n, clean=False) for n in nodes if isinstance(n, described)}
    found = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found - documentation


@pytest.mark.parametrize("folder", ["ed", "scripts"])
def test_file_names_of_a_run_are_defined_once(folder):
    names = (runs.DIVERGED, runs.DONE, runs.FAILED, runs.METRICS, runs.META, runs.DEVIATIONS)
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != Path(runs.__file__) and any(name in path.read_text() for name in names):
            used = {name for name in names for text in strings(path) if name in text}
            assert not used, f"{path}: take {used} from ed.runtime.runs"


def test_identity_ignores_settings_that_do_not_affect_results():
    assert identity(CONFIG) == {"seed": 0, "optimizer": {"lr": 7.0}}
    other = CONFIG | {"seed": 1, "optimizer": {"lr": 7}, "system": {"workers": 2}}
    assert digest(other) == digest(CONFIG)
    assert digest(CONFIG | {"optimizer": {"lr": 8}}) != digest(CONFIG)
    assert differences(CONFIG, CONFIG) == []
    assert differences(CONFIG, other) == [
        "seed is 0 there, 1 here",
        "system.workers is 1 there, 2 here",
    ]
    before, now = ({"model": {"_target_": name, name: 1}} for name in ("Vit", "ResNet"))
    assert differences(before, now) == ["model._target_ is Vit there, ResNet here"]


def test_status_depends_on_files_and_locks(tmp_path):
    assert status(tmp_path / "nowhere") == Status.PENDING
    (tmp_path / runs.CONFIG).touch()
    (tmp_path / runs.METRICS).touch()
    assert status(tmp_path) == Status.PENDING
    (tmp_path / runs.METRICS).write_text('{"step": 1}\n')
    assert status(tmp_path) == Status.STOPPED
    (tmp_path / runs.METRICS).unlink()
    (tmp_path / runs.LAST).touch()
    assert status(tmp_path) == Status.STOPPED
    runs.write_failure(tmp_path, "exit 1: error: no space")
    assert status(tmp_path) == Status.FAILED
    runs.write_failure(tmp_path, f"exit 1: error: {runs.DIVERGED}train/loss = nan")
    assert status(tmp_path) == Status.DIVERGED
    for name in (runs.LOCK, runs.CLAIM):
        with open(tmp_path / name, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert status(tmp_path) == Status.RUNNING
        assert status(tmp_path) == Status.DIVERGED
    runs.write_done(tmp_path, {"last": {}, "best": {}, "steps": 1, "seconds": 0.5})
    assert status(tmp_path) == Status.DONE
    assert read_done(tmp_path)["steps"] == 1


def test_changed_summary_is_rejected(tmp_path):
    summary = {"last": {}, "best": {"eval/acc": 17.2}, "steps": 1, "seconds": 0.5}
    done = tmp_path / runs.DONE
    runs.write_done(tmp_path, summary)
    assert read_done(tmp_path) == summary
    done.write_text(done.read_text().replace("17.2", "33.2"))
    with pytest.raises(runs.RunError, match="digest"):
        read_done(tmp_path)
    done.write_text(json.dumps(summary))  # older versions stored no digest
    assert read_done(tmp_path) == summary
