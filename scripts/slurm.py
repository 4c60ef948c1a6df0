"""Submits runs as one SLURM array job, for `launch.py --where slurm`.

Task i of the array runs entry i of jobs.json: a run folder and the words of its command, which srun
receives as data, without shell parsing. Two minutes before the time limit, and on preemption with a
grace time, SLURM sends USR2 (or TERM) to the training process. The process saves and exits with
code 75, and the script requeues its task. SLURM itself requeues only tasks that it has to kill. A
cancelled task also saves, but its script ends too, so the task is not requeued until the table is
launched again.
"""

import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ed.engine.errors import INTERRUPTED
from ed.runtime.files import read_json, refuse_control, write_atomic, write_json
from ed.runtime.runs import FAILED, OUTPUT, SLURM
from ed.runtime.slurm import SlurmError, ask, require_cluster

# A signal during Python's imports ends a run before it can save. This is not a failure, but if the
# time limit is too short it would repeat forever, so after MAX_EARLY_ENDS it counts as one.
# Cancelling a task also ends its script. If the script is still running after a crash or SIGKILL
# (out of memory), the run has failed.
MAX_EARLY_ENDS = 10
# Tasks need no lock: the engine locks the run folder, and a second launcher learns from
# `queued_among` that the run already has a task.
ENTRY = """import json, sys
job = json.load(open(sys.argv[1]))[int(sys.argv[2])]
print(*job, sep=chr(0), end=chr(0))"""  # bash splits the words at null characters
ARRAY_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}%{parallel}
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --open-mode=append
#SBATCH --output={output}
{settings}
cd {root} || exit 1
mapfile -d '' -t job < <({python} -c {entry} {folder}/jobs.json "$SLURM_ARRAY_TASK_ID")
[ "${{#job[@]}}" -gt 1 ] || exit 1
run_folder=${{job[0]}}
log="$run_folder/{log}"
rm -f "$run_folder/{failed}"
# since SLURM 22.05, srun no longer inherits this from sbatch
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export SLURM_KILL_BAD_EXIT=1  # ends all processes of a run if one fails
touch "$log"
before=$(stat -c %s "$log")
session() {{ tail -c "+$((before + 1))" "$log"; }}
srun "${{job[@]:1}}" >> "$log" 2>&1
code=$?
# with several processes, srun returns the highest code, but the first process to end has the cause
first=$(session | grep -m 1 -E '^srun: error: [^:]+: tasks? [^:]+: ')
case "$first" in *": Exited with exit code "*) code=${{first##* }} ;; esac
requeue=no
case "$code" in
    {interrupted}) requeue=yes ;;
    {early}) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_early} ] && requeue=yes ;;
esac
if [ "$requeue" = yes ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -ne 0 ]; then
    [ "$code" -gt 128 ] && signal=" ($(kill -l "$code"))" || signal=""
    # prefers our own error line, as torch may report broken connections after it
    said=$(session | grep '^error: ' || session | grep -vE '^srun: |^slurmstepd.* CANCELLED AT |^$')
    echo "exit $code$signal: $(tail -n 1 <<< "${{said:-no output}}")" > "$run_folder/{failed}"
fi
exit "$code"
"""


def require_slurm(partition: str | None = None) -> None:
    """Checks for SLURM and the partition before any files are written."""
    names = require_cluster("--where slurm", "use --where local or --where print").split()
    unknown = [name for name in (partition or "").split(",") if name and name not in names]
    if unknown:
        there = ", ".join(dict.fromkeys(names))
        raise SlurmError(f"--partition {unknown[0]}: no such partition; there are {there}")


def submit(
    runs: Path,
    name: str,
    commands: dict[Path, list[str]],
    *,
    root: Path,
    parallel: int,
    settings: dict[str, str | int | None],
) -> str | None:
    """Submits one array task per run and returns the job id; None if there are no commands.

    Args:
        runs: the folder of all runs; its subfolder .slurm gets the scripts and SLURM's output.
        commands: the command of each run, by run folder.
        settings: sbatch options such as partition, time and gres; None leaves one out. If they
            request several tasks, these are the processes of one run and end together.
    """
    if not commands:
        return None
    for key, value in settings.items():
        refuse_control(str(value), f"--{key} {value!r}")
    for words in ([str(runs), name, str(root)], *([str(p), *c] for p, c in commands.items())):
        for word in words:
            refuse_control(word, f"--where slurm: {word!r}")
    folder = runs / ".slurm" / f"{name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    write_json(folder / "jobs.json", [[str(path), *words] for path, words in commands.items()])
    script = array_script(name, len(commands), folder, root, parallel, settings)
    write_atomic(folder / "array.sh", script)
    try:
        job = ask("sbatch", "--parsable", folder / "array.sh").strip().split(";")[0]
    except SlurmError:
        shutil.rmtree(folder)
        raise
    for index, path in enumerate(commands):
        write_json(path / SLURM, {"job": job, "task": index})
    return job


def array_script(
    name: str,
    count: int,
    folder: Path,
    root: Path,
    parallel: int,
    settings: dict[str, str | int | None],
) -> str:
    given = [f"#SBATCH --{key}={shlex.quote(str(v))}" for key, v in settings.items() if v]
    return ARRAY_SCRIPT.format(
        name=shlex.quote(name),
        last=count - 1,
        parallel=parallel,
        output=shlex.quote(f"{folder}/slurm-%a.out"),
        folder=shlex.quote(str(folder)),
        python=shlex.quote(sys.executable),
        entry=shlex.quote(ENTRY),
        root=shlex.quote(str(root)),
        interrupted=INTERRUPTED,
        log=OUTPUT,
        failed=FAILED,
        early=" | ".join(str(128 + number) for number in (signal.SIGUSR2, signal.SIGTERM)),
        max_early=MAX_EARLY_ENDS,
        settings="\n".join(given),
    )


def queued_among(folders: Iterable[Path]) -> tuple[set[Path], dict[Path, str]]:
    """Returns the run folders whose array task is still in SLURM's queue, with one squeue call.

    Also returns the folders whose slurm.json is damaged, with the reason.
    """
    tasks, damaged = {}, {}
    for folder in folders:
        path = folder / SLURM
        try:
            tasks |= {folder: _task(path)} if path.exists() else {}
        except (OSError, ValueError) as error:
            damaged[folder] = (
                f"{error}; check that squeue does not list the run, then remove the file"
            )
    if not tasks or shutil.which("squeue") is None:
        return set(), damaged
    queued = _queued_tasks(sorted({job for job, _ in tasks.values()}))
    return {folder for folder, task in tasks.items() if "_".join(task) in queued}, damaged


def _task(path: Path) -> tuple[str, str]:
    """Reads the job and task number from a run's slurm.json."""
    note = read_json(path)
    job, task = str(note.get("job")), str(note.get("task"))
    if not (job.isdecimal() and task.isdecimal()):
        raise ValueError(f"{path} does not name a SLURM task")
    return job, task


def _queued_tasks(jobs: Sequence[str]) -> set[str]:
    """Returns JOB_TASK of every pending or running task of these array jobs."""
    asked = ("--noheader", "--array", "--format=%i", f"--jobs={','.join(jobs)}")
    try:
        return set(ask("squeue", *asked).split())
    except SlurmError as error:
        # SLURM has purged this job; with several jobs, squeue just omits purged ones
        if "Invalid job id" in str(error) and len(jobs) == 1:
            return set()
        raise  # a run that may be queued must not be started again
