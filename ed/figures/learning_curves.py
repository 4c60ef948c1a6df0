"""Learning curves of PPO: a panel per game, mean and standard error over seeds, then all games.

Solid: unseen levels; dashed: training levels. The last panel aggregates the games: interquartile
mean of the normalised return on unseen levels, with a 95 % stratified bootstrap interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from ed.analysis.collect import Row
from ed.analysis.returns import HARD_RANGES, interquartile_interval, normalised_return
from ed.analysis.spec import Table

TEST, TRAIN = "eval/test_return", "eval/train_return"
METHODS = {"none": ("PPO", "#5b6570"), "ed": ("PPO + ED", "#c0392b")}
OTHER = ("other", "#1b6ca8")
TITLES = {"starpilot": "StarPilot", "fruitbot": "FruitBot"}
GRID = np.linspace(0, 1, 201)  # fractions of training at which seeds are averaged
MILLION = 1e6


@dataclass(frozen=True)
class Curves:
    """The runs of one game by one method.

    Attributes:
        frames: of a whole run.
        values: metric -> (seeds, 201), returns over the course of training, NaN before the first
            episode has ended.
    """

    game: str
    method: str
    frames: float
    values: dict[str, np.ndarray]


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """None while no run has curves."""
    curves = [found for found in (_curves(*g) for g in _groups(table, rows)) if found]
    if not curves:
        return None
    games = list(dict.fromkeys(found.game for found in curves))
    aggregated = len(games) > 1 and all(game in HARD_RANGES for game in games)
    panels = len(games) + aggregated
    figure = Figure(figsize=(2.5 * panels + 0.5, 2.9))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis, game in zip(axes, games, strict=False):
        _game(axis, [found for found in curves if found.game == game])
    axes[0].set_ylabel("return")
    if aggregated:
        _all_games(axes[-1], curves)
    _legend(figure, curves)
    return figure


def _groups(table: Table, rows: Sequence[Row]) -> list[tuple[dict, list[Row]]]:
    """(settings of the cell, its runs) for every cell that has any."""
    groups = []
    for cell in table.cells.values():
        runs = [row for row in rows if (row.table, row.cell) == cell.home]
        if runs:
            groups.append((dict(text.split("=", 1) for text in cell.overrides), runs))
    return groups


def _curves(settings: dict[str, str], rows: Sequence[Row]) -> Curves | None:
    settings = settings | dict(text.split("=", 1) for text in rows[0].deviations.split())
    values = {
        metric: np.array([curve for row in rows if (curve := _curve(row, metric)) is not None])
        for metric in (TEST, TRAIN)
    }
    if not len(values[TEST]):
        return None
    frames = float(settings["task.frames"])
    return Curves(settings["task.game"], settings["regularizer"], frames, values)


def _curve(row: Row, metric: str) -> np.ndarray | None:
    """One run on the common grid: (201,); None where it logged nothing."""
    seen = [(entry["step"], entry[metric]) for entry in row.history() if metric in entry]
    if not seen:
        return None
    steps, values = np.array(seen, float).T
    return np.interp(GRID, steps / row.steps, values, left=np.nan)


def _game(axis, curves: Sequence[Curves]) -> None:
    for found in curves:
        colour = METHODS.get(found.method, OTHER)[1]
        x = GRID * found.frames / MILLION
        for metric, style in ((TEST, {}), (TRAIN, {"linestyle": (0, (4, 2)), "linewidth": 0.9})):
            if not len(found.values[metric]):
                continue
            mean, error = mean_and_error(found.values[metric])
            axis.plot(x, mean, color=colour, **({"linewidth": 1.6} | style))
            if metric == TEST:
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
    game = curves[0].game
    seeds = sorted({len(found.values[TEST]) for found in curves})
    axis.set_title(f"{TITLES.get(game, game.capitalize())} (n = {'/'.join(map(str, seeds))})")
    axis.set_xlabel("million frames")
    axis.set_xlim(0, max(found.frames for found in curves) / MILLION)


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over seeds, (seeds, t) -> (t,) each; no error for a single seed."""
    mean = values.mean(0)  # NaN until every seed has a value
    if len(values) < 2:
        return mean, np.zeros_like(mean)
    return mean, values.std(0, ddof=1) / np.sqrt(len(values))


def _all_games(axis, curves: Sequence[Curves]) -> None:
    """Only methods that played every game: others would be averaged over other games."""
    games = {found.game for found in curves}
    for method, (_, colour) in METHODS.items():
        own = [found for found in curves if found.method == method]
        if {found.game for found in own} != games:
            continue
        scores = [normalised_return(found.values[TEST], found.game) for found in own]
        rng = np.random.default_rng(0)  # the same resamples for every method and every drawing
        mean, low, high = interquartile_interval(scores, rng)
        axis.plot(100 * GRID, mean, color=colour, linewidth=1.6)
        axis.fill_between(100 * GRID, low, high, color=colour, alpha=0.2, lw=0)
    axis.set_title("all games: IQM, 95 % interval")
    axis.set_xlabel("% of training")
    axis.set_ylabel("normalised return")
    axis.set_xlim(0, 100)


def _legend(figure: Figure, curves: Sequence[Curves]) -> None:
    from matplotlib.lines import Line2D

    methods = list(dict.fromkeys(found.method for found in curves))
    handles = [
        Line2D([], [], color=colour, linewidth=1.6, label=label)
        for label, colour in (METHODS.get(method, OTHER) for method in methods)
    ]
    for label, style in (("unseen levels, ± standard error", "-"), ("training levels", "--")):
        handles.append(Line2D([], [], color="0.3", linestyle=style, linewidth=1.2, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
