"""Many copies of a Procgen game, run by one of two engines.

`envpool` supports current Python versions. `procgen` is the original package (through gym3), with
wheels up to Python 3.10. When an episode ends, the original returns the last reward together with
the first frame of the next episode. EnvPool returns that frame one step later; `EnvPoolGames`
restores the original behaviour by preparing first frames in advance.
"""

import importlib
import os
import sys
import types
from collections import deque
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from ed.core.validate import choice

GAMES = ("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball")
GAMES += ("fruitbot", "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot")
MODES = ("easy", "hard")
ACTIONS = 15
FRAME = (3, 64, 64)
LEVELS = 2**31 - 1  # exclusive upper bound on level seeds
PLAYING_PER_SPARE = 8  # on average, at most two of 64 copies finish per step


class EngineError(ImportError):
    """Raised if the requested engine cannot be imported."""


@dataclass(frozen=True)
class Step:
    """Result of one step of all copies.

    Attributes:
        frames: (N, 3, 64, 64) uint8; where an episode has ended, the first frame of the next one.
        rewards: (N,) float32, not normalised.
        dones: (N,) bool.
        returns: raw returns of the episodes that just ended, ordered by copy.
        levels: (N,), current level seed of each copy.
    """

    frames: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    returns: list[float]
    levels: np.ndarray


class Games:
    """Copies of a game; engines implement `_reset` and `_step`."""

    def __init__(self, count: int):
        self.count = count
        self._totals = np.zeros(count)

    def reset(self) -> Step:
        """Returns the first frames of all copies; call it only once."""
        frames, levels = self._reset()
        zeros = np.zeros(self.count, np.float32)
        return Step(frames, zeros, zeros.astype(bool), [], levels)

    def step(self, actions: np.ndarray) -> Step:
        """Advances all copies; `actions` are (N,) integers in 0..14."""
        actions = np.asarray(actions)
        # the engines do not check actions
        if actions.shape != (self.count,) or actions.min() < 0 or actions.max() >= ACTIONS:
            raise ValueError(
                f"actions: got shape {actions.shape} with values {actions.min()} to "
                f"{actions.max()}; pass {self.count} integers from 0 to {ACTIONS - 1}"
            )
        frames, rewards, dones, levels = self._step(actions.astype(np.int32))
        self._totals += rewards
        ended = np.flatnonzero(dones)
        returns = self._totals[ended].tolist()
        self._totals[ended] = 0
        return Step(frames, rewards, dones, returns, levels)

    def _reset(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns frames and levels."""
        raise NotImplementedError

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns frames, rewards, dones and levels."""
        raise NotImplementedError


class EnvPoolGames(Games):
    """Games run by EnvPool's C++ threads.

    Creating a level takes as long as many steps, and without spare copies, all games would wait for
    it. A few spare copies are therefore kept ready at the first frame of an episode. When a copy
    finishes, a spare replaces it, and the finished copy is reset during the next step.
    """

    def __init__(self, game: str, mode: str, count: int, levels: range, seed: int, threads: int):
        super().__init__(count)
        self._pool = load_envpool().make(
            f"{game.capitalize()}{mode.capitalize()}-v0",
            env_type="gymnasium",
            num_envs=count + -(-count // PLAYING_PER_SPARE),
            num_levels=len(levels),
            start_level=levels.start,
            seed=seed,
            num_threads=threads,
        )
        self._playing = np.arange(count, dtype=np.int32)
        self._finished = self._playing[:0]  # reset by the pool at the next step
        self._waiting: deque[tuple[int, np.ndarray, int]] = deque()  # copy, first frame, level

    def _reset(self):
        frames, info = self._pool.reset()
        first, levels = np.split(frames, [self.count]), np.split(info["level_seed"], [self.count])
        self._wait(range(self.count, len(frames)), first[1], levels[1])
        return first[0], levels[0].copy()

    def _step(self, actions):
        late = len(self._finished)
        copies = np.concatenate([self._finished, self._playing])  # slow resets come first
        seen = self._exchange(copies, np.concatenate([np.zeros(late, np.int32), actions]))
        self._wait(copies[:late], seen["obs"], seen["info:level_seed"])
        names = ("obs", "reward", "done", "info:level_seed")
        frames, rewards, dones, levels = (seen[name][late:] for name in names)
        places = np.flatnonzero(dones)
        self._finished = self._playing[places]
        missing = max(0, len(places) - len(self._waiting))
        if missing:
            first, info = self._pool.reset(self._finished[:missing])
            self._wait(info["env_id"], first, info["level_seed"])
            self._finished = self._finished[missing:]
        for place in places:
            self._playing[place], frames[place], levels[place] = self._waiting.popleft()
        return frames, rewards, dones, levels

    def _exchange(self, copies: np.ndarray, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Replaces the pool's `step`, whose Python overhead would delay all lanes."""
        self._pool._send([copies, copies, actions])  # env ids, player ids (the same), actions
        return dict(zip(self._pool._state_keys, self._pool._recv(), strict=True))

    def _wait(self, copies, frames: np.ndarray, levels: np.ndarray) -> None:
        """Queues spare copies; copies the frames, so that the pool's buffer can be released."""
        for copy, frame, level in zip(copies, frames, levels, strict=False):
            self._waiting.append((copy, frame.copy(), level))


class Gym3Games(Games):
    """Games from the original package."""

    def __init__(self, game: str, mode: str, count: int, levels: range, seed: int, threads: int):
        super().__init__(count)
        self._env = load_procgen().ProcgenGym3Env(
            num=count,
            env_name=game,
            distribution_mode=mode,
            num_levels=len(levels),
            start_level=levels.start,
            rand_seed=seed,
            num_threads=threads or os.cpu_count(),
        )

    def _reset(self):
        _, frames, _, levels = self._look()
        return frames, levels

    def _step(self, actions):
        self._env.act(actions)
        return self._look()

    def _look(self):
        rewards, seen, first = self._env.observe()
        levels = np.array([info["level_seed"] for info in self._env.get_info()], np.int32)
        frames = np.ascontiguousarray(seen["rgb"].transpose(0, 3, 1, 2))
        return frames, rewards, first.astype(bool), levels


ENGINES = {"envpool": EnvPoolGames, "procgen": Gym3Games}


def make_games(
    game: str,
    *,
    mode: str,
    count: int,
    levels: range,
    seed: int,
    threads: int = 0,
    engine: str = "envpool",
) -> Games:
    """Creates copies of a game that play random `levels`; threads=0 uses one thread per core."""
    check_settings(game, mode=mode, engine=engine)
    if not len(levels) or levels.step != 1 or levels.start < 0 or levels.stop > LEVELS:
        raise ValueError(f"levels={levels}: use a non-empty range within 0 to {LEVELS - 1}")
    return ENGINES[engine](game, mode, count, levels, seed % 2**31, threads)


def check_settings(game: str, *, mode: str, engine: str) -> None:
    choice("task.game", game, GAMES)
    choice("task.mode", mode, MODES)
    choice("task.engine", engine, ENGINES)


def engine_version(engine: str) -> str:
    """Returns name and version, as levels for the same seed differ between releases."""
    try:
        return f"{engine} {metadata.version(engine)}"
    except metadata.PackageNotFoundError:
        LOADERS[engine]()  # raises EngineError if the package is missing
        return f"{engine} of unknown version"


def load_envpool():
    """Loads only the Procgen part of EnvPool, as `envpool.entry` needs the assets of all games."""
    sys.modules.setdefault("envpool.entry", types.ModuleType("envpool.entry"))
    try:
        envpool = importlib.import_module("envpool")
        importlib.import_module("envpool.procgen.registration")
        # without Qt, the modules load but lack their classes
        importlib.import_module("envpool.procgen").ProcgenEnvSpec  # noqa: B018
    except ModuleNotFoundError as error:
        raise EngineError(
            f"task.engine=envpool requires the package {error.name}: run `bash scripts/setup.sh`, "
            "or `pip install --no-deps -r requirements-procgen.txt` in your own environment"
        ) from error
    except ImportError as error:
        raise EngineError(
            f"task.engine=envpool: EnvPool is installed but fails to import ({error}); on Python "
            "3.11 it needs Qt 5 from the system (on Debian: `apt-get install libqt5gui5`)"
        ) from error
    return envpool


def load_procgen():
    try:
        return importlib.import_module("procgen")
    except ImportError as error:
        raise EngineError(
            f"task.engine=procgen requires the original Procgen ({error}): build it from source "
            "(wheels exist for x86_64 and Python 3.7 to 3.10), or use task.engine=envpool"
        ) from error


LOADERS = {"envpool": load_envpool, "procgen": load_procgen}
