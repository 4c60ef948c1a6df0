"""train.py on the command line: invalid settings and one-line errors."""

import errno
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from ed.engine import main
from ed.engine.checkpoint import SaveError
from ed.engine.compose import compose_config
from ed.engine.errors import EXPECTED, explain
from ed.engine.loop import Interrupted
from ed.engine.run import RunFolder
from ed.envs.procgen import EngineError
from ed.runtime.processes import LostProcess
from ed.runtime.runs import RunError
from scripts import evaluate, launch
from tests.helpers.small import SMALL, small_config, small_run
from tests.helpers.training import train

MISTAKES = {
    "+sed=3": r"\+sed",
    "seed=first": "seed=first",
    "seed=1.5": "seed=1.5",
    "seed=true": "seed=True",
    "optimizer.lr=fast": "optimizer.lr=fast",
    "optimizer.max_grad_norm=off": "optimizer.max_grad_norm=off",
    "regularizer.weight=abc": "regularizer.weight=abc",
    "regularizer.weight=null": "regularizer.weight=null",
    "regularizer.pairs=half": "regularizer.pairs=half",
    "regularizer.anchored=maybe": "regularizer.anchored=maybe",
    "task.epochs=ten": "task.epochs=ten",
    "task.epochs=true": "task.epochs=True",
    "model.dropout=much": "model.dropout=much",
    "system.device=gpu": "system.device=gpu",
    "task.data=/no/such/folder": "task.data=/no/such/folder",
    "task.batch_size=0": "task.batch_size=0",
    "task.batch_size=1e2": "task.batch_size=100.0",
    "task.batch_size=1": "task.batch_size=1",
    "task.batch_size=5000": "task.batch_size=5000: .*2000",
    "task.epochs=0": "task.epochs=0",
    "task.epochs=1.5": "task.epochs=1.5",
    "task.warmup_epochs=2": "task.warmup_epochs=2",
    "task.eval_every=0": "task.eval_every=0",
    "task.classes=5": "0 to 9, .*5 classes",
    "task.space=nowhere": "task.space=nowhere",
    "accumulate=3": "accumulate=3",
    "accumulate=true": "accumulate=True",
    "accumulate=2.0": "accumulate=2.0",
    "system.compile=flase": "system.compile=flase",
    "system.cuda_graph=true": "system.cuda_graph=true",
    "system.log_every=0": "system.log_every=0",
    "system.log_every=2.5": "system.log_every=2.5",
    "sampler=uniform sampler.even=no": "sampler.even=no",
    "measures=[ed] measures.ed.pairs=50.5": "measures.ed.pairs=50.5",
    "measures=[ed] measures.ed.pairs=0": "measures.ed.pairs=0",
    "measures=[norm,ed_pca3] measures.ed_pca3.components=0": "measures.ed_pca3.components=0",
    "measures=[sharpness] measures.sharpness.radii=[-1]": r"measures.sharpness.radii\[0\]=-1",
    "system.log_every=often": "system.log_every=often",
    "system.runs=null": "system.runs=null",
    "system.save_seconds=null": "system.save_seconds=null",
    "system.keep_checkpoint=maybe": "system.keep_checkpoint=maybe",
    "system.measure_every=2": "system.measure_every=2",
    "precision=fp16": "precision=fp16",
    "logger.mode=ofline": "logger.mode=ofline",
    "optimizer.lr=0": "optimizer.lr=0.*",
    "optimizer.weight_decay=-1": "optimizer.weight_decay=-1",
    "optimizer.eps=-1": "optimizer.eps=-1",
    "optimizer.betas=[0.9,1]": r"optimizer.betas\[1\]=1",
    "optimizer.gamma=-1": "optimizer.gamma=-1",
    "optimizer.betas=0.9": "optimizer.betas=0.9",
    "optimizer.betas=[0.9,a]": r"optimizer.betas\[1\]=a",
    "optimizer.milestones=0.5": "optimizer.milestones=0.5",
    "optimizer.milestones=[30]": r"optimizer.milestones\[0\]=30",
    "optimizer.milestones=[0.5]": r"milestones=\[0.5\]: optimizer.schedule=cosine does not",
    "optimizer.lr=1e300": r"optimizer.lr=1e\+300: must be at most",
    "seed=-99999999999999999999": "seed=-99,999.*: must be at least",
    "model._target_=null": "model._target_ is missing",
    "task=image_folder +task.foo=1": "task.foo: ",
    "task=image_folder task.data=null": "task.data=null: must be text",
    "optimizer.schedule=step": "optimizer.schedule=step",
    "optimizer.schedule=multistep": "schedule=multistep: .*optimizer.milestones",
    "task.image_size=32": r"task.image_size=32",
    "model.heads=3": "model.width=32: .*model.heads=3",
    "model.heads=0": "model.heads=0",
    "model.depth=1.5": "model.depth=1.5",
    "model.dropout=1": r"model.dropout=1",
    "model.activation=foo": "model.activation=foo",
    "model.patch=5": "model.patch=5: .*task.image_size",
    "regularizer.weight=-1": "regularizer.weight=-1",
    "regularizer.weight=nan": "regularizer.weight=nan",
    "regularizer.pairs=0": "regularizer.pairs=0",
    "regularizer.pairs=1.5": "regularizer.pairs=1.5",
    "regularizer.pairs=50000": "regularizer.pairs=50000: .*40000",
    "regularizer.components=4": "regularizer.components=4",
    "regularizer.components=1.5": "regularizer.components=1.5",
    "regularizer.components=11 regularizer.resolution=20": "components=11: 10 outputs vary",
    "regularizer.degree=-1": "regularizer.degree=-1",
    "regularizer.degree=0": "regularizer.degree=0",
    "regularizer.detach_pca=true": "regularizer.detach_pca=true",
    "regularizer.degree=2.5": "regularizer.degree=2.5",
    "regularizer.resolution=4.5": "regularizer.resolution=4.5",
    "regularizer.damping=-1": "regularizer.damping=-1",
    "regularizer.damping=nan": "regularizer.damping=nan",
    "regularizer.basis=fourier": "regularizer.basis=fourier",
    "regularizer.ramp=2": "regularizer.ramp=2",
    "regularizer.endpoints=dust": "regularizer.endpoints=dust",
    "regularizer.resolution=2": "regularizer.resolution=2",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_invalid_settings_are_rejected_before_anything_is_written(override, tmp_path):
    with pytest.raises((*EXPECTED, InstantiationException)) as caught:
        small_run(tmp_path / "run", "regularizer=ed", *override.split())
    cause = caught.value.__cause__ if isinstance(caught.value, InstantiationException) else None
    assert isinstance(cause or caught.value, EXPECTED)
    message = str(cause or caught.value)
    assert re.search(MISTAKES[override], message), message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override", ["+sed=3", "seed=first", "optimizer.lr=fast", "precision=fp16", "task.epochs=ten"]
)
def test_evaluate_rejects_the_same_settings_as_train(override, capsys):
    assert evaluate.main([*SMALL, override]) == 1
    printed = capsys.readouterr().err
    assert re.match(f"error: {MISTAKES[override]}", printed), printed
    assert printed.count("\n") == 1


def test_a_file_instead_of_a_folder_is_reported_with_its_key(tmp_path):
    """Tests single runs and sweeps."""
    file = tmp_path / "file"
    file.touch()
    for key, place in (("run_dir", file), ("run_dir", file / "below"), ("runs", file)):
        cfg = compose_config([*SMALL, f"system.{key}={place}"])
        with pytest.raises(RunError, match=rf"^system\.{key}: .*{place}") as error:
            main.run(cfg, ["small"])
        assert "\n" not in str(error.value)
    result = train("-m", *SMALL, f"system.runs={file}")
    assert result.returncode == 1
    assert re.fullmatch(f"error: {file}.*system.runs.*\n", result.stderr)


def test_an_unwritable_run_folder_is_reported_with_its_key(tmp_path, monkeypatch, capsys):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match=rf"^system\.run_dir: .*{tmp_path}/run"):
        RunFolder(tmp_path / "run", small_config(tmp_path / "run"))
    assert launch.main(f"table1 --cells ed --seeds 0 --runs {tmp_path}".split()) == 1
    printed = capsys.readouterr().err
    assert f"{tmp_path}/table1/ed/seed0" in printed
    assert "--runs" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "kind", [PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError]
)
def test_errors_on_paths_are_one_line(kind, capsys):
    assert explain(kind(1, "No way", "/a/place")) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: /a/place: No way; ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENAMETOOLONG])
def test_a_place_that_cannot_be_written_is_one_line(number, capsys):
    assert explain(OSError(number, os.strerror(number), "/a/place")) == 1
    assert re.fullmatch("error: /a/place: .*; use a path that .*\n", capsys.readouterr().err)


def test_a_killed_worker_process_is_one_line(capsys):
    """Usually the system stops it because memory is full, so it is not a bug in ed."""
    assert explain(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")) == 1
    printed = capsys.readouterr().err
    assert "system.workers" in printed
    assert printed.count("\n") == 1


def test_a_full_gpu_is_one_line_with_the_settings_that_save_memory(capsys):
    reason = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a capacity of 1 GiB.\nSee"
    assert explain(torch.OutOfMemoryError(reason)) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: CUDA out of memory. Tried to allocate 20.00 MiB; ")
    assert all(name in printed for name in ("task.batch_size", "--memory-gib"))
    assert printed.count("\n") == 1


def test_a_package_that_a_constructor_misses_is_reported_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InstantiationException) as error:
        instantiate({"_target_": "ed.models.text.TextClassifier"})
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert re.fullmatch(r"error: transformers .*'effective-degree\[glue\]'\n", printed)


def test_a_metric_without_the_eval_prefix_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("ed.tasks.image_task.ImageTask.metric", "acc")
    with pytest.raises(ValueError, match="eval/acc"):
        small_run(tmp_path / "run")


def test_other_processes_wait_for_the_one_that_reports(monkeypatch, capsys):
    """torchrun stops all processes when one exits, which could cut off the message."""
    from ed.engine import errors

    waits = []
    monkeypatch.setattr(errors, "time", SimpleNamespace(sleep=waits.append))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert errors.explain(ValueError("seed=x: no number")) == 1
    assert waits == [errors.SPEAKING_SECONDS]
    assert capsys.readouterr().err == "error: seed=x: no number\n"
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert errors.explain(Interrupted("stopped")) == 75
    assert capsys.readouterr().err == ""


FIXABLE = (ValueError, FileNotFoundError, FloatingPointError, RunError, SaveError, EngineError)


@pytest.mark.parametrize("kind", [*FIXABLE, LostProcess])
def test_errors_that_users_can_fix_are_one_line(kind, capsys):
    assert explain(kind("too bad; do this")) == 1
    assert capsys.readouterr().err == "error: too bad; do this\n"


def test_a_bug_prints_its_traceback(capsys):
    with pytest.raises(KeyError) as error:
        {}["a key"]
    assert explain(error.value) == 1
    assert "Traceback" in capsys.readouterr().err


def test_too_few_nodes_without_damping_are_rejected(tmp_path):
    result = train(
        *SMALL, "regularizer=ed", "regularizer.degree=4", "regularizer.damping=0",
        f"system.runs={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("error: regularizer.resolution=4: ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
