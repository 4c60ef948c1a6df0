"""The report page of a small folder of experiments."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ed.analysis.collect import Row
from ed.analysis.report.page import build_page
from ed.analysis.store import CSV, CURVES, results_folder, to_csv
from ed.analysis.tables import load_table
from ed.analysis.verdicts import header_comment, minus
from tests.helpers.report import HOSTILE, Page

ROOT = Path(__file__).parents[2]


def test_the_page_shows_curves_settings_and_versions(folder):
    page = Page(build_page(folder))
    shown = page.texts["small--plain"]
    assert "data: <b>" in shown
    assert "workers" not in shown  # does not affect results
    assert "2.9.9" in shown
    (curves,) = (json.loads(value) for _, value in page.values("data-curves"))
    assert [(chart["title"], chart["log"]) for chart in curves] == [
        ("train/loss", True),
        ("eval/acc", False),
    ]
    assert all(len(chart["lines"]["seed 0"]) == 40 for chart in curves)


def test_settings_of_all_cells_are_shown_once(folder):
    """A cell's overrides take precedence over the table's."""
    path = folder / "small.yaml"
    path.write_text(path.read_text().replace("[task=toy]", "[task=toy, model.width=4]"))
    page = Page(build_page(folder))
    own = [page.texts[f"small--{name}"] for name in ("plain", "widths-16", "widths-32")]
    assert page.texts["experiment-small"].count("task=toy") == 1
    assert not any("task=toy" in cell or "model.width=4" in cell for cell in own)
    for width, cell in zip((8, 16, 32), own, strict=True):
        assert f"model.width={width}" in cell
    path.write_text(path.read_text().split("  tuned:")[0])
    assert "task=toy" in Page(build_page(folder)).texts["small--plain"]  # the only cell


def test_an_unknown_code_state_is_shown_as_unknown(folder):
    table = folder / "results" / "small" / CSV
    table.with_name(CURVES).unlink()  # leaves only the CSV file
    assert "unknown" not in Page(build_page(folder)).texts["provenance"]
    table.write_text(table.read_text().replace("0123456789ab,no,", "0123456789ab,,"))
    page = Page(build_page(folder))
    assert "01234567, code state unknown" in page.texts["provenance"]
    assert "01234567, code state unknown" in page.texts["small--plain"]
    table.write_text(table.read_text().replace("0123456789ab,,", ",,"))
    assert "commit unknown" in Page(build_page(folder)).texts["provenance"]


def test_a_commit_is_shown_for_every_session_of_a_run(folder):
    table = folder / "results" / "small" / CSV
    text = table.read_text().replace("0123456789ab,no,", "0123456789ab + fedcba987654,no,")
    table.write_text(text)
    table.with_name(CURVES).unlink()  # leaves only the CSV file
    page = Page(build_page(folder))
    assert "01234567 + fedcba98" in page.texts["small--plain"]
    assert "01234567 + fedcba98" in page.texts["provenance"]


def test_a_table_with_runs_but_no_result_says_how_many_are_done(folder):
    path = folder / "small.yaml"
    path.write_text(path.read_text().replace("small,plain", "small,widths-16"))
    table = folder / "results" / "small" / CSV
    table.write_text(table.read_text().replace("small,plain", "small,widths-16"))
    table.with_name(CURVES).unlink()
    text = " ".join(Page(build_page(folder)).texts["experiment-small"].split())
    assert "1 of 6 runs done" in text
    assert "No finished run" not in text


def test_an_overview_shows_the_number_of_seeds(folder):
    head = r"<thead><tr>.*?>ours \[paper\]<.*?</tr></thead>.*?</tbody>"
    overview = re.search(head, build_page(folder), flags=re.DOTALL)[0]
    assert ">n</th>" in overview
    assert ">1 of 2</td>" in overview


def test_figures_have_letters_of_one_size(folder):
    sizes = {"one": (1440, 200), "other": (1080, 150), "plain": (300, None)}
    for name, (width, dots) in sizes.items():
        look = {} if dots is None else {"dpi": (dots, dots)}
        Image.new("RGB", (width, 30)).save(folder / "results" / f"{name}.png", **look)
    images = [a for name, a in Page(build_page(folder)).elements if name == "img" and a["src"]]
    widths = [int(a["width"]) for a in images]
    assert widths[0] == pytest.approx(widths[1], abs=1)
    assert widths[2] == 300


def test_failed_runs_are_shown(folder):
    assert "failed" in Page(build_page(folder)).texts["small--plain"]


def test_probes_come_after_the_tables(folder):
    (folder / "probes").mkdir()
    text = (folder / "small.yaml").read_text().replace("title: ", "title: A probe of ", 1)
    (folder / "probes" / "aside.yaml").write_text(text)
    page = Page(build_page(folder))
    assert "A probe of" in page.texts["experiment-aside"]
    assert list(page.texts).index("experiment-small") < list(page.texts).index("experiment-aside")


def test_a_run_collected_by_another_table_is_shown_with_its_cell(folder):
    (folder / "other.yaml").write_text(
        "title: Other\nplace: Nowhere\nmetric: eval/acc\nseeds: [0, 1]\nfixed: [task=toy]\n"
        "cells: {borrowed: {same_as: small/plain, paper: null}}\n"
    )
    text = (folder / "results" / "small" / CSV).read_text().replace(",last:eval/loss", "")
    row = "small,plain,1,,done,40,40,93.75,93.75,7.5,Some GPU,2.11.0,fedcba9876,no,\n"
    (folder / "results" / "other").mkdir()
    (folder / "results" / "other" / CSV).write_text(text.splitlines()[0] + "\n" + row)
    page = Page(build_page(folder))
    assert "93.75" in page.texts["small--plain"].split()
    assert "fedcba98" in page.texts["provenance"].split()


def test_header_comments_are_split_into_commands_and_text(folder):
    path = folder / "small.yaml"
    header = (
        "# export PLACE=/a\n# python scripts/launch.py small \\\n#   --jobs 2\n"
        "# 4 runs, `cheap`\n# ones. Then:\n#   --cells plain\n"
    )
    path.write_text(header + path.read_text())
    assert header_comment(path) == [
        (True, "export PLACE=/a\npython scripts/launch.py small \\\n  --jobs 2"),
        (False, "4 runs, `cheap` ones. Then:"),
        (True, "--cells plain"),
    ]
    shown = '<p>4 runs, <code>cheap</code> ones. Then:</p><pre tabindex="0">--cells plain</pre>'
    assert shown in build_page(folder)


def test_text_from_files_is_escaped(folder):
    text = build_page(folder)
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;alert") > 4
    (folder / "results" / "explorer.json").write_text(json.dumps({"classes": ["</script><b>"]}))
    assert "</script><b>" not in build_page(folder)


def test_hand_written_notes_are_shown(folder):
    (folder / "results" / "small" / "notes.md").write_text(f"Seeds **agree**. {HOSTILE}")
    text = build_page(folder)
    assert "<p>Seeds <strong>agree</strong>." in text
    assert HOSTILE not in text


def test_a_pool_shows_the_correlation_of_every_variant(tmp_path):
    path = Path(shutil.copy(ROOT / "experiments" / "correlation_vit.yaml", tmp_path))
    table = load_table(str(path))
    rows = [
        Row(
            *cell.home,
            seed,
            status="done",
            last={m: place + seed + len(m) for m in table.metrics} | {"measure/norm": -place * 2.0},
        )
        for place, cell in enumerate(table.cells.values())
        for seed in table.seeds
    ]
    results_folder(table).mkdir(parents=True)
    (results_folder(table) / CSV).write_text(to_csv(table, rows))
    text = Page(build_page(tmp_path)).texts["experiment-correlation_vit"]
    for variants in table.correlation.measures.values():
        assert all(table.metrics[metric] in text for metric in variants)
    assert text.count("27 of 27") == 11
    finding, found = 2, 10 + 1  # 2 measures in the finding; 10 variants and the accuracy
    assert text.count("+1.00 to +1.00") == finding + found
    assert text.count(minus("-1.00 to -1.00")) == 1


def test_figures_are_shown_with_their_experiment_and_other_images_last(folder):
    Image.new("RGB", (3000, 30)).save(folder / "results" / "small" / "figure.png")
    (folder / "results" / "other.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    text = build_page(folder)
    page = Page(text)
    assert "other" in page.texts["figures"]
    sources = [value.split(",")[0] for _, value in page.values("src")]
    assert sources == ["data:image/webp;base64", "data:image/svg+xml;base64"]
    assert text.count("<figcaption>other") == 1
    widths = [int(a["width"]) for name, a in page.elements if name == "img" and "width" in a]
    assert max(widths) < 3000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("small/curves.parquet", "hello", r"curves\.parquet"),
        ("explorer.json", "{", r"explorer\.json"),
        ("small/figure.png", "hello", r"figure\.png"),
        ("small/runs.csv", "a,b\n", r"runs\.csv, line 1"),
    ],
)
def test_broken_files_are_reported(folder, name, content, message):
    (folder / "results" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        build_page(folder)


def test_a_folder_without_experiments_does_not_overwrite_the_page(tmp_path):
    page = tmp_path / "index.html"
    page.write_text("full")
    words = [sys.executable, "scripts/report.py", "--experiments", str(tmp_path)]
    result = subprocess.run([*words, "--out", str(page)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"--experiments {tmp_path}: no experiment files (*.yaml) there" in result.stderr
    assert page.read_text() == "full"


def test_a_broken_file_is_a_one_line_error(folder):
    (folder / "results" / "small" / CSV).write_text("a,b\n")
    words = [sys.executable, "scripts/report.py", "--experiments", str(folder)]
    words += ["--out", str(folder / "page.html")]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert not (folder / "page.html").exists()
