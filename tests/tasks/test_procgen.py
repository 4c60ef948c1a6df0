"""Procgen: settings, levels, engines and real games."""

import json
import signal
import sys
import types
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from ed.analysis.tables import load_table
from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.envs.procgen import ACTIONS, LEVELS, EngineError, load_envpool, make_games
from ed.runtime.files import read_rows
from ed.tasks.procgen import LevelRecord
from tests.helpers.commands import die_at_row, finish, start_command
from tests.helpers.games import ED, SMALL, make_task, needs_envpool, pretend_procgen

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["procgen", "procgen_short"])
def test_cells_have_the_published_settings(name):
    """PPO as in CleanRL; ED as in the paper's appendix, with pairs = minibatch size / 2."""
    for cell in load_table(name).cells.values():
        cfg = compose_config(list(cell.overrides))
        task, optimizer, regularizer = cfg.task, cfg.optimizer, cfg.regularizer
        assert (task.mode, task.start_level, task.num_levels) == ("hard", 0, 500)
        assert (task.num_envs, task.num_steps, task.num_minibatches, task.update_epochs) == (
            128,
            256,
            8,
            3,
        )
        assert (task.gamma, task.gae_lambda, task.clip_coef) == (0.999, 0.95, 0.2)
        assert (task.vf_coef, task.ent_coef) == (0.5, 0.01)
        assert (optimizer.lr, optimizer.eps, optimizer.weight_decay) == (5e-4, 1e-5, 0)
        assert (optimizer.schedule, optimizer.max_grad_norm) == ("constant", 0.5)
        paper = 100_000_000 if task.game == "fruitbot" else 50_000_000
        assert task.frames == (paper if name == "procgen" else 10_000_000)
        if "regularizer=ed" in cell.overrides:
            assert regularizer.ramp == pytest.approx(0 if task.game == "dodgeball" else 1 / 6)
            ed = {"weight": 0.01, "resolution": 4, "degree": 3, "pairs": 2048, "components": 3}
            ed |= {"anchored": False, "weighting": "raw", "ramp_shape": "sine"}
            assert {key: regularizer[key] for key in ed} == ed
            assert regularizer.sampler._target_.endswith("RandomizedCosine")


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match=r"task\.num_minibatches=7"):
        make_task(num_minibatches=7)
    counts = (
        "num_envs",
        "num_steps",
        "num_minibatches",
        "update_epochs",
        "eval_every",
        "frames",
        "num_levels",
    )
    for key in (*counts, "num_test_steps"):
        with pytest.raises(ValueError, match=rf"task\.{key}=0"):
            make_task(**{key: 0})
    for key in ("start_level", "num_test_envs", "threads", "clip_coef", "vf_coef", "ent_coef"):
        with pytest.raises(ValueError, match=rf"task\.{key}=-1"):
            make_task(**{key: -1})
    for key in ("gamma", "gae_lambda"):
        with pytest.raises(ValueError, match=rf"task\.{key}=1\.1"):
            make_task(**{key: 1.1})
    with pytest.raises(ValueError, match=r"task\.frames=50000000\.0"):
        make_task(frames=5e7)
    with pytest.raises(ValueError, match=r"task\.frames=100"):
        make_task(frames=100)
    with pytest.raises(ValueError, match=r"task\.game=pong"):
        make_task(game="pong")
    with pytest.raises(ValueError, match=r"task\.precision=half"):
        make_task(precision="half")


def test_a_level_outside_its_range_raises():
    record = LevelRecord(range(10, 15))
    record.add([12, 10, 12])
    assert record.summary() == {"lowest": 10, "highest": 12, "distinct": 2}
    other = LevelRecord(range(10, 15))
    other.load_state_dict(record.state_dict())
    other.add([14])
    assert other.summary() == {"lowest": 10, "highest": 14, "distinct": 3}
    with pytest.raises(RuntimeError, match=r"12-15.*range\(10, 15\)"):
        record.add([12, 15])


def test_training_and_test_levels_are_disjoint():
    levels = make_task(start_level=100, num_levels=500).levels
    assert levels["train"] == range(100, 600)
    assert levels["test"] == range(600, LEVELS)
    with pytest.raises(ValueError, match=r"task\.start_level=5"):
        make_task(start_level=5, num_levels=LEVELS - 5)


def test_a_run_cannot_resume_with_a_different_engine(bandit):
    task = make_task()
    task.prepare(torch.device("cpu"), seed=0)
    state = task.state_dict() | {"engine": "envpool 0.1"}
    with pytest.raises(ValueError, match=r"task\.engine.*envpool==0\.1"):
        task.load_state_dict(state)


def test_the_original_engine_has_the_same_interface(monkeypatch):
    pretend_procgen(monkeypatch)
    task = make_task(engine="procgen", start_level=7, game="jumper", threads=3)
    games = task.make_games("train", 2, seed=5)
    settings = {"num": 2, "env_name": "jumper", "distribution_mode": "hard", "num_levels": 500}
    settings |= {"start_level": 7, "rand_seed": 5, "num_threads": 3}
    assert games._env.settings == settings
    assert games.reset().levels.tolist() == [7, 7]
    steps = [games.step(np.array([1, 4])) for _ in range(6)]
    assert [s.dones.tolist() for s in steps[:3]] == [[False, False], [True, False], [False, True]]
    assert [s.returns for s in steps] == [[], [2], [12], [2], [], [2, 12]]
    assert steps[-1].levels.tolist() == [10, 9]
    assert steps[-1].frames.shape == (2, 3, 64, 64)
    assert steps[-1].frames[:, 1].min() == 6  # channel 1 is green
    assert steps[-1].frames[:, 0].max() == 0
    assert (steps[-1].frames[:, 2, :2] == [[9], [0]]).all()  # axes are copy, channel, row, column


def test_lanes_share_the_cores_of_the_process(monkeypatch):
    pretend_procgen(monkeypatch)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(9))
    task = make_task(engine="procgen", game="jumper", threads=0)
    for lanes, threads in ((1, 9), (2, 6), (3, 4), (16, 1)):
        task.lanes = lanes
        assert task.make_games("train", 2, seed=5)._env.settings["num_threads"] == threads
        assert task.make_games("test", 2, seed=5)._env.settings["num_threads"] == 9


@pytest.fixture
def no_procgen(monkeypatch):
    """Hides the original procgen package, if it is installed."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "procgen", None)


def test_no_files_are_written_if_the_engine_is_missing(no_procgen, tmp_path):
    cfg = compose_config([*SMALL, "task.engine=procgen", f"system.run_dir={tmp_path}"])
    with pytest.raises(EngineError, match=r"task\.engine=procgen"):
        run(cfg, ["procgen"])
    assert not (tmp_path / "meta.json").exists()


def test_a_run_does_not_resume_without_its_engine(no_procgen):
    """The error reports a missing engine, not a different version."""
    task = make_task(engine="procgen")
    with pytest.raises(EngineError, match=r"task\.engine=procgen"):
        task.load_state_dict({"engine": "procgen 0.10.7"})


def test_a_missing_engine_is_a_one_line_error(no_procgen, capsys):
    from ed.engine.errors import explain

    with pytest.raises(EngineError) as error:
        make_task(engine="procgen").make_games("train", 2, seed=0)
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: task.engine=procgen")
    assert "use task.engine=envpool" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module", name="optree"), "optree"),
        (ImportError("libQt5Gui.so.5: cannot open"), r"libQt5Gui.* `apt-get install libqt5gui5`"),
    ],
)
def test_missing_parts_of_envpool_are_reported(monkeypatch, error, message):
    def fail(name):
        raise error

    task = make_task()
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(EngineError, match=rf"task\.engine=envpool.*{message}"):
        task.make_games("train", 2, seed=0)


def test_missing_qt_is_detected_before_creating_games(monkeypatch):
    """envpool's modules can be imported without Qt, but raise when a name is accessed."""

    def missing(name):
        raise ImportError("requires the system Qt 5 runtime")

    hollow = types.ModuleType("envpool.procgen")
    hollow.__getattr__ = missing
    registration = types.ModuleType("envpool.procgen.registration")
    for module in (types.ModuleType("envpool"), hollow, registration):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(EngineError, match=r"apt-get install libqt5gui5"):
        load_envpool()


@needs_envpool
def test_levels_depend_on_the_seed():
    drawn = [
        make_games("jumper", mode="hard", count=16, levels=range(500), seed=seed, threads=1)
        .reset()
        .levels.tolist()
        for seed in (0, 1, 1)
    ]
    assert drawn[0] != drawn[1] == drawn[2]


@needs_envpool
def test_games_play_the_requested_levels():
    seen = {}
    for side, levels in make_task(num_levels=5, start_level=7).levels.items():
        env = make_games("starpilot", mode="hard", count=16, levels=levels, seed=1, threads=1)
        found = set(env.reset().levels.tolist())
        rng = np.random.default_rng(0)
        for _ in range(300):
            found |= set(env.step(rng.integers(0, ACTIONS, 16)).levels.tolist())
        seen[side] = found
    assert seen["train"] == set(range(7, 12))
    assert min(seen["test"]) >= 12
    assert max(seen["test"]) > LEVELS / 2  # levels come from the whole range


@needs_envpool
def test_the_last_step_of_an_episode_returns_the_next_first_frame():
    """Environments reset in the same step in which an episode ends."""
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
            assert np.array_equal(step.frames[copy], first[copy])  # there is only one level
    assert ended > 3


@needs_envpool
def test_replacing_finished_environments_skips_no_frame():
    """Copies of one level stay in sync, even if more games end than there are spares."""
    games = make_games("starpilot", mode="hard", count=12, levels=range(1), seed=3, threads=2)
    first = games.reset().frames[0].copy()
    rng, ends, together = np.random.default_rng(0), 0, set()
    for _ in range(300):
        step = games.step(np.full(12, rng.integers(ACTIONS)))
        assert (step.frames == step.frames[:1]).all()
        assert len(set(step.rewards)) == len(set(step.dones)) == len(set(step.levels)) == 1
        if step.dones[0]:
            ends += 1
            assert np.array_equal(step.frames[0], first)
            together.add(frozenset(games._playing.tolist()))
    assert ends > 3
    assert len(together) > 1  # finished environments were replaced


@needs_envpool
def test_an_environment_keeps_its_level_until_its_episode_ends():
    """Each new episode starts with the first frame of its level."""
    games = make_games("starpilot", mode="hard", count=24, levels=range(40), seed=0, threads=2)
    seen = games.reset()
    levels, first = seen.levels.copy(), dict(zip(seen.levels, seen.frames.copy(), strict=True))
    rng, changes = np.random.default_rng(0), 0
    for _ in range(400):
        seen = games.step(rng.integers(0, ACTIONS, 24))
        assert (seen.levels == levels)[~seen.dones].all()
        for place in np.flatnonzero(seen.dones):
            level, frame = seen.levels[place], seen.frames[place]
            assert np.array_equal(first.setdefault(level, frame.copy()), frame)
            changes += level != levels[place]
        levels = seen.levels.copy()
    assert changes > 40


@needs_envpool
def test_invalid_actions_are_rejected():
    env = make_games("jumper", mode="easy", count=2, levels=range(5), seed=0, threads=1)
    env.reset()
    for actions in ([0, 15], [-1, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="actions"):
            env.step(np.array(actions))


@needs_envpool
def test_short_runs_of_the_real_game_are_reproducible(tmp_path):
    """Runs with the same seed agree exactly and record levels, engine and speed."""
    overrides = [*SMALL, *ED, "model.channels=[2]", "task.frames=64", "task.threads=1"]
    rows = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert run(compose_config([*overrides, f"system.run_dir={folder}"]), ["x"])["steps"] == 8
        rows.append(read_rows(folder / "metrics.jsonl"))
    last = rows[0][-1]
    assert last["time/frames_per_s"] > 0
    assert 0 <= last["levels/train_lowest"] < last["levels/train_highest"] <= 499
    assert last["levels/train_distinct"] >= 4
    assert last["levels/test_lowest"] >= 500
    for first, second in zip(*rows, strict=True):
        assert all(first[key] == second[key] for key in first if not key.startswith("time/"))
    (session,) = json.loads((tmp_path / "a" / "meta.json").read_text())["sessions"]
    assert session["engine"].startswith("envpool 1.")


@needs_envpool
def test_sigkill_loses_only_the_rollouts_after_the_last_checkpoint(tmp_path):
    overrides = [*SMALL, "model.channels=[]", "task.threads=1", f"system.run_dir={tmp_path}"]
    words = ["train.py", *overrides, "task.frames=640", "system.save_seconds=0"]
    assert finish(start_command(words, prepare=die_at_row(13))) == -signal.SIGKILL
    rows = tmp_path / "metrics.jsonl"
    reached = load_checkpoint(tmp_path)["step"]
    assert reached > 0
    assert reached % 4 == 0  # a rollout is 2 epochs of 2 minibatches
    summary = run(compose_config([*overrides, "task.frames=640"]), ["procgen"])
    assert summary["steps"] == 80
    steps = [row["step"] for row in read_rows(rows) if "train/loss" in row]
    assert steps == list(range(1, 81))
    assert len(json.loads((tmp_path / "meta.json").read_text())["sessions"]) == 2


@needs_envpool
@pytest.mark.slow
def test_ppo_learns_the_real_game(tmp_path):
    """After a million frames (a minute on a GPU), the return is twice that of random play."""
    games = make_games("starpilot", mode="easy", count=64, levels=range(200), seed=0)
    games.reset()
    rng, returns = np.random.default_rng(0), []
    for _ in range(600):
        returns += games.step(rng.integers(0, ACTIONS, 64)).returns
    overrides = ["task=procgen", "model=impala", "task.mode=easy", "task.num_levels=200"]
    overrides += ["task.num_envs=64", "task.frames=1000000", "optimizer=ppo"]
    summary = run(compose_config([*overrides, f"system.run_dir={tmp_path}"]), ["procgen"])
    assert summary["last"]["eval/train_return"] > 2 * np.mean(returns)
    assert summary["last"]["eval/test_return"] > 1.5 * np.mean(returns)
