"""Learning curves of PPO: a panel per game, mean and standard error over seeds, then all games.

Solid: unseen levels; dashed: training levels. The last panel aggregates the games: interquartile
mean of the normalised return on unseen levels, with a 95 % stratified bootstrap interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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

TEST, TRAIN = "eval/test_return", "eval/train_return"
COLOURS = {"none": "#5b6570", "ed": "#c0392b"}
OTHER = ("other", "#1b6ca8")
TITLES = {"starpilot": "StarPilot", "fruitbot": "FruitBot"}
GRID = np.linspace(0, 1, 201)  # fractions of training at which seeds are averaged
MILLION = 1e6


@dataclass(frozen=True)
class Curves:
    """The runs of one game by one method.

    Attributes:
        values: metric -> (seeds, 201), returns over the course of training, NaN before the first
            episode has ended and beyond what a run under way has reached.
    """

    runs: GameRuns
    values: dict[str, np.ndarray]

    @property
    def colour(self) -> str:
        return COLOURS.get(self.runs.method, OTHER[1])

    @property
    def seeds(self) -> int:
        return len(self.values[TEST])


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """None while no run has curves."""
    curves = [found for runs in game_runs(table, rows) if (found := _curves(runs))]
    if not curves:
        return None
    games = list(dict.fromkeys(found.runs.game for found in curves))
    aggregated = by_method([found.runs for found in curves])
    panels = len(games) + bool(aggregated)
    figure = Figure(figsize=(2.5 * panels + 0.5, 2.9))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis, game in zip(axes, games, strict=False):
        _game(axis, [found for found in curves if found.runs.game == game])
    axes[0].set_ylabel("return")
    if aggregated:
        together = [found for found in curves if found.runs.method in aggregated]
        _all_games(axes[-1], together, count_games(table, [found.runs for found in together]))
    _legend(figure, curves)
    return figure


def _curves(runs: GameRuns) -> Curves | None:
    values = {
        metric: np.array([c for row in runs.rows if (c := _curve(row, metric)) is not None])
        for metric in (TEST, TRAIN)
    }
    return Curves(runs, values) if len(values[TEST]) else None


def _curve(row: Row, metric: str) -> np.ndarray | None:
    """One run on the common grid: (201,); None where it logged nothing, or not how long it is."""
    steps, values = series(row.history(), metric)
    if not steps or row.total_steps is None:
        return None
    parts = np.array(steps) / row.total_steps
    return np.interp(GRID, parts, values, left=np.nan, right=np.nan)


def _game(axis, curves: Sequence[Curves]) -> None:
    for found in curves:
        colour, x = found.colour, GRID * found.runs.frames / MILLION
        for metric, style in ((TEST, {}), (TRAIN, {"linestyle": (0, (4, 2)), "linewidth": 0.9})):
            if not len(found.values[metric]):
                continue
            mean, error = mean_and_error(found.values[metric])
            axis.plot(x, mean, color=colour, **({"linewidth": 1.6} | style))
            if metric == TEST:
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
    game = curves[0].runs.game
    seeds = [found.seeds for found in curves]
    counts = seeds if len(set(seeds)) > 1 else seeds[:1]  # in the order of the legend
    axis.set_title(f"{TITLES.get(game, game.capitalize())} (n = {'/'.join(map(str, counts))})")
    axis.set_xlabel("million frames")
    axis.set_xlim(0, max(found.runs.frames for found in curves) / MILLION)


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over seeds, (seeds, t) -> (t,) each; no error for a single seed."""
    mean = values.mean(0)  # NaN where not every seed has a value
    if len(values) < 2:
        return mean, np.zeros_like(mean)
    return mean, values.std(0, ddof=1) / np.sqrt(len(values))


def _all_games(axis, curves: Sequence[Curves], games: str) -> None:
    spread = min(found.seeds for found in curves) > 1  # one seed has nothing to draw anew
    for method in dict.fromkeys(found.runs.method for found in curves):
        own = [found for found in curves if found.runs.method == method]
        scores = [normalised_return(found.values[TEST], found.runs.game) for found in own]
        rng = np.random.default_rng(0)  # the same resamples for every method and every drawing
        mean, low, high = interquartile_interval(scores, rng)
        axis.plot(100 * GRID, mean, color=own[0].colour, linewidth=1.6)
        if spread:
            axis.fill_between(100 * GRID, low, high, color=own[0].colour, alpha=0.2, lw=0)
    axis.set_title(f"{games}: IQM" + (", 95 % interval" if spread else ""))
    axis.set_xlabel("% of training")
    axis.set_ylabel("normalised return")
    axis.set_xlim(0, 100)


def _legend(figure: Figure, curves: Sequence[Curves]) -> None:
    colours = {METHODS.get(found.runs.method, OTHER[0]): found.colour for found in curves}
    handles = [
        Line2D([], [], color=colour, linewidth=1.6, label=label)
        for label, colour in colours.items()
    ]
    spread = any(found.seeds > 1 for found in curves)
    unseen = "unseen levels" + (", ± standard error" if spread else "")
    for label, style in ((unseen, "-"), ("training levels", "--")):
        handles.append(Line2D([], [], color="0.3", linestyle=style, linewidth=1.2, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
