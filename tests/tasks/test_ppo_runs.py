"""PPO runs on a toy game: learning, resuming, state, reports and measures."""

from types import SimpleNamespace

import pytest
import torch

from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import run
from ed.envs.procgen import ACTIONS
from ed.models.impala import Impala
from ed.runtime.files import read_rows
from ed.tasks.procgen import ProcgenPPO
from tests.helpers.games import SMALL, make_task


def test_ppo_learns_the_bandit(bandit, tmp_path, capsys):
    """Random play has an expected return of 5/15 per episode; the best possible return is 5."""
    overrides = [*SMALL, "model.channels=[]", "task.num_steps=20", "task.frames=2400"]
    overrides += ["optimizer.lr=1e-2", "task.update_epochs=4", f"system.run_dir={tmp_path}"]
    summary = run(compose_config(overrides), ["procgen"])
    assert summary["last"]["eval/train_return"] > 2
    assert summary["last"]["eval/test_return"] > 1
    assert "time/frames 2,400  time/frames_per_s " in capsys.readouterr().out


def test_a_run_without_finished_episodes_reports_no_best_return(bandit, tmp_path, capsys):
    overrides = [*SMALL, "model.channels=[]", "task.num_steps=4", "task.num_test_steps=4"]
    overrides += ["task.frames=16"]
    run(compose_config([*overrides, f"system.run_dir={tmp_path}"]), ["procgen"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"done: {tmp_path}  ")
    assert "best" not in last


def test_a_stopped_run_resumes_at_a_rollout_boundary(bandit, tmp_path):
    overrides = [*SMALL, "model.channels=[]", "task.frames=256", f"system.run_dir={tmp_path}"]
    with pytest.raises(Interrupted):
        run(compose_config([*overrides, "system.max_minutes=0"]), ["procgen"])
    state = load_checkpoint(tmp_path)
    assert state["step"] == 4  # one full rollout: 2 epochs of 2 minibatches
    assert state["task"]["normaliser"]["weight"] > 30
    assert state["task"]["levels"]["train"]["seen"] == [0]
    summary = run(compose_config(overrides), ["procgen"])
    assert summary["steps"] == 32
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 33))
    frames = [row["time/frames"] for row in rows if "time/frames" in row]
    assert frames == list(range(32, 257, 32))  # includes frames before the stop


def test_measures_use_the_last_rollout(bandit, tmp_path):
    """Measures during training, at its end, and later, after another rollout."""
    overrides = [*SMALL, "model.channels=[]", "task.frames=64", f"system.run_dir={tmp_path}"]
    small = ["measures.ed.pairs=4", "measures.ed.resolution=9", "measures.ed.degree=4"]
    measured = [*overrides, "measures=[ed,norm]", *small, "system.measure_every=1"]
    done = run(compose_config(measured), ["procgen"])
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "measure/ed" in row] == [4, 8]
    assert done["last"]["measure/ed"] > 0
    again = run(compose_config([*overrides, "measures=sharpness"]), ["procgen"])
    assert again["last"]["measure/sharpness_0.05"] > 0
    same = ("eval/test_return", "measure/ed")
    assert [again["last"][key] for key in same] == [done["last"][key] for key in same]


def test_measures_use_training_frames(bandit, monkeypatch):
    task = make_task(num_envs=4, num_steps=8, num_minibatches=2, frames=32, num_test_envs=2)
    task.prepare(torch.device("cpu"), seed=0)
    with pytest.raises(ValueError, match=r"task=procgen.*train\.py"):
        task.examples(torch.arange(3))
    model = Impala(actions=ACTIONS, channels=[], hidden=8, image_size=[64, 64])
    learnt = sorted(batch["advantages"].sum().item() for batch in task.batches(model, 0))
    halves = task.examples(torch.arange(task.num_examples))["advantages"].sum().item()
    assert sum(learnt) / task.update_epochs == pytest.approx(halves, rel=1e-5)
    statistics = task.normaliser.state["weight"].clone()
    task.latest = None
    assert len(task.examples(torch.arange(5))["frames"]) == 5
    assert task.normaliser.state["weight"] == statistics
    played, games = [], ProcgenPPO.make_games
    # raises KeyError if measuring creates test environments
    monkeypatch.setattr(
        ProcgenPPO, "make_games", lambda task, side, *how: {"train": games}[side](task, side, *how)
    )
    for seed in (0, 0, 1):  # the rollout of a finished run depends only on the seed
        task.prepare(torch.device("cpu"), seed)
        task.model = model
        played.append(task.examples(torch.arange(32))["actions"].clone())
    assert torch.equal(played[0], played[1])
    assert not torch.equal(played[0], played[2])


def test_interrupted_equals_uninterrupted_if_episodes_end_with_rollouts(bandit, tmp_path):
    """A resumed run starts new episodes, which makes no difference here."""
    overrides = [*SMALL, "model.channels=[]", "task.num_steps=10", "task.num_test_steps=10"]
    overrides += ["task.frames=120"]
    stopped, whole = ([*overrides, f"system.run_dir={tmp_path / n}"] for n in ("stopped", "whole"))
    with pytest.raises(Interrupted):
        run(compose_config([*stopped, "system.max_minutes=0"]), ["procgen"])
    for each in (stopped, whole):
        run(compose_config(each), ["procgen"])
    ours, theirs = (
        [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in read_rows(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("stopped", "whole")
    )
    assert ours == theirs
    assert len(ours) > 12


def test_state_dict_restores_returns_levels_and_statistics(bandit):
    tasks = [make_task(num_envs=2, num_steps=64, frames=128) for _ in range(2)]
    for task in tasks:
        task.prepare(torch.device("cpu"), 0)
    first, second = tasks
    first.returns["test"].extend([1.0, 2.0])
    first.levels_seen["train"].add([3, 5, 3])
    first.normaliser(torch.rand(64, 2), torch.zeros(64, 2))
    second.load_state_dict(first.state_dict())
    names = ("eval/test_return", "levels/train_distinct", "levels/train_highest")
    ours, theirs = (task.evaluate(None) for task in tasks)
    assert [theirs[name] for name in names] == [ours[name] for name in names] == [1.5, 2, 5]
    assert second.normaliser.state["variance"] == first.normaliser.state["variance"] != 1
    second.returns["test"].extend([0.0] * 100)  # evaluation averages the last 100 episodes
    assert second.evaluate(None)["eval/test_return"] == 0


def test_speed_is_measured_since_the_last_evaluation(bandit, monkeypatch):
    task, clock = make_task(), iter((10.0, 12.0, 16.0))
    monkeypatch.setattr("ed.tasks.procgen.time", SimpleNamespace(monotonic=lambda: next(clock)))
    task.prepare(torch.device("cpu"), 0)
    speeds = []
    for task.played in (100, 300):
        speeds.append(task.evaluate(None)["time/frames_per_s"])
    assert speeds == [100 / 2, 200 / 4]


def test_anchoring_without_labels_is_rejected(bandit, tmp_path):
    cfg = compose_config([*SMALL, "regularizer=ed", f"system.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=r"regularizer\.anchored=true"):
        run(cfg, ["procgen"])
