"""Returns of several games and seeds as one number with its uncertainty.

Agarwal et al. (2021): the interquartile mean of normalised returns, with confidence intervals from
a bootstrap that draws seeds anew within each game. Every draw comes from the generator given.
"""

import numpy as np

# (R_min, R_max) of the hard mode from Cobbe et al. (2020), "Leveraging Procedural Generation to
# Benchmark Reinforcement Learning", Appendix C: what a policy that sees nothing earns, and the most
# that can be earned (StarPilot, FruitBot: in practice)
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
    """(R - R_min) / (R_max - R_min) of the hard mode: 0 without looking, 1 at the best."""
    low, high = HARD_RANGES[game]
    return (np.asarray(returns, float) - low) / (high - low)


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean without the lowest and the highest quarter (each rounded down to whole scores).

    NaN where any score is: sorting would put it among the highest, which are left out.
    """
    ordered = np.sort(np.asarray(scores, float), axis=axis)
    count = ordered.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    mean = ordered.take(middle, axis=axis).mean(axis=axis)
    return np.where(np.isnan(ordered).any(axis=axis), np.nan, mean)[()]


def stratified_resamples(
    scores: list[np.ndarray], rng: np.random.Generator, *, count: int
) -> np.ndarray:
    """Scores with the seeds of each game drawn anew: a list of (seeds, ...) -> (count, all, ...).

    Args:
        scores: one array per game; games may have different numbers of seeds.
    """
    drawn = [game[rng.integers(len(game), size=(count, len(game)))] for game in scores]
    return np.concatenate(drawn, axis=1)


def interquartile_interval(
    scores: list[np.ndarray], rng: np.random.Generator, *, count: int = 2000, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interquartile mean over games and seeds, and the ends of its bootstrap interval.

    Args:
        scores: one array (seeds, ...) per game, normalised.
    Returns:
        Three arrays of the trailing shape: mean, low, high.
    """
    tail = 100 * (1 - level) / 2
    resampled = interquartile_mean(stratified_resamples(scores, rng, count=count), axis=1)
    low, high = np.percentile(resampled, [tail, 100 - tail], axis=0)
    return interquartile_mean(np.concatenate(scores), axis=0), low, high
