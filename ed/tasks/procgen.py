"""PPO on Procgen, in the standard training loop.

`batches` plays a rollout with the current model, then yields minibatches while the test
environments play with the same weights. `loss` is the clipped objective. Checkpoints are saved only
between rollouts. The state of the games cannot be saved, so a resumed run starts new episodes, but
it keeps the reward statistics and recent returns.
"""

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.validate import choice, count, counts, fraction, not_negative
from ed.envs.play import Player, Policy, begin, play, scaled
from ed.envs.procgen import (
    ACTIONS,
    FRAME,
    LEVELS,
    Games,
    check_settings,
    engine_version,
    make_games,
)
from ed.runtime.processes import available_cores
from ed.runtime.streams import reseed, stream_seed
from ed.tasks.advantages import RewardNormaliser, generalised_advantages
from ed.tasks.base import Batch, Task, check_shapes

RECENT = 100  # number of episodes in the mean return
LEVELS_LOGGED = {"train": ("distinct", "lowest", "highest"), "test": ("lowest",)}
PRECISIONS = ("bf16", "float32")  # for the policy during rollouts
GPU_LANES = 3  # groups of environments: some step while the GPU computes actions for another


class ProcgenPPO(Task):
    """Trains on `num_levels` levels and tests on all later ones.

    Measures use the last rollout.
    """

    metric = "eval/test_return"
    no_sharing = "each process would play its own games"
    no_parts = "advantages are normalised over a minibatch"
    no_evaluation = "it reports returns from training; use python scripts/play.py RUN"
    penalised = slice(ACTIONS)

    def __init__(
        self,
        game: str = "starpilot",
        *,
        mode: str = "hard",
        engine: str = "envpool",
        frames: int = 50_000_000,
        start_level: int = 0,
        num_levels: int = 500,
        num_envs: int = 128,
        num_steps: int = 256,
        num_minibatches: int = 8,
        update_epochs: int = 3,
        gamma: float = 0.999,
        gae_lambda: float = 0.95,
        clip_coef: float = 0.2,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        num_test_envs: int = 128,
        num_test_steps: int = 64,
        eval_every: int = 4,
        threads: int = 0,
        precision: str = "bf16",
    ):
        check_settings(game, mode=mode, engine=engine)
        counts("task", num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches)
        counts("task", frames=frames, num_levels=num_levels, update_epochs=update_epochs)
        counts("task", num_test_steps=num_test_steps, eval_every=eval_every)
        counts("task", least=0, start_level=start_level, threads=threads)
        count("task.num_test_envs", num_test_envs, least=0)
        fraction("task.gamma", gamma)
        fraction("task.gae_lambda", gae_lambda)
        not_negative("task.clip_coef", clip_coef)
        not_negative("task.vf_coef", vf_coef)
        not_negative("task.ent_coef", ent_coef)
        choice("task.precision", precision, PRECISIONS)
        self.num_examples = num_envs * num_steps  # frames in a rollout
        if self.num_examples % num_minibatches:
            raise ValueError(
                f"task.num_minibatches={num_minibatches}: must divide the {self.num_examples} "
                f"frames of a rollout (task.num_envs={num_envs} x task.num_steps={num_steps})"
            )
        if frames < self.num_examples:
            raise ValueError(
                f"task.frames={frames}: must be at least one rollout ({self.num_examples})"
            )
        self.game, self.mode, self.engine, self.threads = game, mode, engine, threads
        self.levels = split_levels(start_level, num_levels)
        self.num_envs, self.num_steps = num_envs, num_steps
        self.num_minibatches, self.update_epochs = num_minibatches, update_epochs
        self.gamma, self.gae_lambda, self.clip_coef = gamma, gae_lambda, clip_coef
        self.vf_coef, self.ent_coef = vf_coef, ent_coef
        self.num_test_envs, self.num_test_steps = num_test_envs, num_test_steps
        self.precision, self.lanes = precision, 1
        self.batch_size = self.num_examples // num_minibatches
        self.steps_per_rollout = update_epochs * num_minibatches
        self.rollouts = frames // self.num_examples
        self.frames = self.rollouts * self.num_examples  # rounded down to whole rollouts
        self.total_steps = self.rollouts * self.steps_per_rollout
        self.eval_steps = eval_every * self.steps_per_rollout

    def check_model(self, model: nn.Module) -> None:
        remedy = f"use model=impala with model.actions={ACTIONS}"
        check_shapes(model, "task=procgen", inputs=FRAME, outputs=ACTIONS + 1, remedy=remedy)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.normaliser = RewardNormaliser(self.num_envs, self.gamma, device)
        self.returns = {side: deque(maxlen=RECENT) for side in self.levels}
        self.levels_seen = {side: LevelRecord(levels) for side, levels in self.levels.items()}
        self.generator = torch.Generator(device)
        if device.type == "cuda":
            self.lanes = GPU_LANES
        self.model, self.latest = None, None  # the trained model and the last rollout
        self.clock = time.monotonic()
        self.played, self.noted = 0, 0  # frames so far, and at the last evaluation

    def provenance(self) -> dict[str, str]:
        return {"engine": engine_version(self.engine)}

    def make_games(self, side: str, count: int, seed: int) -> Games:
        # each lane gets 1.5 times its share of the cores, because some lanes wait for the GPU
        lanes, cores = self.lanes if side == "train" else 1, available_cores()
        each = cores if lanes == 1 else max(1, 3 * cores // (2 * lanes))
        return make_games(
            self.game,
            mode=self.mode,
            count=count,
            levels=self.levels[side],
            seed=seed,
            threads=self.threads or each,
            engine=self.engine,
        )

    def sides(self) -> dict[str, int]:
        """Returns the number of rollout steps for "train" and, if used, "test"."""
        test = {"test": self.num_test_steps} if self.num_test_envs else {}
        return {"train": self.num_steps} | test

    def make_lanes(self, side: str, rollout: int) -> list[Games]:
        """Starts new games, with seeds that depend on the rollout at which the run starts."""
        counts = _shares(self.num_envs, self.lanes) if side == "train" else [self.num_test_envs]
        seed = stream_seed(self.seed, f"environment {side}", rollout)
        return [self.make_games(side, count, seed + lane) for lane, count in enumerate(counts)]

    def make_player(self, side: str, rollout: int, policy: Policy) -> Player:
        return Player(self.make_lanes(side, rollout), policy, steps=self.sides()[side])

    def make_policy(self, model: nn.Module) -> Policy:
        bf16 = self.precision == "bf16" and self.device.type == "cuda"
        return Policy(model, device=self.device, bf16=bf16)

    def batches(self, model: nn.Module, start: int) -> Iterator[Batch]:
        self.model = model
        return self._batches(model, start)

    def _batches(self, model: nn.Module, start: int) -> Iterator[Batch]:
        first = start // self.steps_per_rollout
        policy = self.make_policy(model)
        players = {side: self.make_player(side, first, policy) for side in self.sides()}
        self.played = self.noted = first * self.num_examples
        self.clock = time.monotonic()  # excludes setup from frames per second
        for rollout in range(first, self.rollouts):
            reseed(self.generator, self.seed, "actions", rollout)
            policy.refresh()
            for player in players.values():
                player.draw(self.generator)
            play(players["train"])
            self._note("train", players["train"])
            self.played += self.num_examples
            self.latest = self._advantages(players["train"].memory, self.normaliser)
            minibatches = self._minibatches(self.latest, rollout)
            if "test" in players:  # plays with the same weights as the training rollout
                minibatches = self._while_testing(players["test"], minibatches)
            yield from minibatches

    def _while_testing(self, player: Player, minibatches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields minibatches while the test environments play; waits for them before the last."""
        wait = begin(player)
        try:
            yield from islice(minibatches, self.steps_per_rollout - 1)
        finally:
            wait()
        self._note("test", player)
        yield from minibatches

    def _note(self, side: str, player: Player) -> None:
        self.returns[side].extend(player.returns)
        self.levels_seen[side].add(player.new_levels())

    def examples(self, index: Tensor) -> Batch:
        if self.latest is None:
            self.latest = self._extra_rollout()
        return {name: value[index.to(self.device)] for name, value in self.latest.items()}

    def probe(self) -> Batch:
        """Returns blank frames, as there are no others before the first rollout."""
        return {"frames": torch.zeros(2, *FRAME, dtype=torch.uint8, device=self.device)}

    def _extra_rollout(self) -> Batch:
        """Plays a rollout for measures after training, without changing the run's statistics."""
        if self.model is None:
            raise ValueError(
                "task=procgen: measures need a rollout; run train.py with the run's settings and "
                "measures=[...]"
            )
        policy = self.make_policy(self.model)
        policy.refresh()
        player = self.make_player("train", self.rollouts, policy)
        reseed(self.generator, self.seed, "actions", self.rollouts)
        player.draw(self.generator)
        play(player)
        return self._advantages(player.memory, copy.deepcopy(self.normaliser))

    def _advantages(self, memory: dict[str, Tensor], normaliser: RewardNormaliser) -> Batch:
        rewards, dones = (
            memory[name].to(self.device, non_blocking=True) for name in ("rewards", "dones")
        )
        values, last_value = memory["values"][:-1], memory["values"][-1]
        advantages = generalised_advantages(
            normaliser(rewards, dones),
            values,
            dones,
            last_value,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        data = {name: memory[name][:-1] for name in ("frames", "actions", "log_probabilities")}
        data |= {"values": values, "advantages": advantages, "targets": advantages + values}
        return {name: value.flatten(0, 1) for name, value in data.items()}

    def _minibatches(self, data: Batch, rollout: int) -> Iterator[Batch]:
        reseed(self.generator, self.seed, "order", rollout)
        for _ in range(self.update_epochs):
            count = len(data["actions"])
            order = torch.randperm(count, generator=self.generator, device=self.device)
            for index in order.chunk(self.num_minibatches):
                yield {name: value[index] for name, value in data.items()}

    def field(self, model: nn.Module, batch: Batch) -> Field:
        return Field.of(model, scaled(batch["frames"]))

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the PPO loss (Schulman et al., 2017), with a clipped value loss."""
        outputs = outputs.float()
        logarithms = F.log_softmax(outputs[:, self.penalised], dim=-1)
        chosen = logarithms.gather(1, batch["actions"][:, None]).squeeze(1)
        ratio = (chosen - batch["log_probabilities"]).exp()
        advantage = batch["advantages"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        bounded = ratio.clamp(1 - self.clip_coef, 1 + self.clip_coef)
        policy = -torch.minimum(ratio * advantage, bounded * advantage).mean()
        value, old = outputs[:, -1], batch["values"]
        near = old + (value - old).clamp(-self.clip_coef, self.clip_coef)
        errors = [(v - batch["targets"]).square() for v in (value, near)]
        value_loss = torch.maximum(*errors).mean() / 2
        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
        total = policy + self.vf_coef * value_loss - self.ent_coef * entropy
        report = {"loss": total, "policy": policy, "value": value_loss, "entropy": entropy}
        return total, {name: term.detach() for name, term in report.items()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns mean raw returns of recent episodes, level statistics and frame counts.

        Omits a return if no episode has finished. Frames per second are measured since
        the last evaluation.
        """
        played = {side: seen for side, seen in self.returns.items() if seen}
        found = {f"eval/{side}_return": sum(seen) / len(seen) for side, seen in played.items()}
        for side, names in LEVELS_LOGGED.items():
            summary = self.levels_seen[side].summary()
            found |= {f"levels/{side}_{name}": summary[name] for name in names if name in summary}
        now = time.monotonic()
        speed = (self.played - self.noted) / max(now - self.clock, 1e-9)
        found |= {"time/frames": self.played, "time/frames_per_s": speed}
        self.clock, self.noted = now, self.played
        return found

    def can_save(self, step: int) -> bool:
        return step % self.steps_per_rollout == 0

    def state_dict(self) -> dict:
        return {
            "engine": engine_version(self.engine),
            "normaliser": self.normaliser.state_dict(),
            "returns": {side: list(seen) for side, seen in self.returns.items()},
            "levels": {side: seen.state_dict() for side, seen in self.levels_seen.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        here = engine_version(self.engine)
        if state["engine"] != here:
            raise ValueError(
                f"task.engine: this run used {state['engine']}, but {here} generates other games"
                f"; install {state['engine'].replace(' ', '==')}, or start a new run"
            )
        self.normaliser.load_state_dict(state["normaliser"])
        for side in self.levels:
            self.returns[side] = deque(state["returns"][side], maxlen=RECENT)
            self.levels_seen[side].load_state_dict(state["levels"][side])


def split_levels(start: int, count: int) -> dict[str, range]:
    """Returns the training levels and the test levels, which are all later ones."""
    if start + count >= LEVELS:
        raise ValueError(
            f"task.num_levels={count}, task.start_level={start}: there are only {LEVELS} levels, "
            "which leaves none to test on"
        )
    return {"train": range(start, start + count), "test": range(start + count, LEVELS)}


class LevelRecord:
    """Records which levels were played; raises if one is not allowed."""

    COUNTED = 100_000  # count distinct levels only if at most this many are allowed

    def __init__(self, allowed: range):
        self.allowed = allowed
        self.lowest, self.highest = None, None
        self.seen: set[int] | None = set() if len(allowed) <= self.COUNTED else None

    def add(self, levels: Sequence[int]) -> None:
        if not levels:
            return
        lowest, highest = min(levels), max(levels)
        if lowest < self.allowed.start or highest >= self.allowed.stop:
            raise RuntimeError(
                f"the engine played levels {lowest}-{highest}, outside {self.allowed}"
            )
        self.lowest = lowest if self.lowest is None else min(lowest, self.lowest)
        self.highest = highest if self.highest is None else max(highest, self.highest)
        if self.seen is not None:
            self.seen.update(levels)

    def summary(self) -> dict[str, int]:
        if self.lowest is None:
            return {}
        found = {"lowest": self.lowest, "highest": self.highest}
        return found if self.seen is None else found | {"distinct": len(self.seen)}

    def state_dict(self) -> dict:
        seen = None if self.seen is None else sorted(self.seen)
        return {"lowest": self.lowest, "highest": self.highest, "seen": seen}

    def load_state_dict(self, state: dict) -> None:
        self.lowest, self.highest = state["lowest"], state["highest"]
        self.seen = None if state["seen"] is None else set(state["seen"])


def _shares(count: int, parts: int) -> list[int]:
    """Splits `count` into up to `parts` nearly equal, non-zero integers."""
    return [share for i in range(parts) if (share := (count + i) // parts)]
