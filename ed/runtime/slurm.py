"""SLURM's commands: whether a cluster answers, and their output or one line about what failed."""

import shutil
import subprocess
from pathlib import Path

# of SLURM's own messages: its commands are installed, but no controller can be reached
UNREACHABLE = ("configuration source", "contact slurm controller", "connection refused")


class SlurmError(ValueError):
    """SLURM is missing, does not answer, or rejects the job."""


def require_cluster(option: str, remedy: str) -> str:
    """The partitions of the cluster, one per line; SlurmError if `option` cannot work here."""
    if shutil.which("sbatch") is None:
        raise SlurmError(f"{option}: this machine has no SLURM (no sbatch); {remedy}")
    try:
        return ask("sinfo", "--all", "--noheader", "--format=%R")
    except SlurmError as error:
        if any(words in str(error).lower() for words in UNREACHABLE):
            raise SlurmError(
                f"{option}: SLURM is installed here, but no cluster answers; {remedy}"
            ) from None
        raise


def ask(*command: str | Path) -> str:
    """Output of one of SLURM's commands; its complaints become one line."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: this machine has no such command") from None
    if answer.returncode:
        lines = (line.split(": error: ")[-1].strip() for line in answer.stderr.splitlines())
        raise SlurmError(f"{command[0]}: {'; '.join(line for line in lines if line)}")
    return answer.stdout
