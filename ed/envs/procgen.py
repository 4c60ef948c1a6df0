"""Procgen games through EnvPool: many copies at once, stepped by its C++ thread pool.

EnvPool resets a finished copy one step later than the original Procgen, whose users expect the
first frame of the next episode together with the reward that ended the last one. `ProcgenEnv`
restores that: after a step it resets the finished copies at once and puts their first frames in
place.
"""

import importlib
import sys
import types
from dataclasses import dataclass

import numpy as np

GAMES = ("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball")
GAMES += ("fruitbot", "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot")
MODES = ("easy", "hard")
ACTIONS = 15
FRAME = (3, 64, 64)


@dataclass(frozen=True)
class Step:
    """What one step of all copies gives.

    Attributes:
        frames: (N, 3, 64, 64) uint8, of the next episode where one has ended.
        rewards: (N,) float32, raw. dones: (N,) bool.
        returns: raw returns of the episodes that ended now, in the order of their copies.
        levels: (N,), the level seed that each copy plays now.
    """

    frames: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    returns: list[float]
    levels: np.ndarray


class ProcgenEnv:
    """`count` copies of a game, on `levels` levels from `start_level` on (0: on all there are)."""

    def __init__(
        self,
        game: str,
        *,
        mode: str,
        count: int,
        levels: int,
        seed: int,
        start_level: int = 0,
        threads: int = 0,
    ):
        if game not in GAMES:
            raise ValueError(f"task.game={game}: use one of {', '.join(GAMES)}")
        if mode not in MODES:
            raise ValueError(f"task.mode={mode}: use {' or '.join(MODES)}")
        envpool = load_envpool()
        self.engine = f"envpool {envpool.__version__}"
        self.count = count
        self._pool = envpool.make(
            f"{game.capitalize()}{mode.capitalize()}-v0",
            env_type="gymnasium",
            num_envs=count,
            num_levels=levels,
            start_level=start_level,
            seed=seed % 2**31,
            num_threads=threads,
        )
        self._totals = np.zeros(count)

    def reset(self) -> Step:
        """First frames of all copies."""
        frames, info = self._pool.reset()
        self._totals[:] = 0
        zeros = np.zeros(self.count, np.float32)
        return Step(frames, zeros, zeros.astype(bool), [], info["level_seed"].copy())

    def step(self, actions: np.ndarray) -> Step:
        """Advances all copies; `actions` (N,) of whole numbers in 0..14."""
        actions = np.asarray(actions)
        # the engine accepts any number in silence, and a list makes it fail obscurely
        if actions.shape != (self.count,) or actions.min() < 0 or actions.max() >= ACTIONS:
            raise ValueError(
                f"actions of shape {actions.shape} from {actions.min()} to {actions.max()}: needed "
                f"are {self.count} between 0 and {ACTIONS - 1}"
            )
        frames, rewards, terminated, truncated, info = self._pool.step(actions.astype(np.int32))
        dones = terminated | truncated
        levels = info["level_seed"].copy()
        self._totals += rewards
        returns = self._totals[dones].tolist()
        if dones.any():
            ended = np.flatnonzero(dones).astype(np.int32)
            first, first_info = self._pool.reset(ended)
            order = first_info["env_id"]  # the pool answers in any order
            frames = frames.copy()
            frames[order], levels[order] = first, first_info["level_seed"]
            self._totals[dones] = 0
        return Step(frames, rewards, dones, returns, levels)


def load_envpool():
    """EnvPool with Procgen alone: its own entry module would want every family's assets."""
    sys.modules.setdefault("envpool.entry", types.ModuleType("envpool.entry"))
    try:
        envpool = importlib.import_module("envpool")
        importlib.import_module("envpool.procgen.registration")
    except ImportError as error:
        raise ImportError(
            f"task=procgen needs EnvPool ({error}): run `bash scripts/setup.sh`, which "
            "installs it with the few packages that Procgen needs (on Debian also libqt5gui5)"
        ) from error
    return envpool
