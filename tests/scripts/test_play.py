"""scripts/play.py: returns and images of a saved agent on selected levels."""

import importlib.util
import io
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.envs.play import Policy
from ed.envs.procgen import ACTIONS
from ed.figures.episode import NAMES, PER_ROW, Episode, gif, strip
from scripts import evaluate
from tests.helpers.games import SMALL, make_task, needs_envpool, pretend_procgen
from tests.helpers.small import small_run

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("play_script", ROOT / "scripts" / "play.py")
script = importlib.util.module_from_spec(spec)
sys.modules["play_script"] = script
spec.loader.exec_module(script)


class Favourite(torch.nn.Module):
    """A policy that prefers one action in every state."""

    def __init__(self, action: int):
        super().__init__()
        self.action = action

    def forward(self, x):
        outputs = torch.zeros(len(x), ACTIONS + 1)
        outputs[:, self.action] = 2.0
        return outputs


def play_fake(monkeypatch, *, episodes: int, greedy: bool, seed: int = 0, count: int = 3):
    """Plays games in which copy i's episodes have i + 2 steps; the reward is the action."""
    pretend_procgen(monkeypatch)
    games = make_task(engine="procgen").make_games("train", count, seed=0)
    options = Namespace(episodes=episodes, greedy=greedy, seed=seed)
    recorded = Episode("jumper", level=-1)
    policy = Policy(Favourite(4), device=torch.device("cpu"))
    return list(script.episodes_of(games, policy, options, recorded)), recorded


def test_every_copy_plays_a_fixed_number_of_episodes(monkeypatch):
    """Counting the first seven finished episodes would favour short ones."""
    results, recorded = play_fake(monkeypatch, episodes=7, greedy=True)
    assert sorted(result.length for result in results) == [2, 2, 2, 3, 3, 4, 4]
    assert all(result.total == 4 * result.length for result in results)
    assert [result.level for result in results if result.length == 2] == [0, 1, 2]
    assert len(recorded.frames) == len(recorded.rewards) == 2
    assert recorded.total == 8
    assert recorded.level == 0


def test_sampled_actions_follow_the_probabilities(monkeypatch):
    results, _ = play_fake(monkeypatch, episodes=600, greedy=False)
    share = np.exp(2) / (np.exp(2) + ACTIONS - 1)
    mean = 4 * share + (sum(range(ACTIONS)) - 4) * (1 - share) / (ACTIONS - 1)
    found = sum(r.total for r in results) / sum(r.length for r in results)
    assert found == pytest.approx(mean, abs=0.3)
    assert results == play_fake(monkeypatch, episodes=600, greedy=False)[0]
    assert results != play_fake(monkeypatch, episodes=600, greedy=False, seed=1)[0]


def test_results_have_mean_standard_error_and_table():
    results = [script.Result(3, 1.0, 10), script.Result(3, 3.0, 20), script.Result(9, 8.0, 30)]
    # mean 4, sample variance 13, standard error sqrt(13 / 3)
    assert "return 4 +- 2.08 (mean and standard error of 3 episodes on 2 levels" in script.describe(
        results
    )
    rows = script.per_level(results[::-1]).splitlines()
    assert [row.split() for row in rows[1:]] == [["3", "2", "2", "15"], ["9", "1", "8", "30"]]
    assert "return 1 (mean" in script.describe(results[:1])  # one episode has no standard error


def test_levels_are_parsed_and_described():
    task = make_task(start_level=100)
    assert script.parse_levels("5:10") == range(5, 15)
    assert script.known_levels(range(100, 600), task) == "training levels"
    assert script.known_levels(range(600, 700), task) == "unseen levels"
    assert script.known_levels(range(101), task) == "partly training levels"
    for text in ("5", "5:", "5:0", "-1:5", "a:b"):
        with pytest.raises(ValueError, match=f"--levels {text}: "):
            script.parse_levels(text)
    with pytest.raises(ValueError, match="--levels"):
        script.parse_levels("2147483646:2")


def make_episode(length: int) -> Episode:
    rng, episode = np.random.default_rng(0), Episode("starpilot", 12)
    for step in range(length):
        episode.frames.append(rng.integers(0, 255, (3, 64, 64), dtype=np.uint8))
        episode.actions.append(step % ACTIONS)
        episode.probabilities.append(rng.dirichlet(np.ones(ACTIONS)))
        episode.rewards.append(1.0)
    return episode


@pytest.mark.parametrize("length", [1, 5, 25])
def test_image_sizes_of_short_and_long_episodes(length, monkeypatch):
    monkeypatch.setattr("ed.figures.episode.MOST_FRAMES", 10)
    episode = make_episode(length)
    moving = Image.open(io.BytesIO(gif(episode)))
    assert moving.n_frames == {1: 1, 5: 5, 25: 9}[length]  # every third frame of 25
    still = Image.open(io.BytesIO(strip(episode)))
    assert still.width == min(length, PER_ROW) * 202 + 10
    shown = np.asarray(still)[34 : 34 + 192, 10 : 10 + 192]  # the first frame, enlarged three times
    np.testing.assert_array_equal(shown[::3, ::3], episode.frames[0].transpose(1, 2, 0))


def test_the_last_frame_is_always_shown(monkeypatch):
    """Showing every third of 26 frames would omit the last, which shows the final return."""
    monkeypatch.setattr("ed.figures.episode.MOST_FRAMES", 10)
    shown = []
    monkeypatch.setattr(
        "ed.figures.episode._scene",
        lambda episode, step: shown.append(step) or Image.new("RGB", (4, 4), (step, 0, 0)),
    )
    gif(make_episode(26))
    assert shown == [0, 3, 6, 9, 12, 15, 18, 21, 24, 25]


def test_every_action_has_a_name():
    assert len(NAMES) == ACTIONS
    assert NAMES[7] == "right"
    assert NAMES[4] == "wait"


@needs_envpool
def test_a_saved_agent_is_played(tmp_path, capsys):
    overrides = [*SMALL, "model.channels=[]", "task.frames=32", "task.threads=1", "task.mode=easy"]
    run(compose_config([*overrides, f"system.run_dir={tmp_path / 'run'}"]), ["procgen"])
    common = [str(tmp_path / "run"), "--episodes", "3"]
    out = ["--out", str(tmp_path / "new" / "seen-0.01")]  # file names may contain dots
    script.main([*common, *out, "--levels", "7:1", "--mode", "hard", "--per-level"])
    printed = capsys.readouterr().out
    assert f"agent of {tmp_path / 'run'}, trained for 32 frames" in printed
    assert "starpilot, hard, levels 7:1 (training levels), sampled actions" in printed
    assert "of 3 episodes on 1 levels" in printed
    assert "images of level 7" in printed
    assert Image.open(tmp_path / "new" / "seen-0.01.gif").n_frames > 1
    assert Image.open(tmp_path / "new" / "seen-0.01.png").width > 64
    (tmp_path / "run" / "DONE").unlink()
    script.main(common)
    printed = capsys.readouterr().out
    assert "unfinished" in printed
    assert re.search(r"starpilot, easy, levels \d+:\d+ \(unseen levels\)", printed)
    # by default, images are saved in the run folder
    assert (tmp_path / "run" / "play.gif").exists()


def test_a_different_engine_than_in_training_warns(tmp_path, monkeypatch, capsys):
    (tmp_path / "meta.json").write_text('{"sessions": [{"engine": "a"}, {"engine": "b"}]}')
    printed = []
    for here in ("b", "a"):
        monkeypatch.setattr(script, "engine_version", lambda _, here=here: here)
        script.warn_of_engine(tmp_path, make_task())
        printed.append(capsys.readouterr().out)
    assert printed == ["", "warning: trained on b, but a draws levels differently\n"]


def test_evaluate_refers_to_play(capsys):
    assert evaluate.main(["task=procgen", "model=impala"]) == 1
    assert "scripts/play.py RUN" in capsys.readouterr().err


def test_folders_without_a_procgen_run_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError):
        script.main([str(tmp_path)])
    small_run(tmp_path / "images")
    with pytest.raises(ValueError, match="Cifar10"):
        script.main([str(tmp_path / "images")])
