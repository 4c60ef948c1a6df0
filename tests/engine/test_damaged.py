"""Damaged files and invalid settings raise one-line errors."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from ed.engine.checkpoint import SaveError, load_checkpoint, save_checkpoint
from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.loop import Interrupted
from ed.engine.main import choose_device, load_run, start_tracker
from ed.engine.run import RunFolder
from ed.engine.settings import check_settings
from ed.runtime.files import APP
from ed.runtime.runs import RunError, Status, status
from tests.helpers.hostile import WRONG
from tests.helpers.small import SMALL_GROKKING, small_config, small_run
from tests.helpers.toy import assert_same_weights


@pytest.mark.parametrize("content", WRONG)
@pytest.mark.parametrize("name", ["DONE", "config.yaml"])
def test_damaged_file_is_reported(name, content, run, capsys):
    (run / name).write_bytes(WRONG[content])
    with pytest.raises(ValueError, match=f"{name}|another config") as error:
        small_run(run, base=SMALL_GROKKING)
    assert explain(error.value) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", WRONG)
def test_damaged_meta_json_only_warns(content, run, capsys):
    (run / "DONE").unlink()
    (run / "meta.json").write_bytes(WRONG[content])
    small_run(run, base=SMALL_GROKKING)
    assert "meta.json" in capsys.readouterr().out
    assert len(json.loads((run / "meta.json").read_text())["sessions"]) == 1


def test_foreign_checkpoint_falls_back_to_the_previous_one(run, tmp_path, capsys):
    whole = load_checkpoint(run)
    (run / "DONE").unlink()
    save_checkpoint(run, {"weights": torch.zeros(3)})  # a valid file, but not a run's state
    small_run(run, base=SMALL_GROKKING)
    assert "last.pt is not a checkpoint of this run" in capsys.readouterr().out
    small_run(tmp_path / "other", "model.width=16", base=SMALL_GROKKING)
    (run / "DONE").unlink()
    save_checkpoint(run, whole)
    save_checkpoint(run, load_checkpoint(tmp_path / "other"))
    small_run(run, base=SMALL_GROKKING)
    assert "model.width is 16 there" in capsys.readouterr().out


def test_only_checkpoint_is_not_overwritten_if_foreign(run, tmp_path):
    small_run(tmp_path / "other", "model.width=16", base=SMALL_GROKKING)
    (run / "DONE").unlink()
    (run / "previous.pt").unlink(missing_ok=True)
    shutil.copy(tmp_path / "other" / "last.pt", run / "last.pt")
    before = (run / "last.pt").read_bytes()
    with pytest.raises(RunError, match=r"model\.width is 16"):
        small_run(run, base=SMALL_GROKKING)
    assert (run / "last.pt").read_bytes() == before


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Returns folders of runs that differ from `finished` in their width and in their seed."""
    root = tmp_path_factory.mktemp("others")
    small_run(root / "wide", "model.width=16", base=SMALL_GROKKING)
    small_run(root / "seed", "seed=7", base=SMALL_GROKKING)
    return root


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 16
    path.write_bytes(content)


WRONG_WEIGHTS = {  # name: the damaged file, the damage, and what the error names
    "wide checkpoint": ("last.pt", "wide", r"model\.width is 16"),
    "checkpoint of another seed": ("last.pt", "seed", "seed is 7"),
    "wide weights": ("model.safetensors", "wide", r"config\.yaml"),
    "truncated weights": ("model.safetensors", lambda path: os.truncate(path, 50), "damaged"),
    "flipped bit": ("model.safetensors", _flip, "digest"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_wrong_weights_are_not_loaded(case, run, others):
    name, damage, shown = WRONG_WEIGHTS[case]
    for path in run.glob("*.pt"):
        if path.name != name:
            path.unlink()
    if isinstance(damage, str):
        shutil.copy(others / damage / name, run / name)
    else:
        damage(run / name)
    with pytest.raises(ValueError, match=shown) as error:
        load_run(run, "cpu")
    assert str(run) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_is_loaded_after_its_data_has_moved(tmp_path):
    small_run(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("data: embedded", "data: elsewhere"))
    assert load_run(tmp_path, "cpu", data=False).config.task.data == "elsewhere"


def test_weights_without_a_digest_are_loaded(run):
    """Older versions stored none."""
    (run / "last.pt").unlink()
    state = torch.get_rng_state()
    before = load_run(run, "cpu").model
    assert torch.equal(torch.get_rng_state(), state)
    save_file(before.state_dict(), run / "model.safetensors")
    assert_same_weights(load_run(run, torch.device("cpu")).model, before)


INVALID = [("step", "x"), ("metrics", 5), ("seconds", "x"), ("threads", None), ("rng", [[1]])]
INVALID += [("config", 5), ("training", {}), ("training", {"model": {1: 2}})]


@pytest.mark.parametrize(("key", "value"), INVALID)
def test_checkpoint_with_a_value_of_another_type_is_rejected(key, value, run):
    (run / "DONE").unlink()
    save_checkpoint(run, load_checkpoint(run) | {key: value})
    (run / "previous.pt").unlink()
    with pytest.raises(ValueError, match=str(run)):
        small_run(run, base=SMALL_GROKKING)
    if key in ("config", "training"):
        with pytest.raises(ValueError, match=str(run)):
            load_run(run, "cpu")


def test_run_folder_removed_during_training_is_reported(tmp_path):
    with pytest.raises(SaveError, match="removed is gone"):
        save_checkpoint(tmp_path / "removed", {"step": 1})


@pytest.mark.parametrize("logger", ["none", "csv", "tensorboard"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_run_folder_removed_after_the_last_checkpoint_is_reported(logger, tmp_path, monkeypatch):
    if logger == "tensorboard":
        pytest.importorskip(logger)

    def save_and_remove(folder, state):
        save_checkpoint(folder, state)
        shutil.rmtree(folder)

    monkeypatch.setattr("ed.engine.loop.save_checkpoint", save_and_remove)
    with pytest.raises(SaveError, match="run is gone"):
        small_run(tmp_path / "run", f"logger={logger}", "measures=norm", base=SMALL_GROKKING)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.yaml", "meta.json", "metrics.jsonl"])
def test_full_disk_is_a_one_line_error(name, tmp_path, monkeypatch, capsys):
    import errno

    replace = os.replace

    def full(source, target):
        if str(target).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError) as error:  # noqa: PT011, the message is asserted below
        small_run(tmp_path, base=SMALL_GROKKING)
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path / name}: No space left")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu", "meta", "tpu", "cpu:x"])
def test_only_tested_devices_are_accepted(device):
    with pytest.raises(ValueError, match=rf"system\.device={device}"):
        choose_device(device)


def test_missing_wandb_api_key_error_suggests_offline_mode(tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    monkeypatch.setattr(sys.modules["wandb"], "init", init, raising=False)
    cfg = small_config(tmp_path, "logger=wandb")
    with pytest.raises(ValueError, match=r"logger=wandb: .*logger\.mode=offline"):
        start_tracker(cfg, tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.lr=nan",
        "optimizer.lr=inf",
        "regularizer.weight=-inf",
        "system.save_seconds=nan",
        "system.max_minutes=inf",
        "regularizer.degree=100000000",
        "task.epochs=1e23",
        "task.epochs=100000000000000000000000",
        "task.image_size=[32,nan]",
        "system.threads=1000000000000",
        "system.workers=1000000000000",
        "task=pnn model=pnn task.examples=1000000000000",
        "task=pnn model=pnn model.outputs=1000000000000",
        "task=grokking model=grokking task.eval_per_decade=1000000000000",
        "task=grokking model=grokking task.modulus=1000000",
        "task=grokking model=grokking model.length=1000000000000",
        "task=procgen model=impala model.channels=[16,1000000000000]",
        "task=procgen model=impala task.update_epochs=1000000000000",
        "task=procgen model=impala task.num_test_envs=1000000000000",
        "task=imagenet model=vit_s16 task.repeat=1000000000000",
    ],
)
def test_infinite_and_huge_numbers_are_rejected(setting):
    cfg = compose_config(["regularizer=ed", *setting.split()])
    key = setting.split()[-1].split("=")[0]
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        check_settings(cfg)


@pytest.mark.parametrize("key", ["save_seconds", "max_minutes", "workers"])
def test_negative_system_settings_are_rejected(key, tmp_path):
    with pytest.raises(ValueError, match=f"system.{key}=-1"):
        small_run(tmp_path / "run", f"system.{key}=-1", base=SMALL_GROKKING)
    assert not (tmp_path / "run").exists()


def test_measures_are_checked_again_after_loading_data(tmp_path, monkeypatch):
    from ed.measures.norm import ParameterNorm

    def check(self, task):
        if task.num_examples:
            raise ValueError("measures: too few examples")

    monkeypatch.setattr(ParameterNorm, "check", check)
    monkeypatch.setattr("ed.engine.main.train_in", lambda *_: pytest.fail("it trained"))
    with pytest.raises(ValueError, match="measures"):
        small_run(tmp_path, "measures=norm")


HOLD = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from omegaconf import OmegaConf
from ed.engine.run import RunFolder
folder = RunFolder(Path({path!r}), OmegaConf.create({{"system": {{"run_dir": "x"}}, "seed": 0}}))
print("held", flush=True)
time.sleep(60)
"""


def test_run_stays_locked_if_its_lock_file_is_deleted(tmp_path):
    root = str(APP)
    code = HOLD.format(root=root, path=str(tmp_path / "run"))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            (tmp_path / "run" / ".lock").unlink()
            with pytest.raises(RunError, match="another process"):
                RunFolder(tmp_path / "run", small_config(tmp_path / "run"))
            assert status(tmp_path / "run") == Status.RUNNING  # despite the new lock file
        finally:
            holder.kill()


def test_interrupted_run_still_resumes(tmp_path):
    with pytest.raises(Interrupted):
        small_run(tmp_path, "system.max_minutes=0", base=SMALL_GROKKING)
    assert small_run(tmp_path, base=SMALL_GROKKING)["steps"] == 10
