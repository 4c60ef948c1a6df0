"""Writes metrics to metrics.jsonl and shows them as log lines or in a live view."""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from pathlib import Path

from ed.engine.checkpoint import check_exists
from ed.runtime.console import duration, interactive, number, plain_level, print_line
from ed.runtime.files import open_in_run, read_rows, write_atomic
from ed.runtime.runs import DIVERGED, METRICS

MOST_SHOWN = 12  # maximum number of values per printed line
MARKS = 40  # recent rows from which the pace is computed
logger = logging.getLogger("ed")


class Metrics:
    """Appends rows to metrics.jsonl; on resume, drops the rows after the checkpoint.

    Args:
        saved: the checkpoint's `text()`, which replaces a damaged file; None: no checkpoint.
        writes: False on all ranks but 0; these keep the rows only in memory.

    Attributes:
        view: shows the metrics live on a terminal; see `ed.runtime.console.RunView`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        start: int,
        saved: str | None = None,
        tracker=None,
        writes: bool = True,
    ):
        self.path, self.total, self.start = folder / METRICS, total, start
        self.rows = self._resumed(saved)
        if writes:
            write_atomic(self.path, self.text())
        self.file = open(self.path if writes else os.devnull, "a")  # noqa: SIM115, see close()
        self.tracker, self.view = tracker, None
        self.marks = deque([(start, time.monotonic())], maxlen=MARKS)  # (step, time) of rows

    def _resumed(self, saved: str | None) -> list[dict]:
        """Returns the rows up to the checkpoint; restores them from it if the file is damaged."""
        try:
            rows = [row for row in read_rows(self.path) if row["step"] <= self.start]
            damage = None
        except (ValueError, KeyError, TypeError) as error:
            rows, damage = [], f"a line is not a row of metrics ({error})"
        if saved is None:
            return rows
        kept = [json.loads(line) for line in saved.splitlines()]
        if damage is None and _text(rows[: len(kept)]) != saved:
            damage = f"its {len(rows)} rows differ from the checkpoint's {len(kept)}"
        if damage:
            logger.warning("%s is damaged: %s; restored from the checkpoint", self.path, damage)
            return kept
        # after the final checkpoint, a run only measures the trained model
        later = rows[len(kept) :] if self.start == self.total else []
        return kept + [row for row in later if _is_measured(row)]

    def text(self) -> str:
        """Returns the contents of the file, for checkpoints."""
        return _text(self.rows)

    def sync(self) -> None:
        """Flushes all rows to disk."""
        self._write("", sync=True)

    def _write(self, text: str, *, sync: bool = False) -> None:
        try:
            self.file.write(text)
            self.file.flush()
            if sync:
                os.fsync(self.file.fileno())
        except OSError as error:  # a full-disk error has no file name
            error.filename = error.filename or str(self.path)
            raise

    def log(self, step: int, values: dict[str, float]) -> None:
        if not values:
            return
        if step > self.marks[-1][0]:
            self.marks.append((step, time.monotonic()))
        row = {"step": step, **values}
        if self.rows[-1:] != [row]:  # already logged if the run was killed before it wrote DONE
            self.rows.append(row)
            self._write(json.dumps(row) + "\n")
        if self.tracker is not None:
            check_exists(self.path.parent)  # trackers would recreate it or fail in a thread
            self.tracker.log(values, step=step)
        level = logging.INFO
        if self.view is not None:
            self.view.show(step, values)
            level = plain_level()
        logger.log(level, "step %d/%d  %s  eta %s", step, self.total, brief(values), self.eta(step))

    def advance(self, step: int) -> None:
        if self.view is not None:
            self.view.advance(step, self.eta(step))

    def begin(self, what: str) -> None:
        """Shows the current activity in the live view, until the next row."""
        if self.view is not None:
            self.view.begin(what)

    def pace(self, step: int) -> float:
        """Returns the recent seconds per step, with evaluation.

        Averaging over the newer half of the marks leaves out the first steps, which compile.
        """
        earlier, then = self.marks[(len(self.marks) - 1) // 2]
        return (time.monotonic() - then) / max(1, step - earlier)

    def eta(self, step: int) -> str:
        return duration(self.pace(step) * (self.total - step))

    def evaluated(self, step: int) -> bool:
        rows = (row for row in self.rows if row["step"] == step)
        return any(key.startswith("eval/") for row in rows for key in row)

    def summary(self, metric: str, higher_is_better: bool) -> dict:
        """Returns the last value of every evaluation metric and the best value of `metric`."""
        last = {k: v for row in self.rows for k, v in row.items() if k.startswith("eval/")}
        best = self.best(metric, higher_is_better)
        return {"last": last, "best": {} if best is None else {metric: best}}

    def best(self, metric: str, higher_is_better: bool) -> float | None:
        seen = [row[metric] for row in self.rows if metric in row]
        return (max if higher_is_better else min)(seen, default=None)

    def close(self) -> None:
        if self.view is not None:
            self.view.close()
        with contextlib.suppress(OSError):  # already raised when the row was written
            self.file.close()


def _text(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _is_measured(row: dict) -> bool:
    return all(key == "step" or key.startswith("measure/") for key in row)


def check_finite(values: dict[str, float], after: int, step: int, folder: Path) -> None:
    """Raises FloatingPointError if any value is NaN or infinite."""
    bad = [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{DIVERGED}{', '.join(bad)} between steps {after + 1} and {step} of {folder}; not "
            "saved. Try a smaller optimizer.lr, optimizer.max_grad_norm=1 or a weaker regularizer"
        )


def brief(values: dict[str, float]) -> str:
    """Formats up to MOST_SHOWN values as one line."""
    shown = [f"{name} {number(value)}" for name, value in values.items()]
    more = [f"and {len(shown) - MOST_SHOWN} more"] if len(shown) > MOST_SHOWN else []
    return "  ".join(shown[:MOST_SHOWN] + more)


class TerminalHandler(logging.StreamHandler):
    """Prints to standard output, above the live view if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if interactive():
            print_line(self.format(record), record.levelno)
        else:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores write errors, e.g. after `... | head`; train.log has the same lines."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class LogFile(logging.FileHandler):
    """Writes train.log; write errors do not stop the run."""

    def _open(self):
        return open_in_run(Path(self.baseFilename), self.mode)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores errors: a full disk is reported when metrics or checkpoints are written."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
