"""The report page as tests see it: a parser, a small folder of experiments, browser actions."""

from html.parser import HTMLParser
from pathlib import Path

from ed.analysis.curves import write_curves
from ed.analysis.spec import EXPERIMENTS
from ed.analysis.store import CSV, CURVES
from ed.runtime.runs import Record

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


def write_small(root: Path) -> Path:
    """Writes an experiment with a finished run and a failed one; returns `root`."""
    (root / "small.yaml").write_text(SPEC)
    results = root / "results" / "small"
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
        config={
            "model": {"width": 8},
            "seed": 0,
            "task": {"data": "<b>"},
            "system": {"workers": 99},
        },
        meta={"sessions": [session]},
        done={"last": last, "best": {"eval/acc": 92.5}, "steps": 40, "seconds": 7.5},
        failure="",
        history=lambda: metrics,
    )
    write_curves(results / CURVES, {("plain", 0): record})
    return root


def unfold(window, opened: bool) -> None:
    """Expands or collapses all `<details>` elements on the page."""
    script = "document.querySelectorAll('main details').forEach(f => { f.open = arguments[0]; })"
    window.script(script, opened)
