"""Terminal output: the header, live view and closing panel of a run; tables; progress bars.

Rich is imported on first use, and only if the output is a terminal; callers print plain lines to
pipes and log files. All drawing happens in the calling thread, at most a few times per second.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table

REDRAW_SECONDS = 0.25
WIDEST = 100  # columns of the live view; wider lines are hard to read
LABELS = {"acc": "accuracy", "ed": "ED", "ed_se": "± std. error"}
BEST = "★"  # marks the best evaluation so far
MOST_SQUEEZED = 2.0  # a table up to twice as wide as the terminal is readable with wrapped cells
WORDS = re.compile(r"(?<!±) (?!±)")
CROPPED = {"no_wrap": True, "overflow": "ellipsis", "crop": True}

_displays: weakref.WeakSet[Live] = weakref.WeakSet()


def is_first() -> bool:
    """Returns whether this is rank 0; works before the processes have joined."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def interactive() -> bool:
    """Returns whether standard output is a terminal that can redraw lines and show Unicode.

    With several processes, only rank 0 is interactive; the others print nothing.
    """
    if not is_first():
        return False
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # Rich may wrap stdout
    encoding = (getattr(stream, "encoding", None) or "").lower()
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")


def replace_unencodable() -> None:
    """Makes standard output print ? for characters that it cannot encode, such as ± in ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # notebooks and tests may replace it
        sys.stdout.reconfigure(errors="replace")


def plain_level() -> int:
    """Returns the level of plain log lines: DEBUG (log file only) on a terminal, else INFO."""
    return logging.DEBUG if interactive() else logging.INFO


@functools.cache
def terminal() -> Console:
    """Returns the console, which is shared so that lines and bars do not overwrite each other."""
    from rich.console import Console

    return Console(highlight=False)


def print_facts(facts: Mapping[str, str]) -> None:
    """Prints names and values, one pair per line and aligned."""
    for name, value in facts.items():
        terminal().print(f"  [dim]{name:<11}  [/]{_escape(value)}", soft_wrap=True)


def print_line(text: str, level: int = logging.INFO) -> None:
    """Prints a log line above any live view."""
    style = {logging.WARNING: "yellow", logging.ERROR: "red"}.get(level)
    terminal().print(text, style=style, markup=False, soft_wrap=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows a message while the context is active."""
    if not interactive():
        yield
        return
    from rich.live import Live

    with _registered(Live(f"[dim]  {what} ...[/]", console=terminal(), **_live())):
        yield


def print_result(title: str, facts: Mapping[str, str]) -> None:
    """Prints the closing panel of a run, without side borders so that lines can be copied."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(f"[dim]{name}[/]", _escape(value))
    how = {"title_align": "left", "box": box.HORIZONTALS, "border_style": "green"}
    width = min(terminal().width, WIDEST)
    terminal().print(Panel(grid, title=f"[bold green]{title}[/]", width=width, **how))


def print_markdown(text: str) -> None:
    """Prints Markdown with formatted tables; footnotes become a numbered list."""
    from rich.markdown import Markdown, TableElement

    class Fitted(TableElement):
        def __rich_console__(self, console, options):
            for table in super().__rich_console__(console, options):
                _set_widths(table, options.max_width)
                yield table

    class Page(Markdown):
        elements = Markdown.elements | {"table_open": Fitted}

    text = re.sub(r"^\[\^(\d+)\]: ", r"\1. ", text, flags=re.MULTILINE)
    text = re.sub(r"\[\^(\d+)\]", r"(\1)", text)
    width = terminal().width
    text = re.sub(r"(^\|.*\n?)+", lambda found: _fitting(found[0], width), text, flags=re.M)
    terminal().print(Page(text))


def _set_widths(table: Table, width: int) -> None:
    """Sets column widths so that nothing is cut off, and words and numbers with ± stay whole.

    If these do not fit, the widest columns wrap within words.
    """
    texts = [[str(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    full = [max(map(len, column)) for column in texts]
    widths = [max(len(word) for text in column for word in WORDS.split(text)) for column in texts]
    room = width - sum(widths) - 2 * len(widths)  # two spaces between columns
    for _ in range(-room):
        widths[widths.index(max(widths))] -= 1
    places = sorted(range(len(widths)), key=lambda place: full[place] - widths[place])
    for left, place in zip(range(len(places), 0, -1), places, strict=True):  # equal shares
        extra = min(full[place] - widths[place], max(room, 0) // left)
        widths[place] += extra
        room -= extra
    for column, own in zip(table.columns, widths, strict=True):
        column.overflow, column.width = "fold", max(own, 1)


def _fitting(table: str, width: int) -> str:
    """Returns a Markdown table, or a note if it is too wide for the terminal."""
    rows = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    needed = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=False))
    if needed <= MOST_SQUEEZED * width:
        return table
    return f"*A table of {len(rows[0])} columns does not fit; to scroll, add* `| less -S`\n"


Cell = str | tuple[str, str]  # text, or (text, style)


def print_table(rows: Sequence[Sequence[Cell]]) -> None:
    """Prints a table; the first row is the header, where names wrap before . and /."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, header_style="bold")
    for name in rows[0]:
        table.add_column(Text(re.sub(r"(?<=\w)([./])", r"\n\1", name)), overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(c) if isinstance(c, str) else Text(*c) for c in row))
    terminal().print(table)


def track(items: Iterable, what: str, *, total: int | None = None) -> Iterator:
    """Yields the items; shows a progress bar if the output is a terminal."""
    if not interactive():
        yield from items
        return
    from rich.progress import Progress

    with Progress(console=terminal(), transient=True, auto_refresh=False) as progress:
        _registered(progress.live)
        bar, drawn = progress.add_task(what, total=len(items) if total is None else total), 0.0
        for item in items:
            yield item
            progress.advance(bar)
            if time.monotonic() - drawn >= REDRAW_SECONDS:
                progress.refresh()
                drawn = time.monotonic()


def label(name: str) -> str:
    """Returns the display name of a metric, e.g. "accuracy" for eval/acc."""
    last = name.partition("/")[2] or name
    return LABELS.get(last, last)


def duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class RunView:
    """The live view of a training run: a progress bar and the latest training metrics.

    Evaluations are printed as rows above it.

    Args:
        metric: the metric that decides which evaluation is marked as the best.
        best: the best value from earlier sessions.
        labels: display names of training metrics, in place of `label(name)`.
    """

    def __init__(
        self,
        total: int,
        start: int,
        *,
        metric: str,
        higher_is_better: bool = True,
        best: float | None = None,
        labels: Mapping[str, str] | None = None,
    ):
        from rich.live import Live

        self.total, self.step, self.eta = total, start, "?"
        self.metric, self.sign, self.best = metric, 1 if higher_is_better else -1, best
        self.labels, self.columns = labels or {}, []
        self.console, self.training, self.activity = terminal(), {}, ""
        self.drawn = time.monotonic()
        self.live = _registered(Live(get_renderable=self.draw, console=self.console, **_live()))
        self.live.start(refresh=True)

    def advance(self, step: int, eta: str) -> None:
        self.step, self.eta, self.activity = step, eta, ""
        if time.monotonic() - self.drawn >= REDRAW_SECONDS:
            self.refresh()

    def refresh(self) -> None:
        self.drawn = time.monotonic()
        self.live.refresh()

    def begin(self, what: str) -> None:
        """Shows the current activity until the next row or step."""
        self.activity = f"{what} ..."
        self.refresh()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Shows training metrics in the live view and prints other metrics as a row."""
        self.activity = ""
        if all(name.startswith(("train/", "time/")) for name in values):
            self.training = dict(values)
            self.refresh()
        else:
            self._print_row(step, values)

    def draw(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = min(self.console.width, WIDEST)
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.width = width
        for ratio in (1, None, None, None):
            bar.add_column(ratio=ratio, no_wrap=True, justify="right")
        share = self.step / self.total if self.total else 1.0
        steps = f"step {self.step:,}/{self.total:,}"
        done = ProgressBar(total=self.total or 1, completed=self.step if self.total else 1)
        bar.add_row(done, f"{share:4.0%}", steps, f"eta {self.eta}")
        numbers = Text(self._training_line(), no_wrap=True, overflow="ellipsis")
        numbers.truncate(width, overflow="ellipsis")
        return Group(bar, numbers)

    def _training_line(self) -> str:
        """Formats the training metrics with fixed widths, so that they do not move."""
        if self.activity or not self.training:
            return self.activity or "first steps ..."
        shown = {name: v for name, v in self.training.items() if name != "time/step_s"}
        words = [f"{self._label(name)} {number(v):<8}" for name, v in shown.items()]
        pace = self.training.get("time/step_s")
        return "  ".join(words + ([] if pace is None else [f"{pace:.3g} s/step"]))

    def _label(self, name: str) -> str:
        return self.labels.get(name) or label(name)

    def _print_row(self, step: int, values: Mapping[str, float]) -> None:
        columns = sorted(values, key=lambda name: name != self.metric)
        widths = {name: max(8, len(label(name))) for name in columns}
        steps = max(len(f"{self.total:,}"), 6)
        if columns != self.columns:
            self.columns = columns
            names = "  ".join(f"{label(name):>{widths[name]}}" for name in columns)
            self.console.print(f"  [dim]{'step':>{steps}}  {_escape(names)}[/]", **CROPPED)
        numbers = "  ".join(f"{number(values[name]):>{widths[name]}}" for name in columns)
        mark = BEST if self._is_best(values) else " "
        self.console.print(f"[green]{mark}[/] {step:>{steps},}  {numbers}", **CROPPED)

    def _is_best(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.metric)
        if value is None or (self.best is not None and self.sign * (value - self.best) <= 0):
            return False
        self.best = value
        return True

    def close(self) -> None:
        self.live.stop()


def restore() -> None:
    """Stops all live displays and restores the cursor, e.g. before printing an error."""
    for live in list(_displays):
        live.stop()


def _registered(live: Live) -> Live:
    _displays.add(live)
    return live


def _live() -> dict[str, bool]:
    """Returns settings for rich.Live: no thread; stderr is redirected only on a terminal."""
    return {"transient": True, "auto_refresh": False, "redirect_stderr": sys.stderr.isatty()}


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
