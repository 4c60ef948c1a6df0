"""Aggregates returns over games and seeds, with confidence intervals.

Follows Agarwal et al. (2021): the interquartile mean of normalised returns, with a bootstrap that
resamples seeds within each game. scipy.stats.bootstrap rejects games with a single seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ed.analysis.collect import Row
from ed.analysis.spec import SpecError, Table
from ed.runtime.runs import Status

METHODS = {"none": "PPO", "ed": "PPO + ED"}  # keyed by the choice of regularizer
GAME = "task.game"
RESAMPLES = 2000
# (R_min, R_max) in hard mode: the return of a blind policy and the maximum return (for StarPilot
# and FruitBot, the maximum in practice), from Appendix C of Cobbe et al. (2020), "Leveraging
# Procedural Generation to Benchmark Reinforcement Learning"
HARD_RANGES = {
    "bigfish": (0.0, 40.0),
    "bossfight": (0.5, 13.0),
    "caveflyer": (2.0, 13.4),
    "chaser": (0.5, 14.2),
    "climber": (1.0, 12.6),
    "coinrun": (5.0, 10.0),
    "dodgeball": (1.5, 19.0),
    "fruitbot": (-0.5, 27.2),
    "heist": (2.0, 10.0),
    "jumper": (1.0, 10.0),
    "leaper": (1.5, 10.0),
    "maze": (4.0, 10.0),
    "miner": (1.5, 20.0),
    "ninja": (2.0, 10.0),
    "plunder": (3.0, 30.0),
    "starpilot": (1.5, 35.0),
}


def normalised_return(returns: np.ndarray, game: str) -> np.ndarray:
    """Returns (R - R_min) / (R_max - R_min) in hard mode: 0 is a blind policy, 1 the maximum."""
    low, high = HARD_RANGES[game]
    return (np.asarray(returns, float) - low) / (high - low)


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean without the lowest and highest quarter (rounded down); NaN if any score is NaN."""
    from scipy.stats import trim_mean  # slow to import

    scores = np.asarray(scores, float)
    mean = trim_mean(np.nan_to_num(scores), 0.25, axis=axis)  # NaN would trigger a slow path
    return np.where(np.isnan(scores).any(axis=axis), np.nan, mean)[()]


def stratified_resamples(
    scores: list[np.ndarray], rng: np.random.Generator, *, count: int
) -> np.ndarray:
    """Resamples the seeds within each game; returns (count, seeds of all games, ...).

    Args:
        scores: one array per game; games may have different numbers of seeds.
    """
    drawn = [game[rng.integers(len(game), size=(count, len(game)))] for game in scores]
    return np.concatenate(drawn, axis=1)


def interquartile_interval(
    scores: list[np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interquartile mean over games and seeds, with its 95 % bootstrap interval.

    Args:
        scores: one array (seeds, ...) per game, normalised.
    Returns:
        Three arrays of the trailing shape: mean, low, high.
    """
    resampled = interquartile_mean(stratified_resamples(scores, rng, count=RESAMPLES), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return interquartile_mean(np.concatenate(scores), axis=0), low, high


@dataclass(frozen=True)
class GameRuns:
    """The runs of one method on one game.

    Attributes:
        method: the choice of regularizer.
        frames: the length of a whole run.
    """

    game: str
    method: str
    mode: str
    frames: float
    rows: Sequence[Row]


def game_runs(table: Table, rows: Sequence[Row]) -> list[GameRuns]:
    """Groups runs of equal deviations by game and method, in the table's order."""
    found = []
    for cell in table.cells.values():
        own = [row for row in rows if row.home == cell.home]
        if own:
            texts = (*cell.overrides, *own[0].deviations.split())
            settings = {"task.mode": "hard"} | dict(text.split("=", 1) for text in texts)
            keys = (GAME, "regularizer", "task.mode", "task.frames")
            missing = [key for key in keys if key not in settings]
            if missing:
                raise SpecError(
                    f"{table.path}: cell {cell.name}: overrides must set {missing[0]}, even to its "
                    "default"
                )
            game, method, mode, frames = (settings[key] for key in keys)
            if any((one.game, one.method) == (game, method) for one in found):
                raise SpecError(
                    f"{table.path}: cell {cell.name}: another cell has the same {GAME}={game} and "
                    f"regularizer={method}; move one to its own table"
                )
            found.append(GameRuns(game, method, mode, float(frames), own))
    return found


def by_method(runs: Sequence[GameRuns]) -> dict[str, list[GameRuns]]:
    """Groups runs by method, on the games for which all these methods have runs; hard mode only."""
    found = {m: own for m in METHODS if (own := [r for r in runs if r.method == m])}
    games = {one.game for one in runs}.intersection(*({r.game for r in o} for o in found.values()))
    if len(games) < 2 or not games <= HARD_RANGES.keys() or {r.mode for r in runs} != {"hard"}:
        return {}
    return {method: [r for r in own if r.game in games] for method, own in found.items()}


def count_games(table: Table, runs: Sequence[GameRuns]) -> str:
    """Returns text such as `4 games`, or `3 of 4 games` if a game has no runs."""
    found = len({own.game for own in runs})
    settings = {text for cell in table.cells.values() for text in cell.overrides}
    planned = [text for text in settings if text.startswith(f"{GAME}=")]
    return f"{found} games" if found == len(planned) else f"{found} of {len(planned)} games"


@dataclass(frozen=True)
class Aggregate:
    """A mean over games and seeds, without an interval if a game has only one seed."""

    method: str
    games: str
    runs: int
    mean: float
    low: float | None
    high: float | None


def gain_over_games(
    before: Aggregate, after: Aggregate
) -> tuple[float, float | None, float | None]:
    """Returns the gain of the second method, with a 95 % interval if both means have one.

    The interval follows from the two given ones (Zou and Donner, 2008), so it needs no bootstrap.
    """
    gain = after.mean - before.mean
    if None in (before.low, after.low):
        return gain, None, None
    low = gain - math.hypot(after.mean - after.low, before.high - before.mean)
    high = gain + math.hypot(after.high - after.mean, before.mean - before.low)
    return gain, low, high


def runs_each(found: Sequence[Aggregate]) -> str:
    """Formats the number of runs of each method, e.g. "4 runs per method" or "12 and 4 runs"."""
    first, *others = (one.runs for one in found)
    if set(others) <= {first}:
        return f"{first} runs per method"
    return f"{' and '.join(map(str, [first, *others]))} runs"


def aggregates(table: Table, rows: Sequence[Row]) -> list[Aggregate]:
    """Returns the normalised interquartile mean of the `aggregate` metric for each method."""
    known = [row for row in rows if row.status == Status.DONE and table.aggregate in row.last]
    found = []
    for method, own in by_method(game_runs(table, known)).items():
        values = [[row.last[table.aggregate] for row in game.rows] for game in own]
        scores = [normalised_return(v, g.game) for v, g in zip(values, own, strict=True)]
        rng = np.random.default_rng(0)  # reproducible intervals
        mean, *ends = (float(value) for value in interquartile_interval(scores, rng))
        low, high = ends if min(map(len, scores)) > 1 else (None, None)
        games = count_games(table, own)
        found.append(Aggregate(method, games, sum(map(len, scores)), mean, low, high))
    return found
