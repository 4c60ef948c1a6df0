"""scripts/setup.sh uses an existing environment without changing it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def prepare(folder: Path, exit_code: int) -> tuple[Path, Path]:
    """Copies the script and creates an environment whose Python records its arguments."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    python = folder / "theirs" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/calls"\nexit {exit_code}\n')
    python.chmod(0o755)
    return folder / "theirs", folder / "calls"


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("exit_code", [0, 1])
def test_nothing_is_installed_into_an_existing_environment(tmp_path, link, exit_code):
    theirs, calls = prepare(tmp_path, exit_code)
    if link:
        (theirs / "ready").touch()  # the script must not treat this environment as its own
        (tmp_path / ".venv").symlink_to(theirs)
    else:
        theirs.rename(tmp_path / ".venv")
    run = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode == 0) == (exit_code == 0)
    assert "pip" not in calls.read_text()
    assert ".venv" in run.stdout
    assert not (tmp_path / ".venv" / "made_by_setup").exists()
