"""GPU tests of PPO: captured decisions and updates equal eager ones."""

from itertools import islice

import pytest
import torch
from hydra.utils import instantiate

from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import run
from ed.engine.step import TrainStep
from ed.envs.play import Player, Policy, play
from ed.envs.procgen import ACTIONS, make_games
from ed.models.impala import Impala
from ed.runtime.files import read_rows
from tests.helpers.games import ED, SMALL, Bandit, needs_envpool

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def impala() -> Impala:
    torch.manual_seed(0)
    model = Impala(actions=ACTIONS, channels=[16, 32, 32], hidden=256, image_size=[64, 64])
    torch.nn.init.orthogonal_(model.actor.weight, 1.0)  # so that actions depend on the observation
    return model.to(CUDA)


def rollouts(games, *, capture: bool, bf16: bool, count: int = 2) -> list[dict[str, torch.Tensor]]:
    policy = Policy(impala(), device=CUDA, bf16=bf16)
    player = Player(games, policy, steps=16, capture=capture)
    generator, seen = torch.Generator(CUDA).manual_seed(1), []
    for _ in range(count):
        player.draw(generator)
        play(player)
        seen.append({name: value.clone() for name, value in player.memory.items()})
    return seen


def assert_same(first: list[dict], second: list[dict], tolerance: float = 0.0) -> None:
    for ours, theirs in zip(first, second, strict=True):
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def test_captured_decisions_equal_eager():
    halves = [[Bandit(24, 0), Bandit(40, 0)] for _ in range(2)]
    eager = rollouts(halves[0], capture=False, bf16=False)
    captured = rollouts(halves[1], capture=True, bf16=False)
    assert_same(eager, captured, tolerance=1e-4)  # integers, such as actions, must be equal
    assert not eager[0]["actions"].equal(eager[1]["actions"])  # rollouts use different draws


def test_frames_and_log_probabilities_belong_to_the_same_step():
    played = rollouts([Bandit(32, 0)], capture=True, bf16=True)[1]
    outputs = Policy(impala(), device=CUDA, bf16=True)(played["frames"][9]).detach()
    close = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(played["values"][9], outputs[:, -1], **close)
    chosen = outputs[:, :ACTIONS].log_softmax(-1).gather(1, played["actions"][9][:, None])
    torch.testing.assert_close(played["log_probabilities"][9], chosen.squeeze(1), **close)


@needs_envpool
def test_threaded_rollouts_depend_only_on_the_seed():
    def games():
        settings = {"mode": "hard", "count": 32, "levels": range(500)}
        return [make_games("starpilot", **settings, seed=seed) for seed in (0, 1)]

    first, again = (rollouts(games(), capture=True, bf16=True) for _ in range(2))
    assert_same(first, again)


def test_refresh_copies_the_weights_to_the_policy():
    model = impala()
    policy = Policy(model, device=CUDA, bf16=True)
    with torch.no_grad():
        model.critic.bias.fill_(3.0)
    policy.refresh()
    frames = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8, device=CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        expected = model(frames.float() / 255).float()
    torch.testing.assert_close(policy(frames), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("extra", [[], ED], ids=["none", "ed"])
def test_captured_update_equals_eager(extra, bandit):
    torch.backends.cudnn.deterministic = True
    overrides = [o for o in SMALL if not o.startswith("system.device")]
    cfg = compose_config([*overrides, *extra, "precision=float32", "task.frames=640"])

    def losses(batches, **how):
        torch.manual_seed(0)
        task, model = instantiate(cfg.task), instantiate(cfg.model).to(CUDA)
        task.prepare(CUDA, seed=0)
        regularizer, recipe = instantiate(cfg.regularizer), instantiate(cfg.optimizer)
        step = TrainStep(task, model, regularizer, recipe, device=CUDA, seed=0, **how)
        if batches is None:
            return [{k: v.clone() for k, v in b.items()} for b in islice(task.batches(model, 0), 4)]
        seen = []
        for number in range(24):
            step(batches[number % len(batches)], number)
            seen.append(step.means()["train/loss"])
        return seen

    batches = losses(None)  # shared by both, because rollouts depend on the weights
    eager, captured = losses(batches), losses(batches, capture=True)
    torch.testing.assert_close(captured, eager, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(captured[:8], eager[:8], rtol=1e-4, atol=1e-5)


def test_advantages_and_minibatches_never_wait_for_the_device(bandit):
    overrides = [o for o in SMALL if not o.startswith("system.device")]
    task = instantiate(compose_config([*overrides, "task.frames=640"]).task)
    task.prepare(CUDA, seed=0)
    player = task.make_player("train", 0, Policy(impala(), device=CUDA, bf16=True))
    play(player)
    task._advantages(player.memory, task.normaliser)
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(task._minibatches(task._advantages(player.memory, task.normaliser), 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("extra", [[], ED], ids=["none", "ed"])
def test_interrupted_run_resumes(extra, bandit, tmp_path):
    """Together, two compiled and captured sessions log every step exactly once."""
    overrides = [o for o in SMALL if not o.startswith("system.device")]
    overrides += [*extra, "task.frames=320", f"system.run_dir={tmp_path}"]
    with pytest.raises(Interrupted):
        run(compose_config([*overrides, "system.max_minutes=0"]), ["procgen"])
    assert run(compose_config(overrides), ["procgen"])["steps"] == 40
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 41))
    assert rows[-1]["time/frames_per_s"] > 0
