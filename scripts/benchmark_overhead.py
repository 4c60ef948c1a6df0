"""Builds the overhead table: step times relative to the plain step, beside the paper's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from benchmark_cases import RIVALS, Case, Synthetic, penalty

import ed
from ed.analysis.markdown import plain_table
from ed.regularizers.base import Regularizer
from ed.regularizers.ed import EDRegularizer

EFFICIENCY, PERFORMANCE, PCA = "ED (efficiency)", "ED (performance)", "ED with PCA 3"
LEGEND = (
    "Each ratio is the step time over the plain step time of the same network and batch size B. "
    "ED (efficiency): r = 4, K = 3, B / 2 pairs. ED (performance): r = 15, K = 7, B pairs. "
    "ED with PCA 3: efficiency with three principal components. Labels are anchored, except for "
    "Procgen, which has none. Inputs and labels are random."
)


@dataclass(frozen=True)
class PaperTime:
    """The paper's times (s) without and with ED, and our most similar case and method."""

    setting: str
    case: str
    method: str
    plain: float
    ed: float


PAPER = (  # from its section "Computational Efficiency Analysis"
    PaperTime("CIFAR-10, B = 256, per epoch", "vit_tiny", EFFICIENCY, 6.14, 9.75),
    PaperTime("CLIP fine-tuning, B = 512, per iteration", "vit_b32", PCA, 0.44, 0.90),
)


def performance(case: Case) -> EDRegularizer:
    """Returns ED in the paper's performance configuration, with one pair per example."""
    own = {"pairs": case.batch, "anchored": case.anchored}
    return EDRegularizer(2.0, ed.ChebyshevNodes(), **own, resolution=15, degree=7)


METHODS: dict[str, Callable[[Case], Regularizer]] = {
    EFFICIENCY: lambda case: penalty(case, None),
    PERFORMANCE: performance,
    PCA: lambda case: penalty(case, 3),
    "mixup": lambda case: RIVALS["mixup"](),
    "SAM": lambda case: RIVALS["sam"](),
    "ASAM": lambda case: RIVALS["asam"](),
    "Jacobian": lambda case: RIVALS["jacobian"](),
}
Timer = Callable[[Case, Regularizer], float]  # seconds per step


@dataclass
class Overhead:
    """The step times of one network.

    Attributes:
        plain: seconds of the plain step; None if it could not run.
        ratios: step time relative to the plain step, by method.
        missing: the reason why a method could not run; has only "plain" if the plain step failed.
    """

    case: Case
    plain: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def time_methods(case: Case, timer: Timer) -> Overhead:
    """Times every method on one network, and records why a method could not run."""
    row = Overhead(case)
    plain = time_step(case, Regularizer(), timer)
    if isinstance(plain, str):
        row.missing["plain"] = plain
        return row
    row.plain = plain
    for method, make in METHODS.items():
        seconds = time_step(case, make(case), timer)
        if isinstance(seconds, str):
            row.missing[method] = seconds
        else:
            row.ratios[method] = seconds / plain
    return row


def time_step(case: Case, regularizer: Regularizer, timer: Timer) -> float | str:
    """Returns the seconds per step, or the reason why the step could not run."""
    try:
        regularizer.check(Synthetic(case, case.batch))
    except ValueError as error:
        return str(error).partition(";")[0]  # drops the remedy
    try:
        return timer(case, regularizer)
    except ImportError as error:
        return f"needs the package {error.name}" if error.name else str(error)
    except torch.OutOfMemoryError:
        return "out of GPU memory"


def overhead_text(rows: dict[str, Overhead], machine: str) -> str:
    """Renders the Markdown file; `rows` is keyed by case."""
    parts = [
        "# Overhead of a training step",
        f"{machine}. Written by `python scripts/benchmark.py --table`.",
        LEGEND,
        plain_table(
            ["network", "B", "plain, ms", *METHODS], [_cells(row) for row in rows.values()]
        ),
        "## Comparison with the paper",
        "The paper times whole epochs and iterations on its own machine, and we time single steps, "
        "so only the ratios are comparable.",
        plain_table(
            ["paper", "plain, s", "ED, s", "ED / plain", "our network", "method", "our ratio"],
            [_beside(paper, rows[paper.case]) for paper in PAPER if paper.case in rows],
        ),
    ]
    missing = [
        f"- {row.case.name}, {method}: {reason}"
        for row in rows.values()
        for method, reason in row.missing.items()
    ]
    if missing:
        parts += ["## Not run", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def _cells(row: Overhead) -> list[str]:
    plain = "not run" if row.plain is None else f"{1000 * row.plain:.2f}"
    return [row.case.name, str(row.case.batch), plain, *(_ratio(row, name) for name in METHODS)]


def _beside(paper: PaperTime, row: Overhead) -> list[str]:
    theirs = [f"{paper.plain:.2f}", f"{paper.ed:.2f}", f"{paper.ed / paper.plain:.2f}"]
    return [paper.setting, *theirs, row.case.name, paper.method, _ratio(row, paper.method)]


def _ratio(row: Overhead, method: str) -> str:
    return f"{row.ratios[method]:.2f}" if method in row.ratios else "not run"
