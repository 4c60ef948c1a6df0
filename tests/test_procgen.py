"""PPO's arithmetic against slow references, and Procgen's levels and resets."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.envs.play import Player, Policy, play
from ed.envs.procgen import ACTIONS, LEVELS, Step, load_envpool, make_games
from ed.models.impala import Impala
from ed.tasks.procgen import ProcgenPPO, RewardNormaliser, generalised_advantages

GAMMA, LAMBDA = 0.9, 0.8
SMALL = ["task=procgen", "model=impala", "model.channels=[4,4]", "model.hidden=16"]
SMALL += ["task.envs=4", "task.test_envs=2", "task.rollout=8", "task.minibatches=2"]
SMALL += ["task.epochs=2", "task.eval_every=1", "optimizer.schedule=constant"]
SMALL += ["optimizer.weight_decay=0", "system.device=cpu", "system.log_every=1"]
ED = ["regularizer=ed", "regularizer.anchored=false", "regularizer.components=3"]


def has_envpool() -> bool:
    try:
        load_envpool()
    except ImportError:
        return False
    return True


needs_envpool = pytest.mark.skipif(not has_envpool(), reason="EnvPool does not load here")


class Bandit:
    """A hand-made game: action 3 pays 1, others nothing; episodes last five steps."""

    def __init__(self, count, level):
        self.count, self.clock, self.level = count, 0, level
        self.totals = np.zeros(count)

    def frames(self):
        picture = np.full((self.count, 3, 64, 64), 40 * (self.clock % 5), np.uint8)
        return picture + np.arange(self.count, dtype=np.uint8)[:, None, None, None]

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


@pytest.fixture
def bandit(monkeypatch):
    monkeypatch.setattr(
        ProcgenPPO, "make_games", lambda task, side, count, _: Bandit(count, task.levels[side][0])
    )


def test_advantages_equal_the_definition():
    """Sums of discounted errors written out, ended by every done inside the rollout."""
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


def test_with_lambda_one_targets_are_discounted_returns():
    rewards = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    dones = torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    values = torch.randn(4, 1, dtype=torch.float64)
    last = torch.tensor([16.0], dtype=torch.float64)
    advantages = generalised_advantages(rewards, values, dones, last, gamma=0.5, gae_lambda=1.0)
    returns = (advantages + values).squeeze(1).tolist()
    assert returns == pytest.approx([1 + 0.5 * 2, 2, 4 + 0.5 * 8 + 0.25 * 16, 8 + 0.5 * 16])


def make_task(**changes) -> ProcgenPPO:
    cfg = compose_config(["task=procgen", *(f"task.{k}={v}" for k, v in changes.items())]).task
    return ProcgenPPO(**{k: v for k, v in cfg.items() if k != "_target_"})


def test_loss_equals_a_reference_written_out():
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


def test_reward_normaliser_keeps_the_running_variance_of_returns():
    normaliser = RewardNormaliser(3, GAMMA)
    torch.manual_seed(0)
    rewards, dones = torch.rand(40, 3) * 5, (torch.rand(40, 3) < 0.1).float()
    normalised = normaliser(rewards, dones)
    discounted, seen = torch.zeros(3), []
    for reward, done in zip(rewards, dones, strict=True):
        discounted = discounted * GAMMA + reward
        seen.append(discounted)
        discounted = discounted * (1 - done)
    variance = torch.cat(seen).var(unbiased=False).item()
    assert normaliser.state["variance"].item() == pytest.approx(variance, rel=1e-3)
    expected = (rewards[-1] / (variance + 1e-8) ** 0.5).clamp(-10, 10)
    torch.testing.assert_close(normalised[-1], expected, rtol=1e-3, atol=1e-6)


def test_critic_head_gets_no_gradient_from_ed_and_the_actor_does(bandit):
    from hydra.utils import instantiate

    cfg = compose_config([*SMALL, *ED, "task.frames=64"])
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    task.prepare(torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    model = instantiate(cfg.model)
    batch = next(iter(task.batches(model, 0)))
    field = task.field(model, batch)
    from ed.core.penalty import Paths

    paths = Paths.draw(field, regularizer.representation, 8)
    paths.degrees(paths.field()[:, task.penalised]).mean().backward()
    assert model.critic.weight.grad.abs().max() == 0
    assert model.actor.weight.grad.abs().max() > 0
    assert model.stages[0].convolution.weight.grad.abs().max() > 0


def test_rollout_keeps_what_was_played(bandit):
    task = make_task(envs=4, rollout=8, minibatches=2, frames=64, test_envs=0)
    torch.manual_seed(0)
    model = Impala(actions=ACTIONS, channels=[4, 4], hidden=16, image_size=[64, 64])
    player = Player([Bandit(4, 0)], Policy(model, device=torch.device("cpu")), steps=12)
    player.draw(torch.Generator().manual_seed(0))
    play([player])
    played = player.memory
    assert played["rewards"].equal((played["actions"][:-1] == 3).float())
    assert played["dones"].sum(0).tolist() == [2, 2, 2, 2]  # after steps 5 and 10
    assert len(player.returns) == 8
    outputs = model(played["frames"][7].float() / 255)
    torch.testing.assert_close(played["values"][7], outputs[:, -1].detach())
    logarithms = F.log_softmax(outputs[:, :ACTIONS], dim=-1)
    expected = logarithms.gather(1, played["actions"][7][:, None]).squeeze(1).detach()
    torch.testing.assert_close(played["log_probabilities"][7], expected)
    assert task.steps_per_rollout == 6


def test_ppo_learns_the_bandit(bandit, tmp_path):
    """Random play earns 5/15 an episode; the game pays 5 at best."""
    overrides = [*SMALL, "model.channels=[2]", "task.rollout=20", "task.frames=2400"]
    overrides += ["optimizer.lr=1e-2", "task.epochs=4", f"system.run_dir={tmp_path}"]
    summary = run(compose_config(overrides), ["procgen"])
    assert summary["last"]["eval/train_return"] > 2
    assert summary["last"]["eval/test_return"] > 1


def test_a_stopped_run_goes_on_at_a_rollout(bandit, tmp_path):
    from ed.engine.checkpoint import load_checkpoint
    from ed.engine.loop import Interrupted
    from ed.engine.metrics import read_rows

    overrides = [*SMALL, "task.frames=256", f"system.run_dir={tmp_path}"]
    with pytest.raises(Interrupted):
        run(compose_config([*overrides, "system.max_minutes=0"]), ["procgen"])
    state = load_checkpoint(tmp_path, print)
    assert state["step"] == 4  # one rollout: 2 epochs of 2 minibatches, never in between
    assert state["task"]["normaliser"]["weight"] > 30
    summary = run(compose_config(overrides), ["procgen"])
    assert summary["steps"] == 32
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert steps == list(range(1, 33))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"task\.minibatches=7: must divide the 32768 frames"):
        make_task(minibatches=7)
    with pytest.raises(ValueError, match=r"task\.frames=100: less than one rollout of 32768"):
        make_task(frames=100)
    with pytest.raises(ValueError, match=r"task\.game=pong: use one of bigfish"):
        make_task(game="pong")


def test_anchoring_without_labels_is_refused(bandit, tmp_path):
    cfg = compose_config([*SMALL, "regularizer=ed", f"system.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="ProcgenPPO has no labels to anchor to"):
        run(cfg, ["procgen"])


@needs_envpool
def test_training_levels_are_the_ones_asked_for_and_test_levels_go_beyond():
    seen = {}
    for side, levels in make_task(levels=5).levels.items():
        env = make_games("starpilot", mode="hard", count=16, levels=levels, seed=1, threads=1)
        found = set(env.reset().levels.tolist())
        rng = np.random.default_rng(0)
        for _ in range(300):
            found |= set(env.step(rng.integers(0, ACTIONS, 16)).levels.tolist())
        seen[side] = found
    assert seen["train"] == set(range(5))
    assert min(seen["test"]) >= 5
    assert max(seen["test"]) > LEVELS / 2  # seeds from the whole range


@needs_envpool
def test_a_finished_episode_is_followed_by_the_first_frame_of_the_next():
    """Same-step resets: the frame that comes with a done is what a reset would have shown."""
    env = make_games("starpilot", mode="hard", count=8, levels=range(1), seed=3, threads=1)
    first = env.reset().frames.copy()
    rng = np.random.default_rng(0)
    total, ended = np.zeros(8), 0
    for _ in range(400):
        step = env.step(rng.integers(0, ACTIONS, 8))
        total += step.rewards
        assert step.returns == total[step.dones].tolist()
        total[step.dones] = 0
        for copy in np.flatnonzero(step.dones):
            ended += 1
            assert np.array_equal(step.frames[copy], first[copy])  # one level: one first frame
    assert ended > 3


@needs_envpool
def test_wrong_actions_are_refused():
    env = make_games("jumper", mode="easy", count=2, levels=range(5), seed=0, threads=1)
    env.reset()
    for actions in ([0, 15], [-1, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="needed are 2 between 0 and 14"):
            env.step(np.array(actions))


@needs_envpool
def test_a_short_run_on_the_real_game(tmp_path):
    overrides = [*SMALL, *ED, "task.frames=64", "task.threads=1", f"system.run_dir={tmp_path}"]
    assert run(compose_config(overrides), ["procgen"])["steps"] == 8
