"""The report page: content, size and reproducibility."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ed
from ed.analysis.collect import Row
from ed.analysis.report.cells import MOST_POINTS, cell_view, full_config, in_common, thinned
from ed.analysis.report.grids import Field, extent, grid, marks
from ed.analysis.report.page import build_page
from ed.analysis.report.text import markdown
from ed.analysis.store import CSV, committed, read_results, results_folder
from ed.analysis.tables import load_table, table_names
from ed.analysis.verdicts import Experiment
from ed.runtime.runs import Record
from tests.helpers.report import HOSTILE, SAMPLES, Page

ROOT = Path(__file__).parents[2]


# --- the committed results


@pytest.mark.parametrize("name", table_names())
def test_the_page_has_every_cell_of_every_experiment(page, name):
    table = load_table(name)
    shown = page.texts[f"experiment-{name}"]
    assert table.title in shown
    for cell in table.cells.values():
        assert cell.label in shown
        for paper in cell.paper.values():
            assert paper.mean is None or f"{paper.mean:.{table.digits}f}" in shown
        assert cell.note is None or cell.note in shown
    words = " ".join(shown.split())
    assert all(" ".join(note.replace("`", " ").split()) in words for note in table.notes)


@pytest.mark.parametrize("name", table_names())
def test_the_page_has_every_row_of_every_csv_file(page, name):
    table = load_table(name)
    for row in read_results(results_folder(table) / CSV, table):
        text = page.texts[f"{row.table}--{row.cell}"].replace("\N{MINUS SIGN}", "-")
        shown = re.split(r"[\s,]+", text)
        for value in (
            row.seed,
            row.status,
            row.commit[:8],
            *map("{:.6g}".format, row.last.values()),
        ):
            assert str(value) in shown


def test_links_within_the_page_have_targets(page, folder):
    check_links(page)
    check_links(Page(build_page(folder)))  # a page without explorer or benchmark


def check_links(page: Page) -> None:
    targets = [value[1:] for name, value in page.values("href") if value.startswith("#")]
    assert targets
    assert set(targets) <= set(page.texts)


def test_the_page_loads_no_external_resources(text, page):
    assert all(value.startswith("data:") for _, value in page.values("src"))
    loaded = [value for name, value in page.values("href") if name != "a"]
    assert all(value.startswith("data:") for value in loaded)
    assert not {"iframe", "object", "embed", "base"} & {name for name, _ in page.elements}
    styles_and_scripts = "".join(re.findall(r"<(?:style|script)>(.*?)</", text, flags=re.DOTALL))
    for word in ("url(", "@import", "fetch(", "XMLHttpRequest", "import(", "WebSocket"):
        assert word not in styles_and_scripts
    assert "default-src 'none'" in next(
        a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )


def test_the_page_is_small_enough_for_a_phone(text):
    assert len(text.encode()) <= 3_000_000


def test_sections_follow_the_paper_and_start_with_a_finding(page):
    order = [name.removeprefix("experiment-") for name in page.texts if "experiment-" in name]
    begun = [name for name in order if name in ("grokking", "table1", "procgen_short", "pnn")]
    assert begun == ["grokking", "table1", "procgen_short", "pnn"]
    findings = [a for _, a in page.elements if a.get("class") == "finding"]
    sections = [a for name, a in page.elements if name == "section" and "experiment" in str(a)]
    assert len(findings) == len(sections)


def test_tables_without_runs_are_in_one_collapsed_list(page):
    waiting = page.texts["waiting"]
    for name in table_names():
        table = load_table(name)
        begun = Experiment(table, committed(table)).begun  # tables may share runs
        assert (table.title in waiting) != begun
        assert begun or f"python scripts/launch.py {name}" in waiting
    folded = [a for name, a in page.elements if name == "details" and "waiting" in str(a)]
    assert folded
    assert not any("open" in a for a in folded)


def test_images_have_alt_texts_and_load_lazily(page):
    images = [a for name, a in page.elements if name == "img"]
    assert images
    assert all(len(a["alt"]) > 3 and a["loading"] == "lazy" for a in images)


def test_benchmark_is_rendered_as_tables(page):
    assert "ED with PCA 3, 256 + 256" in page.texts["document-benchmark"]
    assert "| ---" not in page.texts["document-benchmark"]


def test_the_page_is_reproducible_and_needs_no_torch(text, tmp_path):
    code = "import runpy, sys\ntry: runpy.run_path('scripts/report.py', run_name='__main__')\n"
    code += "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    out = tmp_path / "index.html"
    words = [sys.executable, "-c", code, "--out", str(out)]
    environment = os.environ | {"PYTHONHASHSEED": "1"}  # this process has a random one
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert out.read_text("utf-8") == text


# --- parts of the page


def test_a_scale_needs_two_numbers():
    assert extent([(1.0, 0.5), (None, None)]) is None
    assert marks({"ours": (1.0, 0.5)}, None) == []
    scale = extent([(1.0, 0.5), (3.0, None)])
    both = marks({"paper": (1.0, 0.5), "ours": (3.0, None)}, scale)
    assert [mark.kind for mark in both] == ["paper", "ours"]
    assert 0 < both[0].low < both[0].x < both[0].high < both[1].x < 100


def test_values_below_the_scale_are_drawn_at_its_edge():
    (mark,) = marks({"ours": (69.0, 4.0)}, (78.0, 88.0))
    assert mark.beyond
    assert mark.x == mark.low == mark.high == 0


def test_empty_columns_are_omitted_and_numbers_right_aligned():
    rows = [["a", "86.53 ± 0.43", "", "x"], ["b", "-", "", Field(href="c")]]
    shown = grid(["first", "number", "empty", "last"], rows)
    assert [tuple(column) for column in shown.columns] == [
        ("first", False), ("number", True), ("last", False)
    ]  # fmt: skip
    assert [len(row) for row in shown.rows] == [3, 3]


def test_markdown_is_converted_and_escaped():
    text = markdown(
        f"# A\n\nb `c` **d** [e](f.md) [g](https://h.org)\n\n| i | j |\n| --- | --- |\n"
        f"| k | 1,234 |\n\n{HOSTILE}"
    )
    assert text.startswith("<h2>A</h2>\n<p>b <code>c</code> <strong>d</strong> e <a href=")
    assert "<td>1,234</td>" in text
    assert HOSTILE not in text


def test_curves_keep_the_first_and_last_finite_points():
    history = [{"step": step, "loss": 1 / step} for step in range(1, 1000)]
    history += [{"step": 1000, "loss": float("nan")}, {"step": 1001, "other": 1.0}]
    points = thinned(history, "loss")
    assert len(points) <= MOST_POINTS + 1
    assert points[0] == (1, 1.0)
    assert points[-1][0] == 999


def test_the_lines_of_a_chart_share_its_steps():
    """A stopped run has no values at later steps."""
    table = load_table("pca")
    cell, rows = next(iter(table.cells.values())), []
    for seed, steps in enumerate([(10, 20, 30), (10, 20)]):
        history = [{"step": step, "train/loss": step + seed} for step in steps]
        record = Record("", {}, {}, None, "", lambda history=history: history)
        rows.append(Row(*cell.home, seed, status="done", record=record))
    (chart,) = cell_view(table, cell, rows, {}, {})["curves"]
    assert chart["steps"] == [10, 20, 30]
    assert chart["lines"] == {"seed 0": [10, 20, 30], "seed 1": [11, 21, None]}


def test_settings_that_all_cells_share_are_shown_once():
    table, shared = load_table("pca"), {"task": {"epochs": 300}, "optimizer": {"betas": [0.9, 1]}}
    cells, widths = list(table.cells.values())[:3], (4, None, 4)
    rows = []
    for seed, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        config = shared | {"model": {"width": width}, "seed": seed}
        record = Record("", config, {}, None, "", list)
        rows.append(Row(table.name, cell.name, seed, status="done", record=record))
    configs = [full_config(row) for row in rows]
    common = in_common(configs)
    assert common == {"task.epochs": 300, "optimizer.betas": [0.9, 1]}
    assert in_common(configs[:1]) == {}
    views = [cell_view(table, c, [row], {}, common) for c, row in zip(cells, rows, strict=True)]
    shown = [view["record"]["config"] for view in views]
    assert shown == ["model.width: 4\n", "model.width: null\n", "model.width: 4\n"]


# --- explorer samples


def test_committed_samples_are_small_and_complete():
    assert SAMPLES.stat().st_size < 300 * 1024
    samples = json.loads(SAMPLES.read_text())
    values = torch.tensor([path["values"] for path in samples["paths"]])
    shape = (len(samples["paths"]), 2, len(samples["nodes"]), len(samples["classes"]))
    assert values.shape == shape
    torch.testing.assert_close(values.sum(-1), torch.ones(shape[:-1]), atol=1e-5, rtol=0)


def test_samples_equal_the_outputs_on_paths(tmp_path):
    from ed.engine.main import load_run
    from scripts.explorer_samples import samples, to_text
    from tests.helpers.small import small_run

    summary = small_run(tmp_path / "run")
    trained = load_run(tmp_path / "run")
    task, model = trained.task, trained.model
    estimate = ed.estimate(model, task.normalise(task.train.pixels[:20]), pairs=2)
    result = {"summary": summary, "estimate": estimate, "task": task, "model": model}
    content = json.loads(to_text(samples({"none": result}, ((3, 17), (8, 40)))))
    assert content["models"][0]["label"] == "plain training"
    first, last = task.test.pixels[8], task.test.pixels[40]  # at alpha = 1 and alpha = 0
    near_last = task.normalise(last + content["nodes"][0] * (first.float() - last))
    expected = model(near_last[None]).softmax(-1)[0]
    measured = torch.tensor(content["paths"][1]["values"][0][0])
    torch.testing.assert_close(measured, expected.detach(), atol=1e-4, rtol=0)
