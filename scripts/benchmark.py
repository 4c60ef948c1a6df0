"""Times training steps: python scripts/benchmark.py [--out FILE]

For each network, this times an ordinary eager loop, the ED step, and the plain step, both at batch
size B and with as many inputs as the ED step; for ViT-Tiny also the steps of the other methods.
With --table, it times all methods on all networks, and compares ED's overhead with the paper's.
With --kernels, it compares our kernels with torch's operators. With --estimator, it compares the
adaptive estimator with the paper's protocol. On a CPU, it uses smaller sizes.
"""

import argparse
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from benchmark_cases import CPU_CASES, CUDA, DEVICE, GPU_CASES, RIVALS, Case, Synthetic, penalty
from benchmark_estimator import compare, estimator_text, networks, throughput
from benchmark_kernels import SHAPES, kernels_text, time_shape
from benchmark_overhead import Overhead, overhead_text, time_methods
from benchmark_tables import NETWORK, time_tables
from torch.utils.flop_counter import FlopCounterMode

import ed
from ed.analysis.steps import STEPS as STEPS_FILE
from ed.engine.errors import or_explain
from ed.engine.main import wants_channels_last
from ed.engine.optimizer import AdamW
from ed.engine.run import commit
from ed.engine.step import TrainStep
from ed.regularizers.base import Regularizer
from ed.runtime.files import APP, write_atomic

SPEED = APP / "experiments" / "results" / "speed"
OVERHEAD, KERNELS = SPEED / "overhead.md", SPEED / "kernels.md"
BLOCKS, STEPS = (5, 20) if CUDA else (3, 1)  # timed blocks (reports the median), steps per block
BLOCK_SECONDS = 0.5  # fewer steps per block if they would take longer


def measure(advance: Callable[[], None]) -> tuple[float, float]:
    """Returns median seconds per call and peak memory in GiB (CUDA only), after a warm-up."""
    for _ in range(6 if CUDA else 1):
        advance()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    steps = max(1, min(STEPS, int(BLOCK_SECONDS / seconds_per_call(advance, 1))))
    seconds = [seconds_per_call(advance, steps) for _ in range(BLOCKS)]
    memory = torch.cuda.max_memory_reserved() / 2**30 if CUDA else float("nan")
    return statistics.median(seconds), memory


def seconds_per_call(function: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if CUDA:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def our_step(
    case: Case, batch_size: int, regularizer: Regularizer, *, kernels: bool | str = CUDA and "auto"
) -> Callable[[], None]:
    """Builds a training step of the engine, with the default settings for this device."""
    clear()
    task, model = Synthetic(case, batch_size), case.build().to(DEVICE)
    if wants_channels_last(model, DEVICE, "auto"):
        model.to(memory_format=torch.channels_last)
    how = {"compile_model": CUDA, "capture": CUDA, "kernels": kernels}
    how["bf16"] = CUDA and case.bf16
    recipe = AdamW(lr=1e-4, weight_decay=0.1)
    step = TrainStep(task, model, regularizer, recipe, device=DEVICE, seed=0, **how)
    counter = itertools.count()
    return lambda: step(task.batch, next(counter))


def ordinary_loop(case: Case) -> Callable[[], None]:
    """Builds the baseline: a step of an eager loop with autocast and AdamW."""
    clear()
    task, model = Synthetic(case, case.batch), case.build().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    def advance() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss, _ = task.loss(task.field(model, task.batch)(), task.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return advance


def flops_per_input(case: Case) -> float:
    """Returns the FLOPs of a forward and backward pass for one input."""
    clear()
    small = 8
    task, model = Synthetic(case, small), case.build().to(DEVICE)
    with FlopCounterMode(display=False) as counter:
        task.loss(task.field(model, task.batch)(), task.batch)[0].backward()
    return counter.get_total_flops() / small


def clear() -> None:
    torch._dynamo.reset()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def peak_flops() -> float:
    """Measures the FLOP/s of a large matrix product (bf16 on a GPU)."""
    size = 8192 if CUDA else 1024
    a, b = (torch.randn(size, size, device=DEVICE) for _ in range(2))
    if CUDA:
        a, b = a.bfloat16(), b.bfloat16()
    return 2 * size**3 / measure(lambda: a @ b)[0]


def bench_case(case: Case, peak: float) -> list[str]:
    """Times all steps of one network and returns its table rows."""
    ideal = flops_per_input(case) / peak  # seconds per input at peak FLOP/s
    total = case.batch + case.extra
    timed: list[tuple[str, int, int, Regularizer | None]] = [  # label, batch, inputs per step
        ("ordinary eager loop", case.batch, case.batch, None),
        ("plain", case.batch, case.batch, Regularizer()),
        ("plain", total, total, Regularizer()),
        ("ED", case.batch, total, penalty(case, case.components)),
    ]
    if case.rivals:
        timed.append(("ED with PCA 3", case.batch, total, penalty(case, 3)))
    for name in case.rivals:
        passes = 2 if name in ("sam", "asam") else 1
        timed.append((name, case.batch, passes * case.batch, RIVALS[name]()))
    spent: dict[tuple[str, int], float] = {}
    rows = []
    for label, batch_size, inputs, regularizer in timed:
        # not assigned to a variable, which would hold its memory during the next measurement
        seconds, memory = measure(
            ordinary_loop(case) if regularizer is None else our_step(case, batch_size, regularizer)
        )
        spent[label, batch_size] = seconds
        rows.append(row(case, label, batch_size, inputs, seconds, memory, ideal, spent))
    return rows


def row(case, label, batch_size, inputs, seconds, memory, ideal, spent) -> str:
    """Formats one table row: times, and ratios to steps that were measured earlier."""
    plain, same = spent.get(("plain", case.batch)), spent.get(("plain", inputs))
    epoch = seconds * (case.epoch // batch_size) if case.epoch else None
    cells = [
        f"{label}, {batch_size}" + (f" + {inputs - batch_size}" if "ED" in label else ""),
        f"{1000 * seconds:.2f}",
        f"{seconds / plain:.2f}" if plain else "",
        f"{seconds / same:.3f}" if same else "",
        f"{spent['ordinary eager loop', case.batch] / seconds:.2f}",
        f"{batch_size / seconds:,.0f}",
        f"{epoch:.2f}" if epoch else "",
        f"{100 * ideal * inputs / seconds:.1f} %" if label != "jacobian" else "",
        f"{memory:.1f}" if CUDA else "",
    ]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


HEADER = (
    "step, inputs",
    "ms",
    "x plain",
    "x plain at the same inputs",
    "x faster than eager",
    "examples/s",
    "s/epoch",
    "of peak",
    "GiB",
)


def bench_fit(case: Case) -> list[str]:
    """Measures how much of an ED step softmax, PCA and fit take."""
    clear()
    model, task = case.build().to(DEVICE), Synthetic(case, case.batch)
    field = task.field(model, task.batch)
    lines = []
    for components in (None, 3):
        regularizer = penalty(case, components)
        paths = ed.Paths.draw(
            field, regularizer.representation, case.pairs, labels=task.batch["label"]
        )
        logits = torch.randn(len(paths.field.x), case.classes, device=DEVICE, requires_grad=True)
        fit, _ = measure(lambda p=paths, x=logits: p.degrees(x).mean().backward())
        step, _ = measure(our_step(case, case.batch, regularizer))
        lines.append(
            f"Fit of {case.name}{' with PCA 3' if components else ''}: {1000 * fit:.2f} ms of a "
            f"step of {1000 * step:.1f} ms, {100 * fit / step:.1f} %."
        )
        print(lines[-1], flush=True)
    return lines


def machine() -> str:
    name = torch.cuda.get_device_name() if CUDA else f"{torch.get_num_threads()} CPU threads"
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name} ({platform.machine()}), {python}, commit {(commit() or 'unknown')[:8]}"


def step_seconds(case: Case, regularizer: Regularizer) -> float:
    return measure(our_step(case, case.batch, regularizer))[0]


def bench_overhead(cases: dict[str, Case], out: Path | None) -> None:
    """Prints the overhead table and, if `out` is given, saves it after each network."""

    def seconds(case: Case, regularizer: Regularizer) -> float:
        found = step_seconds(case, regularizer)
        print(f"{case.name}, {type(regularizer).__name__}: {1000 * found:.2f} ms", flush=True)
        return found

    rows: dict[str, Overhead] = {}
    for name, case in cases.items():
        rows[name] = time_methods(case, seconds)
        if out:
            write_atomic(out, overhead_text(rows, machine()))
    print("", overhead_text(rows, machine()), sep="\n")


def bench_kernels(out: Path | None) -> None:
    """Prints the comparison of the kernels and, if `out` is given, saves it after each shape."""

    def seconds(case: Case, kernels: bool) -> float:
        return measure(our_step(case, case.batch, Regularizer(), kernels=kernels))[0]

    rows = []
    for shape in SHAPES:
        rows.append(time_shape(shape, seconds))
        print(*rows[-1], sep=" | ", flush=True)
        if out:
            write_atomic(out, kernels_text(rows, machine()))
    print("", kernels_text(rows, machine()), sep="\n")


def bench_steps(cases: dict[str, Case], out: Path | None) -> None:
    """Prints the tables of all networks and, if `out` is given, saves them after each one."""
    peak = peak_flops()
    kind = "bf16" if CUDA else "float32"
    text = [
        "# Benchmark",
        f"{machine()}. Peak of a large {kind} product: {peak / 1e12:.1f} TFLOP/s.",
    ]
    print(*text, sep="\n")
    for name, case in cases.items():
        header = "| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER)
        print(f"\n## {case.name}\n{header}")
        text.append(f"## {case.name}\n\n{header}\n" + "\n".join(bench_case(case, peak)))
        if name == "vit_tiny" and not CUDA:
            text += bench_fit(case)
        if out:
            write_atomic(out, "\n\n".join(text) + "\n")


def bench_estimators(cases: dict[str, Case], pairs: int, out: Path | None) -> None:
    """Prints the comparison of the estimators and, if `out` is given, saves it."""
    rows = []
    for name, build in networks(cases).items():
        clear()
        rows.append(compare(name, build(), pairs))
        print(*rows[-1].cells(), sep=" | ", flush=True)
    clear()
    text = estimator_text(rows, throughput(cases["vit_tiny"]), machine())
    if out:
        write_atomic(out, text)
    print("", text, sep="\n")


def _short(path: Path) -> str:
    return str(path.relative_to(APP))


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    cases = GPU_CASES if CUDA else CPU_CASES
    parser.add_argument("--cases", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--quick", action="store_true", help="use tiny batches, as a smoke test")
    instead = parser.add_mutually_exclusive_group()  # what to time instead of the steps
    where = f"with all cases on a GPU, --out defaults to {_short(OVERHEAD)}"
    instead.add_argument("--table", action="store_true", help=f"make the overhead table; {where}")
    where = f"on a GPU and without --quick, --out defaults to {_short(STEPS_FILE)}"
    timed = f"time the cells of these tables; {where}"
    instead.add_argument("--tables", nargs="+", metavar="TABLE", help=timed)
    against = f"compare our kernels with torch's operators; --out defaults to {_short(KERNELS)}"
    instead.add_argument("--kernels", action="store_true", help=against)
    instead.add_argument("--estimator", action="store_true", help="compare the estimators of ED")
    parser.add_argument("--out", type=Path, help="file for the tables: Markdown, CSV for --tables")
    options = parser.parse_args()
    chosen = {name: cases[name] for name in options.cases}
    if options.quick:
        chosen = {name: replace(case, batch=8, pairs=4) for name, case in chosen.items()}
    if options.tables and NETWORK not in chosen:
        parser.error(f"--tables times {NETWORK}; drop --cases")
    if options.tables:
        out = options.out or (STEPS_FILE if CUDA and not options.quick else None)
        time_tables(options.tables, chosen[NETWORK], step_seconds, commit() or "unknown", out)
    elif options.kernels:
        if not CUDA:
            parser.error("--kernels: our kernels need a GPU")
        bench_kernels(options.out or KERNELS)
    elif options.estimator:
        if chosen.keys() != cases.keys():
            parser.error("--estimator uses a fixed set of networks; drop --cases")
        pairs = 400 if CUDA and not options.quick else 2
        bench_estimators(cases, pairs, options.out)
    elif options.table:
        whole = CUDA and chosen == cases
        bench_overhead(chosen, options.out or (OVERHEAD if whole else None))
    else:
        bench_steps(chosen, options.out)


if __name__ == "__main__":
    or_explain(main)
