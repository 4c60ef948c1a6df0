"""Links, pipes and odd values in a run folder change no other file, and reading them ends."""

import os
from pathlib import Path

import pytest

from ed.analysis.spec import expand
from ed.engine.checkpoint import load_checkpoint, save_checkpoint
from ed.engine.errors import explain
from ed.engine.main import load_run
from ed.runtime import runs
from ed.runtime.files import open_in_run, read_bytes, write_atomic
from scripts import launch, local, table
from tests.helpers.small import SMALL_GROKKING, small_run
from tests.helpers.tables import fabricate, write_table

MINE = "my own file\n"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine"
    path.write_text(MINE)
    return path


def replace(path, make) -> None:
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize("name", [".lock", "train.log"])
def test_training_does_not_write_through_a_link(name, run, mine, capsys):
    replace(run / name, lambda path: path.symlink_to(mine))
    with pytest.raises(ValueError, match=f"{name} is a link") as error:
        small_run(run, base=SMALL_GROKKING)
    assert explain(error.value) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert mine.read_text() == MINE


def test_saving_replaces_links(run, mine):
    for name in ("last.pt.tmp", f"metrics.jsonl.{os.getpid()}.tmp", "metrics.jsonl", "meta.json"):
        replace(run / name, lambda path: path.symlink_to(mine))
    save_checkpoint(run, load_checkpoint(run))
    write_atomic(run / "metrics.jsonl", "")
    runs.write_sessions(run, [])
    assert mine.read_text() == MINE
    assert not any(path.is_symlink() for path in run.iterdir())


def test_the_launcher_does_not_write_through_a_link(mine, tmp_path):
    (first, *_) = expand(write_table(tmp_path), root=tmp_path / "runs")
    first.folder.mkdir(parents=True)
    (first.folder / runs.CLAIM).symlink_to(mine)
    with pytest.raises(ValueError, match=r"\.launch is a link"):
        local.claimed(first, rerun_failed=False)
    assert mine.read_text() == MINE


@pytest.mark.parametrize("name", ["config.yaml", "DONE", "train.log", ".lock"])
def test_training_refuses_pipes(name, run):
    replace(run / name, os.mkfifo)
    with pytest.raises(ValueError, match=f"{name} is a"):
        small_run(run, base=SMALL_GROKKING)


def test_pipes_in_place_of_metrics_and_checkpoints_count_as_damaged(run, tmp_path):
    expected = runs.read_done(run)
    (run / "DONE").unlink()
    for name in ("metrics.jsonl", "meta.json", "previous.pt"):
        replace(run / name, os.mkfifo)
    assert small_run(run, base=SMALL_GROKKING)["last"] == expected["last"]
    replace(run / "last.pt", os.mkfifo)
    replace(run / "model.safetensors", os.mkfifo)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_run(run, "cpu")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path), os.mkdir])
@pytest.mark.parametrize("name", ["config.yaml", "DONE", "meta.json", "FAILED", "slurm.json"])
def test_one_odd_file_does_not_stop_the_status_or_the_table(name, make, tmp_path, capsys):
    own = write_table(tmp_path)
    found = expand(own, root=tmp_path / "runs")
    for each in found:
        fabricate(each)
    if name in ("FAILED", "slurm.json"):
        (found[0].folder / "DONE").unlink()
    replace(found[0].folder / name, make)
    options = [str(own.path), "--runs", str(tmp_path / "runs")]
    assert launch.main([*options, "--status"]) in (
        0,
        1,
        75,
    )  # 75: without its config, it is pending
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sum(" done " in line for line in lines) >= len(found) - 1
    assert table.main(options) == 0


ODD_CONFIGS = {
    "date": "note: 2020-01-01\n",
    "number as key": "task: {1: 2}\n",
    "path": "task: {data: !!python/object/apply:pathlib.PosixPath [/]}\n",
    "bytes": "note: !!binary aGVsbG8=\n",
}


@pytest.mark.parametrize("kind", ODD_CONFIGS)
def test_configs_hold_only_text_numbers_lists_and_mappings(kind, run):
    config = run / "config.yaml"
    lines = config.read_text()
    if "task" in ODD_CONFIGS[kind]:
        lines = lines.replace("task:\n", "other:\n")
    config.write_text(lines + ODD_CONFIGS[kind])
    # load_run reads a date as text
    for read in (load_run, runs.read_record) if kind != "date" else (runs.read_record,):
        with pytest.raises(ValueError, match=r"config\.yaml is not the config of a run"):
            read(run)


def test_numbers_too_large_to_square_are_damage(tmp_path, capsys):
    own = write_table(tmp_path)
    for each in expand(own, root=tmp_path / "runs"):
        fabricate(each, 1e300 if each.seed else 80.0)
    assert table.main([str(own.path), "--runs", str(tmp_path / "runs")]) == 0
    assert "left out" in capsys.readouterr().err


def test_failures_are_shown_without_control_characters(tmp_path):
    (tmp_path / "FAILED").write_bytes(b"exit 1: \x1b[31mred\x00\nline\xff")
    assert runs.read_failure(tmp_path) == "exit 1: [31mred line\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("step", [-1, 11])
def test_a_checkpoint_beyond_the_last_step_is_foreign(step, run):
    state = load_checkpoint(run) | {"step": step}
    for name in ("DONE", *runs.CHECKPOINTS):
        (run / name).unlink(missing_ok=True)
    save_checkpoint(run, state)
    with pytest.raises(runs.RunError, match=f"its step {step} is not"):
        small_run(run, base=SMALL_GROKKING)


def test_a_measure_of_a_finished_run_comes_from_its_summary(tmp_path):
    base = [*SMALL_GROKKING, "measures=norm"]
    norm = small_run(tmp_path, base=base)["last"]["measure/norm"]
    metrics = tmp_path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 10, "measure/norm": 1.0}\n')
    summary = small_run(tmp_path, "measures=[norm,gap]", base=base)
    assert summary["last"]["measure/norm"] == norm != 1.0
    assert "measure/gap" in summary["last"]
    assert runs.read_done(tmp_path) == summary


def test_devices_and_loops_are_not_read(tmp_path):
    with pytest.raises(ValueError, match="/dev/zero is a pipe or a device"):
        read_bytes(Path("/dev/zero"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="is a link to itself"):
        read_bytes(tmp_path / "loop")
    with open_in_run(tmp_path / "new", "a") as file:
        file.write("1")
    assert read_bytes(tmp_path / "new") == b"1"
