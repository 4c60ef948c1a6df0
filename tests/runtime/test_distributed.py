"""Two processes train like one, keep bitwise identical weights, and stop and resume together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from ed.datasets.images import Images
from ed.engine import check as checks
from ed.engine.check import check
from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.main import choose_device, load_run
from ed.runtime import distributed, processes
from ed.runtime.distributed import first_host
from ed.runtime.files import read_rows
from tests.helpers import together
from tests.helpers.commands import run_together
from tests.helpers.once import once, shared_folder
from tests.helpers.small import SMALL, assert_same_run, small_run, weights

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


def killed_in_the_middle(folder: Path) -> tuple[int, str]:
    """One of two processes kills itself; returns the exit code and output of the launcher."""
    words = ["tests/helpers/dying.py", *SMALL, *together.LONG, "system.save_seconds=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    words = [*TORCHRUN, *words, f"system.run_dir={folder / 'killed'}"]
    done = subprocess.run(words, stderr=subprocess.STDOUT, timeout=400, **how)
    assert load_checkpoint(folder / "killed")["step"] in (5, 6), done.stdout
    return done.returncode, done.stdout


def seen_together(folder: Path) -> list[dict]:
    """Runs `together`, which also resumes the killed run; returns its records by rank."""
    done = run_together(["tests/helpers/together.py", str(folder)])
    assert done.returncode == 0, done.stdout
    return [json.loads((folder.parent / f"seen{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = shared_folder(tmp_path_factory, "together") / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def killed(folder) -> list:
    return once(folder.parent, "killed", lambda: killed_in_the_middle(folder))


@pytest.fixture(scope="module")
def seen(folder, killed) -> list[dict]:
    return once(folder.parent, "seen", lambda: seen_together(folder))


def test_death_of_one_process_stops_all_with_at_most_one_error_line(killed):
    """There is none if the launcher stops rank 0 before it notices."""
    code, output = killed
    assert code != 0
    assert len(errors(output)) <= 1
    assert all(line.startswith("error: rank 0 of 2 ") for line in errors(output))


def test_signal_to_one_process_stops_all_after_the_same_step(seen):
    for rank in seen:
        assert rank["stopped"] == "Interrupted: stopped and saved at step 16 of 20"


def test_killed_and_stopped_run_equals_uninterrupted_run(folder, seen):
    assert_same_run(folder / "whole", folder / "killed")
    sessions = json.loads((folder / "killed" / "meta.json").read_text())["sessions"]
    assert [session["processes"] for session in sessions] == [2, 2, 2]


def test_penalty_works_with_distributed_data_parallel(seen):
    """Loss and penalty use two passes through the model; gradients are averaged over processes."""
    halves = [together.gradients_in_a_loop_of_ones_own(rank) for rank in (0, 1)]
    expected = [(first + second) / 2 for first, second in zip(*halves, strict=True)]
    for rank in seen:
        found = [torch.tensor(gradient) for gradient in rank["ddp"]]
        torch.testing.assert_close(found, expected)


def test_one_process_can_measure_alone(seen):
    wrapped, plain = seen[0]["measured"]
    assert wrapped == plain


def test_two_processes_equal_one_with_the_full_batch(folder, seen, tmp_path):
    small_run(tmp_path / "one", *together.PLAIN)
    ours = weights(tmp_path / "one")
    for name, theirs in weights(folder / "plain").items():
        # ten steps with a different order of float32 summation
        torch.testing.assert_close(theirs, ours[name], rtol=1e-4, atol=1e-6)
    runs = (tmp_path / "one", folder / "plain")
    for one, two in zip(*(read_rows(run / "metrics.jsonl") for run in runs), strict=True):
        for key in one.keys() - {"time/step_s"}:
            assert two[key] == pytest.approx(one[key], rel=1e-4), key


def test_two_processes_equal_one_in_float64(folder, seen):
    """Also holds with accumulation, momentum, weight decay and gradient clipping."""
    theirs = torch.load(folder / "float64.pt", weights_only=True)
    for name, ours in together.float64_weights().items():
        torch.testing.assert_close(theirs[name], ours, rtol=1e-10, atol=1e-13)
    assert seen[0]["shares"]  # a task may yield only the examples of its process


@pytest.mark.parametrize("method", together.METHODS)
def test_processes_stay_bitwise_equal(method, seen):
    for name in (method, f"{method} with batch norm"):
        first, second = (rank["fingerprints"][name] for rank in seen)
        assert first == second, name


def test_each_process_draws_its_own_dropout(seen):
    assert seen[0]["draw"] != seen[1]["draw"]


def test_methods_give_different_weights(seen):
    assert len(set(seen[0]["fingerprints"].values())) == 2 * len(together.METHODS)


def test_shared_evaluation_counts_every_image_once(folder, seen):
    first, second = (rank["scores"] for rank in seen)
    assert (first.pop("rows"), second.pop("rows")) == (249, 250)
    assert first == second
    trained = load_run(folder / "plain", "cpu")
    task, model = trained.task, trained.model
    count = together.UNEVEN
    images = Images(task.test.pixels[:count], task.test.labels[:count])
    with torch.no_grad():
        accuracy, loss = task.score(model, images)
        logits = model(task.normalise(images.pixels))
    assert first["acc"] == accuracy
    assert first["logits"] == pytest.approx(logits.double().sum().item(), rel=1e-5)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)  # the order of float32 summation differs


def test_only_rank_0_writes(seen):
    assert seen[0]["written"]
    assert seen[1]["written"] == []


def test_all_stop_together_at_the_time_limit_and_on_divergence(seen):
    for rank in seen:
        assert rank["late"] == "Interrupted: stopped and saved at step 1 of 20"
        assert rank["wild"].startswith("FloatingPointError: diverged: train/loss = nan")
    assert seen[0]["wild"] == seen[1]["wild"]


def test_resuming_requires_the_same_number_of_processes(folder, seen):
    with pytest.raises(ValueError, match=r"2 processes .*system\.run_dir"):
        small_run(folder / "late", *together.LONG)


# --- with a single process


@pytest.fixture
def two(monkeypatch):
    """Makes the config checks assume two processes."""
    monkeypatch.setattr(checks, "world_size", lambda: 2)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["task.batch_size=25"], r"task\.batch_size=25"),
        (["task.batch_size=75", "accumulate=5"], r"task\.batch_size=75.*accumulate=5"),
        (["regularizer=ed", "regularizer.pairs=33"], r"regularizer\.pairs=33"),
        (["regularizer=ed", "task.batch_size=2"], "2 parts"),
        (["task=procgen", "model=impala"], "ProcgenPPO"),
        (["task=clip_standin_pretrain"], "StandInPretraining"),
    ],
)
def test_settings_that_two_processes_cannot_share_are_rejected(overrides, named, two):
    cfg = compose_config(overrides)
    with pytest.raises(ValueError, match=named):
        check(cfg, instantiate(cfg.task), instantiate(cfg.regularizer))


@pytest.mark.parametrize(("count", "everyone"), [(10, 3), (2, 4), (0, 2), (1000, 7), (5, 1)])
def test_parts_cover_the_range_exactly_once(count, everyone, monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: everyone)
    rows = []
    for rank in range(everyone):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        rows += processes.part(count)
    assert rows == list(range(count))


def test_ranks_use_different_random_streams(monkeypatch):
    names = []
    for rank in range(3):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        names.append(processes.own_stream("regularizer"))
    assert len(set(names)) == 3
    assert names[0] == "regularizer"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("a-b[3],c", "a-b3"),
        ("rack1,rack2", "rack1"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


def test_srun_variables_give_rank_and_address(monkeypatch):
    """Checks the last of four tasks on two nodes, and a batch script without srun."""
    slurm = {"STEP_NUM_TASKS": "4", "JOB_ID": "1234", "STEP_ID": "2", "PROCID": "3", "LOCALID": "1"}
    for name, value in (slurm | {"STEP_NODELIST": "gpu[07-08]"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}
    assert distributed._srun() == place | {
        "MASTER_PORT": "29746"
    }  # the port is 20000 + (1234 x 16 + 2) % 10000
    monkeypatch.setenv("MASTER_PORT", "4444")
    assert distributed._srun() == place | {"MASTER_PORT": "4444"}
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert distributed._srun() is None


def test_each_local_process_takes_its_own_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    # with srun, a task may see only its own GPU
    for count, local in ((4, "3"), (2, "0"), (1, "3")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert distributed.local_device("cuda").index == taken[-1]
    assert taken == [3, 0, 0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun shows all GPUs to all processes")
    for count in (1, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ValueError, match=rf"process 3 .*{count}.*system\.device=cpu"):
            distributed.local_device("cuda")


def test_named_gpu_becomes_the_current_device(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "auto", "cuda:1"):
        choose_device(name)
    assert taken == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match=r"^system\.device=cuda:2"):
        choose_device("cuda:2")


def test_means_keep_shapes_and_dtypes(monkeypatch):
    """Simulates two processes whose values differ by 2."""
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    # modifies its input in place
    monkeypatch.setattr(processes, "_add_up", lambda value: value.mul_(2).add_(2))
    values = [torch.rand(2, 3), torch.rand((), dtype=torch.float64), torch.rand(4)]
    before = [value.clone() for value in values]
    torch.testing.assert_close(processes.mean(values), [value + 1 for value in before])
    torch.testing.assert_close(processes.total(values[0]), 2 * before[0] + 2)
    assert all(map(torch.equal, values, before))  # inputs are not modified


def test_local_processes_share_the_cores(monkeypatch, tmp_path):
    """Without torchrun, a process may use all cores of its affinity mask."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(processes, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes.available_cores() == 8
    for beside, cores in (("3", 2), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        assert processes.available_cores() == cores


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_a_container_may_limit_the_cores(monkeypatch, tmp_path, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(processes, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    processes.CPU_LIMIT.write_text(f"{limit}\n")
    assert processes.available_cores() == cores


def test_only_one_of_several_failing_processes_reports(monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(processes, "_store", torch.distributed.HashStore())
    assert [processes.first_to_fail(ValueError()) for _ in range(2)] == [True, False]


def test_without_rank_0_only_lost_processes_report(monkeypatch):
    class GoneStore:
        def add(self, *_):
            raise RuntimeError("broken pipe")

    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(processes, "_store", GoneStore())
    assert not processes.first_to_fail(ValueError())
    assert processes.first_to_fail(processes.LostProcess())


def test_single_process_does_not_communicate():
    x = torch.ones(3)
    assert processes.total(x) is x
    assert processes.mean([x])[0] is x
    assert processes.anyone(True, False) == [True, False]
    assert processes.gather("a") == ["a"]
