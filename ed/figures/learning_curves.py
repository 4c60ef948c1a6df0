"""Plots learning curves of PPO, with one panel per game and one for all games together.

Thin lines are seeds on unseen levels, and thick lines are their smoothed mean with its standard
error. Dashed lines are training levels. The last panel shows the interquartile mean of the
normalised return on unseen levels, with a 95 % stratified bootstrap interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from ed.analysis.collect import Row, series
from ed.analysis.returns import (
    METHODS,
    GameRuns,
    by_method,
    count_games,
    game_runs,
    interquartile_interval,
    normalised_return,
)
from ed.analysis.spec import Table
from ed.figures.style import BAND, MEAN, SEED, WIDTH, legend_handles, method_colour

TEST, TRAIN = "eval/test_return", "eval/train_return"
TITLES = {"starpilot": "StarPilot", "fruitbot": "FruitBot"}
GRID = np.linspace(0, 1, 201)  # fractions of training; seeds are averaged at these points
MILLION = 1e6
COLUMNS = 3
WINDOW = 21  # grid points in the moving average, a tenth of training
DASHED = {"linewidth": 1.1, "linestyle": (0, (3, 1.5))}


@dataclass(frozen=True)
class Curves:
    """The learning curves of one method on one game.

    Attributes:
        values: returns during training by metric, (seeds, 201) each; NaN before the first
            episode ends and after the last step of an unfinished run.
    """

    runs: GameRuns
    values: dict[str, np.ndarray]

    @property
    def colour(self) -> str:
        return method_colour(self.runs.method)

    @property
    def seeds(self) -> int:
        return len(self.values[TEST])


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws the learning curves of all games; None if no run has curves yet."""
    curves = [found for runs in game_runs(table, rows) if (found := _curves(runs))]
    if not curves:
        return None
    games = list(dict.fromkeys(found.runs.game for found in curves))
    aggregated = [r for own in by_method([f.runs for f in curves]).values() for r in own]
    axes = _panels(len(games) + bool(aggregated))
    figure = axes[0].figure
    for axis, game in zip(axes, games, strict=False):
        _game(axis, [found for found in curves if found.runs.game == game])
    if aggregated:
        together = [found for found in curves if found.runs in aggregated]
        _all_games(axes[-1], together, count_games(table, aggregated))
    _legend(figure, curves)
    return figure


def _panels(count: int) -> list:
    """Returns axes in rows of three; the last one fills the rest of its row."""
    columns = min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else WIDTH / 2, 1.9 * lines + 0.5))
    grid = figure.add_gridspec(lines, columns)
    spans = [grid[divmod(place, columns)] for place in range(count - 1)]
    row, column = divmod(count - 1, columns)
    return [figure.add_subplot(span) for span in (*spans, grid[row, column:])]


def _curves(runs: GameRuns) -> Curves | None:
    values = {
        metric: np.array([c for row in runs.rows if (c := _curve(row, metric)) is not None])
        for metric in (TEST, TRAIN)
    }
    return Curves(runs, values) if len(values[TEST]) else None


def _curve(row: Row, metric: str) -> np.ndarray | None:
    """Interpolates a run to GRID; None if it logged no value or its length is unknown."""
    steps, values = series(row.history(), metric)
    if not steps or row.total_steps is None:
        return None
    parts = np.array(steps) / row.total_steps
    return np.interp(GRID, parts, values, left=np.nan, right=np.nan)


def _game(axis, curves: Sequence[Curves]) -> None:
    for found in curves:
        colour, x = found.colour, GRID * found.runs.frames / MILLION
        for metric, style in ((TRAIN, DASHED), (TEST, MEAN)):
            if not len(found.values[metric]):
                continue
            mean, error = map(smoothed, mean_and_error(found.values[metric]))
            axis.plot(x, mean, color=colour, **style)
            if metric == TEST:
                axis.plot(x, found.values[TEST].T, color=colour, **SEED)
                axis.fill_between(x, mean - error, mean + error, color=colour, **BAND)
    game = curves[0].runs.game
    seeds = [found.seeds for found in curves]
    counts = seeds if len(set(seeds)) > 1 else seeds[:1]  # in the order of the legend
    axis.set_title(f"{TITLES.get(game, game.capitalize())} (n = {'/'.join(map(str, counts))})")
    axis.set_xlabel("million frames")
    axis.set_ylabel("return")
    axis.locator_params(axis="x", integer=True)
    axis.set_xlim(0, max(found.runs.frames for found in curves) / MILLION)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the moving average of (t,) values, ignoring NaN in each window; NaN stays NaN."""
    known, window = np.isfinite(values), np.ones(WINDOW)
    total = np.convolve(np.where(known, values, 0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.where(known, total / np.maximum(count, 1), np.nan)


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and standard error (0 for one seed) over seeds: (seeds, t) -> (t,)."""
    mean = values.mean(0)  # NaN wherever a seed has no value
    if len(values) < 2:
        return mean, np.zeros_like(mean)
    return mean, values.std(0, ddof=1) / np.sqrt(len(values))


def _all_games(axis, curves: Sequence[Curves], games: str) -> None:
    spread = min(found.seeds for found in curves) > 1  # a single seed cannot be resampled
    for method in dict.fromkeys(found.runs.method for found in curves):
        own = [found for found in curves if found.runs.method == method]
        scores = [normalised_return(found.values[TEST], found.runs.game) for found in own]
        rng = np.random.default_rng(0)  # the same resamples for every method
        mean, low, high = interquartile_interval(scores, rng)
        axis.plot(100 * GRID, smoothed(mean), color=own[0].colour, **MEAN)
        axis.plot(100 * GRID, mean, color=own[0].colour, **SEED)
        if spread:
            ends = smoothed(low), smoothed(high)
            axis.fill_between(100 * GRID, *ends, color=own[0].colour, **BAND)
    axis.set_title(f"{games}, interquartile mean" + (", 95 % interval" if spread else ""))
    axis.set_xlabel("% of training")
    axis.set_ylabel("normalised return")
    axis.set_xlim(0, 100)


def _legend(figure: Figure, curves: Sequence[Curves]) -> None:
    methods = dict.fromkeys(found.runs.method for found in curves)
    looks = {METHODS.get(m, m): {"color": method_colour(m)} | MEAN for m in methods}
    spread = any(found.seeds > 1 for found in curves)
    smooth = "unseen levels, smoothed" + (" mean ± standard error" if spread else "")
    looks |= {smooth: MEAN, "not smoothed": SEED, "training levels, smoothed": DASHED}
    columns = 3 if figure.get_figwidth() == WIDTH else 1  # methods, then unseen and training levels
    handles = legend_handles(looks)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.5)
