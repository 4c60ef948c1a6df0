"""scripts/table.py: tables from run folders and committed files."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ed.analysis.collect import Row
from ed.analysis.merging import merge
from ed.analysis.spec import expand
from ed.analysis.store import CSV, CURVES, README, committed, read_results, to_csv
from ed.runtime.runs import Record
from scripts import launch
from scripts import table as script
from tests.helpers.commands import ROOT
from tests.helpers.tables import fabricate, full_rows, main, write_table


def test_results_are_written_only_on_request(table, tmp_path, capsys):
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    assert script.main(here) == 0
    assert "79.00 (1)" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    assert script.main([*here, "--out", str(tmp_path / "mine")]) == 0
    written = {path.name for path in (tmp_path / "mine" / "mini").iterdir()}
    assert written == {README, CSV, CURVES}
    assert not (tmp_path / "results").exists()


def test_tables_combine_run_folders_and_committed_results(table, tmp_path, capsys):
    runs, results = expand(table, root=tmp_path / "runs"), tmp_path / "results" / "mini"
    fabricate(runs[0], 79.0)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    # the first run's folder is gone, but both runs are in the table
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    fabricate(runs[1], 81.0)
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    text = (results / "README.md").read_text()
    assert "80.00 ± 1.41 (2)" in text
    before = (results / "runs.csv").read_bytes(), text
    assert main([*here, str(tmp_path / "elsewhere")]) == 0
    assert before == ((results / "runs.csv").read_bytes(), (results / "README.md").read_text())
    # two folders with different numbers for the same cell are rejected, and nothing is written
    fabricate(runs[0], 70.0)
    assert main([*here, str(tmp_path / "elsewhere")]) == 1
    assert "mini/baseline/seed0" in capsys.readouterr().err
    assert before == ((results / "runs.csv").read_bytes(), (results / "README.md").read_text())


def test_a_metric_that_no_finished_run_has_is_reported(tmp_path, capsys):
    """A mistyped metric would otherwise look like runs that are still pending."""
    names = {"eval/acc": "accuracy", "eval/los": "loss"}
    table = write_table(tmp_path, metric=None, metrics=names)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    (tmp_path / "runs").mkdir()
    assert script.main(here) == 0
    assert capsys.readouterr().err == ""
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    assert script.main(here) == 0
    printed = capsys.readouterr().err
    assert "eval/los:" in printed
    assert "eval/acc" not in printed


def test_a_new_run_replaces_a_committed_one_with_a_warning(table, tmp_path, capsys):
    """Repeated runs rarely reproduce the committed numbers exactly."""
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    results = tmp_path / "results" / "mini"
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    assert main(here) == 0
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    # rounding may differ on another machine
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0 * (1 + 1e-14))
    assert main(here) == 0
    assert before == {path.name: path.read_bytes() for path in results.iterdir()}
    assert "takes the place" not in capsys.readouterr().err
    fabricate(expand(table, root=tmp_path / "runs")[0], 70.0)
    assert main(here) == 0
    replaced = f"{tmp_path}/runs/mini/baseline/seed0 (70.0) takes the place of {results}"
    assert replaced in capsys.readouterr().err
    assert "70.00 (1)" in (results / README).read_text()
    (row,) = [row for row in committed(table) if row.status == "done"]
    assert row.last == {"eval/acc": 70.0}
    assert row.history()[-1] == {"step": 10, "eval/acc": 70.0}
    assert main([*here, "--check"]) == 0


def test_a_committed_run_with_outdated_settings_raises_until_rerun(tmp_path, capsys):
    table = write_table(tmp_path)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    assert main(here) == 0
    (tmp_path / "runs").rename(tmp_path / "old")
    (tmp_path / "runs").mkdir()
    table = write_table(tmp_path, fixed=["task=cifar10", "task.epochs=200"])
    for more in ([], ["--check"]):
        assert main([*here, *more]) == 1
        error = capsys.readouterr().err
        assert "baseline/seed0 has task.epochs=300.0" in error
        assert error.count("\n") == 1
    fabricate(expand(table, root=tmp_path / "runs")[0], 70.0)
    assert main(here) == 0
    assert main([*here, "--check"]) == 0


def test_runs_of_an_edited_table_share_one_warning_and_its_remedy(tmp_path, capsys):
    runs = expand(write_table(tmp_path), root=tmp_path / "runs")
    for run in runs:
        fabricate(run)
    cell = {"overrides": ["regularizer=none"]}
    fixed = ["task=cifar10", "task.epochs=200"]
    table = write_table(tmp_path, fixed=fixed, cells={"baseline": cell}, tuning=None)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    assert script.main(here) == 0
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"task.epochs=300.0, but the table has 200: it is another run; move {runs[0].folder} "
    assert warning.endswith("away and launch again; likewise 1 other run of mini/baseline\n")
    assert launch.main(here) == 1
    assert capsys.readouterr().err == warning.replace("warning: left out", "error")


def test_several_replaced_runs_share_one_warning(table, tmp_path, capsys):
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    for score in (79.0, 70.0):
        for run in expand(table, root=tmp_path / "runs"):
            fabricate(run, score)
        assert main(here) == 0
    warning = capsys.readouterr().err
    assert "baseline/seed0 (70.0) takes the place of" in warning
    cells = "mini/baseline, mini/ed, mini/rho-0.1, mini/rho-0.5"
    assert warning.endswith(f"(79.0); likewise 7 other runs of {cells}\n")
    assert warning.count("\n") == 1


def test_metrics_from_two_sources_are_merged():
    row = Row("t", "c", 0, status="done", steps=9, last={"eval/acc": 1.0}, best=2.0)
    known = [Record(name, {}, {}, None, "", list) for name in "ab"]
    more = replace(row, last={"eval/acc": 1.0, "measure/norm": 3.0}, best=None, record=known[0])
    for less in (row, replace(row, record=known[1])):
        for rows in ((less, more), (more, less)):
            (merged,) = merge(rows)
            assert (merged.last, merged.best, merged.record) == (more.last, 2.0, known[0])


def test_reduced_runs_are_found_through_deviations_json(table, tmp_path, capsys):
    run = expand(table, sets=["task.epochs=2"], root=tmp_path / "runs")[0]
    fabricate(run, 60.0)
    (run.folder.parents[1] / "deviations.json").write_text('["task.epochs=2"]')
    assert main([str(table.path), "--runs", str(tmp_path / "runs")]) == 0
    text, note = capsys.readouterr()
    assert "## Reduced: task.epochs=2" in text
    assert "60.00 (1)" in text
    assert "| ed |" not in text.split("## Reduced")[1]  # the table has only cells with runs
    assert "--commit leaves out reduced runs (task.epochs=2)" in note
    assert note.count("\n") == 1
    assert "Reduced" not in (tmp_path / "results" / "mini" / README).read_text()


def test_rows_borrowed_from_another_table_have_only_this_tables_metrics(tmp_path):
    """Uses only this table's seeds; ignores reduced runs and best values of other metrics."""
    metrics = {"eval/acc": "accuracy", "eval/loss": "loss"}
    home = write_table(tmp_path, metric=None, metrics=metrics)
    rows = [
        replace(row, last=row.last | {"eval/loss": 0.5}, best=99.0)
        for row in full_rows(home)
        if row.cell in ("baseline", "ed")
    ]
    rows += [replace(row, deviations="task.epochs=2") for row in rows]
    (tmp_path / "results" / "mini").mkdir(parents=True)
    (tmp_path / "results" / "mini" / CSV).write_text(to_csv(home, rows))
    shown = {"cells": {"same": {"same_as": "mini/ed", "paper": None}}, "tuning": None, "seeds": [1]}
    (row,) = committed(write_table(tmp_path, "one", **shown))
    assert (row.home, row.seed, row.deviations) == (("mini", "ed"), 1, "")
    assert (row.last, row.best) == ({"eval/acc": 85.1}, 99.0)
    (row,) = committed(write_table(tmp_path, "two", **shown, metric="eval/loss"))
    assert (row.last, row.best) == ({"eval/loss": 0.5}, None)


def test_a_results_file_round_trips(table, tmp_path):
    about = {"device": "cpu", "torch": "2.0", "commit": "abc"}
    score = {"last": {"eval/acc": 79.5}, "best": 80.25, "seconds": 3.5}
    rows = [
        Row("mini", "baseline", 0, "", "done", 20, 20, **score, **about, dirty=False),
        Row("mini", "baseline", 1, "", "failed", 5, 20, **about, dirty=True, error="exit 1: a, b"),
        Row("mini", "ed", 0, "task.epochs=2", "stopped", 5),
    ]
    (tmp_path / "mini.csv").write_text(to_csv(table, rows))
    assert read_results(tmp_path / "mini.csv", table) == rows


def test_results_of_another_file_are_added(table, tmp_path):
    fabricate(expand(table, root=tmp_path / "far")[0], 79.0)
    main([str(table.path), "--runs", str(tmp_path / "far")])
    far = tmp_path / "far.csv"
    (tmp_path / "results" / "mini" / CSV).rename(far)
    shutil.rmtree(tmp_path / "results")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([str(table.path), "--runs", str(empty), "--add", str(far)]) == 0
    assert (tmp_path / "results" / "mini" / "runs.csv").read_text() == far.read_text()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-4], "line 2"),
        (lambda text: text[:-1], "line 2: "),
        (lambda text: text + "hello\n", "line 3: "),
        (lambda text: text.replace("mini,baseline", "mini,foreign"), "mini/foreign"),
        (
            lambda text: text.replace("mini,baseline,0", "mini,baseline,7"),
            "line 2: ",
        ),
        (lambda text: text.replace(",79.0,", ",high,"), "line 2: "),
        (lambda text: text.replace(",79.0,", ",nan,"), "line 2: nan"),
        (lambda text: text.replace("done", "great"), "'great'"),
        (lambda text: text.replace(",no,", ",maybe,"), "'maybe'"),
        (lambda text: "a" + text, "line 1: "),
        (
            lambda text: text.replace("table,cell", "cell,table", 1),
            "line 1: ",
        ),
        (
            lambda text: text + text.splitlines()[1].replace("79.0", "12.0") + "\n",
            "mini/baseline/seed0",
        ),
    ],
)
def test_a_damaged_results_file_raises_and_is_not_overwritten(
    table, tmp_path, damage, complaint, capsys
):
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    main(here)
    path = tmp_path / "results" / "mini" / "runs.csv"
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    assert main(here) == 1
    assert main([*here, "--check"]) == 1
    errors = capsys.readouterr().err
    assert complaint in errors
    assert CSV in errors
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tabel1"], "'tabel1'; did you mean table1"),
        (["table1", "--add", "nowhere.csv"], "--add nowhere.csv"),
        (["table1", "--runs", "nowhere"], "--runs nowhere: no such file or folder"),
    ],
)
def test_invalid_arguments_print_one_line(arguments, complaint, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error


def test_the_folder_of_one_table_is_not_a_folder_of_runs(table, tmp_path, capsys):
    fabricate(expand(table, root=tmp_path)[0])
    for main_of in (script.main, launch.main):
        assert main_of([str(table.path), "--runs", str(tmp_path / "mini")]) == 1
        assert capsys.readouterr().err.endswith(f"use --runs {tmp_path}\n")


def test_a_closed_pipe_is_not_an_error(table):
    """For example, `table.py all | head` must not print an error."""
    words = [sys.executable, ROOT / "scripts/table.py", table.path]
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    result = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert result.stderr == b""


def test_an_ascii_terminal_gets_question_marks(table, tmp_path):
    """A locale like LC_ALL=C has no ±."""
    for run, accuracy in zip(expand(table, root=tmp_path)[:2], (79.0, 81.0), strict=True):
        fabricate(run, accuracy)
    words = [sys.executable, ROOT / "scripts/table.py", table.path, "--runs", tmp_path]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(words, capture_output=True, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"80.00 ? 1.41 (2)" in result.stdout


def test_check_detects_an_edited_table(table, tmp_path, capsys):
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    main([str(table.path), "--runs", str(tmp_path / "runs")])
    path = tmp_path / "results" / "mini" / "README.md"
    whole = path.read_text()
    path.write_text(whole.replace("79.00", "89.00"))
    assert main([str(table.path), "--check"]) == 1
    assert "run python scripts/table.py" in capsys.readouterr().err
    path.unlink()
    assert main([str(table.path), "--check"]) == 1
    path.write_text(whole)
    assert main([str(table.path), "--check"]) == 0
    lines = path.with_name(CSV).read_text().splitlines(keepends=True)
    path.with_name(CSV).write_text("".join([*lines, lines[-1]]))  # repeats the last run
    assert main([str(table.path), "--check"]) == 1


def test_committed_tables_equal_regenerated_ones():
    assert main(["all", "--check"]) == 0


def test_files_are_read_as_utf_8_in_every_locale():
    """Tables contain ±, which an ASCII locale cannot decode."""
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "scripts/table.py", "mnist_cifar", "--check"]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, env=os.environ | ascii_only, check=True)


def test_place_and_paper_are_optional_in_your_own_table(tmp_path, capsys):
    cells = {"plain": {"overrides": ["regularizer=none"]}, "ed": {"overrides": ["regularizer=ed"]}}
    own = write_table(tmp_path, place=None, cells=cells)
    for run in expand(own, root=tmp_path / "runs"):
        fabricate(run)
    assert script.main([str(tmp_path / "mini.yaml"), "--runs", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "80.00" in printed
    assert "None" not in printed
