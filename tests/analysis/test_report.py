"""The report page: complete, self-contained, quick, the same every time, and right in a browser."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ed
from ed.analysis.collect import Row
from ed.analysis.curves import write_curves
from ed.analysis.render import table_lines
from ed.analysis.report.charts import Axis, key, line_chart
from ed.analysis.report.markdown import render_markdown
from ed.analysis.report.markup import Html, tag
from ed.analysis.report.page import build_page
from ed.analysis.report.tables import Experiment, comparison, header_comment, print_width
from ed.analysis.spec import EXPERIMENTS
from ed.analysis.stats import Ours
from ed.analysis.store import CSV, CURVES, read_results, results_folder, to_csv
from ed.analysis.tables import load_table, table_names
from ed.runtime.runs import Record
from tests.helpers.browser import browser, missing

ROOT = Path(__file__).parents[2]
SAMPLES = EXPERIMENTS / "results" / "explorer.json"
VOID = {"br", "img", "input", "link", "meta"}
HOSTILE = "<script>alert('x')</script>"

SPEC = f"""
title: "Small {HOSTILE}"
place: "Nowhere"
metrics: {{eval/acc: accuracy, eval/loss: loss}}
seeds: [0, 1]
paper_seeds: 2
fixed: [task=toy]
notes: ["{HOSTILE}"]
cells:
  plain:
    label: "A & B"
    overrides: [model.width=8]
    paper: {{eval/acc: {{mean: 90.0, std: 1.0}}, eval/loss: {{mean: 0.5, std: 0.1}}}}
    note: "{HOSTILE}"
  tuned:
    best_of: widths
    paper: {{mean: 95.0}}
tuning:
  widths:
    overrides: [model.depth=2]
    grid: {{model.width: [16, 32]}}
    rule: "the best"
"""


class Page(HTMLParser):
    """Every element's attributes, the text inside each id, and whether the tags nest."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: dict[str, str] = {}
        self.stack: list[tuple[str, str | None]] = []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, name, attributes):
        attributes = dict(attributes)
        self.elements.append((name, attributes))
        identifier = attributes.get("id")
        if identifier is not None:
            assert identifier not in self.texts, f"id {identifier} twice"
            self.texts[identifier] = ""
        if name not in VOID:
            self.stack.append((name, identifier))

    def handle_endtag(self, name):
        assert self.stack.pop()[0] == name

    def handle_data(self, data):
        for _, identifier in self.stack:
            if identifier is not None:
                self.texts[identifier] += data + " "

    def values(self, attribute: str) -> list[tuple[str, str]]:
        return [(name, a[attribute]) for name, a in self.elements if attribute in a]


@pytest.fixture(scope="module")
def text() -> str:
    return build_page()


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


# --- the committed results


@pytest.mark.parametrize("name", table_names())
def test_every_experiment_is_there_with_every_cell(page, name):
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
    assert table.title in page.texts["overview"]


@pytest.mark.parametrize("name", table_names())
def test_every_row_of_every_csv_file_is_there(page, name):
    table = load_table(name)
    for row in read_results(results_folder(table) / CSV, table):
        shown = page.texts[f"{row.table}--{row.cell}"].split()
        for value in (
            row.seed,
            row.status,
            row.commit[:8],
            *map("{:.6g}".format, row.last.values()),
        ):
            assert str(value) in shown


def test_links_within_the_page_have_targets(page, folder):
    check_links(page)
    check_links(Page(build_page(folder)))  # neither explorer nor benchmark


def check_links(page: Page) -> None:
    targets = [value[1:] for name, value in page.values("href") if value.startswith("#")]
    assert targets
    assert set(targets) <= set(page.texts)


def test_nothing_is_loaded_from_outside(text, page):
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


def test_benchmark_is_rendered_as_tables(page):
    assert "ED with PCA 3, 256 + 256" in page.texts["document-benchmark"]
    assert "| ---" not in page.texts["document-benchmark"]


def test_the_command_makes_the_same_page_every_time_and_needs_no_torch(tmp_path):
    code = "import runpy, sys\ntry: runpy.run_path('scripts/report.py', run_name='__main__')\n"
    code += "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    pages = []
    for seed in ("1", "2"):
        out = tmp_path / seed / "index.html"
        words = [sys.executable, "-c", code, "--out", str(out)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        pages.append(out.read_bytes())
    assert pages[0] == pages[1]


# --- a small folder of experiments


@pytest.fixture
def folder(tmp_path) -> Path:
    """One experiment with a recorded run and a failed one."""
    (tmp_path / "small.yaml").write_text(SPEC)
    results = tmp_path / "results" / "small"
    results.mkdir(parents=True)
    header = "table,cell,seed,deviations,status,steps,total_steps,last:eval/acc,last:eval/loss,"
    header += "best:eval/acc,seconds,device,torch,commit,dirty,error\n"
    rows = (
        "small,plain,0,,done,40,40,91.25,0.5,92.5,7.5,Some GPU,2.11.0,0123456789ab,no,\n"
        f"small,plain,1,,failed,20,40,50.0,0.9,,,Some GPU,2.11.0,0123456789ab,yes,{HOSTILE}\n"
    )
    (results / CSV).write_text(header + rows)
    metrics = [{"step": s, "train/loss": 2.0 / s, "eval/acc": 60.0 + s} for s in range(1, 41)]
    session = {"device": "Some GPU", "versions": {"numpy": "2.9.9"}, "command": HOSTILE}
    last = {"eval/acc": 91.25, "eval/loss": 0.5}
    record = Record(
        source="",
        config={"model": {"width": 8}, "seed": 0, "task": {"data": "<b>"}},
        meta={"sessions": [session]},
        done={"last": last, "best": {"eval/acc": 92.5}, "steps": 40, "seconds": 7.5},
        failure="",
        history=lambda: metrics,
    )
    write_curves(results / CURVES, {("plain", 0): record})
    return tmp_path


def test_a_record_gives_curves_settings_and_versions(folder):
    page = Page(build_page(folder))
    shown = page.texts["small--plain"]
    assert "train/loss, by step, log scale" in shown
    assert "eval/acc, by step" in shown
    assert "data: <b>" in shown
    assert "2.9.9" in shown
    curves = [a for name, a in page.elements if name == "path" and a["class"] == "line s0"]
    assert [a["d"].count("L") for a in curves] == [39, 39]


def test_an_unknown_code_state_is_shown_as_unknown(folder):
    table = folder / "results" / "small" / CSV
    table.with_name(CURVES).unlink()  # the CSV file alone
    assert "unknown" not in Page(build_page(folder)).texts["provenance"]
    table.write_text(table.read_text().replace("0123456789ab,no,", "0123456789ab,,"))
    page = Page(build_page(folder))
    assert "01234567 , code state unknown" in page.texts["provenance"]
    assert "01234567 , code state unknown" in page.texts["small--plain"]
    table.write_text(table.read_text().replace("0123456789ab,,", ",,"))
    assert "commit unknown" in Page(build_page(folder)).texts["provenance"]


def test_failed_runs_are_there(folder):
    assert "failed" in Page(build_page(folder)).texts["small--plain"]


def test_probes_come_after_the_tables(folder):
    (folder / "probes").mkdir()
    text = (folder / "small.yaml").read_text().replace("title: ", "title: A probe of ", 1)
    (folder / "probes" / "aside.yaml").write_text(text)
    page = Page(build_page(folder))
    assert "A probe of" in page.texts["experiment-aside"]
    assert list(page.texts).index("experiment-small") < list(page.texts).index("experiment-aside")


def test_a_run_that_another_table_collected_stands_with_its_cell(folder):
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


def test_commands_of_an_experiment_stand_apart_from_its_prose(folder):
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
    assert "<p>4 runs, <code>cheap</code> ones. Then:</p><pre>--cells plain</pre>" in build_page(
        folder
    )


def test_text_from_files_is_escaped(folder):
    text = build_page(folder)
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;alert") > 4
    (folder / "results" / "explorer.json").write_text(json.dumps({"classes": ["</script><b>"]}))
    assert "</script><b>" not in build_page(folder)


def test_a_pool_shows_every_variant_with_its_r(tmp_path):
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
    assert text.count("+1.00 to +1.00") == 10 + 1  # the training accuracy alone
    assert text.count("-1.00 to -1.00") == 1


def test_a_figure_stands_with_its_experiment_and_other_images_at_the_end(folder):
    (folder / "results" / "small" / "figure.png").write_bytes(b"\x89PNG")
    (folder / "results" / "other.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    text = build_page(folder)
    page = Page(text)
    assert "other" in page.texts["figures"]
    sources = [value.split(",")[0] for _, value in page.values("src")]
    assert sources == ["data:image/png;base64", "data:image/svg+xml;base64"]
    assert text.count("<figcaption>other") == 1
    assert "<figcaption>figure" not in text  # the experiment's title names it


def png(width: int, resolution: bytes) -> bytes:
    """As much of a PNG as says how large it is."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, 10) + resolution


def test_pictures_are_as_wide_as_on_paper():
    metre = struct.pack(">I4sIIB", 9, b"pHYs", 7874, 7874, 1)  # 200 to the inch
    assert print_width(png(1000, metre)) == 480  # 5 inches of 96
    assert print_width(png(1000, metre[:-1] + b"\0")) is None  # no unit
    assert print_width(png(1000, b"")) is None
    assert print_width(b"<svg/>") is None


def test_a_strip_needs_two_numbers_to_compare():
    """The paper prints none for grokking, and the interval of one cell alone says nothing."""
    table = load_table("grokking")
    lines = table_lines(table, [])
    cells = [(cell, metric) for cell in table.cells.values() for metric in cell.metrics]
    first, second = [i for i, (_, metric) in enumerate(cells) if metric == table.primary][:2]
    lines[first] = replace(lines[first], ours=Ours(93.0, 1.0, 2))
    assert "strip" not in comparison(table, cells, lines, [])
    lines[second] = replace(lines[second], ours=Ours(91.0, None, 1))
    shown = comparison(table, cells, lines, [])
    assert shown.count('class="strip"') == 2
    assert "ours ●" in shown
    assert "paper ■" not in shown


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("small/curves.parquet", "hello", r"curves\.parquet is damaged"),
        ("explorer.json", "{", "explorer.json is not JSON"),
        ("small/runs.csv", "a,b\n", "line 1: not the header"),
    ],
)
def test_broken_files_are_named(folder, name, content, message):
    (folder / "results" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        build_page(folder)


def test_a_folder_without_experiments_leaves_the_page_as_it_is(tmp_path):
    page = tmp_path / "index.html"
    page.write_text("full")
    words = [sys.executable, "scripts/report.py", "--experiments", str(tmp_path)]
    result = subprocess.run([*words, "--out", str(page)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"--experiments {tmp_path}: no experiment files (*.yaml) there" in result.stderr
    assert page.read_text() == "full"


def test_a_broken_file_ends_the_command_with_one_line(folder):
    (folder / "results" / "small" / CSV).write_text("a,b\n")
    words = [sys.executable, "scripts/report.py", "--experiments", str(folder)]
    words += ["--out", str(folder / "page.html")]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert not (folder / "page.html").exists()


# --- pieces


def test_tags_escape_what_is_not_markup():
    assert tag("p", "a<b", Html("<i>c</i>"), None, class_='"') == (
        '<p class="&quot;">a&lt;b<i>c</i></p>'
    )


def test_markdown_of_result_files():
    text = render_markdown("# A\n\nb `c` **d** [e](f.md)\n\n- g\n- h\n\n| i | j |\n| --- | --- |\n"
                           "| k | 1,234 |\n")  # fmt: skip
    assert text.startswith("<h2>A</h2><p>b <code>c</code> <strong>d</strong> e</p><ul><li>g</li>")
    assert 'data-key="1234.0">1,234</td>' in text


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (50, 85, False, [50, 60, 70, 80]),
        (0, 58500, False, [0, 20000, 40000]),
        (0.0004, 1.6, True, [0.001, 0.01, 0.1, 1]),
        (3, 3, False, [3]),
    ],
)
def test_axis_ticks_are_round(low, high, log, ticks):
    assert Axis(low, high, 0, 100, log).ticks() == pytest.approx(ticks)


def test_curves_leave_out_what_cannot_be_drawn():
    nan = float("nan")
    assert line_chart("loss", {"a": [(1, nan), (2, 0.5)]}) is None
    falls_to_zero = line_chart("loss", {"a": [(1, 0.5), (2, 0.1), (3, 0.0)]}, log=True)
    assert falls_to_zero.count("L") == 1
    assert "log scale" in falls_to_zero
    of_both_signs = line_chart("loss", {"a": [(1, -1.0), (2, 0.5), (3, -0.1)]}, log=True)
    assert of_both_signs.count("L") == 2  # PPO's: no point may be missing
    assert "log scale" not in of_both_signs
    assert "at the end a: -0.1" in of_both_signs


def test_a_curve_keeps_the_style_of_its_name():
    """Also beside a run that has one point so far, and is not drawn."""
    two = [(1, 0.5), (2, 0.1)]
    chart = line_chart("loss", {"a": two[:1]} | dict.fromkeys("bcdefgh", two))
    assert (
        re.findall(r'class="(line [^"]*)"', chart)
        == re.findall(r'class="(line [^"]*)"', key(list("abcdefgh")))[1:]
    )
    assert len(set(re.findall(r'class="line [^"]*"', chart))) == 7


# --- samples of the explorer


def test_committed_samples_are_small_and_whole():
    assert SAMPLES.stat().st_size < 300 * 1024
    samples = json.loads(SAMPLES.read_text())
    values = torch.tensor([path["values"] for path in samples["paths"]])
    shape = (len(samples["paths"]), 2, len(samples["nodes"]), len(samples["classes"]))
    assert values.shape == shape
    torch.testing.assert_close(values.sum(-1), torch.ones(shape[:-1]), atol=1e-5, rtol=0)


def test_samples_are_the_outputs_on_the_paths(tmp_path):
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
    first, last = task.test.pixels[8], task.test.pixels[40]  # alpha = 1, alpha = 0
    near_last = task.normalise(last + content["nodes"][0] * (first.float() - last))
    expected = model(near_last[None]).softmax(-1)[0]
    measured = torch.tensor(content["paths"][1]["values"][0][0])
    torch.testing.assert_close(measured, expected.detach(), atol=1e-4, rtol=0)


# --- in a browser


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if missing() is not None:
        pytest.skip(f"needs {missing()}: make test-browser installs it")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "index.html").write_text(build_page())
    with browser(folder) as opened:
        opened.resize(1280, 1000)
        opened.open(folder / "index.html")
        yield opened
        assert opened.console() == []  # of all tests together


def shown_numbers(window, name: str = "raw") -> list[float]:
    """What stands in the two panels, to the digits printed."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => Number(e.textContent))"
    return window.script(script, f".panel dd[data-name={name}]")


def expected_degrees(samples: dict, path: int, degree: int, basis: str) -> torch.Tensor:
    """ED and ED_norm of each model by ed.fit: (models, 2)."""
    values = torch.tensor(samples["paths"][path]["values"], dtype=torch.float64)
    nodes = torch.tensor(samples["nodes"], dtype=torch.float64)
    coefficients = ed.fit(
        values, nodes, degree, basis=getattr(ed, basis), damping=samples["damping"]
    )
    both = (ed.effective_degree(coefficients), ed.normalised_degree(coefficients))
    return torch.stack([each.mean(-1) for each in both], dim=-1)


@pytest.mark.browser
def test_page_opens_without_console_errors(window):
    assert window.console() == []
    assert "Effective degree" in window.script("return document.title")
    assert window.script("return document.querySelectorAll('.panel svg').length") == 4


@pytest.mark.browser
def test_page_notices_what_goes_wrong(window):
    """The check above sees errors, and the page may not load anything."""
    window.script("const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'")
    end = time.monotonic() + 10
    messages = []
    while not messages and time.monotonic() < end:
        messages = window.console()
    assert "Content Security Policy" in messages[0]


@pytest.mark.browser
def test_a_click_or_a_key_sorts_a_table(window):
    script = (
        "return [...document.querySelectorAll('#experiment-table1 > .wide tbody tr')]"
        ".map(row => Number(row.cells[1].dataset.key))"
    )
    before = window.script(script)
    head = "#experiment-table1 > .wide thead th:nth-child(2)"
    window.click(f"{head} button")
    assert window.script(script) == sorted(before)
    window.keys(f"{head} button", "\ue007")  # Enter
    assert window.script(script) == sorted(before, reverse=True)
    sort = f"return document.querySelector('{head}').getAttribute('aria-sort')"
    assert window.script(sort) == "descending"
    window.keys(f"{head} button", "\ue007")
    assert window.script(script) == before


@pytest.mark.browser
def test_empty_fields_sort_last_in_both_directions(window):
    script = (
        "return [...document.querySelectorAll('#experiment-table1 > .wide tbody tr')]"
        ".map(row => row.cells[2].dataset.key === undefined)"
    )
    for _ in range(2):
        window.click("#experiment-table1 > .wide thead th:nth-child(3) button")
        empty = window.script(script)
        assert empty == sorted(empty)
    window.click("#experiment-table1 > .wide thead th:nth-child(3) button")


@pytest.mark.browser
def test_the_theme_follows_the_system_until_it_is_switched(window):
    script = "return getComputedStyle(document.body).backgroundColor"

    def system(value: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": value}
        window.devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    system("light")
    light = window.script(script)
    system("dark")
    dark = window.script(script)
    assert light != dark
    window.click("#theme input[value=light]")
    assert window.script(script) == light
    system("light")
    window.click("#theme input[value=dark]")
    assert window.script(script) == dark
    window.click("#theme input[value=auto]")
    assert window.script(script) == light


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "tone"), [("light", (255, 255)), ("dark", (200, 240))])
def test_pictures_lie_on_a_card_whose_tone_they_take(window, tmp_path, theme, tone):
    """Light enough for their dark ink, and in the dark theme no glaring white."""
    window.click(f"#theme input[value={theme}]")
    try:
        place = window.script(
            "const card = document.querySelector('.card'), image = card.querySelector('img');"
            "card.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const [outer, inner] = [card, image].map(e => e.getBoundingClientRect());"
            "return [outer.x, inner.x, inner.y, inner.height]"
        )
        window.screenshot(tmp_path / "page.png")
    finally:
        window.click("#theme input[value=auto]")
        window.script("scrollTo({top: 0, behavior: 'instant'})")  # as the next test expects it
    outer, inner, top, height = map(round, place)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    card, picture = pixels[top + height // 2, outer + 5], pixels[top + 3, inner + 3]
    assert (card == picture).all()
    assert (card >= tone[0]).all()
    assert (card <= tone[1]).all()


@pytest.mark.browser
def test_a_cell_opens_its_runs(window):
    script = "return document.getElementById('table1--baseline').checkVisibility()"
    assert not window.script(script)
    window.click("#experiment-table1 > .wide tbody a[href='#table1--baseline']")
    end = time.monotonic() + 5
    while not window.script(script) and time.monotonic() < end:
        time.sleep(0.05)
    assert window.script("return document.getElementById('table1--baseline').open")
    assert window.script(script)


@pytest.mark.browser
def test_the_slider_moves_ed_as_python_computes_it(window):
    samples = json.loads(SAMPLES.read_text())
    top = samples["degree"]
    assert shown_numbers(window) == pytest.approx(
        expected_degrees(samples, 0, top, "chebyshev")[:, 0].tolist(), abs=5.1e-5
    )
    window.keys("#degree", "\ue012" * 6)  # the left arrow, as a person would
    assert window.script("return document.getElementById('degree-shown').value") == str(top - 6)
    window.click("#basis input[value=legendre]")
    window.click(".pairs button:nth-child(3)")
    expected = expected_degrees(samples, 2, top - 6, "legendre")
    assert shown_numbers(window) == pytest.approx(expected[:, 0].tolist(), abs=5.1e-5)
    assert shown_numbers(window, "norm") == pytest.approx(expected[:, 1].tolist(), abs=5.1e-5)
    bars = "return document.querySelectorAll('.panel:first-child rect.column').length"
    assert window.script(bars) == top - 6 + 1


@pytest.mark.browser
def test_the_page_agrees_with_ed_fit_at_every_degree(window):
    samples = json.loads(SAMPLES.read_text())
    script = """
        const [data, basis] = arguments;
        return data.paths.map((path) => path.values.map((values) =>
          Array.from({ length: data.degree + 1 }, (_, degree) => {
            const result = degrees(fit(values, data.nodes, degree, basis, data.damping));
            return [result.raw, result.normalised];
          })));
    """
    for basis in ("chebyshev", "legendre"):
        measured = torch.tensor(window.script(script, samples, basis), dtype=torch.float64)
        for path in range(len(samples["paths"])):
            for degree in range(samples["degree"] + 1):
                expected = expected_degrees(samples, path, degree, basis)
                torch.testing.assert_close(measured[path, :, degree], expected, atol=1e-6, rtol=0)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_itself_never_scrolls_sideways(window, width):
    window.resize(width, 844)
    window.script("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert window.script(script) <= 0
    window.resize(1280, 1000)


def test_the_driver_is_looked_for_where_programs_are():
    assert (missing() is None) == all(map(shutil.which, ("chromium", "chromedriver")))


def test_a_number_of_the_paper_counts_once_beside_last_and_best_epochs():
    """GLUE: nine numbers, each beside ours of the last and of the best epoch."""
    table = load_table("glue")
    assert len(table_lines(table, [])) == 18
    assert Experiment(table, []).verdicts == ["pending"] * 9
