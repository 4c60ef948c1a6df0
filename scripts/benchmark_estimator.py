"""Compares the adaptive estimator with the paper's protocol: passes, ED, error and time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from benchmark_cases import CUDA, DEVICE, Bert, Case, Synthetic, tokens
from torch import Tensor

import ed
from ed.analysis.markdown import plain_table
from ed.core.estimator import points_per_chunk
from ed.core.field import Field
from ed.core.result import Estimate, with_error
from ed.tasks.pnn import target_map, uniform_inputs

HEADER = [
    "network",
    "ED, fixed",
    "ED, adaptive",
    "passes, fixed",
    "passes, adaptive",
    "share",
    "s, fixed",
    "s, adaptive",
]
LEGEND = (
    "Fixed: the paper's protocol for measuring, 200 nodes on each path and K = 40. Adaptive: "
    '`ed.estimate(..., resolution="auto")`. Both use the same paths, without autocast, and ED is '
    "given with its standard error. Passes are evaluations of the network at one point. Networks "
    "have random weights and inputs."
)
MINILM = Case(
    "MiniLM, length 128", partial(Bert, layers=6, width=384, heads=12), tokens(128), 2, 32, 16
)
POLYNOMIAL = "polynomial map of degree 5"


@dataclass(frozen=True)
class Comparison:
    network: str
    fixed: Estimate
    adaptive: Estimate
    seconds: tuple[float, float]  # fixed, adaptive

    def cells(self) -> list[str]:
        both = (self.fixed, self.adaptive)
        return [
            self.network,
            *(with_error(found.mean, found.standard_error) for found in both),
            *(f"{found.passes:,}" for found in both),
            f"{100 * self.adaptive.passes / self.fixed.passes:.1f} %",
            *(f"{seconds:.2f}" for seconds in self.seconds),
        ]


def networks(cases: dict[str, Case]) -> dict[str, Callable[[], Field]]:
    """Returns functions that build fields, by name."""
    kinds = [cases["vit_tiny"], cases["resnet18"], MINILM if CUDA else cases["bert"]]
    kinds.append(cases["procgen"])
    return {case.name: partial(network, case) for case in kinds} | {POLYNOMIAL: polynomial}


def network(case: Case) -> Field:
    task, model = Synthetic(case, 512 if CUDA else 32), case.build().to(DEVICE).eval()
    whole = task.field(model, task.batch)
    return replace(whole, forward=lambda *given: whole.forward(*given)[:, : case.classes])


def polynomial() -> Field:
    inputs = uniform_inputs(512, torch.Generator().manual_seed(0))
    return Field.of(partial(target_map, 3), inputs.float().to(DEVICE))


@torch.no_grad()
def compare(name: str, field: Field, pairs: int) -> Comparison:
    found, seconds = [], []
    how = {"softmax": name != POLYNOMIAL}
    for resolution in (200, "auto"):
        ed.estimate(field, pairs=pairs // 10 or 1, resolution=resolution, **how)  # warm-up
        start = time.perf_counter()
        found.append(ed.estimate(field, pairs=pairs, resolution=resolution, **how))
        str(found[-1])  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return Comparison(name, *found, tuple(seconds))


@torch.no_grad()
def throughput(case: Case) -> str:
    """Times the paper's protocol against its forward passes alone, in equal chunks."""
    model, images = case.build().to(DEVICE).eval(), case.inputs(512)
    pairs, budget = (400, 8.0) if CUDA else (10, 0.5)
    points = pairs * 200

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            return model(x)

    # as in the estimator: chunks of whole paths within the memory budget
    chunk = min(points_per_chunk(Field.of(forward, images), budget) // 200 * 200, points)
    batch = images.repeat(chunk // len(images) + 1, 1, 1, 1)[:chunk]

    def bare() -> None:
        for start in range(0, points, chunk):
            forward(batch[: points - start])

    def estimate() -> None:
        ed.estimate(forward, images, pairs=pairs, memory_gib=budget)

    times = {}
    for name, function in (("bare", bare), ("estimate", estimate)):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        function()
        start = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
        times[name] = time.perf_counter() - start
    used = (torch.cuda.max_memory_allocated() - before) / 2**30 if CUDA else float("nan")
    name = f"{case.name}, bf16 autocast" if CUDA else case.name
    return (
        f"{name}: the fixed protocol with {pairs} paths takes {times['estimate']:.2f} s, its "
        f"forward passes alone {times['bare']:.2f} s: "
        f"{100 * times['bare'] / times['estimate']:.0f} % of their throughput"
        + (f"; {used:.2f} of {budget:.0f} GiB used." if CUDA else ".")
    )


def estimator_text(rows: list[Comparison], speed: str, machine: str) -> str:
    parts = [
        "# Estimators of ED",
        f"{machine}. Written by `python scripts/benchmark.py --estimator`.",
        LEGEND,
        plain_table(HEADER, [row.cells() for row in rows]),
        speed,
    ]
    return "\n\n".join(parts) + "\n"
