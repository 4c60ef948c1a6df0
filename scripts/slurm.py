"""Runs as one SLURM array job: what `launch.py --where slurm` writes and submits.

Task i of the array runs entry i of jobs.json, a run folder and the words of its command. They reach
srun as data: no shell reads them. Two minutes
before the time limit, and at a preemption with a grace time, SLURM sends USR2 (or TERM) to the
training process, which saves and exits with code 75; the script then puts its task back into the
queue. SLURM itself requeues only what it has to kill. A cancelled task saves as well, but its
script ends with it, so that it stays out of the queue until the table is launched again.
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

# A signal during Python's imports ends a run before it can save. That is not a failure, but if the
# time limit is too short it would repeat forever, so it counts as one after MAX_EARLY_ENDS.
# Cancelling a task also ends its script; if the script goes on after a crash or SIGKILL (out of
# memory), the run has failed.
MAX_EARLY_ENDS = 10
# No lock is needed around a task: the engine locks the run folder, and `queued_among` tells a
# second launcher that the run has a task already.
ENTRY = """import json, sys
job = json.load(open(sys.argv[1]))[int(sys.argv[2])]
print(*job, sep=chr(0), end=chr(0))"""  # bash keeps the words apart by the null character
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
# srun does not take it from sbatch by itself, since SLURM 22.05
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export SLURM_KILL_BAD_EXIT=1  # of several processes of a run none waits for one that has failed
touch "$log"
before=$(stat -c %s "$log")
session() {{ tail -c "+$((before + 1))" "$log"; }}
srun "${{job[@]:1}}" >> "$log" 2>&1
code=$?
# of several processes srun gives the highest code, but the first to end tells why they all did
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
    # after our own line of an error, torch may tell of the connections that ended with it
    said=$(session | grep '^error: ' || session | grep -vE '^srun: |^slurmstepd.* CANCELLED AT |^$')
    echo "exit $code$signal: $(tail -n 1 <<< "${{said:-no output}}")" > "$run_folder/{failed}"
fi
exit "$code"
"""


def require_slurm(partition: str | None = None) -> None:
    """Rejects up front what sbatch would reject only after files were written."""
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
    """Submits one array task per run and returns the job's number; None where none is due.

    Args:
        runs: the folder of all runs; scripts and SLURM's own output go below it.
        commands: what to run, by run folder.
        settings: partition, time, gres, ...: for sbatch where given. Where they ask for several
            tasks, these are the processes of one run, and end together.
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
    """The run folders whose array task SLURM still has, by one question for all.

    Also those whose note of the task is damaged, with the reason.
    """
    tasks, damaged = {}, {}
    for folder in folders:
        path = folder / SLURM
        try:
            tasks |= {folder: _task(path)} if path.exists() else {}
        except ValueError as error:
            damaged[folder] = f"{error}; look whether squeue has the run, then remove the file"
    if not tasks or shutil.which("squeue") is None:
        return set(), damaged
    queued = _queued_tasks(sorted({job for job, _ in tasks.values()}))
    return {folder for folder, task in tasks.items() if "_".join(task) in queued}, damaged


def _task(path: Path) -> tuple[str, str]:
    """Job and task number in a run's slurm.json."""
    note = read_json(path)
    job, task = str(note.get("job")), str(note.get("task"))
    if not (job.isdecimal() and task.isdecimal()):
        raise ValueError(f"{path} does not name a task of SLURM")
    return job, task


def _queued_tasks(jobs: Sequence[str]) -> set[str]:
    """JOB_TASK of every task of these arrays that waits or runs."""
    asked = ("--noheader", "--array", "--format=%i", f"--jobs={','.join(jobs)}")
    try:
        return set(ask("squeue", *asked).split())
    except SlurmError as error:
        # of one job: SLURM has forgotten it; of several it leaves out those that it has forgotten
        if "Invalid job id" in str(error) and len(jobs) == 1:
            return set()
        raise  # to take a run that may be queued for free would run it twice
