"""PPO on Procgen: the rollout is a batch source, so the ordinary loop trains it.

`batches` plays with the current model, then yields minibatches; `loss` is the clipped objective.
Saves happen between rollouts only. What the engine cannot restore is the state of the games: a
resumed run starts new episodes, with the reward statistics and the curves where they were.
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.streams import reseed, stream_seed
from ed.envs.procgen import ACTIONS, FRAME, ProcgenEnv
from ed.tasks.base import Batch, Task

RECENT = 100  # episodes in the mean return of a curve
REWARD_BOUND = 10.0


class ProcgenPPO(Task):
    """Trains on `levels` levels, plays all levels beside it, and never trains on those."""

    metric = "eval/test_return"
    no_sharing = "each process would play games of its own"
    penalised = slice(ACTIONS)

    def __init__(
        self,
        game: str,
        *,
        mode: str,
        frames: int,
        levels: int,
        envs: int,
        rollout: int,
        minibatches: int,
        epochs: int,
        gamma: float,
        gae_lambda: float,
        clip: float,
        value_weight: float,
        entropy_weight: float,
        test_envs: int,
        eval_every: int,
        threads: int,
    ):
        if (envs * rollout) % minibatches:
            raise ValueError(
                f"task.minibatches={minibatches}: must divide the {envs * rollout} frames of a "
                f"rollout (task.envs={envs} x task.rollout={rollout})"
            )
        if frames < envs * rollout:
            raise ValueError(f"task.frames={frames}: less than one rollout of {envs * rollout}")
        self.game, self.mode, self.levels, self.threads = game, mode, levels, threads
        self.envs, self.rollout, self.minibatches, self.epochs = envs, rollout, minibatches, epochs
        self.gamma, self.gae_lambda, self.clip = gamma, gae_lambda, clip
        self.value_weight, self.entropy_weight = value_weight, entropy_weight
        self.test_envs = test_envs
        self.batch_size = envs * rollout // minibatches
        self.steps_per_rollout = epochs * minibatches
        self.rollouts = frames // (envs * rollout)
        self.total_steps = self.rollouts * self.steps_per_rollout
        self.eval_steps = eval_every * self.steps_per_rollout

    def prepare(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.normaliser = RewardNormaliser(self.envs, self.gamma)
        self.returns = {side: deque(maxlen=RECENT) for side in ("train", "test")}
        self.generator = torch.Generator(device)

    def make_env(self, side: str, rollout: int) -> ProcgenEnv:
        """Games for one side; seeded by where training stands, as their state is not saved."""
        return ProcgenEnv(
            self.game,
            mode=self.mode,
            count=self.envs if side == "train" else self.test_envs,
            levels=self.levels if side == "train" else 0,
            seed=stream_seed(self.seed, f"environment {side}", rollout),
            threads=self.threads,
        )

    def batches(self, model: nn.Module, start: int) -> Iterator[Batch]:
        first = start // self.steps_per_rollout
        players = {
            side: Player(self.make_env(side, first), self.device)
            for side in ("train", "test")
            if side == "train" or self.test_envs
        }
        for rollout in range(first, self.rollouts):
            reseed(self.generator, self.seed, "actions", rollout)
            for side, player in players.items():
                played = player.play(model, self.rollout, self.generator)
                self.returns[side].extend(player.finished)
                if side == "train":
                    data = self._advantages(played)
            yield from self._minibatches(data, rollout)

    def _advantages(self, played: dict[str, Tensor]) -> Batch:
        rewards = self.normaliser(played.pop("rewards"), played["dones"])
        advantages = generalised_advantages(
            rewards.to(self.device),
            played["values"],
            played.pop("dones").to(self.device),
            played.pop("last_value"),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        played |= {"advantages": advantages, "targets": advantages + played["values"]}
        return {name: value.flatten(0, 1) for name, value in played.items()}

    def _minibatches(self, data: Batch, rollout: int) -> Iterator[Batch]:
        reseed(self.generator, self.seed, "order", rollout)
        for _ in range(self.epochs):
            count = len(data["actions"])
            order = torch.randperm(count, generator=self.generator, device=self.device)
            for index in order.chunk(self.minibatches):
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
        bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy = -torch.minimum(ratio * advantage, bounded * advantage).mean()
        value, old = outputs[:, -1], batch["values"]
        near = old + (value - old).clamp(-self.clip, self.clip)
        errors = [(v - batch["targets"]).square() for v in (value, near)]
        value_loss = torch.maximum(*errors).mean() / 2
        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
        total = policy + self.value_weight * value_loss - self.entropy_weight * entropy
        report = {"loss": total, "policy": policy, "value": value_loss, "entropy": entropy}
        return total, {name: term.detach() for name, term in report.items()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean raw returns of the last episodes; sides without a finished episode are left out."""
        return {
            f"eval/{side}_return": sum(seen) / len(seen)
            for side, seen in self.returns.items()
            if seen
        }

    def can_save(self, step: int) -> bool:
        return step % self.steps_per_rollout == 0

    def state_dict(self) -> dict:
        curves = {side: list(seen) for side, seen in self.returns.items()}
        return {"normaliser": self.normaliser.state_dict(), "returns": curves}

    def load_state_dict(self, state: dict) -> None:
        self.normaliser.load_state_dict(state["normaliser"])
        for side, seen in state["returns"].items():
            self.returns[side] = deque(seen, maxlen=RECENT)


class Player:
    """Plays an environment with a model's sampled actions and keeps what learning needs."""

    def __init__(self, env, device: torch.device):
        self.env, self.device = env, device
        self.frames = torch.from_numpy(env.reset().frames).to(device)

    @torch.no_grad()
    def play(self, model: nn.Module, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
        """`steps` steps of all copies; tensors are (steps, N, ...), `last_value` is (N,)."""
        count, where = self.env.count, {"device": self.device}
        frames = torch.empty(steps, count, *FRAME, dtype=torch.uint8, **where)
        actions = torch.empty(steps, count, dtype=torch.long, **where)
        chosen, values = (torch.empty(steps, count, **where) for _ in range(2))
        rewards, dones = torch.empty(steps, count), torch.empty(steps, count)
        self.finished: list[float] = []
        for step in range(steps):
            frames[step] = self.frames
            outputs = model(scaled(self.frames)).float()
            logarithms = F.log_softmax(outputs[:, :ACTIONS], dim=-1)
            action = torch.multinomial(logarithms.exp(), 1, generator=generator)
            actions[step] = action.squeeze(1)
            chosen[step] = logarithms.gather(1, action).squeeze(1)
            values[step] = outputs[:, -1]
            seen = self.env.step(action.squeeze(1).cpu().numpy())
            rewards[step] = torch.from_numpy(seen.rewards)
            dones[step] = torch.from_numpy(seen.dones)
            self.finished += seen.returns
            self.frames = torch.from_numpy(seen.frames).to(self.device)
        last_value = model(scaled(self.frames)).float()[:, -1]
        return {
            "frames": frames,
            "actions": actions,
            "log_probabilities": chosen,
            "values": values,
            "rewards": rewards,
            "dones": dones,
            "last_value": last_value,
        }


class RewardNormaliser:
    """Divides rewards by the running standard deviation of the discounted return, then clips."""

    def __init__(self, count: int, gamma: float):
        self.gamma = gamma
        self.discounted = torch.zeros(count, dtype=torch.float64)
        self.mean, self.variance, self.weight = 0.0, 1.0, 1e-4

    def __call__(self, rewards: Tensor, dones: Tensor) -> Tensor:
        """(T, N) raw -> (T, N) normalised, step by step as they came."""
        normalised = torch.empty_like(rewards)
        for step, (reward, done) in enumerate(zip(rewards.double(), dones.double(), strict=True)):
            self.discounted = self.discounted * self.gamma + reward
            self._observe(self.discounted)
            scale = (self.variance + 1e-8) ** 0.5
            normalised[step] = (reward / scale).clamp(-REWARD_BOUND, REWARD_BOUND)
            self.discounted = self.discounted * (1 - done)
        return normalised

    def _observe(self, values: Tensor) -> None:
        """Merges a batch into the running mean and variance (Chan et al.)."""
        count, mean = len(values), values.mean().item()
        variance = values.var(unbiased=False).item()
        total, delta = self.weight + count, mean - self.mean
        squares = self.variance * self.weight + variance * count
        squares += delta**2 * self.weight * count / total
        self.mean += delta * count / total
        self.variance, self.weight = squares / total, total

    def state_dict(self) -> dict:
        numbers = {name: getattr(self, name) for name in ("mean", "variance", "weight")}
        return {"discounted": self.discounted, **numbers}

    def load_state_dict(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.discounted = torch.zeros_like(self.discounted)  # episodes start anew


def scaled(frames: Tensor) -> Tensor:
    """uint8 frames -> [0, 1], the space in which paths run."""
    return frames.float() / 255


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

    dones[t] says that the episode ended with step t, so nothing flows back over it.
    """
    advantages = torch.empty_like(values)
    running, following = torch.zeros_like(last_value), last_value
    for step in range(len(rewards) - 1, -1, -1):
        alive = 1 - dones[step]
        error = rewards[step] + gamma * following * alive - values[step]
        running = error + gamma * gae_lambda * alive * running
        advantages[step], following = running, values[step]
    return advantages
