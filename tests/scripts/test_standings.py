"""launch.py --status: totals, committed results and the grid of runs."""

import io
import os

import pytest
from rich.console import Console

from ed.analysis.collect import Row
from ed.analysis.store import results_folder, write_results
from ed.analysis.tables import load_table
from ed.runtime import console as drawing
from ed.runtime.files import lock
from ed.runtime.runs import Status
from scripts import launch, standings
from tests.helpers.launching import stand_in, write_table

DONE = {"status": Status.DONE, "steps": 5, "total_steps": 5, "last": {"eval/acc": 80.0}}


@pytest.fixture
def watched(monkeypatch):
    console = Console(record=True, width=80, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr(standings, "interactive", lambda: True)
    for module in (standings, drawing):
        monkeypatch.setattr(module, "terminal", lambda: console)
    return console


def commit(path: str, *seeds: int) -> None:
    table = load_table(path)
    rows = [Row("six", "ed", seed, best=80.0, seconds=1.0, **DONE) for seed in seeds]
    write_results(table, rows, results_folder(table), {})


def test_committed_results_count_as_done(tmp_path, capsys):
    path = write_table(tmp_path)
    arguments = [path, "--runs", str(tmp_path / "runs"), "--status"]
    assert launch.main(arguments) == 75
    capsys.readouterr()
    commit(path, 0, 1, 2)
    assert launch.main(arguments) == 75
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "six: 6 runs: 3 done (3 committed), 3 pending"
    assert lines[0].split() == ["ed", "seed", "0", "committed", "80"]
    assert launch.main([*arguments, "--cells", "ed"]) == 0


def test_committed_results_do_not_count_for_reduced_runs(tmp_path, capsys):
    path = write_table(tmp_path)
    commit(path, 0, 1, 2)
    more = ["--cells", "ed", "--set", "task.epochs=2"]
    assert launch.main([path, "--runs", str(tmp_path / "runs"), "--status", *more]) == 75
    assert "3 runs: 3 pending" in capsys.readouterr().out


@pytest.mark.parametrize("status", [Status.FAILED, Status.DIVERGED])
def test_only_failed_runs_are_worth_repeating(status, tmp_path, capsys):
    rows = [Row("six", "ed", 0, status=status, error="exit 1: error: x")]
    assert standings.report(load_table(write_table(tmp_path)), rows) == 1
    assert ("--rerun-failed" in capsys.readouterr().out) == (status == Status.FAILED)


@pytest.mark.parametrize("seeds", [3, 12])
def test_the_grid_shows_every_status_and_fits_the_terminal(tmp_path, watched, capsys, seeds):
    table = load_table(write_table(tmp_path, seeds=list(range(seeds))))
    rows = [Row("six", "ed", seed) for seed in range(seeds)]
    rows += [Row("six", "none", 0, **DONE), Row("six", "none", 1, error="exit 1: x")]
    rows[0] = Row("six", "ed", 0, status=Status.RUNNING, steps=21, total_steps=50)
    rows[1] = Row("six", "ed", 1, **DONE | {"status": standings.COMMITTED})
    rows[-1] = Row("six", "none", 1, status=Status.FAILED, error="exit 1: error: too bad")
    assert standings.report(table, rows) == 1
    text = watched.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = ["42%", "✓", "✗", "·", "too bad"]
    words += ["running 42%", "✓ committed", "✓ done", "✗ failed"] if seeds == 3 else ["✓c"]
    for word in words:
        assert word in text
    assert capsys.readouterr().out.startswith(f"six: {seeds + 2} runs: 1 running")


def test_runs_of_other_tables_are_listed_with_their_table(capsys):
    rows = [Row("table1", "baseline", 0, **DONE), Row("resolution", "efficiency", 0, **DONE)]
    assert standings.report(load_table("table1"), rows) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("baseline ")
    assert second.startswith("resolution/efficiency ")


def test_a_running_run_that_prints_nothing_gets_a_hint(tmp_path, capsys, monkeypatch):
    arguments = [write_table(tmp_path, seeds=[0]), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    launch.main(arguments)
    run, other = (tmp_path / "runs/six" / cell / "seed0" for cell in ("ed", "none"))
    for folder in (run, other):
        os.utime(folder / "output.log", (0, 0))  # in 1970
    with open(run / ".lock", "a") as file:
        assert lock(file)
        capsys.readouterr()
        launch.main([*arguments, "--status"])
    hints = [line for line in capsys.readouterr().out.splitlines() if "printed nothing" in line]
    assert [hint.split()[1] for hint in hints] == ["six/ed/seed0"]
