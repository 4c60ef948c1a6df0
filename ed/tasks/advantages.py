"""Reward normalisation and generalised advantage estimation for PPO, over whole rollouts."""

import torch
from torch import Tensor

REWARD_BOUND = 10.0


class RewardNormaliser:
    """Divides rewards by the running standard deviation of discounted returns, then clips."""

    def __init__(self, count: int, gamma: float, device: torch.device | str = "cpu"):
        self.gamma = gamma
        start = {"discounted": torch.zeros(count), "mean": 0.0, "variance": 1.0, "weight": 1e-4}
        self.state = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device)
            for name, value in start.items()
        }

    def __call__(self, rewards: Tensor, dones: Tensor) -> Tensor:
        """Normalises rewards (T, N); each row uses the statistics up to that step."""
        terms, alive = rewards.to(torch.float64, copy=True), 1 - dones.double()
        terms[0] += self.gamma * self.state["discounted"]
        # the return restarts at step t if the episode ended at t - 1
        factors = self.gamma * torch.cat([torch.zeros_like(alive[:1]), alive[:-1]])
        discounted = solve_backward(terms.flip(0), factors.flip(0)).flip(0)
        self.state["discounted"] = discounted[-1] * alive[-1]
        scale = (self._observe(discounted) + 1e-8).sqrt()
        bounded = (rewards.double() / scale[:, None]).clamp(-REWARD_BOUND, REWARD_BOUND)
        return bounded.to(rewards.dtype)

    def _observe(self, values: Tensor) -> Tensor:
        """Updates the statistics with values (T, N); returns the variance after each row (T,)."""
        mean, variance, weight = (self.state[name] for name in ("mean", "variance", "weight"))
        apart = values - mean  # avoids cancellation in the variance
        counts = weight + torch.full_like(values[:, 0], values.shape[1]).cumsum(0)
        shifts = apart.sum(1).cumsum(0) / counts
        squares = (variance * weight + apart.square().sum(1).cumsum(0)) / counts
        variances = squares - shifts.square()
        last = {"mean": mean + shifts[-1], "variance": variances[-1], "weight": counts[-1]}
        # clone, because saving a view would save the whole tensor
        self.state |= {name: value.clone() for name, value in last.items()}
        return variances

    def state_dict(self) -> dict:
        """Returns the statistics, without unfinished returns: a resumed run starts new episodes."""
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
    """Computes GAE (Schulman et al., 2016) for a rollout.

    All tensors are (T, N), except `last_value` (N,). dones[t] means that the episode ended with
    step t. As in the original implementation, reaching the time limit also ends an episode.
    """
    alive = 1 - dones
    following = torch.cat([values[1:], last_value[None]])
    errors = rewards + gamma * following * alive - values
    return solve_backward(errors, gamma * gae_lambda * alive)


def solve_backward(terms: Tensor, factors: Tensor) -> Tensor:
    """Solves x[t] = terms[t] + factors[t] x[t + 1] with x[T] = 0: (T, ...) -> (T, ...).

    Needs only log2(T) passes, because substituting x[t + span] into the equation for x[t] doubles
    its span.
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
