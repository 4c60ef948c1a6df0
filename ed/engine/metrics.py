"""Metrics: a JSON row per log point for machines, a line with an ETA (or a bar) for people."""

import json
import logging
import math
import os
import sys
import time
from pathlib import Path

from ed.files import read_rows, write_atomic

MOST_SHOWN = 12  # values in a line for people
logger = logging.getLogger("ed")


class Metrics:
    """Appends to metrics.jsonl. On resume, rows beyond the checkpoint are cut: none comes twice.

    Of several processes the first alone `writes`; the others only remember.
    """

    def __init__(self, folder: Path, *, total: int, start: int, tracker=None, writes: bool = True):
        self.path, self.total, self.start = folder / "metrics.jsonl", total, start
        self.rows = [row for row in read_rows(self.path) if row["step"] <= start]
        if writes:
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = open(self.path if writes else os.devnull, "a")  # noqa: SIM115, see close()
        self.tracker, self.began = tracker, time.monotonic()
        self.bar = _bar(total, start) if writes else None

    def log(self, step: int, values: dict[str, float]) -> None:
        if not values:
            return
        row = {"step": step, **values}
        if self.rows[-1:] != [row]:  # equal: killed after its last row, before it counted as done
            self.rows.append(row)
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        if self.tracker is not None:
            self.tracker.log(values, step=step)
        shown = brief(values)
        training = all(name.startswith(("train/", "time/")) for name in values)
        level = logging.INFO
        if self.bar is not None and training:
            self.bar.set_postfix_str(shown)
            level = logging.DEBUG  # the terminal has it on its bar; the log file has every line
        logger.log(level, "step %d/%d  %s  eta %s", step, self.total, shown, self.eta(step))

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def pace(self, step: int) -> float:
        """Seconds per step, since this session began."""
        return (time.monotonic() - self.began) / max(1, step - self.start)

    def eta(self, step: int) -> str:
        return duration(self.pace(step) * (self.total - step))

    def evaluated(self, step: int) -> bool:
        rows = (row for row in self.rows if row["step"] == step)
        return any(key.startswith("eval/") for row in rows for key in row)

    def summary(self, metric: str, higher_is_better: bool) -> dict:
        """The last value of every evaluated metric, and the best of the one that tables report.

        Measures count of the final model alone: asked for on the way, they may not be at the end.
        """
        last: dict[str, float] = {}
        for row in self.rows:
            kinds = ("eval/", "measure/") if row["step"] == self.total else ("eval/",)
            last |= {key: value for key, value in row.items() if key.startswith(kinds)}
        seen = [row[metric] for row in self.rows if metric in row]
        best = {metric: (max if higher_is_better else min)(seen)} if seen else {}
        return {"last": last, "best": best}

    def close(self) -> None:
        self.file.close()
        if self.bar is not None:
            self.bar.close()


def check_finite(values: dict[str, float], after: int, step: int, folder: Path) -> None:
    """Stops a run that has left the numbers, before anything of it is saved."""
    bad = [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"diverged: {', '.join(bad)} between steps {after + 1} and {step} of {folder}: "
            "nothing of this was saved. Try a smaller optimizer.lr, optimizer.clip=1, or a weaker "
            "regularizer"
        )


def brief(values: dict[str, float]) -> str:
    """Values in one line for people; machines find all of them in metrics.jsonl."""
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in values.items()
    ]
    more = [f"and {len(shown) - MOST_SHOWN} more"] if len(shown) > MOST_SHOWN else []
    return "  ".join(shown[:MOST_SHOWN] + more)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class TerminalHandler(logging.StreamHandler):
    """Lines on standard output, above a progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(self.format(record), file=sys.stdout)
        else:
            super().emit(record)


def _bar(total: int, start: int):
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)
