"""scripts/table.py: figures of finished, unfinished and reduced runs."""

import importlib
import json
import re
import shutil
import sys

import pytest

from ed.analysis.spec import Table, expand
from ed.analysis.store import CSV, README
from scripts import table as script
from tests.helpers.tables import fabricate, main, write_table

FIGURE = """
from matplotlib.figure import Figure

def draw(table, rows):
    global latest
    if len(rows) < 2:
        return None
    figure = latest = Figure(figsize=(3, 2))
    axis = figure.add_subplot()
    for row in rows:
        history = [(h["step"], h["eval/acc"]) for h in row.history() if "eval/acc" in h]
        axis.plot(*zip(*history), "o", label=f"{row.cell} {row.seed}")
    axis.legend()
    return figure
"""


@pytest.fixture
def drawn(tmp_path, monkeypatch) -> Table:
    (tmp_path / "little_figure.py").write_text(FIGURE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("little_figure")
    monkeypatch.setitem(sys.modules, "ed.figures.little_figure", module)
    return write_table(tmp_path, figure="ed.figures.little_figure:draw")


def test_figures_are_drawn_from_finished_runs_and_are_reproducible(drawn, tmp_path):
    results = tmp_path / "results" / "mini"
    runs = expand(drawn, root=tmp_path / "runs")
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    fabricate(runs[0])
    fabricate(runs[1], done=False)
    assert main(here) == 0
    assert not (results / "figure.png").exists()  # this figure needs two finished runs
    assert "(figure.png)" not in (results / "README.md").read_text()
    fabricate(runs[1])
    assert main(here) == 0
    assert f"\n\n![{drawn.title}](figure.png)\n\n" in (results / "README.md").read_text()
    assert main([*here, "--check"]) == 0
    first = (results / "figure.png").read_bytes()
    assert first[:4] == b"\x89PNG"
    # without the run folders, the committed curves give the same file
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (results / "figure.png").unlink()
    assert main(here) == 0
    assert first == (results / "figure.png").read_bytes()


def test_figures_are_written_as_pdf_only_outside_the_results(drawn, tmp_path):
    for run in expand(drawn, root=tmp_path / "runs"):
        fabricate(run)
    here = [str(drawn.path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "mine")]
    pdf = tmp_path / "mine" / "mini" / "figure.pdf"
    assert main(here) == 0
    first = pdf.read_bytes()
    assert first[:4] == b"%PDF"
    assert not any(word in first for word in (b"CreationDate", b"Producer"))
    assert main(here) == 0
    assert first == pdf.read_bytes()
    results = tmp_path / "results" / "mini"
    assert [path.name for path in results.glob("figure*")] == ["figure.png"]


def test_a_figure_with_missing_runs_is_drawn_only_on_request(drawn, tmp_path, capsys):
    """A run added from a CSV file has no logged values to draw."""
    import little_figure

    results, far = tmp_path / "results" / "mini", tmp_path / "far.csv"
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    for run in expand(drawn, cells=["baseline", "ed"], root=tmp_path / "runs"):
        fabricate(run)
    assert main(here) == 0
    whole = (results / "figure.png").read_bytes()
    (results / CSV).rename(far)
    shutil.rmtree(results)
    run.folder.rename(tmp_path / "elsewhere")
    assert main(here) == 0
    before = (results / "figure.png").read_bytes()
    capsys.readouterr()
    here += ["--add", str(far)]
    assert main(here) == 0
    complaint = capsys.readouterr().err
    assert "no figure of mini is drawn: 3 of 4 finished runs" in complaint
    assert f"(mini/ed/seed{run.seed} has not)" in complaint
    assert (results / "figure.png").read_bytes() == before
    assert main([*here, "--available"]) == 0
    assert capsys.readouterr().err == ""
    assert little_figure.latest.get_suptitle() == "3 of 4 finished runs"
    (tmp_path / "elsewhere").rename(run.folder)
    assert main(here) == 0
    assert little_figure.latest.get_suptitle() == ""
    assert (results / "figure.png").read_bytes() == whole


def test_available_draws_unfinished_runs_if_a_cell_has_no_finished_ones(drawn, tmp_path):
    """Finished and unfinished runs are not averaged together, since curves would end early."""
    import little_figure

    image = tmp_path / "results" / "mini" / "figure.png"
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    for run in expand(drawn, cells=["baseline", "ed"], root=tmp_path / "runs"):
        fabricate(run, done=False)
    assert main(here) == 0
    assert not image.exists()
    assert main([*here, "--available"]) == 0
    assert little_figure.latest.get_suptitle() == "4 of these 4 runs are not finished"
    fabricate(run)  # finishes one seed of ed
    assert main([*here, "--available"]) == 0
    assert little_figure.latest.get_suptitle() == "2 of these 3 runs are not finished"
    (legend,) = [axis.get_legend() for axis in little_figure.latest.axes]
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["baseline 0", "baseline 1", f"ed {run.seed}"]


def test_reduced_runs_are_drawn_separately(drawn, tmp_path):
    sets = ["optimizer.max_grad_norm=1.5", "task.epochs=2"]
    for run in expand(drawn, sets=sets, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    (run.folder.parents[1] / "deviations.json").write_text(json.dumps(sets))
    for run in expand(drawn, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    here = [str(drawn.path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "mine")]
    assert script.main(here) == 0
    text = (tmp_path / "mine" / "mini" / README).read_text()
    (own, first), (reduced, second) = re.findall(r"!\[(.*)\]\((.*)\)", text)
    assert (own, first) == (drawn.title, "figure.png")
    assert reduced == f"{drawn.title}; reduced: {' '.join(sets)}"
    assert second.startswith("figure@maxgradnorm1.5-epochs2-")
    assert (tmp_path / "mine" / "mini" / second).exists()
    assert main(here) == 0
    figures = [path.name for path in (tmp_path / "results" / "mini").glob("figure*")]
    assert figures == ["figure.png"]


@pytest.mark.parametrize("name", ["ed.figures.nothing:draw", "ed.figures.style:draw"])
def test_a_missing_figure_function_is_a_one_line_error(drawn, tmp_path, name, capsys):
    for run in expand(drawn, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    text = drawn.path.read_text().replace("ed.figures.little_figure:draw", name)
    drawn.path.write_text(text)
    assert main([str(drawn.path), "--runs", str(tmp_path / "runs")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "figure: " in error
    assert name in error
