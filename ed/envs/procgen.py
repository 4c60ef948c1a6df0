"""Many copies of a Procgen game, from either of two engines.

`envpool` supports current Python versions; `procgen` is the original package (through gym3), whose
wheels end with Python 3.10. The original returns the first frame of the next episode together with
the reward that ended the last one. EnvPool returns it one step later; `EnvPoolGames` restores the
original behaviour by preparing first frames in advance.
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
LEVELS = 2**31 - 1  # level seeds are below this
PLAYING_PER_SPARE = 8  # on average, at most two of 64 copies finish in a step


class EngineError(ImportError):
    """The requested engine is not installed."""


@dataclass(frozen=True)
class Step:
    """Result of one step of all copies.

    Attributes:
        frames: (N, 3, 64, 64) uint8; after the end of an episode, the first frame of the next.
        rewards: (N,) float32, raw. dones: (N,) bool.
        returns: raw returns of the episodes that just ended, in order of their copies.
        levels: (N,), current level seed of each copy.
    """

    frames: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    returns: list[float]
    levels: np.ndarray


class Games:
    """`count` copies of a game; engines implement `_reset` and `_step`."""

    def __init__(self, count: int):
        self.count = count
        self._totals = np.zeros(count)

    def reset(self) -> Step:
        """First frames of all copies; call it once."""
        frames, levels = self._reset()
        zeros = np.zeros(self.count, np.float32)
        return Step(frames, zeros, zeros.astype(bool), [], levels)

    def step(self, actions: np.ndarray) -> Step:
        """Advances all copies; `actions` are (N,) integers in 0..14."""
        actions = np.asarray(actions)
        # the engines do not check them
        if actions.shape != (self.count,) or actions.min() < 0 or actions.max() >= ACTIONS:
            raise ValueError(
                f"actions of shape {actions.shape} from {actions.min()} to {actions.max()}: pass "
                f"{self.count} numbers between 0 and {ACTIONS - 1}"
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
    """Games stepped by EnvPool's C++ threads.

    A few spare copies wait at the first frame of an episode. A spare replaces a copy that has
    finished, which is reset while the others step on: creating a level takes as long as many steps,
    and all copies would have to wait for it.
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
        self._finished = self._playing[:0]  # the pool resets these at their next step
        self._waiting: deque[tuple[int, np.ndarray, int]] = deque()  # copy, first frame, level

    def _reset(self):
        frames, info = self._pool.reset()
        first, levels = np.split(frames, [self.count]), np.split(info["level_seed"], [self.count])
        self._wait(range(self.count, len(frames)), first[1], levels[1])
        return first[0], levels[0].copy()

    def _step(self, actions):
        late = len(self._finished)
        copies = np.concatenate([self._finished, self._playing])  # slow resets first
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
        """The pool's `step` without its Python overhead, for which all lanes would wait."""
        self._pool._send([copies, copies, actions])  # env ids, player ids (the same), actions
        return dict(zip(self._pool._state_keys, self._pool._recv(), strict=True))

    def _wait(self, copies, frames: np.ndarray, levels: np.ndarray) -> None:
        """Queues spare copies; frames are copied to release the pool's buffer."""
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
    """`count` copies of a game that draw from `levels`; threads=0 uses one per core."""
    check_settings(game, mode=mode, engine=engine)
    if not len(levels) or levels.step != 1 or levels.start < 0 or levels.stop > LEVELS:
        raise ValueError(f"levels={levels}: use a range within 0 to {LEVELS - 1}, not empty")
    return ENGINES[engine](game, mode, count, levels, seed % 2**31, threads)


def check_settings(game: str, *, mode: str, engine: str) -> None:
    choice("task.game", game, GAMES)
    choice("task.mode", mode, MODES)
    choice("task.engine", engine, ENGINES)


def engine_version(engine: str) -> str:
    """Name and version, to be recorded, as releases draw the same level differently."""
    try:
        return f"{engine} {metadata.version(engine)}"
    except metadata.PackageNotFoundError:
        LOADERS[engine]()  # raises if it is missing
        return f"{engine} of unknown version"


def load_envpool():
    """EnvPool with only Procgen; its entry module would need the assets of all families."""
    sys.modules.setdefault("envpool.entry", types.ModuleType("envpool.entry"))
    try:
        envpool = importlib.import_module("envpool")
        importlib.import_module("envpool.procgen.registration")
        # without Qt, the modules load but lack their classes
        importlib.import_module("envpool.procgen").ProcgenEnvSpec  # noqa: B018
    except ModuleNotFoundError as error:
        raise EngineError(
            f"task.engine=envpool needs the package {error.name}: run `bash scripts/setup.sh` or, "
            "in your own environment, `pip install --no-deps -r requirements-procgen.txt`"
        ) from error
    except ImportError as error:
        raise EngineError(
            f"task.engine=envpool: EnvPool is installed but does not load ({error}); on Python "
            "3.11 it needs the system's Qt 5, on Debian `apt-get install libqt5gui5`"
        ) from error
    return envpool


def load_procgen():
    try:
        return importlib.import_module("procgen")
    except ImportError as error:
        raise EngineError(
            f"task.engine=procgen needs the original Procgen ({error}): build it from source "
            "(wheels exist for x86_64 and Python 3.7 to 3.10), or use task.engine=envpool"
        ) from error


LOADERS = {"envpool": load_envpool, "procgen": load_procgen}
