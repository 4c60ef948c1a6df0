"""Runs on a real SLURM cluster on this machine match local runs, even after interruptions.

Arrays and sweeps are cancelled, preempted and stopped by the time limit. `make test-slurm` installs
SLURM if it has permission.
"""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ed.analysis.spec import Run, expand
from ed.analysis.tables import load_table
from tests.helpers.launching import SPEC, logged, rendered, steps_of, wait_for, write_table

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
STEPS = 40
TRAINING = [o for o in SPEC["fixed"] if not o.startswith(("task.batch_size", "system.save"))]
TRAINING += ["task.batch_size=50"]

# With auth/none and linuxproc, SLURM does not need munge, cgroups or root. A requeued task waits
# one second longer than cred_expire. KillWait and GraceTime give a run time to save.
CONFIG = """
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=ci Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes={host} PriorityTier=10 PreemptMode=OFF
"""


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[None]:
    """Starts slurmctld and slurmd in a temporary folder for the tests in this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
        missing = [name for name in ("slurmctld", "slurmd") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"no {' and no '.join(missing)} on this machine")
        for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "SRUN"))]:
            patch.delenv(name)  # set if the tests run in a SLURM job
        folder = tmp_path_factory.mktemp("slurm")
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("OMP_NUM_THREADS", "1")  # fixes the order of summation
        write_config(folder)
        daemons = {}
        try:
            for name in ("slurmctld", "slurmd"):
                daemons[name] = start_daemon(name, folder)
            wait_for(lambda: is_idle(daemons), f"an idle node; see {folder}/*.log", 30)
            yield
        finally:
            stop(daemons)


def write_config(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    text = CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 needs a mounted cgroup


def start_daemon(name: str, folder: Path) -> subprocess.Popen:
    with open(folder / f"{name}.log", "w") as log:
        command = [name, "-D", "-f", folder / "slurm.conf"]  # -D runs it in the foreground
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def is_idle(daemons: dict[str, subprocess.Popen]) -> bool:
    for name, daemon in daemons.items():
        assert daemon.poll() is None, f"{name} ended with code {daemon.returncode}"
    answer = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True)
    return answer.stdout.split()[:1] == ["idle"]


def stop(daemons: dict[str, subprocess.Popen]) -> None:
    """Cancels remaining jobs, then stops the daemons."""
    try:
        if len(daemons) == 2 and all(daemon.poll() is None for daemon in daemons.values()):
            for name in ("ci", "urgent"):
                ask("scancel", f"--partition={name}")
            wait_for(lambda: not ask("squeue", "-h"), "the end of all jobs", 30)
    finally:
        for daemon in reversed(daemons.values()):
            daemon.terminate()
        for daemon in daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def launch(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/launch.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def process_of(folder: Path) -> int | None:
    """Returns the id of a run's training process (not of srun), or None."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
            if words[1:2] == ["train.py"] and f"system.run_dir={folder}" in words:
                return int(entry.name)
    return None


def hold(run: Run) -> int:
    """Pauses a run during training, so that later signals reach it before it ends."""
    wait_for(lambda: steps_of(run) >= 2, f"{run.folder} to train", 120)
    pid = process_of(run.folder)
    assert pid is not None, f"{run.folder} is done already"
    os.kill(pid, signal.SIGSTOP)
    return pid


def ended(run: Run) -> bool:
    return process_of(run.folder) is None


def sessions(run: Run) -> int:
    return len(json.loads((run.folder / "meta.json").read_text())["sessions"])


@contextlib.contextmanager
def launched_here(*arguments: str) -> Iterator[subprocess.Popen]:
    """Runs the local launcher in the background."""
    command = [sys.executable, "scripts/launch.py", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()  # no effect if it has ended


def test_an_unknown_partition_prints_one_line_and_writes_nothing(cluster, tmp_path):
    arguments = ["--runs", str(tmp_path / "runs"), "--where", "slurm", "--partition", "nope"]
    result = launch(write_table(tmp_path), *arguments)
    assert result.returncode == 1
    assert result.stderr == "error: --partition nope: no such partition; there are ci, urgent\n"
    assert not (tmp_path / "runs").exists()


def test_an_sbatch_error_is_printed_in_one_line(cluster, tmp_path):
    arguments = ["--runs", str(tmp_path / "runs"), "--where", "slurm", "--gres", "gpu:1"]
    result = launch(write_table(tmp_path), *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: sbatch: ")
    assert "Invalid generic resource (gres) specification" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list((tmp_path / "runs/.slurm").iterdir())


def test_an_interrupted_array_equals_local_runs(cluster, tmp_path):
    epochs = 10  # SLURM resumes a paused process before it sends the signal, which must come first
    path = write_table(tmp_path, fixed=[*TRAINING, f"task.epochs={epochs}"])
    root, here = tmp_path / "the runs", tmp_path / "local"
    # SLURM checks every 30 s and sends SIGUSR2 about two minutes before the time limit
    slurm = [path, "--runs", str(root), "--where", "slurm", "--partition", "ci", "--time", "3"]
    submitted = launch(*slurm, "--jobs", "2")
    assert submitted.returncode == 0, submitted.stderr
    assert ": 6 runs" in submitted.stdout
    table = load_table(path)
    runs = expand(table, root=root)
    with launched_here(path, "--runs", str(here), "--jobs", "2") as local:
        for run in runs[:2]:
            hold(run)
        preempted = preempt_one(runs[:2])
        cancel(runs[2])
        assert "stopped" in launch(*slurm, "--status", "--cells", "ed", "--seeds", "2").stdout
        again = launch(*slurm)  # the other runs are still queued or running
        assert ": 1 run" in again.stdout, again.stdout + again.stderr
        (limited,) = (run for run in runs[:2] if run is not preempted)
        wait_for(lambda: ended(limited), "the run at its time limit to save and end", 120)
        wait_for(
            lambda: all((run.folder / "DONE").exists() for run in runs), "all runs to finish", 240
        )
        assert local.wait(timeout=240) == 0
    assert "6 runs: 6 done" in launch(*slurm, "--status").stdout
    for run in runs[:3]:
        assert sessions(run) >= 2
        assert "stopped and saved at step" in (run.folder / "train.log").read_text()
    for run in runs:
        assert logged(run.folder) == list(range(1, epochs * STEPS + 1))  # no gap, no repeat
    assert rendered(table, root) == rendered(table, here)


def preempt_one(held: Sequence[Run]) -> Run:
    """Preempts one of the paused runs with an urgent job and returns it.

    SLURM sends SIGCONT first, which resumes a paused process; the same happens when a job is
    cancelled or reaches its time limit.
    """
    ask("sbatch", "--partition=urgent", "--output=/dev/null", "--wrap=true")
    return wait_for(lambda: next(filter(ended, held), None), "a preempted run to save and end")


def cancel(run: Run) -> None:
    hold(run)
    place = json.loads((run.folder / "slurm.json").read_text())
    task = f"{place['job']}_{place['task']}"
    ask("scancel", task)
    wait_for(lambda: not ask("squeue", "-h", f"--jobs={task}"), "the cancelled run to save and end")


def test_the_processes_of_a_run_are_requeued_together(cluster, tmp_path):
    path, root = write_table(tmp_path, fixed=TRAINING, seeds=[0]), tmp_path / "runs"
    chosen = ["--runs", str(root), "--cells", "ed"]
    submitted = launch(path, *chosen, "--where", "slurm", "--gpus", "2", "--gres", "none")
    assert ": 1 run" in submitted.stdout, submitted.stderr
    (run,) = expand(load_table(path), cells=["ed"], root=root)
    held = hold(run)  # pauses one process; the other waits for it
    job = json.loads((run.folder / "slurm.json").read_text())["job"]
    ask("scancel", "--signal=USR2", f"{job}_0")  # as SLURM does at a time limit
    os.kill(held, signal.SIGCONT)
    wait_for(lambda: (run.folder / "DONE").exists(), "the requeued run to finish", 240)
    log = (run.folder / "output.log").read_text()
    assert log.count("the same command resumes it") == 1, log
    assert logged(run.folder) == list(range(1, STEPS + 1))
    history = json.loads((run.folder / "meta.json").read_text())["sessions"]
    assert [session["processes"] for session in history] == [2, 2]


def test_a_run_gets_the_requested_cores(cluster, tmp_path):
    """Without --cpus, SLURM would grant one core, too few to decode images."""
    path, root = write_table(tmp_path, fixed=TRAINING, seeds=[0]), tmp_path / "runs"
    launch(path, "--runs", str(root), "--cells", "ed", "--where", "slurm", "--cpus", "2")
    (run,) = expand(load_table(path), cells=["ed"], root=root)
    pid = wait_for(lambda: process_of(run.folder), "the run to start", 60)
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    job = json.loads((run.folder / "slurm.json").read_text())["job"]
    ask("scancel", job)
    assert "SLURM_CPUS_ON_NODE=2" in environment
    wait_for(lambda: ended(run), "the cancelled run to end", 60)


def test_crashes_and_errors_are_recorded(cluster, tmp_path):
    path, root = write_table(tmp_path, fixed=TRAINING, seeds=[0, 1]), tmp_path / "runs"
    arguments = [path, "--runs", str(root), "--cells", "ed"]
    launch(*arguments, "--where", "slurm", "--seeds", "0")
    (crashed,) = expand(load_table(path), cells=["ed"], seeds=[0], root=root)
    held = hold(crashed)
    os.kill(held, signal.SIGSEGV)
    os.kill(held, signal.SIGCONT)
    wait_for(lambda: (crashed.folder / "FAILED").exists(), "FAILED of the crashed run", 60)
    assert (crashed.folder / "FAILED").read_text().startswith("exit 139 (SEGV): ")
    # the process that reports the error exits first; the other waits, so the message is complete
    two = ["--where", "slurm", "--gpus", "2", "--gres", "none"]
    launch(*arguments, *two, "--seeds", "1", "--set", "task.batch_size=25")
    (refused,) = expand(
        load_table(path), cells=["ed"], seeds=[1], sets=["task.batch_size=25"], root=root
    )
    wait_for(lambda: (refused.folder / "FAILED").exists(), "FAILED of the rejected run", 60)
    mark = (refused.folder / "FAILED").read_text()
    assert mark.startswith("exit 1: error: task.batch_size=25: "), mark


def test_a_sweep_reports_failures_and_requeues_stopped_runs(cluster, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=slurm", "hydra.launcher.partition=ci"]
    overrides = [*TRAINING, "regularizer=none", "model.heads=2,3", f"system.runs={tmp_path}"]
    command = [sys.executable, "train.py", "-m", *launcher, *overrides]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as sweep:
        try:
            metrics = wait_for(
                lambda: list(tmp_path.glob("adhoc/*/seed0/metrics.jsonl")), "a run to start", 120
            )
            folder = metrics[0].parent
            wait_for(lambda: logged(folder), "a step to be logged")
            job = ask("squeue", "--noheader", "--array", "--format=%F").split()[0]
            ask("scancel", "--signal=USR2", f"{job}_0")  # as SLURM does at a time limit
            errors = sweep.communicate(timeout=240)[1]
        finally:
            sweep.kill()
    assert sweep.returncode == 1
    assert "model.width=16" in errors.splitlines()[-1]
    assert (folder / "DONE").exists()
    assert logged(folder) == list(range(1, STEPS + 1))
    assert len(json.loads((folder / "meta.json").read_text())["sessions"]) == 2
    assert [path.parent for path in tmp_path.rglob("DONE")] == [folder]
