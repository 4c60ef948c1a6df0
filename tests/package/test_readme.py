"""What the README says must be true: its code runs, its commands are accepted."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests.helpers.commands import run_command
from tests.helpers.small import SMALL, small_run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.startswith(".venv/bin/")
]


def test_the_first_block_is_the_two_commands():
    language, block = BLOCKS[0]
    assert language == "bash"
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make demo", "make test"]


def test_the_library_example_runs(tmp_path):
    (code,) = [block for language, block in BLOCKS if language == "python"]
    (tmp_path / "example.py").write_text(code)
    run = run_command([str(tmp_path / "example.py")])
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert run.stdout.strip() in code  # the printed estimate is the one in the comment


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    """As printed, but for the sizes: every key and every choice must be known."""
    program, *words = shlex.split(command)
    if "--cfg" in command:
        pass  # prints the config and trains nothing
    elif "train.py" in command:
        words += [*SMALL, f"system.runs={tmp_path}"]
    elif "measure.py" in command:
        words += ["--pairs", "3", "--resolution", "8", "--degree", "4"]
        words += ["--out", str(tmp_path / "paths.png")]
    elif "theory.py" in command:
        words += ["--paths", "500", "--out", str(tmp_path / "theory.png")]
    elif "runs.py" in command:
        small_run(tmp_path / "run")
        words += [str(tmp_path)]
    elif "launch.py" in command:
        words += ["--runs", str(tmp_path)]
    else:
        words += ["--check"]
    environment = {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    if program.endswith("torchrun"):  # test_distributed.py starts several processes with it
        read = torchrun.parse_args(words)
        words = [read.training_script, *read.training_script_args]
    run = run_command(words, env=environment)
    expected = (0, 75) if "--status" in command else (0,)  # 75: not all done yet
    assert run.returncode in expected, run.stderr


def test_relative_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
