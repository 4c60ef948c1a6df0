"""Measures input throughput in images per second, from the file to the training step.

python scripts/benchmark_input.py task.data=/data/imagenet
python scripts/benchmark_input.py task.data=/data/imagenet --steps 200 regularizer=ed

Takes the overrides of train.py; the defaults are task=imagenet and model=vit_s16. Without --steps,
it times only the input: each stage in one process, then the loader with its workers. With --steps,
it also times training, first on one repeated batch and then on batches from the loader.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from benchmark import machine
from hydra.utils import instantiate

from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.engine.errors import or_explain
from ed.engine.main import build_model, choose_device, make_step
from ed.runtime.console import track
from ed.runtime.files import write_atomic
from ed.runtime.processes import available_cores
from ed.runtime.streams import generator, stream_seed

WARM_UP = 10  # steps, for compilation, CUDA graph capture and the first batches


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each input stage")
    parser.add_argument("--steps", type=int, default=0, help="training steps to time")
    parser.add_argument("--out", type=Path, help="also write the output to this file")
    options = parser.parse_intermixed_args(arguments)
    given = {override.partition("=")[0] for override in options.overrides}
    defaults = {"task": "task=imagenet", "model": "model=vit_s16"}
    unset = [default for group, default in defaults.items() if group not in given]
    cfg = compose_config([*unset, *options.overrides])
    task, device = instantiate(cfg.task), choose_device(cfg.system.device)
    task.workers = cfg.system.workers
    task.prepare(device, cfg.seed)
    if not task.input_stages():
        raise ValueError(f"{type(task).__name__} keeps its data in memory; use task=imagenet")
    lines = [f"# {machine()}", "# " + " ".join(options.overrides)]

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if options.out:
            write_atomic(options.out, "\n".join(lines) + "\n")

    for line in one_process(task, options.seconds):
        show(line)
    torch.manual_seed(stream_seed(cfg.seed, "init"))
    model = build_model(cfg, device)
    show(all_workers(task, model, options.seconds))
    if options.steps:
        for line in training(cfg, task, model, device, options.steps):
            show(line)


def one_process(task, seconds: float) -> Iterator[str]:
    """Times each stage of image loading in one process."""
    order = torch.randperm(task.num_examples, generator=generator(0, "benchmark")).tolist()
    yield "one process:"
    for name, work in task.input_stages().items():
        yield f"{_rate(work, order, seconds):10.0f} images/s  {name}"


def _rate(work: Callable[[int], object], order: list[int], seconds: float) -> float:
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        work(order[done % len(order)])
        done += 1
    return done / (time.perf_counter() - began)


def all_workers(task, model, seconds: float) -> str:
    """Times the loader up to batches on the device, without training."""
    batches, done = task.batches(model, 0), 0
    next(batches)  # starts the workers
    began = time.perf_counter()
    while done == 0 or time.perf_counter() - began < seconds:
        next(batches)
        done += 1
    rate = done * task.batch_size / (time.perf_counter() - began)
    count = available_cores() if task.workers is None else task.workers
    return f"{rate:10.0f} images/s  {count} workers on {available_cores()} cores, to the device"


def training(cfg, task, model, device: torch.device, count: int) -> Iterator[str]:
    """Times the training step of this config, without and with loading its input."""
    regularizer, recipe = instantiate(cfg.regularizer), instantiate(cfg.optimizer)
    check(cfg, task, regularizer)
    if task.total_steps < 2 * WARM_UP + count:
        raise ValueError(
            f"--steps {count}: the run has only {task.total_steps} steps; increase task.epochs"
        )
    step = make_step(cfg, task, model, regularizer, recipe, device)
    batches = task.batches(model, 0)
    batch = next(batches)
    label = f"{type(regularizer).__name__} step at batch {task.batch_size}"
    for name, source in (("one batch repeated", None), ("from the loader", batches)):
        for number in range(WARM_UP):  # also uses up the loader's prefetched batches
            step(batch if source is None else next(source), number)
        _wait(device)
        began = time.perf_counter()
        for number in track(range(count), name):
            step(batch if source is None else next(source), WARM_UP + number)
        _wait(device)
        seconds = (time.perf_counter() - began) / count
        rate = task.batch_size / seconds
        yield f"{rate:10.0f} images/s  {label}, {name}: {1000 * seconds:.1f} ms"
    if device.type == "cuda":
        yield f"{torch.cuda.max_memory_allocated() / 2**30:10.1f} GiB         peak memory"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    or_explain(main)
