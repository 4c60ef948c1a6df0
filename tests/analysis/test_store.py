"""The results store: everything written is read back exactly."""

import fcntl
import json
import math
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ed.analysis.collect import CollectError, collect
from ed.analysis.curves import read_curves, write_curves
from ed.analysis.merging import merge
from ed.analysis.spec import EXPERIMENTS, PROBES, expand
from ed.analysis.store import (
    CSV,
    CURVES,
    NOTES,
    README,
    committed,
    is_current,
    results_folder,
    stored,
    write_results,
)
from ed.analysis.tables import load_table, table_names
from ed.engine.errors import explain
from ed.runtime.runs import FAILED, LOCK, METRICS, Record, Status, read_record
from tests.helpers.tables import fabricate, write_table

ROWS = [
    {"step": 5, "train/loss": 0.1 + 0.2, "count": 3},
    {"step": 5, "eval/acc": 1 / 3},
    {"step": 5, "eval/acc": math.inf},  # a second value at the same step
    {"step": 9, "train/loss": math.nan},
]
ABOUT = {"config": {"seed": 0, "lr": 1e-5, "name": "±"}, "meta": {"sessions": []}}


def record(rows=ROWS, **more) -> Record:
    return Record(**{"source": "", "done": None, "failure": "", **ABOUT, **more}, history=rows.copy)


def long(rows) -> list[tuple]:
    return [(row["step"], key, repr(float(row[key]))) for row in rows for key in row]


def test_logged_values_and_config_round_trip_exactly(tmp_path):
    path = tmp_path / CURVES
    done = {"last": {"eval/acc": 0.1}, "best": {}, "steps": 9, "seconds": 1.5}
    write_curves(path, {("a", 0): record(done=done), ("b-1", 12): record(failure="exit 1: no")})
    first, second = read_curves(path).items()
    assert (first[0], second[0]) == (("a", 0), ("b-1", 12))
    values = [entry for entry in long(ROWS) if entry[1] != "step"]
    for _, found in (first, second):
        assert [entry for entry in long(found.history()) if entry[1] != "step"] == values
        assert (found.config, found.meta) == (ABOUT["config"], ABOUT["meta"])
    assert (first[1].done, first[1].status) == (done, Status.DONE)
    assert (second[1].failure, second[1].status) == ("exit 1: no", Status.FAILED)


def test_a_run_that_failed_before_its_first_value_is_stored(tmp_path):
    write_curves(tmp_path / CURVES, {("a", 0): record([], failure="exit 1: no data")})
    (found,) = read_curves(tmp_path / CURVES).values()
    assert (found.history(), found.status) == ([], Status.FAILED)


def test_the_file_is_readable_with_pyarrow(tmp_path):
    write_curves(tmp_path / CURVES, {("a", 0): record()})
    table = pq.read_table(tmp_path / CURVES)
    assert table.column_names == ["cell", "seed", "step", "metric", "value"]
    assert table.num_rows == 5
    assert json.loads(table.schema.metadata[b"runs"])["a/seed0"]["config"] == ABOUT["config"]


def test_writing_again_does_not_change_the_file(tmp_path):
    path = tmp_path / CURVES
    write_curves(path, {("a", 0): record()})
    first = path.read_bytes()
    write_curves(path, read_curves(path))  # overwrites the same file
    assert path.read_bytes() == first
    path.rename(tmp_path / "other")
    write_curves(path, read_curves(tmp_path / "other"))  # writes a new file
    assert path.read_bytes() == first
    write_curves(path, {("a", 0): record(ROWS[:2])})
    assert path.read_bytes() != first
    write_curves(path, {})
    assert not path.exists()


def test_the_folder_above_the_runs_is_not_stored(tmp_path):
    """The path means nothing on other machines, and it may contain a user's name."""
    folder = "/home/zoë/ed/runs/table/a/seed0"
    sessions = [{"command": f"train.py seed=0 task.data=/big/data system.run_dir={folder}"}]
    config = {"system": {"run_dir": folder}, "task": {"data": "/big/data"}}
    failure = f"exit 1: {folder}/last.pt is damaged"
    own = record(config=config, meta={"sessions": sessions}, failure=failure)
    write_curves(tmp_path / CURVES, {("a", 0): own})
    (found,) = read_curves(tmp_path / CURVES).values()
    assert found.config == config | {"system": {"run_dir": "runs/table/a/seed0"}}
    (session,) = found.sessions
    assert session["command"].endswith("task.data=/big/data system.run_dir=runs/table/a/seed0")
    assert found.failure == "exit 1: runs/table/a/seed0/last.pt is damaged"


@pytest.mark.parametrize("above", ["/data", ""])
def test_other_paths_are_stored_unchanged(tmp_path, above):
    folder = f"{above}/runs/table/a/seed0"
    data = "/mnt/data/images https://data/x"
    failure = f"exit 1:\n{above}/last.pt"
    own = record(config={"system": {"run_dir": folder}, "task": {"data": data}}, failure=failure)
    write_curves(tmp_path / CURVES, {("a", 0): own})
    (found,) = read_curves(tmp_path / CURVES).values()
    assert found.config["task"] == {"data": data}
    assert found.failure == f"exit 1:\n{'' if above else '/'}last.pt"


def test_damaged_files_and_missing_packages_raise_one_line_errors(tmp_path, monkeypatch, capsys):
    path = tmp_path / CURVES
    write_curves(path, {("a", 0): record()})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CollectError, match=r"curves\.parquet"):
        read_curves(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError) as error:
        read_curves(path)
    assert explain(error.value) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: pyarrow is not installed")
    assert "pip install 'effective-degree[" in shown
    assert shown.count("\n") == 1


def test_results_contain_all_runs_that_have_started(tmp_path):
    table = write_table(tmp_path)
    runs = expand(table, root=tmp_path / "runs")
    fabricate(runs[0])
    for run in runs[1:4]:
        fabricate(run, done=False)
    (runs[2].folder / FAILED).write_text("exit 1: error: no space\n")
    (runs[3].folder / FAILED).write_text("exit 1: error: diverged: train/loss = nan\n")
    rows = merge(collect(table, [tmp_path / "runs"], warn=pytest.fail))
    folder = results_folder(table)
    write_results(table, rows, folder, {})
    assert {path.name for path in folder.iterdir()} == {README, CSV, CURVES}
    kept = {row.key: row for row in committed(table)}
    assert kept == {row.key: row for row in rows if row.status != Status.PENDING}
    for run in runs[:4]:
        found, whole = kept[run.table, run.cell, run.seed, ""].record, read_record(run.folder)
        assert long(found.history()) == long(whole.history())
        assert (found.config, found.meta) == (whole.config, whole.meta)
    assert is_current(table)


def test_a_running_run_is_committed_as_stopped(tmp_path):
    table = write_table(tmp_path)
    run = expand(table, root=tmp_path / "runs")[0]
    fabricate(run, done=False)
    with open(run.folder / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = collect(table, [tmp_path / "runs"], warn=pytest.fail)
    assert rows[0].status == Status.RUNNING
    write_results(table, rows, results_folder(table), {})
    assert [row.status for row in committed(table)] == [Status.STOPPED]


def test_curves_of_reused_runs_are_stored_with_their_own_table(tmp_path):
    home = write_table(tmp_path)
    fabricate(expand(home, cells=["ed"], root=tmp_path / "runs")[0], 85.0)
    cells = {"same": {"same_as": "mini/ed", "paper": None}}
    other = write_table(tmp_path, "other", cells=cells, tuning=None)
    for table in (home, other):
        write_results(
            table, collect(table, [tmp_path / "runs"], warn=pytest.fail), results_folder(table), {}
        )
    assert not (results_folder(other) / CURVES).exists()
    (row,) = stored(other)
    assert row.last == {"eval/acc": 85.0}
    assert row.history()[-1]["eval/acc"] == 85.0


def test_a_table_is_out_of_date_once_another_commits_a_shared_run(tmp_path):
    home = write_table(tmp_path)
    cells = {"same": {"same_as": "mini/ed", "paper": None}}
    other = write_table(tmp_path, "other", cells=cells, tuning=None)
    runs = expand(home, cells=["ed"], root=tmp_path / "runs")
    fabricate(runs[0], 85.0)
    for table in (home, other):
        write_results(
            table, collect(table, [tmp_path / "runs"], warn=pytest.fail), results_folder(table), {}
        )
    assert is_current(other)
    fabricate(runs[1], 86.0)
    write_results(
        home, collect(home, [tmp_path / "runs"], warn=pytest.fail), results_folder(home), {}
    )
    assert not is_current(other)
    write_results(other, committed(other), results_folder(other), {})
    assert is_current(other)


def test_the_readme_includes_hand_written_notes(tmp_path):
    table = write_table(tmp_path)
    fabricate(expand(table, root=tmp_path / "runs")[0])
    folder = results_folder(table)
    folder.mkdir(parents=True)
    (folder / NOTES).write_text("By hand: <b>bold</b>.\n")
    write_results(table, collect(table, [tmp_path / "runs"], warn=pytest.fail), folder, {})
    assert "\n\nBy hand: &lt;b>bold&lt;/b>.\n\n" in (folder / README).read_text()
    assert is_current(table)


def every_table() -> list[str]:
    return [*table_names(), *(f"{PROBES}/{name}" for name in table_names(EXPERIMENTS / PROBES))]


@pytest.mark.parametrize("name", every_table())
def test_every_committed_run_has_curves_and_no_deviations(name):
    for row in committed(load_table(name)):
        assert not row.deviations
        assert row.history(), row.key


def test_the_repository_has_few_result_files_and_no_run_folders():
    paths = [path for path in EXPERIMENTS.rglob("*") if path.is_file()]
    assert len(paths) <= 150
    assert not [path for path in paths if path.name == METRICS or "@" in path.name]
    folders = {path.parent.name for path in paths if path.name == CSV}
    assert folders <= {Path(name).name for name in every_table()}
