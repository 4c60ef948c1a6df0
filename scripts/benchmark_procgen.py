"""Frames per second of PPO on Procgen: python scripts/benchmark_procgen.py [--games NAME ...]

In one run, in training frames per second, for each game of the paper: the engine alone on random
actions, with the copies that training steps (test copies included, their frames not counted), the
faster of one and of several lanes; and our loop. For the first game also our loop with ED and a
plain PPO loop of the usual kind (one synchronous engine with four threads, eager float32 network,
transfers at every step, no test copies). All of a game take turns, a rollout each, so that a slow
moment of the machine is everybody's. On a CPU at a small size.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout finds ed

import numpy as np
import torch
from hydra.utils import instantiate
from torch import Tensor
from torch.distributions import Categorical

from ed.engine.compose import compose_config
from ed.engine.errors import or_explain
from ed.engine.main import choose_device, make_step
from ed.envs.procgen import ACTIONS, engine_version
from ed.runtime.console import track
from ed.runtime.files import write_atomic
from ed.runtime.processes import available_cores
from ed.tasks.procgen import GPU_LANES, generalised_advantages

CUDA = torch.cuda.is_available()
BASE = ["task=procgen", "model=impala", "optimizer=ppo"]
ED = ["regularizer=ed", "regularizer.anchored=false", "regularizer.weight=0.01"]
ED += ["regularizer.resolution=4", "regularizer.degree=3", "regularizer.components=3"]
SMALL = ["task.num_envs=8", "task.num_test_envs=2", "task.num_steps=8", "task.num_test_steps=8"]
SMALL += [
    "task.num_minibatches=2",
    "task.update_epochs=1",
    "model.channels=[4,8,8]",
    "model.hidden=32",
]
WARM_UP = 3 if CUDA else 1  # rollouts before the timed ones: compilation and capture
PAPER = ["starpilot", "dodgeball", "fruitbot", "jumper"]
PLAIN_THREADS = 4  # what the original package starts unless told otherwise

Rollout = Callable[[], tuple[float, float]]  # plays one: seconds of playing and of learning


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    base = [*BASE, *([] if CUDA else SMALL), *options.overrides]
    task = build([*base, f"task.game={options.games[0]}"], options)[1]
    text, frames = heading(task), task.num_envs * task.num_steps
    print(text)
    rows: list[tuple[str, float, str]] = []

    def add(name: str, speed: float, remark: str = "") -> float:
        rows.append((name, speed, remark))
        print(f"{name:<30} {speed:>10,.0f} frames/s  {remark}", flush=True)
        return speed

    speeds = {}
    for game in options.games:
        played = [*base, f"task.game={game}"]
        racers = {"our loop": our_loop(*build(played, options))}
        for lanes in sorted({1, options.lanes}):
            racers[f"engine alone, lanes: {lanes}"] = engine(build(played, options, lanes)[1])
        if game == options.games[0]:
            racers["our loop with ED"] = our_loop(*build([*played, *ED], options))
            racers["plain loop"] = plain_loop(*build(played, options))
        speeds[game] = {
            name: add(f"{game}: {name}", *summary(frames, times))
            for name, times in race(racers, options.rollouts).items()
        }
    ratios = compare(speeds)
    print(ratios)
    if options.out:
        table = [f"| {name} | {speed:,.0f} | {remark} |" for name, speed, remark in rows]
        header = ["| | training frames/s | |", "| --- | --- | --- |"]
        write_atomic(options.out, "\n".join([text, "", *header, *table, "", ratios, ""]))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, several = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add("--games", **several, default=PAPER if CUDA else PAPER[:1])
    add("--rollouts", type=int, default=5 if CUDA else 2, help="timed ones, of which the median")
    add("--lanes", type=int, default=GPU_LANES if CUDA else 1, help="of the training copies")
    add("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides", help="of the config")
    return parser.parse_args(arguments)


def heading(task) -> str:
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    cores = available_cores()
    return (
        f"{task.mode} levels: {task.num_envs} training copies (lanes: {task.lanes}), "
        f"rollouts of {task.num_steps} steps; {task.num_test_envs} test copies, "
        f"{task.num_test_steps} steps; {name}, "
        f"{cores} cores, torch {torch.__version__}, {engine_version(task.engine)}"
    )


def compare(speeds: dict[str, dict[str, float]]) -> str:
    """Our share of the engine's speed, and of all games the share of their seconds together."""
    ours = {game: of["our loop"] for game, of in speeds.items()}
    limit = {
        game: max(speed for name, speed in of.items() if name.startswith("engine"))
        for game, of in speeds.items()
    }
    shares = ", ".join(f"{game} {ours[game] / limit[game]:.0%}" for game in speeds)
    share = sum(1 / speed for speed in limit.values()) / sum(1 / speed for speed in ours.values())
    first, of = next(iter(speeds.items()))
    return (
        f"our loop: {share:.0%} of the engine over all games ({shares}); on {first} "
        f"{of['our loop'] / of['plain loop']:.2f} x the plain loop, and "
        f"{of['our loop with ED'] / of['our loop']:.0%} of it with ED"
    )


def build(overrides: list[str], options: argparse.Namespace, lanes: int | None = None):
    """The config, and a prepared task long enough to be timed."""
    gc.collect()  # of the game before
    cfg = compose_config(overrides)
    task = instantiate(cfg.task)
    task.rollouts = options.rollouts + WARM_UP
    task.total_steps = task.rollouts * task.steps_per_rollout
    task.prepare(choose_device("auto"), cfg.seed)
    task.lanes = lanes or options.lanes
    return cfg, task


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def race(racers: dict[str, Rollout], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Times of one rollout of each after the other, round by round."""
    times = {name: [] for name in racers}
    for rollout in racers.values():
        torch._dynamo.reset()  # none may feed on another's compilation
        for _ in range(WARM_UP):
            rollout()
    for _ in track(range(rounds), "rounds"):
        for name, rollout in racers.items():
            times[name].append(rollout())
    return times


def summary(frames: int, times: list[tuple[float, float]]) -> tuple[float, str]:
    """Training frames per second, and where the time went."""
    playing, learning = (statistics.median(part) for part in zip(*times, strict=True))
    remark = f"{1000 * playing:.0f} ms playing + {1000 * learning:.0f} ms learning per rollout"
    return frames / (playing + learning), remark if learning else ""


def engine(task) -> Rollout:
    """Random actions in all copies that training steps: of a side all lanes at once."""
    if task.lanes == 1:
        task.threads = 0  # all cores, whatever each of several lanes was given
    rng, sides = np.random.default_rng(0), []
    for side, steps in task.sides().items():
        games = task.make_lanes(side, 0)
        for part in games:
            part.reset()
        actions = [rng.integers(0, ACTIONS, (steps, part.count)) for part in games]
        sides.append((games, actions))
    threads = ThreadPoolExecutor(max(len(games) for games, _ in sides))

    def step(part, rows: np.ndarray) -> None:
        for row in rows:
            part.step(row)

    def rollout() -> tuple[float, float]:
        began = time.perf_counter()
        for games, actions in sides:
            list(threads.map(step, games, actions))
        return time.perf_counter() - began, 0.0

    return rollout


def our_loop(cfg, task) -> Rollout:
    """The engine's own step on the task's own batches."""
    torch.manual_seed(0)
    model = instantiate(cfg.model).to(task.device)
    step = make_step(
        cfg, task, model, instantiate(cfg.regularizer), instantiate(cfg.optimizer), task.device
    )
    batches, numbers = task.batches(model, 0), itertools.count()
    return lambda: one_rollout(task, step, batches, next(numbers))


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


def plain_loop(cfg, task) -> Rollout:
    """What most PPO scripts do, on the same engine."""
    task.threads = PLAIN_THREADS
    torch.manual_seed(0)
    agent = instantiate(cfg.model).to(task.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4, eps=1e-5)
    games = task.make_games("train", task.num_envs, 0)
    frames = games.reset().frames

    def rollout() -> tuple[float, float]:
        nonlocal frames
        wait()
        began = time.perf_counter()
        data, frames = plain_rollout(task, agent, games, frames)
        wait()
        played = time.perf_counter()
        plain_update(task, agent, optimizer, data)
        wait()
        return played - began, time.perf_counter() - played

    return rollout


def to_input(frames: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(frames, dtype=torch.float32).to(device)


@torch.no_grad()
def plain_rollout(task, agent, games, frames: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
    """One synchronous step after the other; observations are kept as float32 on the device."""
    kept: dict[str, list[Tensor]] = {}
    for _ in range(task.num_steps):
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
    for _ in range(task.update_epochs):
        order = rng.permutation(len(data["action"]))
        for index in np.split(order, task.num_minibatches):
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
    or_explain(main)
