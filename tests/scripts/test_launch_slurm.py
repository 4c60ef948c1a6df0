"""The launcher on SLURM, with fake SLURM commands; test_slurm.py uses a real cluster."""

import json
import os
import subprocess

import pytest

from scripts import launch
from tests.helpers.launching import fake, stand_in, write_table


def test_an_array_is_submitted_once_and_each_task_runs_its_command(tmp_path, capsys, monkeypatch):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    fake(binaries, "sinfo", "echo ci")
    fake(binaries, "sbatch", "echo '42;cluster'")  # output format with several clusters
    fake(binaries, "squeue", "printf '42_%s\\n' {0..5}")
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--jobs", "3", "--partition", "ci"]) == 0
    assert "job 42: 6 runs" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs/.slurm").iterdir()
    script = (folder / "array.sh").read_text()
    assert "--array=0-5%3" in script
    assert "#SBATCH --partition=ci" in script
    assert len(json.loads((folder / "jobs.json").read_text())) == 6
    assert launch.main(arguments) == 0  # queued runs are not submitted again
    assert "nothing to submit" in capsys.readouterr().out
    assert launch.main([*arguments[:3], "--status"]) == 75
    assert "6 runs: 6 queued" in capsys.readouterr().out

    fake(binaries, "srun", 'exec "$@"')
    fake(binaries, "scontrol", f'echo "$@" > {tmp_path}/requeued')
    task = os.environ | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "43"}
    assert subprocess.run(["bash", folder / "array.sh"], env=task, check=False).returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 43\n"
    (tmp_path / "requeued").unlink()
    mark = tmp_path / "runs/six/ed/seed1/FAILED"
    fake(binaries, "srun", "exit 140")  # killed by SIGUSR2 during imports
    for restarts, requeued in (("9", True), ("10", False)):
        early = task | {"SLURM_RESTART_COUNT": restarts}
        assert (
            subprocess.run(["bash", folder / "array.sh"], env=early, check=False).returncode == 140
        )
        assert (tmp_path / "requeued").exists() == requeued == (not mark.exists())
        (tmp_path / "requeued").unlink(missing_ok=True)
    assert mark.read_text() == "exit 140 (USR2): no output\n"
    fake(binaries, "srun", 'exec "$@"')
    jobs = folder / "jobs.json"
    jobs.write_text(jobs.read_text().replace("SystemExit(75)", "SystemExit('error: x')"))
    assert subprocess.run(["bash", folder / "array.sh"], env=task, check=False).returncode == 1
    assert mark.read_text() == "exit 1: error: x\n"


@pytest.mark.parametrize(
    ("srun", "code", "mark"),
    [
        ("echo step 7; exit 139", 139, "exit 139 (SEGV): step 7\n"),
        ("echo step 7; exit 137", 137, "exit 137 (KILL): step 7\n"),  # e.g. out of memory
        ("exit 143", 143, None),  # killed by SIGTERM during imports
        (
            # one process fails; srun terminates the other, whose exit code is higher
            "printf 'error: x\\nframe #0: main\\n\\n'; "
            "echo srun: error: n1: task 0: Exited with exit code 1 >&2; exit 143",
            1,
            "exit 1: error: x\n",
        ),
        ("echo srun: error: n1: tasks 0-1: Exited with exit code 75 >&2; exit 75", 75, None),
        (
            # one process is stopped before it can save, so the other fails
            "echo srun: error: n1: task 0: User defined signal 2 >&2; "
            "echo srun: error: n1: task 1: Exited with exit code 1 >&2; exit 140",
            140,
            None,
        ),
    ],
)
def test_a_task_that_crashes_is_marked_and_not_requeued(tmp_path, monkeypatch, srun, code, mark):
    from scripts.slurm import submit

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sbatch", "echo 42")
    fake(tmp_path, "scontrol", f"touch {tmp_path}/requeued")
    fake(tmp_path, "srun", srun)
    run = tmp_path / "a run"
    run.mkdir()
    earlier = "error: y\nsrun: error: n1: task 0: Exited with exit code 2\n"
    (run / "output.log").write_text(earlier)
    (run / "FAILED").write_text("exit 2: error: y\n")
    submit(tmp_path, "six", {run: ["true"]}, root=tmp_path, parallel=1, settings={})
    (script,) = tmp_path.glob(".slurm/*/array.sh")
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "43"}
    task = subprocess.run(["bash", script], env=environment, check=False)
    assert task.returncode == code
    assert ((run / "FAILED").read_text() if (run / "FAILED").exists() else None) == mark
    assert (tmp_path / "requeued").exists() == (mark is None)


def test_an_unknown_partition_is_rejected_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "printf 'ci\\nlong\\n'")
    fake(tmp_path, "sbatch", f"touch {tmp_path}/submitted")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--partition", "gpu"]) == 1
    error = capsys.readouterr().err
    assert error == "error: --partition gpu: no such partition; there are ci, long\n"
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:h100:4"])
def test_one_process_is_started_per_gpu(tmp_path, capsys, monkeypatch, gres):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, answer in (("sinfo", "ci"), ("sbatch", "42"), ("squeue", "")):
        fake(tmp_path, name, f"echo {answer}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs")]
    asked = ["--where", "slurm", "--gpus", "4", "--nodes", "2", "--cpus", "16"]
    asked += ["--time", "02:00:00"]
    asked += [] if gres == "gpu:4" else ["--gres", gres]
    assert launch.main([*arguments, *asked]) == 0
    (folder,) = (tmp_path / "runs/.slurm").iterdir()
    lines = (folder / "array.sh").read_text().splitlines()
    assert "#SBATCH --array=0-5%8" in lines  # --jobs defaults to 8
    wanted = ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", f"#SBATCH --gres={gres}"]
    wanted += ["#SBATCH --cpus-per-task=16", "#SBATCH --time=02:00:00"]
    assert set(wanted) <= set(lines)
    for option in ("--gpus", "--jobs"):
        with pytest.raises(SystemExit):
            launch.main([*arguments, "--where", "slurm", option, "0"])
        assert f"{option} 0: at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("where", [[], ["--where", "local"], ["--where", "print"], ["--status"]])
@pytest.mark.parametrize(
    "setting",
    [
        "--partition long",
        "--time 02:00:00",
        "--gres gpu:1",
        "--gpus 4",
        "--nodes 2",
        "--cpus 8",
    ],
)
def test_slurm_options_require_slurm(setting, where, capsys):
    with pytest.raises(SystemExit) as ended:
        launch.main(["table1", *where, *setting.split()])
    assert ended.value.code == 2
    assert f"error: {setting}: only with --where slurm" in capsys.readouterr().err


def test_slurm_errors_are_shown_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "echo ci")
    fake(
        tmp_path,
        "sbatch",
        "printf 'sbatch: error: too long\\nsbatch: error: failed\\n' >&2; exit 1",
    )
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--partition", "ci"]) == 1
    assert capsys.readouterr().err == "error: sbatch: too long; failed\n"
    assert not list((tmp_path / "runs/.slurm").iterdir())


def test_an_unreachable_slurm_does_not_make_runs_pending(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--status", "--cells", "ed"]
    folder = tmp_path / "six/ed/seed0"
    folder.mkdir(parents=True)
    (folder / "slurm.json").write_text('{"job": "42", "task": 0}')
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert launch.main(arguments) == 75
    assert "3 runs: 3 pending" in capsys.readouterr().out
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    assert launch.main(arguments) == 1
    assert capsys.readouterr().err == "error: squeue: slurm_load_jobs error: Unable to contact\n"


def test_slurm_is_queried_once_for_all_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--status", "--cells", "ed"]
    fake(tmp_path, "squeue", f"echo \"$@\" >> {tmp_path}/asked; printf '42_1\\n42_12\\n43_0\\n'")
    assert launch.main(arguments) == 75
    assert not (tmp_path / "asked").exists()  # squeue is not called before a run is submitted
    for seed, (job, task) in enumerate([("42", 1), ("42", 2), ("43", 0)]):
        folder = tmp_path / f"six/ed/seed{seed}"
        folder.mkdir(parents=True)
        (folder / "slurm.json").write_text(json.dumps({"job": job, "task": task}))
    capsys.readouterr()
    assert launch.main(arguments) == 75
    assert "3 runs: 2 queued, 1 pending" in capsys.readouterr().out
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("--jobs=42,43")


@pytest.mark.parametrize(
    "option",
    ["--time", "--gres", "--partition", "--set", "--data", "--runs", "--cells"],
)
def test_no_option_can_inject_a_line_into_the_script(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "echo ci")
    fake(tmp_path, "sbatch", f"touch {tmp_path}/submitted")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, option, f"task.data=1\ntouch {tmp_path}/ran"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} ")
    assert error.count("\n") == 1
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("word", ["hydra.launcher.partition='ci\ntouch x\n#'", "seed=0\r"])
def test_train_rejects_control_characters(word):
    """submitit writes its settings into a job script, which would run the second line."""
    import train

    with pytest.raises(ValueError, match="control character") as raised:
        train.check_words(["-m", "hydra/launcher=basic", word])
    assert str(raised.value).startswith(repr(word))


def test_command_arguments_are_passed_to_srun_unchanged(tmp_path, monkeypatch):
    from scripts.slurm import submit

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sbatch", "echo 42")
    fake(tmp_path, "srun", """printf '%s\\0' "$@" > "$(dirname "$0")/given" """)
    words = [f"$(touch {tmp_path}/ran)", f"`touch {tmp_path}/ran`", "a'b\"c", "", " ; *", "\\n"]
    runs = [tmp_path / "first", tmp_path / "$(second) '"]
    for run in runs:
        run.mkdir()
    settings = {"time": "1' ; x", "gres": None}
    submit(tmp_path, "six", {runs[0]: ["true"], runs[1]: words}, root=tmp_path, parallel=1,
           settings=settings)  # fmt: skip
    (script,) = tmp_path.glob(".slurm/*/array.sh")
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "43"}
    assert subprocess.run(["bash", script], env=environment, check=False).returncode == 0
    assert (tmp_path / "given").read_text().split("\0")[:-1] == words
    assert (runs[1] / "output.log").exists()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="control character"):
        submit(tmp_path, "six", {runs[0]: ["a\nb"]}, root=tmp_path, parallel=1, settings={})
    with pytest.raises(ValueError, match="--account"):
        submit(tmp_path, "six", {runs[0]: ["a"]}, root=tmp_path, parallel=1,
               settings={"account": "a\ntouch x"})  # fmt: skip
    assert len(list(tmp_path.glob(".slurm/*"))) == 1


@pytest.mark.parametrize("command", ["launch", "train"])
def test_slurm_without_a_cluster_is_a_one_line_error(tmp_path, capsys, monkeypatch, command):
    import train

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sbatch", "exit 1")
    reason = "resolve_ctls: Unknown host\\nsinfo: fatal: Could not establish a configuration source"
    fake(tmp_path, "sinfo", f"printf 'sinfo: error: {reason}\\n' >&2; exit 1")
    runs = tmp_path / "runs"
    if command == "launch":
        assert launch.main([write_table(tmp_path), "--runs", str(runs), "--where", "slurm"]) == 1
        error, option = capsys.readouterr().err, "--where slurm"
    else:
        with pytest.raises(ValueError, match="hydra/launcher=slurm") as raised:
            train.check_words(["-m", "hydra/launcher=slurm", "seed=0,1"])
        error, option = f"error: {raised.value}\n", "hydra/launcher=slurm"
        # no error, as nothing is submitted
        train.check_words(["hydra/launcher=slurm", "--cfg", "job"])
    assert error.startswith(f"error: {option}: ")
    assert "no cluster answers" in error
    assert error.count("\n") == 1
    assert not runs.exists()
