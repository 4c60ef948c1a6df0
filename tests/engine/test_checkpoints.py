"""Checkpoints: damaged or unreadable files, loading runs, and what is never saved."""

import io
import os
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file

import ed
from ed.engine.checkpoint import SaveError, load_checkpoint, save_checkpoint
from ed.runtime.files import seal, write_atomic
from tests.helpers.small import small_run


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty", "foreign"])
def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, damage, monkeypatch):
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step, "weights": torch.arange(1000)})
    last = tmp_path / "last.pt"
    content = bytearray(last.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped bit":
        content[-2000] ^= 1
    else:
        content = b"" if damage == "empty" else b"PK not ours"
    last.write_bytes(content)
    warnings = []
    monkeypatch.setattr("ed.engine.checkpoint.logger.warning", warnings.append)
    assert load_checkpoint(tmp_path)["step"] == 1
    assert "last.pt" in warnings[0]


def test_kill_during_save_after_a_damaged_checkpoint_loses_nothing(tmp_path, monkeypatch):
    """Saving first replaces the intact previous.pt with the damaged last.pt."""
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step})
    (tmp_path / "last.pt").write_bytes(b"damaged")
    rename = os.replace

    def killed(source, target):
        if Path(source).suffix == ".tmp":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, {"step": 3})
    assert load_checkpoint(tmp_path) == {"step": 3}


def test_unreadable_checkpoint_is_not_treated_as_damaged(tmp_path, monkeypatch):
    """The run would otherwise resume from an older checkpoint and overwrite the newer one."""
    save_checkpoint(tmp_path, {"step": 1})

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match=r"last\.pt"):
        load_checkpoint(tmp_path)


def test_checkpoints_are_plain_torch_files(tmp_path):
    state = {"step": 3, "weights": torch.arange(1000)}
    save_checkpoint(tmp_path, state)
    for mapped in (False, True):
        opened = torch.load(tmp_path / "last.pt", weights_only=True, mmap=mapped)
        assert opened["step"] == 3
        assert torch.equal(opened["weights"], state["weights"])


def test_run_can_be_loaded_with_torch_safetensors_and_load_run(tmp_path):
    small_run(tmp_path)
    trained = ed.load_run(tmp_path, "cpu")
    assert not trained.model.training
    assert trained.config.task.batch_size == trained.task.batch_size == 200
    state = torch.load(tmp_path / "last.pt", weights_only=True)["training"]["model"]
    plain = instantiate(trained.config.model).eval()
    x = trained.task.examples(torch.arange(4))["x"]
    expected = trained.model(x)
    for found in (state, load_file(tmp_path / "model.safetensors")):
        plain.load_state_dict(found)
        assert torch.equal(plain(x), expected)
    (tmp_path / "last.pt").unlink()  # shared runs may lack last.pt
    shared = ed.load_run(tmp_path, "cpu", data=False)
    assert torch.equal(shared.model(x), expected)
    assert not hasattr(shared.task, "train")
    with pytest.raises(ValueError, match=r"^device=gpu"):
        ed.load_run(tmp_path, "gpu")


def test_loading_an_unfinished_run_warns(tmp_path, monkeypatch):
    small_run(tmp_path)
    warnings = []
    monkeypatch.setattr("ed.engine.main.logger.warning", lambda *words: warnings.append(words[0]))
    ed.load_run(tmp_path, "cpu", data=False)
    assert not warnings
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "DONE").unlink()
    ed.load_run(tmp_path, "cpu", data=False)
    assert [text for text in warnings if "has not finished" in text] == warnings != []


def test_loading_checkpoints_executes_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch should_not_exist",)

    buffer = io.BytesIO()
    torch.save({"step": Evil()}, buffer)
    content = buffer.getbuffer()
    digest = seal(content)
    (tmp_path / "last.pt").write_bytes(bytes(content) + digest)
    with pytest.raises(UnpicklingError, match=r"posix\.system"):
        load_checkpoint(tmp_path)
    assert not Path("should_not_exist").exists()


def test_state_that_cannot_be_loaded_is_not_saved(tmp_path):
    """Such a checkpoint would be treated as damaged, and the run would start over."""
    save_checkpoint(tmp_path, {"step": 1})
    with pytest.raises(SaveError, match=r"numpy.*scalar"):
        save_checkpoint(tmp_path, {"step": 2, "task": {"mean": np.float64(0.5)}})
    assert load_checkpoint(tmp_path) == {"step": 1}


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, {"step": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left"):
        save_checkpoint(tmp_path, {"step": 2})
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "DONE", "{}")
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt"]


def test_non_finite_loss_stops_the_run_without_saving(tmp_path):
    with pytest.raises(FloatingPointError, match=r"train/loss = nan between steps 1 and \d+"):
        small_run(tmp_path / "run", "optimizer.lr=1e30", "task.epochs=3", "system.log_every=5")
    assert not (tmp_path / "run" / "last.pt").exists()
    # the previous row was finite
    with pytest.raises(FloatingPointError, match="between steps 2 and 2 of"):
        small_run(tmp_path / "rows", "optimizer.lr=1e30")


def test_checkpoint_between_rows_contains_only_finite_values(tmp_path):
    """Losses are also checked before saving, not only when a row is logged."""
    often = ["optimizer.lr=1e30", "system.log_every=5", "system.save_seconds=0"]
    with pytest.raises(FloatingPointError, match=r"loss = nan.* between steps 1 and \d+ of"):
        small_run(tmp_path, *often)
    state = load_checkpoint(tmp_path)
    assert state["step"] < 5
    assert all(value.isfinite() for value in state["training"]["sums"].values())


def test_weights_that_diverge_at_the_last_step_are_not_saved(tmp_path):
    """There is no later loss to check, but the final evaluation is not finite."""
    whole = ["task.batch_size=2000", "optimizer=sgd", "optimizer.lr=1e38"]  # a single step
    with pytest.raises(FloatingPointError, match=r"eval/loss = nan between steps 1 and 1 of .*run"):
        small_run(tmp_path / "run", *whole)
    assert not (tmp_path / "run" / "last.pt").exists()
    assert not (tmp_path / "run" / "DONE").exists()
