"""The report page: content, size, reproducibility and behaviour in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ed
from ed.analysis.collect import Row
from ed.analysis.curves import write_curves
from ed.analysis.report.cells import MOST_POINTS, thinned
from ed.analysis.report.grids import Field, extent, grid, marks
from ed.analysis.report.page import build_page
from ed.analysis.report.text import MOST_WORDS, items, markdown
from ed.analysis.spec import EXPERIMENTS
from ed.analysis.store import CSV, CURVES, read_results, results_folder, to_csv
from ed.analysis.tables import load_table, table_names
from ed.analysis.verdicts import header_comment
from ed.runtime.runs import Record
from tests.helpers.browser import browser, missing
from tests.helpers.once import once, shared_folder

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
    """Collects element attributes and text by id; asserts that tags are properly nested."""

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
            assert identifier not in self.texts, f"duplicate id {identifier}"
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
def text(tmp_path_factory) -> str:
    return once(shared_folder(tmp_path_factory, "report"), "page", build_page)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


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
        shown = re.split(r"[\s,]+", page.texts[f"{row.table}--{row.cell}"])
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
        begun = (results_folder(table) / CSV).exists()
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


# --- a small folder of experiments


@pytest.fixture
def folder(tmp_path) -> Path:
    """Writes an experiment with a finished run and a failed one."""
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


def test_the_page_shows_curves_settings_and_versions(folder):
    page = Page(build_page(folder))
    shown = page.texts["small--plain"]
    assert "data: <b>" in shown
    assert "2.9.9" in shown
    (curves,) = (json.loads(value) for _, value in page.values("data-curves"))
    assert [(chart["title"], chart["log"]) for chart in curves] == [
        ("train/loss", True),
        ("eval/acc", False),
    ]
    assert all(len(chart["lines"]["seed 0"]) == 40 for chart in curves)


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
    assert text.count("-1.00 to -1.00") == 1


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


def test_long_notes_are_split_between_sentences():
    sentences = [f"Sentence {i} has {'many ' * 10}words." for i in range(9)]
    found = list(items([" ".join(sentences), "Short."]))
    assert " ".join(found[:-1]) == " ".join(sentences)
    assert found[-1] == "Short."
    assert max(len(item.split()) for item in found) <= MOST_WORDS


def test_curves_keep_the_first_and_last_finite_points():
    history = [{"step": step, "loss": 1 / step} for step in range(1, 1000)]
    history += [{"step": 1000, "loss": float("nan")}, {"step": 1001, "other": 1.0}]
    points = thinned(history, "loss")
    assert len(points) <= MOST_POINTS + 1
    assert points[0] == (1, 1.0)
    assert points[-1][0] == 999


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


# --- behaviour in a browser


@pytest.fixture(scope="module")
def opened(text, tmp_path_factory):
    if missing() is not None:
        pytest.skip(f"needs {missing()}: make test-browser installs it")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "index.html").write_text(text)
    (folder / "blank.html").write_text("<!doctype html>")
    with browser(folder) as found:
        found.resize(1280, 1000)
        yield found, folder / "index.html"
        assert found.console() == []  # no test logged an error


@pytest.fixture
def window(opened):
    """Opens the page anew, so that no test depends on what another one clicked."""
    found, page = opened
    found.open(page.with_name("blank.html"))  # a reload would keep the values of inputs
    found.open(page)
    return found


def shown_numbers(window, name: str = "raw") -> list[float]:
    """Returns the numbers shown in the two panels."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => Number(e.textContent))"
    return window.script(script, f".panel dd[data-name={name}]")


def expected_degrees(samples: dict, path: int, degree: int, basis: str) -> torch.Tensor:
    """Returns ED and ED_norm of each model, computed with ed.fit: (models, 2)."""
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
def test_external_requests_are_blocked_and_logged(window):
    """Shows that the previous test would detect a blocked request."""
    window.script("const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'")
    end = time.monotonic() + 10
    messages = []
    while not messages and time.monotonic() < end:
        messages = window.console()
    assert "Content Security Policy" in messages[0]


def unfold(window, opened: bool) -> None:
    """Expands or collapses all `<details>` elements on the page."""
    script = "document.querySelectorAll('main details').forEach(f => { f.open = arguments[0]; })"
    window.script(script, opened)


def column(window, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#experiment-table1 > .wide tbody tr')]"
        ".map(row => row.cells[arguments[0]].textContent.trim())"
    )
    return window.script(script, place)


@pytest.mark.browser
def test_tables_can_be_sorted_by_mouse_and_keyboard(window):
    before = column(window, 1)
    head = "#experiment-table1 > .wide thead th:nth-child(2)"
    window.click(f"{head} button")
    assert column(window, 1) == sorted(before, key=lambda text: float(text.split()[0]))
    window.keys(f"{head} button", "\ue007")  # the Enter key
    means = [float(text.split()[0]) for text in column(window, 1)]
    assert means == sorted(means, reverse=True)
    sort = f"return document.querySelector('{head}').getAttribute('aria-sort')"
    assert window.script(sort) == "descending"
    window.keys(f"{head} button", "\ue007")
    assert column(window, 1) == before


@pytest.mark.browser
def test_empty_cells_sort_last_in_both_directions(window):
    head = "#experiment-table1 > .wide thead th:nth-child(3) button"
    for _ in range(2):
        window.click(head)
        empty = [text == "" for text in column(window, 2)]
        assert any(empty)
        assert empty == sorted(empty)
    window.click(head)


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
def test_figures_have_the_background_of_their_card(window, tmp_path, theme, tone):
    """The background is light enough for dark text, but not white in the dark theme."""
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
        # resets the view for the next test
        window.script("scrollTo({top: 0, behavior: 'instant'})")
    outer, inner, top, height = map(round, place)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    card, image = pixels[top + height // 2, outer + 5], pixels[top + 3, inner + 3]
    assert (card == image).all()
    assert (card >= tone[0]).all()
    assert (card <= tone[1]).all()


@pytest.mark.browser
def test_clicking_a_cell_shows_its_runs(window):
    script = "return document.getElementById('table1--baseline').checkVisibility()"
    assert not window.script(script)
    window.click("#experiment-table1 > .wide tbody a[href='#table1--baseline']")
    end = time.monotonic() + 5
    while not window.script(script) and time.monotonic() < end:
        time.sleep(0.05)
    assert window.script("return document.getElementById('table1--baseline').open")
    assert window.script(script)


@pytest.mark.browser
def test_the_slider_shows_the_same_ed_as_python(window):
    samples = json.loads(SAMPLES.read_text())
    assert shown_numbers(window) == pytest.approx(
        expected_degrees(samples, 0, 3, "chebyshev")[:, 0].tolist(), abs=5.1e-5
    )
    window.keys("#degree", "\ue014" * 6)  # press the right arrow key
    assert window.script("return document.getElementById('degree-shown').value") == "9"
    window.click("#basis input[value=legendre]")
    window.click(".pairs button:nth-child(3)")
    expected = expected_degrees(samples, 2, 9, "legendre")
    assert shown_numbers(window) == pytest.approx(expected[:, 0].tolist(), abs=5.1e-5)
    assert shown_numbers(window, "norm") == pytest.approx(expected[:, 1].tolist(), abs=5.1e-5)
    bars = "return document.querySelectorAll('.panel:first-child rect.column').length"
    assert window.script(bars) == 10


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
def test_the_alpha_slider_blends_two_images(window):
    """The canvas shows one image at each end of the slider and their mean in the middle."""
    script = """
        const slider = document.getElementById("alpha");
        const copy = Object.assign(document.createElement("canvas"), { width: 32, height: 32 });
        const context = copy.getContext("2d", { willReadFrequently: true });
        return [0, 0.5, 1].map((alpha) => {
          slider.value = alpha;
          slider.dispatchEvent(new Event("input"));
          context.drawImage(document.getElementById("blend"), 0, 0);
          return [...context.getImageData(0, 0, 32, 32).data];
        });
    """
    left, middle, right = np.array(window.script(script), dtype=float)
    assert np.abs(left - right).mean() > 10
    # canvases use 8 bits: rounding the product and alpha costs up to one level each
    assert np.abs(middle - (left + right) / 2).max() <= 2
    label = "return document.getElementById('blend-label').textContent"
    assert window.script(label).startswith("0 % ")


@pytest.mark.browser
def test_the_animation_changes_the_degree_until_stopped(window):
    shown = "return document.getElementById('degree-shown').value"
    before = window.script(shown)
    window.click("#animate")
    end = time.monotonic() + 10
    while window.script(shown) == before and time.monotonic() < end:
        time.sleep(0.05)
    window.click("#animate")
    stopped = window.script(shown)
    assert stopped != before
    time.sleep(0.6)  # longer than one step of the animation
    assert window.script(shown) == stopped


@pytest.mark.browser
def test_curves_and_bars_stay_within_the_axes(window):
    samples = json.loads(SAMPLES.read_text())
    script = """
        const data = arguments[0];
        const top = highestBar(data);
        let outside = 0;
        for (const basis of Object.keys(BASES)) for (const path of data.paths)
          for (const values of path.values) for (let k = 0; k <= data.degree; k += 1) {
            const found = fit(values, data.nodes, k, basis, data.damping);
            outside += degrees(found).spectrum.filter((bar) => bar > top).length;
            for (const output of leading(values)) for (let i = 0; i <= 160; i += 1) {
              const y = polynomial(found[output], i / 160, basis);
              outside += y < LOW || y > HIGH;
            }
          }
        return outside;
    """
    assert window.script(script, samples) == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    ("low", "high", "expected"), [(50, 85, [50, 60, 70, 80]), (0, 58500, [0, 20000, 40000])]
)
def test_axis_ticks_are_round_numbers(window, low, high, expected):
    assert window.script("return ticks(...arguments)", low, high) == pytest.approx(expected)


@pytest.mark.browser
def test_an_opened_cell_draws_its_curves_once(window):
    window.script("location.hash = '#table1_100--ed'")
    script = "return document.querySelectorAll('#table1_100--ed .charts svg').length"
    end = time.monotonic() + 10
    while window.script(script) == 0 and time.monotonic() < end:
        time.sleep(0.05)
    assert window.script(script) == 3
    window.script("document.getElementById('table1_100--ed').open = false; location.hash = ''")


@pytest.mark.browser
def test_the_table_of_contents_highlights_the_visible_section(window):
    script = "return document.querySelector('.contents a[aria-current]').textContent"
    for target, expected in (("#explorer", "Explorer"), ("#waiting", "Not run yet")):
        window.script("document.querySelector(arguments[0]).scrollIntoView()", target)
        end = time.monotonic() + 5
        while window.script(script) != expected and time.monotonic() < end:
            time.sleep(0.05)
        assert window.script(script) == expected
    window.script("scrollTo(0, 0)")


@pytest.mark.browser
def test_details_are_collapsed_until_opened(window):
    unfold(window, False)
    notes = "#experiment-table1 details.notes"
    script = f"return document.querySelector('{notes} ul').checkVisibility()"
    assert not window.script(script)
    window.click(f"{notes} summary")
    assert window.script(script)


@pytest.mark.browser
def test_a_skip_link_leads_to_the_results(window):
    """The first link on the page skips the table of contents."""
    window.script("scrollTo(0, 0); document.activeElement.blur()")
    first = "return document.querySelector('a, button, input, summary, [tabindex]').className"
    assert window.script(first) == "skip"
    window.keys(".skip", "\ue007")
    assert window.script("return document.activeElement.id") == "main"


@pytest.mark.browser
def test_a_figure_can_be_enlarged_and_closed(window):
    window.script("document.querySelector('#experiment-table1_100 .enlarge').click()")
    opened = "return document.getElementById('enlarged').open"
    assert window.script(opened)
    assert window.script("return document.querySelector('#enlarged img').alt.length") > 3
    window.click("#enlarged button")
    assert not window.script(opened)


CONTRAST = """
    const READ = { willReadFrequently: true };
    const parse = (text) => {
      const canvas = document.createElement("canvas").getContext("2d", READ);
      canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const colours = new Map();
    const rgba = (text) => colours.get(text) || colours.set(text, parse(text)).get(text);
    const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
      for (; e; e = e.parentElement) {
        const colour = rgba(getComputedStyle(e).backgroundColor);
        if (colour[3] === 255) return colour;
      }
      return [255, 255, 255, 255];
    };
    const low = [];
    for (const e of document.querySelectorAll("body *")) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || !e.checkVisibility() || /SCRIPT|STYLE|OPTION/.test(e.tagName)) continue;
      const style = getComputedStyle(e);
      const [x, y] = [rgba(e.ownerSVGElement ? style.fill : style.color), ground(e)].map(light);
      const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
      if (ratio < 4.5) low.push(`${e.tagName} ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
    }
    return [...new Set(low)].slice(0, 10);
"""


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_enough_contrast(window, theme):
    window.click(f"#theme input[value={theme}]")
    unfold(window, True)
    try:
        assert window.script(CONTRAST) == []
    finally:
        unfold(window, False)
        window.click("#theme input[value=auto]")


@pytest.mark.browser
def test_phones_get_stacked_tables_and_collapsed_contents(window):
    window.resize(390, 844)
    try:
        window.script("scrollTo(0, 0)")
        assert not window.script("return document.querySelector('.contents details').open")
        head = "return document.querySelector('#claims thead').checkVisibility()"
        assert not window.script(head)
        wide = "return document.querySelector('.ranking .strip').getBoundingClientRect().width"
        assert window.script(wide) > 250
    finally:
        window.resize(1280, 1000)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_never_scrolls_horizontally(window, width):
    window.resize(width, 844)
    unfold(window, True)
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    try:
        assert window.script(script) <= 0
    finally:
        unfold(window, False)
        window.resize(1280, 1000)


def test_the_browser_and_its_driver_are_searched_on_the_path():
    assert (missing() is None) == all(map(shutil.which, ("chromium", "chromedriver")))
