"""Extracts code blocks from Markdown files and runs their commands at small sizes."""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import run as torchrun

from tests.helpers.commands import ROOT, run_command, run_together
from tests.helpers.launching import fake
from tests.helpers.small import SMALL, small_run

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
FEW_PATHS = ["--pairs", "3", "--resolution", "8", "--degree", "4"]
UNFINISHED = 75  # exit code of `launch.py --status` while runs are missing


@dataclass(frozen=True)
class Block:
    """A fenced code block; `title` is the name of the file to create from it, if any."""

    language: str
    title: str
    text: str


def blocks_of(path: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(path.read_text())]


def commands_of(path: Path) -> Iterator[str]:
    """Yields the commands in bash blocks, without comments."""
    for block in blocks_of(path):
        if block.language == "bash":
            lines = (line.split(" #")[0].strip() for line in block.text.splitlines())
            yield from filter(None, lines)


def check_command(command: str, folder: Path) -> None:
    """Runs a command at small sizes; for make and pip, only checks targets and extras."""
    first, *words = shlex.split(command)
    if first == "make":
        how = {"cwd": ROOT, "capture_output": True, "text": True}
        made = subprocess.run(["make", "--dry-run", *words], **how)
        assert made.returncode == 0, made.stderr
    elif first == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = set(re.findall(r"[\w-]+", words[-1].partition("[")[2]))
        assert named <= set(extras["optional-dependencies"]), command
    else:
        run = run_small(command, folder)
        expected = (0, UNFINISHED) if "--status" in command else (0,)
        assert run.returncode in expected, run.stderr


def run_small(
    command: str, folder: Path, *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a command as printed, except for sizes, so unknown keys and choices fail."""
    _, venv, rest = command.partition(".venv/bin/")  # removes a leading srun
    assert venv, f"no test runs this command: {command}"
    program, *words = shlex.split(rest)
    words = smaller(words, folder)
    environment = {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **(env or {})}
    if "slurm" in words:  # submits nothing; tests/scripts/test_slurm.py uses a real SLURM
        for name, answer in (("sinfo", "NAME"), ("sbatch", "42"), ("squeue", "")):
            fake(folder, name, f"echo {answer}")
        environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    if program == "torchrun":
        script = words.index("train.py")
        torchrun.parse_args(words)  # only checks the options; test_distributed.py starts torchrun
        return run_together(words[script:])
    return run_command(words, cwd=cwd, env=environment)


def smaller(words: list[str], folder: Path) -> list[str]:
    """Returns the words of a command with small sizes and `folder` as the output folder."""
    script = next(word for word in words if word.endswith(".py")).removeprefix("scripts/")
    if script == "train.py":
        if "--cfg" in words:
            return words  # prints the config without training
        if "hydra/launcher=slurm" in words:  # only composes; `make test-slurm` submits
            return [word for word in words if word != "-m" and "," not in word] + ["--cfg", "job"]
        own = "--config-dir" in words and any(word.startswith("task=") for word in words)
        sizes = ["system.device=cpu"] if own else [*SMALL]
        sizes += ["task.batch_size=1000"] if "-m" in words and not own else []  # two steps a run
        return [*words, *sizes, f"system.runs={folder}"]
    if script == "measure.py":
        return [*words, *FEW_PATHS, "--out", str(folder / "paths.png")]
    if script == "theory.py":
        return [*words, "--paths", "100", "--out", str(folder / "theory.png")]
    if script == "runs.py":
        small_run(folder / "run")
        return [*words, str(folder)]
    if script == "launch.py":
        own = any(word.endswith(".yaml") for word in words)
        where = ["--cells", "plain", "--seeds", "0"] if own else []
        words = ["print" if word == "local" else word for word in words]
        return [*words, *where, "--runs", str(folder)]
    assert script == "table.py", words
    return [*words, "--runs", str(folder)] if words[-1].endswith(".yaml") else [*words, "--check"]
