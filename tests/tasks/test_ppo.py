"""PPO, compared with slow references: loss, network, rollouts and updates."""

from copy import deepcopy

import pytest
import torch
from hydra.utils import instantiate
from torch.nn import functional as F

from ed.core.penalty import Paths
from ed.engine.compose import compose_config
from ed.engine.main import make_step
from ed.envs.play import Player, Policy, play
from ed.envs.procgen import ACTIONS
from ed.models.impala import Impala
from ed.tasks.advantages import RewardNormaliser, generalised_advantages, solve_backward
from ed.tasks.procgen import ProcgenPPO
from tests.helpers.games import ED, SMALL, Bandit, make_task

GAMMA, LAMBDA = 0.9, 0.8


def test_advantages_equal_the_definition():
    """The reference sums discounted errors up to the end of each episode."""
    steps, count = 12, 3
    torch.manual_seed(0)
    rewards, values = torch.randn(2, steps, count, dtype=torch.float64)
    dones = (torch.rand(steps, count) < 0.25).double()
    last = torch.randn(count, dtype=torch.float64)
    ours = generalised_advantages(rewards, values, dones, last, gamma=GAMMA, gae_lambda=LAMBDA)
    following = torch.cat([values[1:], last[None]])
    for copy in range(count):
        for start in range(steps):
            expected, factor = 0.0, 1.0
            for t in range(start, steps):
                alive = 1 - dones[t, copy]
                error = rewards[t, copy] + GAMMA * following[t, copy] * alive - values[t, copy]
                expected += factor * error
                factor *= GAMMA * LAMBDA
                if not alive:
                    break
            assert ours[start, copy].item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 9])
def test_doubling_solves_the_recursion(steps):
    torch.manual_seed(0)
    terms, factors = torch.randn(2, steps, 4, dtype=torch.float64)
    expected, following = torch.empty_like(terms), torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(steps)):
        following = terms[t] + factors[t] * following
        expected[t] = following
    torch.testing.assert_close(solve_backward(terms, factors), expected)


def test_with_lambda_one_targets_are_discounted_returns():
    rewards = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    dones = torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    values = torch.randn(4, 1, dtype=torch.float64)
    last = torch.tensor([16.0], dtype=torch.float64)
    advantages = generalised_advantages(rewards, values, dones, last, gamma=0.5, gae_lambda=1.0)
    returns = (advantages + values).squeeze(1).tolist()
    assert returns == pytest.approx([1 + 0.5 * 2, 2, 4 + 0.5 * 8 + 0.25 * 16, 8 + 0.5 * 16])


def test_loss_equals_a_slow_reference():
    torch.manual_seed(0)
    task, n = make_task(), 50
    outputs = torch.randn(n, ACTIONS + 1)
    actions, old = torch.randint(ACTIONS, (n,)), torch.randn(n)
    batch = {"actions": actions, "values": old, "targets": torch.randn(n)}
    batch |= {"advantages": torch.randn(n), "log_probabilities": -3 + 0.3 * torch.randn(n)}
    total, report = task.loss(outputs, batch)
    probabilities = outputs[:, :ACTIONS].softmax(-1)
    advantages = (batch["advantages"] - batch["advantages"].mean()) / batch["advantages"].std()
    policy = value = entropy = 0.0
    for i in range(n):
        ratio = probabilities[i, actions[i]] / batch["log_probabilities"][i].exp()
        bounded = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
        policy -= min(ratio * advantages[i], bounded * advantages[i]) / n
        change = min(max(outputs[i, -1] - old[i], torch.tensor(-0.2)), torch.tensor(0.2))
        errors = [(v - batch["targets"][i]) ** 2 for v in (outputs[i, -1], old[i] + change)]
        value += max(errors) / (2 * n)
        entropy -= (probabilities[i] * probabilities[i].log()).sum() / n
    assert report["policy"].item() == pytest.approx(float(policy), rel=1e-4)
    assert report["value"].item() == pytest.approx(float(value), rel=1e-4)
    assert report["entropy"].item() == pytest.approx(float(entropy), rel=1e-4)
    assert total.item() == pytest.approx(float(policy + 0.5 * value - 0.01 * entropy), rel=1e-4)


def test_rewards_are_divided_by_the_running_std_of_returns():
    """The reference computes two rollouts step by step."""
    normaliser = RewardNormaliser(3, GAMMA)
    torch.manual_seed(0)
    rewards, dones = torch.rand(40, 3) * 5, (torch.rand(40, 3) < 0.1).float()
    rewards[-1, 0] = 1e4  # more than ten standard deviations, even among 120 values
    halves = zip(rewards.chunk(2), dones.chunk(2), strict=True)
    normalised = torch.cat([normaliser(*half) for half in halves])
    discounted, seen = torch.zeros(3, dtype=torch.float64), []
    for step, (reward, done) in enumerate(zip(rewards, dones, strict=True)):
        discounted = discounted * GAMMA + reward
        seen.append(discounted)
        discounted = discounted * (1 - done)
        everything = torch.cat(seen)
        # the initial mean 0 and variance 1 count as 1e-4 values
        weight, mean = len(everything) + 1e-4, everything.sum() / (len(everything) + 1e-4)
        squares = 1e-4 * (1 + mean**2) + (everything - mean).square().sum()
        expected = (reward / (squares / weight + 1e-8).sqrt()).clamp(-10, 10).float()
        torch.testing.assert_close(normalised[step], expected, rtol=1e-5, atol=1e-6)
    assert normalised.max() == 10


def test_resuming_keeps_reward_statistics_but_not_unfinished_returns():
    torch.manual_seed(0)
    before, after, fresh = (RewardNormaliser(3, GAMMA) for _ in range(3))
    before(torch.rand(20, 3), torch.zeros(20, 3))
    after.load_state_dict(before.state_dict())
    assert after.state["variance"] == before.state["variance"] != fresh.state["variance"]
    assert after.state["discounted"].equal(torch.zeros(3, dtype=torch.float64))


def test_the_network_equals_a_reference():
    torch.manual_seed(0)
    model = Impala(actions=15, channels=[2, 3], hidden=20, image_size=[8, 8])
    x = h = torch.rand(4, 3, 8, 8)
    for stage in model.stages:
        h = F.max_pool2d(stage.convolution(h), kernel_size=3, stride=2, padding=1)
        for block in stage.blocks:
            h = h + block.second(F.relu(block.first(F.relu(h))))
    h = F.relu(model.hidden(F.relu(h).reshape(4, -1)))
    torch.testing.assert_close(model(x), torch.cat([model.actor(h), model.critic(h)], 1))
    actor, critic = model.actor.weight, model.critic.weight
    torch.testing.assert_close(actor @ actor.T, 1e-4 * torch.eye(15), atol=1e-9, rtol=1e-4)
    torch.testing.assert_close(critic @ critic.T, torch.eye(1))


def test_parameter_count_equals_the_standard_implementation():
    model = instantiate(compose_config(["task=procgen", "model=impala"]).model)
    conv = [(3, 16), *[(16, 16)] * 4, (16, 32), *[(32, 32)] * 4, (32, 32), *[(32, 32)] * 4]
    layers = [(32 * 8 * 8, 256), (256, 15), (256, 1)]
    expected = sum(9 * a * b + b for a, b in conv) + sum(a * b + b for a, b in layers)
    assert sum(weight.numel() for weight in model.parameters()) == expected == 626_256


def test_ed_has_no_gradient_for_the_critic_head(bandit):
    cfg = compose_config([*SMALL, *ED, "task.frames=64"])
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    task.prepare(torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    model = instantiate(cfg.model)
    batch = next(iter(task.batches(model, 0)))
    field = task.field(model, batch)
    paths = Paths.draw(field, regularizer.representation, 8)
    paths.degrees(paths.field()[:, task.penalised]).mean().backward()
    assert model.critic.weight.grad.abs().max() == 0
    assert model.actor.weight.grad.abs().max() > 0
    assert model.stages[0].convolution.weight.grad.abs().max() > 0


def test_rollout_records_the_game(bandit):
    task = make_task(
        num_envs=4, num_steps=8, num_minibatches=2, frames=90, num_test_envs=0, eval_every=5
    )
    torch.manual_seed(0)
    model = Impala(actions=ACTIONS, channels=[4, 4], hidden=16, image_size=[64, 64])
    player = Player([Bandit(4, 0)], Policy(model, device=torch.device("cpu")), steps=12)
    player.draw(torch.Generator().manual_seed(0))
    play(player)
    played = player.memory
    assert played["rewards"].equal((played["actions"][:-1] == 3).float())
    assert played["dones"].sum(0).tolist() == [2, 2, 2, 2]  # episodes end after steps 5 and 10
    assert len(player.returns) == 8
    assert len(player.new_levels()) == 4 + 8  # 4 at the start and one after each of 8 episodes
    assert player.new_levels() == []
    outputs = model(played["frames"][7].float() / 255)
    torch.testing.assert_close(played["values"][7], outputs[:, -1].detach())
    logarithms = F.log_softmax(outputs[:, :ACTIONS], dim=-1)
    expected = logarithms.gather(1, played["actions"][7][:, None]).squeeze(1).detach()
    torch.testing.assert_close(played["log_probabilities"][7], expected)
    assert (task.steps_per_rollout, task.eval_steps) == (6, 30)
    assert (task.frames, task.total_steps) == (64, 12)  # rounded down to full rollouts


def test_advantages_stop_at_the_end_of_an_episode(bandit):
    """Episodes of the toy game have 5 steps; the rollout has 12."""
    task = make_task(num_envs=3, num_steps=12, num_minibatches=2, frames=36, num_test_envs=0)
    task.prepare(torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    model = Impala(actions=ACTIONS, channels=[], hidden=16, image_size=[64, 64])
    player = task.make_player("train", 0, Policy(model, device=torch.device("cpu")))
    player.draw(torch.Generator().manual_seed(0))
    play(player)
    found = task._advantages(player.memory, lambda rewards, dones: rewards)
    data = {name: value.unflatten(0, (12, 3)) for name, value in found.items()}
    paid, values = (data["actions"] == 3).float(), player.memory["values"]
    assert player.returns == [paid[a:b, c].sum() for a, b in ((0, 5), (5, 10)) for c in range(3)]
    for copy in range(3):
        for start in range(12):
            end = min(5 * (start // 5 + 1), 12)  # where the episode or the rollout ends
            expected, factor = 0.0, 1.0
            for t in range(start, end):
                after = 0 if t + 1 in (5, 10) else values[t + 1, copy]
                expected += factor * (paid[t, copy] + 0.999 * after - values[t, copy])
                factor *= 0.999 * 0.95
            assert data["advantages"][start, copy].item() == pytest.approx(
                expected.item(), abs=1e-5
            )
    torch.testing.assert_close(data["targets"], data["advantages"] + values[:-1])


def test_lanes_do_not_change_a_rollout():
    """One lane of 6 environments plays the same games as lanes of 2 and 4."""
    torch.manual_seed(0)
    model = Impala(actions=ACTIONS, channels=[], hidden=8, image_size=[64, 64])
    torch.nn.init.orthogonal_(model.actor.weight, 3.0)
    played, returns = [], []
    for shares in ([6], [2, 4]):
        games = [Bandit(count, 0, first=sum(shares[:i])) for i, count in enumerate(shares)]
        player = Player(games, Policy(model, device=torch.device("cpu")), steps=12)
        player.draw(torch.Generator().manual_seed(0))
        play(player)
        played.append(player.memory)
        returns.append(player.returns)
    for name in ("frames", "actions", "rewards", "dones"):
        assert played[0][name].equal(played[1][name]), name
    assert returns[0] == returns[1]  # sorted by time, not by lane
    assert returns[0] != sorted(returns[0])


def test_rollouts_differ_in_actions_and_minibatches(bandit):
    """Model and frames are the same in both rollouts; only random draws can differ."""
    task = make_task(
        num_envs=4, num_steps=10, num_minibatches=2, update_epochs=1, frames=80, num_test_envs=0
    )
    task.prepare(torch.device("cpu"), seed=0)
    batches = task.batches(Impala(actions=ACTIONS, channels=[], hidden=8, image_size=[64, 64]), 0)
    played = []
    for _ in range(2):
        next(batches)
        played.append(task.latest["actions"].clone())
        next(batches)
    assert task.latest["frames"].unflatten(0, (10, 4))[:, 0].unique().tolist() == [
        *range(0, 200, 40)
    ]
    assert not torch.equal(*played)
    orders = []
    for rollout in (0, 0, 1):
        parts = task._minibatches({"actions": torch.arange(40)}, rollout)
        orders.append(torch.cat([part["actions"] for part in parts]))
        assert orders[-1].sort().values.tolist() == list(range(40))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_every_lane_and_every_session_gets_its_own_seed(monkeypatch):
    made = []
    monkeypatch.setattr(ProcgenPPO, "make_games", lambda _, *how: made.append(how))
    task = make_task(num_envs=128, num_test_envs=5)
    task.prepare(torch.device("cpu"), seed=0)
    task.lanes = 3
    for rollout in (0, 7):  # the first rollouts of a new and a resumed run
        for side in task.sides():
            task.make_lanes(side, rollout)
    counts = [("train", 42), ("train", 43), ("train", 43), ("test", 5)]
    assert [(side, count) for side, count, _ in made] == 2 * counts
    assert len({seed for _, _, seed in made}) == len(made)


def test_two_rollouts_equal_a_plain_loop(bandit):
    """The reference is CleanRL's update: Adam (lr 5e-4, eps 1e-5) with clipping at 0.5."""
    own = [text for text in SMALL if not text.startswith("optimizer.")]
    cfg = compose_config([*own, "optimizer=ppo", "task.frames=64", "task.num_test_envs=0"])
    task = instantiate(cfg.task)
    task.prepare(torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    model = instantiate(cfg.model)
    plain = deepcopy(model)
    adam = torch.optim.Adam(plain.parameters(), lr=5e-4, eps=1e-5)
    parts = instantiate(cfg.regularizer), instantiate(cfg.optimizer), torch.device("cpu")
    step, norms = make_step(cfg, task, model, *parts), []
    for number, batch in enumerate(task.batches(model, 0)):
        outputs = plain(batch["frames"].float() / 255)
        policy = torch.distributions.Categorical(logits=outputs[:, :ACTIONS])
        ratio = (policy.log_prob(batch["actions"]) - batch["log_probabilities"]).exp()
        gain = batch["advantages"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        value, old, target = outputs[:, -1], batch["values"], batch["targets"]
        near = old + (value - old).clamp(-0.2, 0.2)
        loss += 0.5 * 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
        loss -= 0.01 * policy.entropy().mean()
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        adam.step()
        step(batch, number)
    assert len(norms) == 2 * task.steps_per_rollout
    assert max(norms) > 0.5  # some gradients were clipped
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_test_environments_play_once_per_rollout(bandit):
    task = make_task(
        num_envs=4,
        num_steps=8,
        num_minibatches=2,
        update_epochs=1,
        num_test_envs=3,
        num_test_steps=15,
    )
    task.prepare(torch.device("cpu"), seed=0)
    batches = task.batches(Impala(actions=ACTIONS, channels=[], hidden=8, image_size=[64, 64]), 0)
    seen = []
    for _ in range(4):  # each rollout has two minibatches
        next(batches)
        seen.append((len(task.returns["train"]), len(task.returns["test"])))
    assert seen == [(4, 0), (4, 9), (12, 9), (12, 18)]  # episodes have five steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": 9}, "10 outputs.*16.*model=impala"),
        ({"image_size": [32, 32]}, "3 x 64 x 64"),
    ],
)
def test_networks_of_the_wrong_shape_are_rejected(change, message):
    shape = {"actions": 15, "channels": [2], "hidden": 4, "image_size": [64, 64]}
    make_task().check_model(Impala(**shape))
    with pytest.raises(ValueError, match=message):
        make_task().check_model(Impala(**shape | change))
