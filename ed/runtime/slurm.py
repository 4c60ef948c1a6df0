"""Runs SLURM's commands and reports their errors in one line."""

import shutil
import subprocess
from pathlib import Path

# phrases in SLURM's errors if it is installed but no controller can be reached
UNREACHABLE = ("configuration source", "contact slurm controller", "connection refused")


class SlurmError(ValueError):
    """Raised if SLURM is missing, does not answer, or rejects the job."""


def require_cluster(option: str, remedy: str) -> str:
    """Returns the cluster's partitions, one per line; raises SlurmError if there is no cluster."""
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
    """Runs a SLURM command and returns its output; raises SlurmError with a one-line message."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: this machine has no such command") from None
    if answer.returncode:
        lines = (line.split(": error: ")[-1].strip() for line in answer.stderr.splitlines())
        raise SlurmError(f"{command[0]}: {'; '.join(line for line in lines if line)}")
    return answer.stdout
