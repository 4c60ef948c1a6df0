"""Where a step's time goes, and what was tried against it: one H200 run, side by side.

    python scripts/benchmark_step.py [--out FILE] [--parts kernels variants ...]
    python scripts/benchmark_step.py --case procgen --parts kernels variants --names 30

The kernels of one captured step by kind; variants of the step (compiler modes, libraries); several
runs at once on one GPU (processes with and without MPS, streams in one process, weights stacked
with torch.func); for ViT-Tiny attention kernels at its shapes, tokens, activation; for Procgen the
convolutions, by cuDNN and by our own kernels. A GPU is needed.
"""

import argparse
import contextlib
import multiprocessing
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from benchmark import clear, machine, measure, our_step
from benchmark_cases import CUDA, DEVICE, GPU_CASES, Case, Synthetic
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn.attention import SDPBackend, sdpa_kernel

from ed.engine.errors import or_explain
from ed.files import write_atomic
from ed.models import narrow
from ed.models.grokking import SPECIAL_TOKENS, GrokkingTransformer
from ed.regularizers.base import COMPILATION, Regularizer


def equations(count: int) -> torch.Tensor:
    return torch.randint(97, (count, 4), device=DEVICE)


VIT = GPU_CASES["vit_tiny"]
CASES = GPU_CASES | {
    "grokking": Case(
        "Grokking, 2 layers, float32",
        partial(GrokkingTransformer, numbers=97, length=4, depth=2, width=128, heads=4),
        equations,
        97 + SPECIAL_TOKENS,
        512,
        256,
        bf16=False,
    )
}
KINDS = {  # of kernels, by what their names contain; the first that fits
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "convolutions and pooling": ("convolve", "weight_gradient", "fprop", "dgrad", "wgrad", "pool"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma"),
    "optimizer": ("multi_tensor", "adam"),
    "GELU": ("gelu", "erf"),
    "norms with products, fused": ("add_norm_linear", "add_norm_mlp"),
    "layer norm and residuals": ("layer_norm", "add_norm"),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
}


def plain_step(case: Case, **how) -> Callable[[], None]:
    return our_step(case, case.batch, Regularizer(), **how)


def milliseconds(case: Case, **how) -> float:
    return 1000 * measure(plain_step(case, **how))[0]


# --- where the time goes ---------------------------------------------------------------------


def kernels(case: Case, shown: int, steps: int = 10) -> list[str]:
    """Kernels of one captured step by kind: how many, their milliseconds; the slowest by name."""
    advance = plain_step(case)
    for _ in range(8):
        advance()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            advance()
        torch.cuda.synchronize()
    count, spent, names = defaultdict(int), defaultdict(float), defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = kind_of(event.name)
            count[kind] += 1
            spent[kind] += event.device_time_total / 1000
            names[event.name] += event.device_time_total / 1000
    rows = [
        f"| {kind} | {count[kind] / steps:.0f} | {spent[kind] / steps:.2f} |"
        for kind in sorted(spent, key=spent.get, reverse=True)
    ]
    total = f"| all | {sum(count.values()) / steps:.0f} | {sum(spent.values()) / steps:.2f} |"
    slowest = sorted(names.items(), key=lambda item: -item[1])[:shown]
    rows += [total, *(f"| `{name[:120]}` | | {ms / steps:.3f} |" for name, ms in slowest)]
    return ["| kernels | number | ms |", "| --- | --- | --- |", *rows]


def kind_of(name: str) -> str:
    lowered = name.lower()
    found = (kind for kind, marks in KINDS.items() if any(mark in lowered for mark in marks))
    return next(found, "other fused element-wise and reductions")


# --- attention alone ---------------------------------------------------------------------------


def attention() -> list[str]:
    """Forward and backward of the step's attentions alone, captured, for each kernel there is.

    Alone, since the compiler's cache would hand every choice of kernel the code of the first.
    """
    rows = ["| attention of 12 blocks | 65 tokens, ms | 64 tokens, ms |", "| --- | --- | --- |"]
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        times = [attention_ms(getattr(SDPBackend, backend), tokens) for tokens in (65, 64)]
        rows.append(f"| {backend} | {times[0]:.2f} | {times[1]:.2f} |")
    return rows


def attention_ms(backend: SDPBackend, tokens: int, layers: int = 12) -> float:
    clear()
    shape = (VIT.batch, 3, tokens, 64)
    made = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    inputs = [tensor.requires_grad_() for tensor in made]
    upstream = torch.randn_like(inputs[0])

    def run() -> None:
        for _ in range(layers):
            with sdpa_kernel([backend]):
                out = nn.functional.scaled_dot_product_attention(*inputs)
            torch.autograd.grad(out, inputs, upstream)

    return 1000 * measure(captured(run).replay)[0]


def captured(update: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries and the compiler set themselves up
            update()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        update()
    return graph


# --- convolutions alone -------------------------------------------------------------------------

LAYERS = ((3, 16, 64), (16, 16, 32), (16, 32, 32), (32, 32, 16), (32, 32, 8))  # of IMPALA


def convolutions(batch: int = 4096) -> list[str]:
    """IMPALA's convolutions alone, captured, in bf16: cuDNN's, and ours with ReLU in them."""
    rows = ["| channels, size | cuDNN, ms | ours, ms |", "| --- | --- | --- |"]
    for inputs, outputs, size in LAYERS:
        times = [convolution_ms(inputs, outputs, size, batch, ours) for ours in (False, True)]
        shown = (", ".join(f"{ms:.3f}" for ms in parts) for parts in times)
        rows.append(f"| {inputs} to {outputs}, {size} x {size} | " + " | ".join(shown) + " |")
        print(rows[-1], flush=True)
    return rows


def convolution_ms(inputs: int, outputs: int, size: int, batch: int, ours: bool) -> list[float]:
    clear()
    half = {"device": DEVICE, "dtype": torch.bfloat16}

    def made(channels: int) -> torch.Tensor:
        x = torch.randn(batch, channels, size, size, **half)
        return x.contiguous(memory_format=torch.channels_last)

    x, upstream = made(inputs), made(outputs)
    weight = torch.randn(outputs, inputs, 3, 3, **half)
    weight = weight.contiguous(memory_format=torch.channels_last)
    ones = [1, 1]

    def back(*mask: bool) -> None:
        torch.ops.aten.convolution_backward(
            upstream, x, weight, None, ones, ones, ones, False, [0, 0], 1, [*mask, False]
        )

    if ours:
        convolve, gradient = torch.ops.ed.convolve, torch.ops.ed.weight_gradient
        works = [lambda: convolve(x, weight, None, None, None, True, False)]
        if inputs in narrow.CHANNELS:
            works.append(lambda: convolve(upstream, weight, None, x, None, False, True))
        works.append(lambda: gradient(x, upstream, True))
    else:
        works = [lambda: nn.functional.conv2d(x.relu(), weight, padding=1)]
        if inputs in narrow.CHANNELS:
            works.append(lambda: back(True, False))
        works.append(lambda: back(False, True))
    return [1000 * measure(captured(work).replay)[0] for work in works]


# --- variants of the step --------------------------------------------------------------------


def with_inductor(case: Case, **settings) -> float:
    options = {**COMPILATION["options"], **settings}
    with patch.dict(COMPILATION, options=options):
        return milliseconds(case)


def with_cudnn_benchmark(case: Case) -> float:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return milliseconds(case)


def with_cudnn_alone(case: Case) -> float:
    with patch.object(narrow, "TRITON", False):
        return milliseconds(case)


VARIANTS: dict[str, Callable[[Case], float]] = {
    "as it is": milliseconds,
    "captured, not compiled": partial(milliseconds, compile_model=False),
    "compiled, not captured": partial(milliseconds, capture=False),
    "64 tokens, mean pooling": partial(milliseconds, build=partial(VIT.build, pool="avg")),
    "GELU by tanh": partial(milliseconds, build=partial(VIT.build, activation="gelu_tanh")),
    "max-autotune": partial(with_inductor, max_autotune=True),
    "coordinate descent tuning": partial(with_inductor, coordinate_descent_tuning=True),
    "without combo kernels": partial(with_inductor, combo_kernels=False),
    "combo kernels where timed faster": partial(with_inductor, benchmark_combo_kernel=True),
    "cuDNN tries its algorithms": with_cudnn_benchmark,
    "cuDNN in place of our kernels": with_cudnn_alone,
    "timm's blocks in place of our kernels": partial(milliseconds, kernels=False),
}
ONLY = {  # where the others would be the same step twice
    "64 tokens, mean pooling": "vit_tiny",
    "GELU by tanh": "vit_tiny",
    "cuDNN in place of our kernels": "procgen",
    "timm's blocks in place of our kernels": "vit_tiny",
}


def variants(case: Case, names: list[str]) -> list[str]:
    """Each variant's step, and what its compilation costs where nothing is cached."""
    header = "| variant | ms | x as it is | s with its compilation |"
    rows, base = [header, "| --- | --- | --- | --- |"], None
    for name in names:
        began = time.perf_counter()
        try:
            with fresh_cache():
                ms = VARIANTS[name](case)
            base, spent = base or ms, time.perf_counter() - began
            rows.append(f"| {name} | {ms:.2f} | {ms / base:.3f} | {spent:.0f} |")
        except Exception as error:
            rows.append(f"| {name} | does not run: {str(error).splitlines()[0][:90]} | | |")
        print(rows[-1], flush=True)
    return rows


# --- several seeds at once -------------------------------------------------------------------


def by_streams(case: Case, seeds: int) -> float:
    """Milliseconds for one step of each of `seeds` runs in one process, each on its own stream."""
    runs = [plain_step(case) for _ in range(seeds)]
    streams = [torch.cuda.Stream() for _ in runs]
    for _ in range(6):
        for run in runs:
            run()
    torch.cuda.synchronize()

    def advance() -> None:
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                run()

    return 1000 * measure(advance)[0]


class Whole(nn.Module):
    """From what a batch holds to outputs: with the embedding, where a model is cut behind it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.model.embed(x) if hasattr(self.model, "embed") else x)


def by_stacking(case: Case, seeds: int) -> float:
    """The same with the weights of all runs stacked: one network of batched products."""
    from torch.func import functional_call, stack_module_state

    clear()
    models = [Whole(case.build()).to(DEVICE) for _ in range(seeds)]
    parameters, _ = stack_module_state(models)
    task = Synthetic(case, case.batch)
    x = torch.stack([task.batch["x"]] * seeds)
    labels = torch.stack([task.batch["label"]] * seeds)
    optimizer = torch.optim.AdamW(parameters.values(), fused=True, capturable=True)

    def loss_of(weights, x, label):
        outputs = functional_call(models[0], weights, (x,))
        return nn.functional.cross_entropy(outputs.float(), label)

    losses = torch.compile(torch.vmap(loss_of), dynamic=False)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=case.bf16):
            loss = losses(parameters, x, labels).sum()
        loss.backward()
        optimizer.step()

    return 1000 * measure(captured(update).replay)[0]


def worker(name: str, barrier, results, seconds: float) -> None:
    advance = plain_step(CASES[name])
    for _ in range(8):
        advance()
    torch.cuda.synchronize()
    barrier.wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            advance()
        torch.cuda.synchronize()
        done += 20
    results.put((time.perf_counter() - began) / done)


def by_processes(case: Case, seeds: int, *, mps: bool) -> float:
    """The same in separate processes, as a sweep starts them; MPS lets their kernels overlap."""
    clear()
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(seeds), spawn.Queue()
    name = next(name for name, one in CASES.items() if one is case)  # cases hold functions
    given = (name, barrier, results, 3.0)
    with mps_server() if mps else contextlib.nullcontext():
        workers = [spawn.Process(target=worker, args=given) for _ in range(seeds)]
        for process in workers:
            process.start()
        try:
            paces = [results.get(timeout=120) for _ in workers]
        finally:
            for process in workers:
                process.kill()
    return 1000 * max(paces)


@contextlib.contextmanager
def mps_server():
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", capture_output=True)


PROCESSES: dict[str, Callable[[Case, int], float]] = {
    "processes under MPS": partial(by_processes, mps=True),
    "processes": partial(by_processes, mps=False),
}
ONE_PROCESS: dict[str, Callable[[Case, int], float]] = {
    "streams in one process": by_streams,
    "weights stacked": by_stacking,
}


def several_runs(
    case: Case, ways: dict[str, Callable[[Case, int], float]], counts: list[int]
) -> list[str]:
    """Each way against as many runs one after another, which take the time of one that often."""
    rows = ["| runs at once | way | ms for a step of each | x one after another |"]
    rows.append("| --- | --- | --- | --- |")
    for way, measured in ways.items():
        one = None
        for count in [1, *counts]:
            try:
                ms = measured(case, count)
                one = one or ms
                rows.append(f"| {count} | {way} | {ms:.2f} | {ms / (count * one):.3f} |")
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0][:90]
                rows.append(f"| {count} | {way} | does not run: {reason} | |")
            print(rows[-1], flush=True)
    return rows


TITLES = {  # in this order: processes while this one holds nothing on the GPU
    "processes": "Several runs at once, in processes",
    "kernels": "Kernels of one captured step",
    "attention": "Attention kernels",
    "convolutions": "Convolutions, forward with ReLU, input gradient, weight gradient",
    "variants": "Variants",
    "stacked": "Several runs at once, in one process",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), default="vit_tiny")
    parser.add_argument("--parts", nargs="+", choices=list(TITLES))
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS))
    parser.add_argument("--names", type=int, default=0, help="of the slowest kernels")
    parser.add_argument("--runs", nargs="*", type=int, default=[2, 3], help="at once")
    parser.add_argument("--out", type=Path, help="write the tables as Markdown")
    options = parser.parse_args()
    if not CUDA:
        raise ValueError("no CUDA device: these tables are about a GPU; see scripts/benchmark.py")
    case = CASES[options.case]
    chosen = [name for name in VARIANTS if ONLY.get(name, options.case) == options.case]
    chosen = options.variants or chosen
    made = {
        "processes": partial(several_runs, case, PROCESSES, options.runs),
        "kernels": partial(kernels, case, options.names),
        "attention": attention,
        "convolutions": convolutions,
        "variants": partial(variants, case, chosen),
        "stacked": partial(several_runs, case, ONE_PROCESS, options.runs),
    }
    usual = {"vit_tiny": [part for part in TITLES if part != "convolutions"]}
    usual["procgen"] = ["kernels", "convolutions", "variants"]
    wanted = options.parts or usual.get(options.case, ["kernels", "variants"])
    heading = f"{machine()}. {case.name}, batch {case.batch}, plain step."
    parts = ["# Where the time of a step goes", heading]
    print(*parts, sep="\n")
    for part in [name for name in TITLES if name in wanted]:
        parts.append(f"## {TITLES[part]}\n\n" + "\n".join(made[part]()))
        print(parts[-1], flush=True)
        if options.out:
            write_atomic(options.out, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    or_explain(main)
