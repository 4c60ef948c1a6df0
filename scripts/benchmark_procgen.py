# ruff: noqa: E402, imports follow the line that lets a plain checkout find ed
"""Frames per second of PPO on Procgen: python scripts/benchmark_procgen.py [--game NAME]

In one run, in training frames per second: the engine alone on random actions, with the very copies
that training steps (test copies included, their frames not counted); our loop without and with ED;
and a plain PPO loop of the usual kind (one synchronous engine with four threads, eager float32
network, a transfer per step, no test copies). On a CPU the same at a small size.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from hydra.utils import instantiate
from torch import Tensor
from torch.distributions import Categorical

from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.main import choose_device, make_step
from ed.envs.procgen import ACTIONS, engine_version
from ed.files import write_atomic
from ed.tasks.procgen import generalised_advantages

CUDA = torch.cuda.is_available()
BASE = ["task=procgen", "model=impala", "optimizer.weight_decay=0", "optimizer.eps=1e-5"]
BASE += ["optimizer.lr=5e-4", "optimizer.schedule=constant", "optimizer.clip=0.5"]
ED = ["regularizer=ed", "regularizer.anchored=false", "regularizer.weight=0.01"]
ED += ["regularizer.resolution=4", "regularizer.degree=3", "regularizer.components=3"]
SMALL = ["task.envs=8", "task.test_envs=2", "task.rollout=8", "task.minibatches=2"]
SMALL += ["task.epochs=1", "model.channels=[4,8,8]", "model.hidden=32"]
PLAIN_THREADS = 4  # what the original package starts unless told otherwise


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if CUDA:
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
    base = [*BASE, *([] if CUDA else SMALL), f"task.game={options.game}", *options.overrides]
    rows: list[tuple[str, float, str]] = []

    def add(name: str, speed: float, remark: str = "") -> None:
        rows.append((name, speed, remark))
        print(f"{name:<28} {speed:>10,.0f} frames/s  {remark}", flush=True)

    task = build(base, options)[1]
    print(heading(task, options))
    add("engine alone", engine_speed(task, options.rollouts))
    add("our loop", *loop_speed(base, options))
    add("our loop with ED", *loop_speed([*base, *ED], options))
    add("plain loop", *plain_speed(base, options))
    speeds = {name: speed for name, speed, _ in rows}
    engine, ours, plain = (speeds[name] for name in ("engine alone", "our loop", "plain loop"))
    ratios = f"our loop: {ours / plain:.2f} x the plain loop, {ours / engine:.0%} of the engine"
    ratios += f"; with ED {speeds['our loop with ED'] / ours:.0%} of our loop"
    print(ratios)
    if options.out:
        table = [f"| {name} | {speed:,.0f} | {remark} |" for name, speed, remark in rows]
        header = ["| | training frames/s | |", "| --- | --- | --- |"]
        lines = [heading(task, options), "", *header, *table, "", ratios, ""]
        write_atomic(options.out, "\n".join(lines))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--game", default="starpilot")
    add("--rollouts", type=int, default=8 if CUDA else 2, help="timed ones, of which the median")
    add("--lanes", type=int, help="lanes of the training copies instead of the default")
    add("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    add("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of the config, e.g. task.test_envs=128")
    return parser.parse_args(arguments)


def heading(task, options) -> str:
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    cores = len(os.sched_getaffinity(0))
    return (
        f"{options.game}, {task.mode}: {task.envs} training copies in {task.lanes} lanes and "
        f"{task.test_envs} test copies, rollouts of {task.rollout} steps; {name}, "
        f"{cores} cores, torch {torch.__version__}, {engine_version(task.engine)}"
    )


def build(overrides: list[str], options):
    """The config, and a prepared task long enough to be timed."""
    torch._dynamo.reset()  # one case must not feed on another's compilation
    gc.collect()
    cfg = compose_config(overrides)
    device = choose_device("auto")
    task = instantiate(cfg.task)
    task.rollouts = options.rollouts + 3
    task.total_steps = task.rollouts * task.steps_per_rollout
    task.prepare(device, cfg.seed)
    if options.lanes:
        task.lanes = options.lanes
    return cfg, task


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def engine_speed(task, rollouts: int) -> float:
    """Random actions in all copies that training steps, all lanes at once."""
    games = [
        task.make_games(side, count, seed)
        for side, counts in task.lane_counts().items()
        for seed, count in enumerate(counts)
    ]
    for part in games:
        part.reset()

    def step(part) -> None:
        actions = np.random.default_rng(0).integers(0, ACTIONS, (task.rollout, part.count))
        for row in actions:
            part.step(row)

    seconds = []
    with ThreadPoolExecutor(len(games)) as threads:
        for _ in range(rollouts + 1):
            began = time.perf_counter()
            list(threads.map(step, games))
            seconds.append(time.perf_counter() - began)
    return task.envs * task.rollout / statistics.median(seconds[1:])


def loop_speed(overrides: list[str], options) -> tuple[float, str]:
    """The engine's own step on the task's own batches; the first rollouts compile and capture."""
    cfg, task = build(overrides, options)
    torch.manual_seed(0)
    model = instantiate(cfg.model).to(task.device)
    if CUDA:
        model = model.to(memory_format=torch.channels_last)  # what convolutions are fastest in
    step = make_step(
        cfg, task, model, instantiate(cfg.regularizer), instantiate(cfg.optimizer), task.device
    )
    batches = task.batches(model, 0)
    times = [one_rollout(task, step, batches, number) for number in range(task.rollouts)][3:]
    playing, learning = (statistics.median(part) for part in zip(*times, strict=True))
    remark = f"{1000 * playing:.0f} ms playing + {1000 * learning:.0f} ms learning per rollout"
    return task.envs * task.rollout / (playing + learning), remark


def one_rollout(task, step, batches: Iterator, number: int) -> tuple[float, float]:
    """Seconds of playing (with advantages) and of learning."""
    first = number * task.steps_per_rollout
    wait()
    began = time.perf_counter()
    batch = next(batches)
    wait()
    played = time.perf_counter()
    for index in range(first, first + task.steps_per_rollout):
        step(batch if index == first else next(batches), index)
    wait()
    return played - began, time.perf_counter() - played


def plain_speed(overrides: list[str], options) -> tuple[float, str]:
    """What most PPO scripts do, on the same engine."""
    cfg, task = build(overrides, options)
    task.threads = PLAIN_THREADS
    torch.manual_seed(0)
    agent = instantiate(cfg.model).to(task.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4, eps=1e-5)
    games = task.make_games("train", task.envs, 0)
    frames, times = games.reset().frames, []
    for _ in range(min(options.rollouts, 3) + 1):
        wait()
        began = time.perf_counter()
        data, frames = plain_rollout(task, agent, games, frames)
        played = time.perf_counter()
        plain_update(task, agent, optimizer, data)
        wait()
        times.append((played - began, time.perf_counter() - played))
    playing, learning = (statistics.median(part) for part in zip(*times[1:], strict=True))
    remark = f"{1000 * playing:.0f} ms playing + {1000 * learning:.0f} ms learning per rollout"
    return task.envs * task.rollout / (playing + learning), remark


def to_input(frames: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(frames, dtype=torch.float32).to(device)


@torch.no_grad()
def plain_rollout(task, agent, games, frames: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
    """One synchronous step after the other; observations are kept as float32 on the device."""
    kept: dict[str, list[Tensor]] = {}
    for _ in range(task.rollout):
        x = to_input(frames, task.device)
        outputs = agent(x / 255)
        policy = Categorical(logits=outputs[:, :ACTIONS])
        action = policy.sample()
        seen = games.step(action.cpu().numpy())
        frames = seen.frames
        now = {"x": x, "action": action, "logarithm": policy.log_prob(action)}
        now |= {"value": outputs[:, -1], "reward": torch.tensor(seen.rewards).to(task.device)}
        now["done"] = torch.tensor(seen.dones, dtype=torch.float32).to(task.device)
        for name, value in now.items():
            kept.setdefault(name, []).append(value)
    data = {name: torch.stack(values) for name, values in kept.items()}
    last = agent(to_input(frames, task.device) / 255)[:, -1]
    data["advantage"] = generalised_advantages(
        data.pop("reward"), data["value"], data.pop("done"), last,
        gamma=task.gamma, gae_lambda=task.gae_lambda,
    )  # fmt: skip
    return {name: value.flatten(0, 1) for name, value in data.items()}, frames


def plain_update(task, agent, optimizer, data: dict[str, Tensor]) -> None:
    names = {"action": "actions", "logarithm": "log_probabilities", "value": "values"}
    rng = np.random.default_rng(0)
    for _ in range(task.epochs):
        order = rng.permutation(len(data["action"]))
        for index in np.split(order, task.minibatches):
            part = {name: value[index] for name, value in data.items()}
            batch = {ours: part[name] for name, ours in names.items()}
            batch |= {"advantages": part["advantage"], "targets": part["advantage"] + part["value"]}
            loss, report = task.loss(agent(part["x"] / 255), batch)
            report["entropy"].item()  # as scripts log
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(explain(error))
