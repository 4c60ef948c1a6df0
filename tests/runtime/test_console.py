"""Terminal output (live view, rows, tables) and plain lines without a terminal."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from ed.engine.main import closing_facts, log_to
from ed.engine.metrics import Metrics
from ed.runtime import console as drawing
from ed.runtime.console import RunView, print_markdown, print_result, print_table, restore, track
from tests.helpers.commands import finish, start_command

WIDTH = 80
TRAINING = {"train/loss": 1.25, "train/acc": 50.0, "train/penalty": 0.0321, "time/step_s": 0.1}


@pytest.fixture
def console(monkeypatch):
    """Returns a console that records what is printed on the terminal."""
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing on a dumb terminal
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr(drawing, "terminal", lambda: console)
    return console


@pytest.fixture
def watched(console, monkeypatch):
    """Makes `console` stand in for an interactive terminal."""
    monkeypatch.setattr(drawing, "interactive", lambda: True)
    return console


def lines_of(console: Console, drawn) -> list[str]:
    lines = console.render_lines(drawn, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def shows_cursor(printed: str) -> bool:
    """Returns whether the cursor was hidden and then shown again."""
    return -1 < printed.rfind("\x1b[?25l") < printed.rfind("\x1b[?25h")


def new_view(**settings) -> RunView:
    return RunView(1000, 0, metric="eval/acc", **settings)


def still_view(console: Console, **settings) -> RunView:
    """Returns a view without live lines, so that only its rows are recorded."""
    view = new_view(**settings)
    view.close()
    console.export_text(clear=True)
    return view


@pytest.mark.parametrize("extra", [0, 20])
def test_live_view_has_two_lines_that_fit_the_terminal(console, extra):
    view = new_view(labels={"train/penalty": "ED"})
    view.advance(420, "0:01:02")
    view.show(420, TRAINING | {f"train/another_{i}": 1.0 for i in range(extra)})
    bar, numbers = lines_of(console, view.draw())
    view.close()
    assert max(len(bar), len(numbers)) <= WIDTH
    assert "42%" in bar
    assert "420/1,000" in bar
    assert "eta 0:01:02" in bar
    assert numbers.split()[:6] == ["loss", "1.25", "accuracy", "50", "ED", "0.0321"]


def test_current_activity_is_shown_until_its_result(console):
    view = new_view()
    view.begin("measuring ed")
    assert "measuring ed" in lines_of(console, view.draw())[1]
    view.show(1, {"measure/ed": 0.1})
    assert "measuring" not in lines_of(console, view.draw())[1]
    view.close()


def test_columns_do_not_move(console):
    view = new_view()
    places = []
    for loss in (1.25, 0.012345, 12.0):
        view.show(1, TRAINING | {"train/loss": loss})
        places.append(lines_of(console, view.draw())[1].index("accuracy"))
    view.close()
    assert len(set(places)) == 1


@pytest.mark.parametrize(
    ("higher_is_better", "best", "marked"),
    [(True, None, [10, 20]), (False, None, [10, 30]), (True, 55.0, [20])],
)
def test_evaluation_rows_mark_the_best_so_far(console, higher_is_better, best, marked):
    view = still_view(console, higher_is_better=higher_is_better, best=best)
    for step, value in ((10, 50.0), (20, 60.0), (30, 40.0)):
        view.show(step, {"eval/loss": 1.0, "eval/acc": value})
    header, *rows = console.export_text().splitlines()
    assert header.split() == ["step", "accuracy", "loss"]
    assert len({len(row) for row in rows}) == 1  # rows are aligned
    assert [int(row.split()[1]) for row in rows if row.startswith("★")] == marked


def test_new_metrics_start_a_new_header(console):
    view = still_view(console)
    view.show(10, {"eval/acc": 50.0})
    view.show(10, {f"measure/sharpness_{i}": 1.0 for i in range(20)})
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "★", "step", "10"]
    assert max(map(len, lines)) <= WIDTH


def test_closing_the_view_shows_the_cursor(console):
    view = new_view()
    view.show(1, TRAINING)
    restore()  # called before an error is printed
    assert shows_cursor(console.file.getvalue())
    view.close()  # closing again is harmless


@pytest.mark.parametrize("target", ["ed.tasks.cifar10.Cifar10", "mine.tasks.Disc"])
def test_the_suggested_command_works_for_classes_outside_ed(tmp_path, target):
    cfg = OmegaConf.create({"system": {"keep_checkpoint": True}, "task": {"_target_": target}})
    task = SimpleNamespace(num_examples=10, has_logits=True)
    facts = closing_facts(cfg, task, tmp_path, {"last": {}, "best": {}})
    assert facts["next"].endswith(" --trust") == target.startswith("mine.")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("degree", [None, 0.25])
def test_final_panel_fits_and_suggests_measuring(console, tmp_path, keep, degree):
    cfg = OmegaConf.create({"system": {"keep_checkpoint": keep}})
    task = SimpleNamespace(num_examples=10, has_logits=True)
    last = {"eval/acc": 80.0} | ({} if degree is None else {"measure/ed": degree})
    summary = {"last": last, "best": {"eval/acc": 81.5}, "seconds": 3700.0}
    folder = tmp_path.relative_to("/") / "seed0"
    print_result("done", closing_facts(cfg, task, folder, summary))
    text = console.export_text()
    assert "done" in text
    assert "81.5" in text
    assert ("not measured" in text) == (degree is None)
    assert ("measure.py" in text) == (keep and degree is None)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_tables_print_brackets_literally(console):
    print_table([["key", "state"], ["betas=[a]", ("✓ done", "green")]])
    text = console.export_text()
    assert "betas=[a]" in text
    print_table([["optimizer.weight_decay"] * 5, ["0.1"] * 5])
    assert "weight_decay" in console.export_text()
    assert "✓ done" in text


def test_wide_markdown_tables_are_replaced_by_a_sentence(console):
    narrow = "| a | b |\n| --- | --- |\n| 1 | 2 [^1] |\n"
    wide = f"| {' | '.join(['a long heading'] * 20)} |\n" * 3
    print_markdown(f"# Title\n\n{narrow}\n{wide}\n[^1]: a footnote\n")
    text = console.export_text()
    assert "2 (1)" in text
    assert "20 columns" in text
    assert "1 a footnote" in text
    assert "[^" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_markdown_tables_cut_nothing_off(console):
    header = "| | paper | ours (n) | difference [95 % interval] | verdict | notes |\n"
    header += "| --- " * 6 + "|\n"
    label = "ED without anchors (efficiency configuration)"
    row = f"| {label} | 90.00 ± 0.60 | 90.44 ± 0.75 (3) | +0.44 [-1.1, +2.0] | match | [^1] |\n"
    row += "| SAM | 87.85 ± 1.27 | - | | pending 0 of 3 | [^2] |\n"
    print_markdown(header + row)
    text = console.export_text()
    assert "…" not in text
    for whole in ("configuration)", "90.00 ± 0.60", "difference", "notes"):
        assert whole in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_narrow_columns_of_markdown_tables_break_words(console):
    names = [f"{letter * 15}" for letter in "abcdefgh"]
    print_markdown(f"| {' | '.join(names)} |\n{'| --- ' * 8}|\n")
    text = console.export_text()
    assert [text.count(letter) for letter in "abcdefgh"] == [15] * 8
    assert max(map(len, text.splitlines())) <= WIDTH


def test_progress_bar_needs_a_terminal(capsys):
    assert list(track(range(3), "decoding")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_progress_bar_is_closed_after_the_loop(watched):
    assert list(track(iter("abc"), "decoding", total=3)) == list("abc")
    assert "decoding" in watched.file.getvalue()
    assert shows_cursor(watched.file.getvalue())


def test_progress_bar_of_an_unfinished_loop_is_closed(watched):
    rows = track(iter("abc"), "decoding", total=3)
    next(rows)
    restore()
    assert shows_cursor(watched.file.getvalue())


def test_metrics_are_plain_lines_without_a_terminal(tmp_path, capsys):
    log_to(tmp_path / "train.log")
    metrics = Metrics(tmp_path, total=4, start=0)
    metrics.log(2, {"train/loss": 1.5})
    metrics.advance(2)
    metrics.close()
    log_to(None)
    assert capsys.readouterr().out.startswith("step 2/4  train/loss 1.5  eta ")


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_draws(monkeypatch, name):
    terminal = SimpleNamespace(isatty=lambda: True, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    for key in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert drawing.interactive()
    monkeypatch.setenv(name, "1")
    assert not drawing.interactive()


@pytest.mark.parametrize(
    ("encoding", "term"), [("iso-8859-1", "xterm"), ("utf-8", "dumb"), (None, "xterm")]
)
def test_unsupported_terminals_get_plain_lines(monkeypatch, encoding, term):
    terminal = SimpleNamespace(isatty=lambda: True, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    assert not drawing.interactive()


def test_rich_is_imported_lazily():
    code = "import sys, ed, ed.runtime.console, ed.engine.errors; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def read_all(descriptor: int, into: list[bytes]) -> None:
    try:
        while data := os.read(descriptor, 4096):
            into.append(data)
    except OSError:  # raised on Linux when the other end is closed
        pass


def test_a_run_in_a_terminal_shows_a_header_rows_and_a_panel(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    small = ["debug=tiny", "task.batch_size=500", "model.depth=1", "model.width=32"]
    words = ["train.py", *small, "regularizer=ed", f"system.run_dir={tmp_path / 'run'}"]
    env = {"TERM": "xterm", "RANK": "0", "PYTHONIOENCODING": "utf-8"}
    env |= {"COLUMNS": str(WIDTH), "LINES": "40"}  # rich prefers these to the size of the terminal
    child = start_command(words, env=env, outputs=(theirs, theirs))
    os.close(theirs)
    pieces: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, pieces))
    reader.start()
    assert finish(child) == 0
    reader.join()
    text = b"".join(pieces).decode()
    for word in ("cifar10_mini", "vit_micro", "λ = 7", "cpu", "eta 0:", "★", "done in", "--run"):
        assert word in text
    assert "train/loss" not in text  # plain lines go to train.log only
    assert "train/loss" in (tmp_path / "run" / "train.log").read_text()
    assert shows_cursor(text)
