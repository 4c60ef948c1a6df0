"""PPO on Procgen: the rollout is a batch source, so the ordinary loop trains it.

`batches` plays with the current model, then yields minibatches, while the test copies play by the
same weights; `loss` is the clipped objective.
Saves happen between rollouts only. What the engine cannot restore is the state of the games: a
resumed run starts new episodes, with the reward statistics and the curves where they were.
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
from ed.tasks.base import Batch, Task, check_shapes

RECENT = 100  # episodes in the mean return of a curve
REWARD_BOUND = 10.0
LEVELS_LOGGED = {"train": ("distinct", "lowest", "highest"), "test": ("lowest",)}
PRECISIONS = ("bf16", "float32")  # of playing
GPU_LANES = 3  # parts of the training copies: some are stepped while the GPU decides for another


class ProcgenPPO(Task):
    """Trains on `num_levels` levels, plays all later levels beside it, and never trains on those.

    Measures look at the frames of the last rollout, with what was done and won in them.
    """

    metric = "eval/test_return"
    no_sharing = "each process would play games of its own"
    no_parts = "advantages are normalised over a minibatch"
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
        if (num_envs * num_steps) % num_minibatches:
            raise ValueError(
                f"task.num_minibatches={num_minibatches}: must divide the {num_envs * num_steps} "
                f"frames of a rollout (task.num_envs={num_envs} x task.num_steps={num_steps})"
            )
        if frames < num_envs * num_steps:
            raise ValueError(
                f"task.frames={frames}: less than one rollout of {num_envs * num_steps}"
            )
        self.game, self.mode, self.engine, self.threads = game, mode, engine, threads
        self.levels = split_levels(start_level, num_levels)
        self.num_envs, self.num_steps = num_envs, num_steps
        self.num_minibatches, self.update_epochs = num_minibatches, update_epochs
        self.gamma, self.gae_lambda, self.clip_coef = gamma, gae_lambda, clip_coef
        self.vf_coef, self.ent_coef = vf_coef, ent_coef
        self.num_test_envs, self.num_test_steps = num_test_envs, num_test_steps
        self.precision, self.lanes = precision, 1
        self.num_examples = num_envs * num_steps
        self.batch_size = self.num_examples // num_minibatches
        self.steps_per_rollout = update_epochs * num_minibatches
        self.rollouts = frames // (num_envs * num_steps)
        self.frames = self.rollouts * num_envs * num_steps  # whole rollouts only
        self.total_steps = self.rollouts * self.steps_per_rollout
        self.eval_steps = eval_every * self.steps_per_rollout

    def check_model(self, model: nn.Module) -> None:
        remedy = f"model=impala with model.actions={ACTIONS} has the action logits and the value"
        check_shapes(model, "task=procgen", inputs=FRAME, outputs=ACTIONS + 1, remedy=remedy)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.normaliser = RewardNormaliser(self.num_envs, self.gamma, device)
        self.returns = {side: deque(maxlen=RECENT) for side in self.levels}
        self.levels_seen = {side: LevelRecord(levels) for side, levels in self.levels.items()}
        self.generator = torch.Generator(device)
        if device.type == "cuda":
            self.lanes = GPU_LANES
        self.model, self.latest = None, None  # who plays; the last rollout
        self.clock, self.played, self.noted = time.monotonic(), 0, 0  # frames so far; when asked

    def provenance(self) -> dict[str, str]:
        return {"engine": engine_version(self.engine)}

    def make_games(self, side: str, count: int, seed: int) -> Games:
        # lanes share the cores, and one that is decided for has no use for its share
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
        """Those that play, one after the other, and the steps of their rollouts."""
        return {"train": self.num_steps} | (
            {"test": self.num_test_steps} if self.num_test_envs else {}
        )

    def make_lanes(self, side: str, rollout: int) -> list[Games]:
        """Seeded by where training stands, as the state of games is not saved."""
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
        self.played = self.noted = first * self.num_envs * self.num_steps
        self.clock = time.monotonic()  # building all this is no playing
        for rollout in range(first, self.rollouts):
            reseed(self.generator, self.seed, "actions", rollout)
            policy.refresh()
            for player in players.values():
                player.draw(self.generator)
            play(players["train"])
            self._note("train", players["train"])
            self.played += self.num_envs * self.num_steps
            self.latest = self._advantages(players["train"].memory, self.normaliser)
            minibatches = self._minibatches(self.latest, rollout)
            if "test" in players:  # by the weights that the training copies had
                minibatches = self._beside(players["test"], minibatches)
            yield from minibatches

    def _beside(self, player: Player, minibatches: Iterator[Batch]) -> Iterator[Batch]:
        """The minibatches, while the test copies play; they end before the last, to be logged."""
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
            self.latest = self._play_aside()
        return {name: value[index.to(self.device)] for name, value in self.latest.items()}

    def _play_aside(self) -> Batch:
        """A rollout of a run that has nothing left to learn; it leaves no trace in its curves."""
        if self.model is None:
            raise ValueError(
                "task=procgen: the frames to measure on come from playing, which train.py does: "
                "give it measures=[...] with the run's settings"
            )
        policy = self.make_policy(self.model)
        policy.refresh()
        player = self.make_player("train", self.rollouts, policy)
        reseed(self.generator, self.seed, "actions", self.rollouts)
        player.draw(self.generator)
        play(player)
        return self._advantages(player.memory, copy.deepcopy(self.normaliser))

    def _advantages(self, memory: dict[str, Tensor], normaliser: "RewardNormaliser") -> Batch:
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
        """Clipped surrogate, clipped value loss, entropy bonus (Schulman et al., 2017)."""
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
        """Mean raw returns of the last episodes; sides without a finished episode are left out.

        Beside them the levels that were played, and the training frames: how many so far, and how
        many per second since last asked.
        """
        found = {
            f"eval/{side}_return": sum(seen) / len(seen)
            for side, seen in self.returns.items()
            if seen
        }
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
                f"this run was played on {state['engine']}, here is {here}, which draws the games "
                f"differently: install {state['engine'].replace(' ', '==')}, or start another run"
            )
        self.normaliser.load_state_dict(state["normaliser"])
        for side in self.levels:
            self.returns[side] = deque(state["returns"][side], maxlen=RECENT)
            self.levels_seen[side].load_state_dict(state["levels"][side])


def split_levels(start: int, count: int) -> dict[str, range]:
    """Those to train on, and all later ones to test on: disjoint by construction."""
    if start + count >= LEVELS:
        raise ValueError(
            f"task.num_levels={count} from task.start_level={start}: leave some below {LEVELS} to "
            "test on"
        )
    return {"train": range(start, start + count), "test": range(start + count, LEVELS)}


class LevelRecord:
    """Which of the allowed levels were played; any other is an error."""

    COUNTED = 100_000  # more levels than this are not told apart

    def __init__(self, allowed: range):
        self.allowed = allowed
        self.lowest, self.highest = None, None
        self.seen: set[int] | None = set() if len(allowed) <= self.COUNTED else None

    def add(self, levels: Sequence[int]) -> None:
        if not levels:
            return
        lowest, highest = min(levels), max(levels)
        if lowest < self.allowed.start or highest >= self.allowed.stop:
            raise RuntimeError(f"the engine played levels {lowest} to {highest} of {self.allowed}")
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


class RewardNormaliser:
    """Divides rewards by the running standard deviation of the discounted return, then clips."""

    def __init__(self, count: int, gamma: float, device: torch.device | str = "cpu"):
        self.gamma = gamma
        start = {"discounted": torch.zeros(count), "mean": 0.0, "variance": 1.0, "weight": 1e-4}
        self.state = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device)
            for name, value in start.items()
        }

    def __call__(self, rewards: Tensor, dones: Tensor) -> Tensor:
        """(T, N) raw -> (T, N) normalised, each by what was known when it came."""
        terms, alive = rewards.to(torch.float64, copy=True), 1 - dones.double()
        terms[0] += self.gamma * self.state["discounted"]
        # the return up to step t: a done at t - 1 cuts it
        factors = self.gamma * torch.cat([torch.zeros_like(alive[:1]), alive[:-1]])
        discounted = solve_backward(terms.flip(0), factors.flip(0)).flip(0)
        self.state["discounted"] = discounted[-1] * alive[-1]
        scale = (self._observe(discounted) + 1e-8).sqrt()
        bounded = (rewards.double() / scale[:, None]).clamp(-REWARD_BOUND, REWARD_BOUND)
        return bounded.to(rewards.dtype)

    def _observe(self, values: Tensor) -> Tensor:
        """The running variance after each row of values (T, N): (T,)."""
        mean, variance, weight = (self.state[name] for name in ("mean", "variance", "weight"))
        apart = values - mean  # around the mean so far, so that nothing cancels
        counts = weight + torch.full_like(values[:, 0], values.shape[1]).cumsum(0)
        shifts = apart.sum(1).cumsum(0) / counts
        squares = (variance * weight + apart.square().sum(1).cumsum(0)) / counts
        variances = squares - shifts.square()
        last = {"mean": mean + shifts[-1], "variance": variances[-1], "weight": counts[-1]}
        # no views: they are saved
        self.state |= {name: value.clone() for name, value in last.items()}
        return variances

    def state_dict(self) -> dict:
        """Without the returns under way: a resumed run starts new episodes."""
        return {name: value for name, value in self.state.items() if name != "discounted"}

    def load_state_dict(self, state: dict) -> None:
        for name, value in state.items():
            self.state[name].copy_(value)


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """GAE (Schulman et al., 2016) over a rollout: all (T, N), `last_value` (N,) -> (T, N).

    dones[t] says that the episode ended with step t, so nothing flows back over it. The engine's
    time limit is such an end, too, as in the original, which does not tell it from others.
    """
    alive = 1 - dones
    following = torch.cat([values[1:], last_value[None]])
    errors = rewards + gamma * following * alive - values
    return solve_backward(errors, gamma * gae_lambda * alive)


def solve_backward(terms: Tensor, factors: Tensor) -> Tensor:
    """x[t] = terms[t] + factors[t] x[t + 1] with x[T] = 0, for all t at once: (T, ...) -> (T, ...).

    By doubling, in log2(T) passes instead of T: putting the equation for x[t + span] into that for
    x[t] leaves one of the same form with twice the span.
    """
    span = 1
    while span < len(terms):
        reach = factors[:-span]
        terms, factors = (
            torch.cat([terms[:-span] + reach * terms[span:], terms[-span:]]),
            torch.cat([reach * factors[span:], torch.zeros_like(factors[-span:])]),
        )
        span *= 2
    return terms


def _shares(count: int, parts: int) -> list[int]:
    """`count` cut into up to `parts` nearly equal whole numbers."""
    shares = [(count + i) // parts for i in range(parts)]
    return [share for share in shares if share]
