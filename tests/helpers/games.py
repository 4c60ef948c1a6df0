"""Helpers for Procgen tests: a hand-made game, a fake of the original engine, small settings."""

import sys
import types

import numpy as np
import pytest

from ed.engine.compose import compose_config
from ed.envs.procgen import Step, load_envpool
from ed.tasks.procgen import ProcgenPPO

SMALL = ["task=procgen", "model=impala", "model.channels=[4,4]", "model.hidden=16"]
SMALL += ["task.num_envs=4", "task.num_test_envs=2", "task.num_steps=8", "task.num_test_steps=8"]
SMALL += [
    "task.num_minibatches=2",
    "task.update_epochs=2",
    "task.eval_every=1",
    "optimizer.schedule=constant",
]
SMALL += ["optimizer.weight_decay=0", "system.device=cpu", "system.log_every=1"]
ED = ["regularizer=ed", "regularizer.anchored=false", "regularizer.components=3"]


def has_envpool() -> bool:
    try:
        load_envpool()
    except ImportError:
        return False
    return True


needs_envpool = pytest.mark.skipif(not has_envpool(), reason="EnvPool cannot be loaded")


class Bandit:
    """A hand-made game: action 3 earns a reward of 1, others 0; episodes last five steps."""

    def __init__(self, count, level, first=0):
        self.count, self.clock, self.level, self.first = count, 0, level, first
        self.totals = np.zeros(count)

    def frames(self):
        image = np.full((self.count, 3, 64, 64), 40 * (self.clock % 5), np.uint8)
        return (
            image
            + np.arange(self.first, self.first + self.count, dtype=np.uint8)[:, None, None, None]
        )

    def reset(self):
        nothing = np.zeros(self.count, np.float32)
        return Step(self.frames(), nothing, nothing > 0, [], np.full(self.count, self.level))

    def step(self, actions):
        self.clock += 1
        rewards = (actions == 3).astype(np.float32)
        self.totals += rewards
        dones = np.full(self.count, self.clock % 5 == 0)
        returns = self.totals[dones].tolist()
        self.totals[dones] = 0
        return Step(self.frames(), rewards, dones, returns, np.full(self.count, self.level))


def make_task(**changes) -> ProcgenPPO:
    cfg = compose_config(["task=procgen", *(f"task.{k}={v}" for k, v in changes.items())]).task
    return ProcgenPPO(**{k: v for k, v in cfg.items() if k != "_target_"})


class FakeProcgen:
    """A fake of the original package's `ProcgenGym3Env`; episodes of copy i last i + 2 steps.

    `first` marks observations that begin an episode; their reward belongs to the previous episode.
    """

    def __init__(self, **settings):
        self.settings, self.count = settings, settings["num"]
        self.time, self.acted = 0, np.zeros(self.count)

    def observe(self):
        rgb = np.zeros((self.count, 64, 64, 3), np.uint8)
        rgb[..., 1] = self.time % 256
        rgb[:, 0, :, 2] = 9  # the top row is blue
        return self.acted.astype(np.float32), {"rgb": rgb}, self.time % self.lengths() == 0

    def lengths(self):
        return np.arange(self.count) + 2

    def act(self, actions):
        assert actions.dtype == np.int32
        self.time, self.acted = self.time + 1, actions

    def get_info(self):
        start = self.settings["start_level"]
        return [{"level_seed": start + int(n)} for n in self.time // self.lengths()]


def pretend_procgen(monkeypatch) -> None:
    fake = types.ModuleType("procgen")
    fake.ProcgenGym3Env = FakeProcgen
    monkeypatch.setitem(sys.modules, "procgen", fake)
