"""Plays a trained agent: python scripts/play.py RUN [--levels START:COUNT] [--episodes 100]

Plays an agent trained with task=procgen on a range of levels (by default its test levels) and
prints the mean return with its standard error. Saves the first episode as a GIF and as a strip of
frames, by default in the run's folder. Each environment plays a fixed number of episodes, so that
short episodes are not overrepresented.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

import numpy as np
import torch

from ed.analysis.stats import summarise
from ed.engine.errors import or_explain
from ed.engine.main import load_run
from ed.envs.play import Policy
from ed.envs.procgen import ACTIONS, LEVELS, MODES, Games, engine_version, make_games
from ed.figures.episode import Episode, gif, strip
from ed.runtime import runs
from ed.runtime.console import track
from ed.runtime.files import write_atomic
from ed.runtime.streams import generator
from ed.tasks.procgen import ProcgenPPO

COPIES = 64


@dataclass(frozen=True)
class Result:
    level: int
    total: float
    length: int


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    trained = load_run(options.run, options.device, trust=options.trust)
    task, model = trained.task, trained.model
    stem = options.out or options.run / "play"
    stem.parent.mkdir(parents=True, exist_ok=True)  # fail before playing
    if not isinstance(task, ProcgenPPO):
        raise ValueError(f"{options.run} is a run of {type(task).__name__}, not of task=procgen")
    warn_of_engine(options.run, task)
    extent = "trained for" if runs.is_done(options.run) else "unfinished, of"
    print(f"agent of {options.run}, {extent} {task.frames:,} frames")
    levels = parse_levels(options.levels) if options.levels else task.levels["test"]
    mode, copies = options.mode or task.mode, min(options.episodes, COPIES)
    games = make_games(
        task.game, mode=mode, count=copies, levels=levels, seed=options.seed, engine=task.engine
    )
    recorded = Episode(task.game, level=-1)
    policy = Policy(model, device=task.device)
    played = episodes_of(games, policy, options, recorded)
    results = list(track(played, "episodes", total=options.episodes))
    known = known_levels(levels, task)
    actions = "most probable" if options.greedy else "sampled"
    print(f"{task.game}, {mode}, levels {levels.start}:{len(levels)} ({known}), {actions} actions")
    print(describe(results))
    if options.per_level:
        print(per_level(results))
    for kind, image in (("gif", gif), ("png", strip)):
        write_atomic(stem.with_name(f"{stem.name}.{kind}"), image(recorded))
    print(f"images of level {recorded.level}: {stem}.gif and .png")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run folder: runs/...")
    add("--levels", metavar="START:COUNT", help="levels, e.g. 0:500 for the training levels")
    add("--mode", choices=MODES, help="default: the run's")
    add("--episodes", type=int, default=100, help="number of episodes (default: 100)")
    add("--greedy", action="store_true", help="play the most probable action instead of sampling")
    add("--per-level", action="store_true", help="print a table by level, worst first")
    add("--seed", type=int, default=0, help="seed of levels and actions")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    add("--trust", action="store_true", help="allow classes outside ed in RUN's config")
    add("--out", type=Path, metavar="STEM", help="write STEM.gif and STEM.png (default: RUN/play)")
    options = parser.parse_args(arguments)
    if options.episodes < 1:
        parser.error(f"--episodes {options.episodes}: must be at least 1")
    return options


def parse_levels(text: str) -> range:
    start, _, count = text.partition(":")
    if not (start.isdecimal() and count.isdecimal() and int(count)):
        raise ValueError(f"--levels {text}: use START:COUNT, e.g. 0:500")
    levels = range(int(start), int(start) + int(count))
    if levels.stop > LEVELS:
        raise ValueError(f"--levels {text}: the last level is {LEVELS - 1}")
    return levels


def known_levels(levels: range, task: ProcgenPPO) -> str:
    """Describes whether the agent was trained on these levels."""
    own = task.levels["train"]
    if levels.start >= own.start and levels.stop <= own.stop:
        return "training levels"
    shared = levels.start < own.stop and own.start < levels.stop
    return "partly training levels" if shared else "unseen levels"


def warn_of_engine(folder: Path, task: ProcgenPPO) -> None:
    """Warns if the agent was trained with another engine, which draws levels differently."""
    try:
        trained = runs.read_meta(folder)["sessions"][-1].get("engine")
    except (OSError, ValueError, LookupError):
        trained = f"an unknown engine ({runs.META} is damaged)"
    here = engine_version(task.engine)
    if trained != here:
        print(f"warning: trained on {trained}, but {here} draws levels differently")


@torch.no_grad()
def episodes_of(
    games: Games, policy: Policy, options: argparse.Namespace, recorded: Episode
) -> Iterator[Result]:
    """Yields `options.episodes` results; records the first episode of environment 0."""
    chance = generator(options.seed, "play", device=policy.device)
    left = np.full(games.count, options.episodes // games.count)
    left[: options.episodes % games.count] += 1
    seen = games.reset()
    playing, lengths = seen.levels.copy(), np.zeros(games.count, int)
    recorded.level, recording = int(playing[0]), True
    while left.any():
        frames = seen.frames
        outputs = policy(torch.from_numpy(frames).to(policy.device))
        probabilities = outputs[:, :ACTIONS].softmax(-1)
        noise = torch.ones_like(probabilities)
        if not options.greedy:
            noise.exponential_(generator=chance)
        actions = (probabilities / noise).argmax(-1).cpu().numpy()
        if recording:
            recorded.frames.append(frames[0].copy())
            recorded.actions.append(int(actions[0]))
            recorded.probabilities.append(probabilities[0].cpu().numpy())
        seen = games.step(actions)
        lengths += 1
        if recording:
            recorded.rewards.append(float(seen.rewards[0]))
            recording = not seen.dones[0]
        for copy, total in zip(np.flatnonzero(seen.dones), seen.returns, strict=True):
            if left[copy]:
                left[copy] -= 1
                yield Result(int(playing[copy]), total, int(lengths[copy]))
            lengths[copy] = 0
        playing = seen.levels.copy()


def describe(results: Sequence[Result]) -> str:
    found = summarise([result.total for result in results])
    error = "" if found.std is None else f" +- {found.std / math.sqrt(found.count):.3g}"
    length = sum(result.length for result in results) / len(results)
    levels = len({result.level for result in results})
    return (
        f"return {found.mean:.4g}{error} (mean and standard error of {found.count} episodes on "
        f"{levels} levels, {length:.0f} steps each)"
    )


def per_level(results: Sequence[Result]) -> str:
    """Renders a table of levels by mean return, worst first."""
    by_level: dict[int, list[Result]] = {}
    for result in results:
        by_level.setdefault(result.level, []).append(result)
    means = {level: summarise([r.total for r in own]).mean for level, own in by_level.items()}
    lines = [f"{'level':>11}  {'episodes':>8}  {'return':>8}  {'steps':>6}"]
    for level in sorted(means, key=lambda level: (means[level], level)):
        own = by_level[level]
        steps = sum(result.length for result in own) / len(own)
        lines.append(f"{level:>11}  {len(own):>8}  {means[level]:>8.4g}  {steps:>6.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    or_explain(main)
