"""train.py on the command line: help, sweeps and one-line errors."""

import contextlib
import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
)
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from ed.engine import main
from ed.engine.check import SWITCHES
from ed.engine.checkpoint import SaveError
from ed.engine.compose import compose_config, sampler_is_unused
from ed.engine.errors import EXPECTED, composition, explain
from ed.engine.loop import Interrupted
from ed.engine.main import load_run, start_tracker
from ed.engine.run import RunFolder
from ed.engine.settings import check_settings
from ed.envs.procgen import EngineError
from ed.runtime.files import read_rows
from ed.runtime.processes import LostProcess
from ed.runtime.runs import RunError
from scripts import evaluate, launch
from scripts.launch import command
from tests.helpers.commands import run_command
from tests.helpers.small import SMALL, small_config, small_run

ROOT = Path(__file__).parents[2]
SHORT = [*SMALL, "task.batch_size=1000"]  # two steps


def train(*arguments: str, cwd: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    words, env = [str(ROOT / "train.py"), *arguments], {"OMP_NUM_THREADS": "1"} | environment
    return run_command(words, cwd=cwd, env=env)


def train_afresh(*arguments: str, **environment) -> subprocess.CompletedProcess:
    """Runs train.py in a new process."""
    words = [sys.executable, str(ROOT / "train.py"), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("argument", [("--cfg", "job"), ("--help",)], ids=lambda a: a[0])
def test_help_and_config_do_not_import_torch(argument):
    """Importing torch would take seconds."""
    result = train_afresh(*argument, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert "regularizer" in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hydra" in loaded
    assert not loaded & {"torch", "numpy", "datasets", "matplotlib"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "regularizer.weigth=3",
            "unknown key 'regularizer.weigth'; did you mean regularizer.weight",
        ),
        ("optimiser.lr=3", "unknown key 'optimiser.lr'; did you mean optimizer.lr"),
        ("sede=1", "unknown key 'sede'; did you mean seed"),
        ("regularizer=edd", "regularizer=edd: no such choice; did you mean ed"),
        ("measures=[ed,sharpnes]", "measures=sharpnes: no such choice; did you mean sharpness"),
        ("regularizer=null", "regularizer=null: no such choice; Choices: asam, ed, "),
        ("measures=[null]", "measures=[null]: no such choice; Choices: "),
        (
            "regularizer.rho=0.1",
            "'regularizer.rho'",
        ),
        ("regularizer.lambda=3", "regularizer.weight"),
        (
            "measures.ed.pairs=50",
            "measures=[ed]",
        ),
        ("regularizer.weight=[", "error: regularizer.weight=["),
        ("regularizer.weight", "error: regularizer.weight"),
        (
            "task=procgen",  # the default model is a classifier
            "error: model.classes: ",
        ),
    ],
)
def test_errors_on_mistyped_keys_suggest_the_nearest(override, message, tmp_path):
    result = train("regularizer=ed", override, f"system.runs={tmp_path}")
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1  # no traceback
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+task.smoothing=0.1"], "^error: task.smoothing: "),
        (["task=pnn", "model=pnn", "debug=tiny"], "^error: task.data: .*debug=tiny"),
    ],
)
def test_a_setting_that_no_constructor_accepts_is_reported(overrides, message, tmp_path):
    result = train(*overrides, f"system.runs={tmp_path}")
    assert result.returncode == 1
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        (["regularizer=sam", "sampler=uniform"], True),
        (["sampler=uniform", "sampler.even=true"], True),
        (["regularizer=ed", "sampler=uniform"], False),
        (["regularizer=sam"], False),  # the default sampler is never reported
        (["regularizer=ed_performance"], False),
    ],
)
def test_unused_samplers_are_detected(overrides, unused):
    assert sampler_is_unused(compose_config(overrides), overrides) is unused


def test_an_unused_sampler_prints_a_warning(tmp_path):
    # this device is rejected before training
    words = ["regularizer=sam", "sampler=uniform", "system.device=tpu"]
    lines = train(*words, f"system.runs={tmp_path}").stderr.splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "warning: sampler",
        "error: system.device",
    ]


def test_a_key_of_swept_choices_must_be_swept(tmp_path):
    words = ["-m", *SHORT, f"system.runs={tmp_path}", "regularizer=ed,jacobian"]
    result = train(*words, "regularizer.weight=3")
    assert result.stderr.startswith("error: regularizer.weight=3: ")
    assert "'regularizer.weight=choice(3)'" in result.stderr
    result = train(*words, "regularizer.weight=choice(3)")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("adhoc/*/seed0/DONE"))) == 2


@pytest.mark.parametrize("choices", ["ed,none", "choice(ed, none)"])
@pytest.mark.parametrize("value", ["3", "1,2", "choice(1,2)"])
def test_a_swept_choice_without_the_key_is_reported(choices, value, monkeypatch):
    overrides = [f"regularizer={choices}", f"regularizer.weight={value}"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *overrides])
    found = composition(ConfigCompositionException(), overrides)
    assert found.startswith(f"regularizer.weight={value}: regularizer=none ")


def test_a_swept_choice_may_inherit_the_key():
    # ed_performance inherits the key from ed.yaml
    overrides = ["regularizer=ed,ed_performance", "regularizer.anchored=false"]
    found = composition(ConfigCompositionException(), overrides)
    assert "'regularizer.anchored=choice(false)'" in found


def test_an_unknown_swept_choice_is_reported(monkeypatch):
    """Hydra checks keys before swept choices, so its own error is about the key."""
    overrides = ["regularizer=edd,ed", "regularizer.weight=3"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *overrides])
    found = composition(ConfigCompositionException(), overrides)
    assert found.startswith("regularizer=edd: ")


def test_a_mistyped_launcher_is_reported_with_its_group():
    with pytest.raises(MissingConfigException) as error:
        compose_config(["hydra/launcher=slrum"])
    assert composition(error.value, []).startswith("hydra/launcher=slrum: ")


def test_your_own_config_that_overrides_an_unknown_group_is_reported(tmp_path, monkeypatch):
    (tmp_path / "regularizer").mkdir()
    leaf = "defaults: [ed, override /sampeler: uniform, _self_]\n"
    (tmp_path / "regularizer" / "own.yaml").write_text(leaf)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path)])
    with pytest.raises(ConfigCompositionException) as error:
        compose_config(["regularizer=own"], folders=[tmp_path])
    found = composition(error.value, ["regularizer=own"])
    assert "sampeler" in found
    assert "\n" not in found


def test_the_error_lists_choices_that_inherit_the_key(tmp_path, monkeypatch):
    (tmp_path / "regularizer").mkdir()
    (tmp_path / "regularizer" / "mine.yaml").write_text("defaults: [ed_performance, _self_]\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path)])
    found = composition(ConfigCompositionException(), ["regularizer.components=3"])
    assert "'regularizer.components'" in found
    assert found.endswith("regularizer=ed, ed_fast, ed_performance, mine")


def test_the_error_suggests_the_nested_key_of_a_measure():
    found = composition(ConfigCompositionException(), ["measures=[ed]", "measures.pairs=50"])
    assert "did you mean measures.ed.pairs" in found


def test_your_own_configs_may_be_outside_the_repository(tmp_path):
    """Hydra's --config-dir adds choices, and errors suggest their keys."""
    for group, name, leaf in (
        ("sampler", "ends", "_target_: own_parts.Ends\nshift: 0.0\n"),
        ("regularizer", "shrink", "_target_: own_parts.Shrink\nfactor: 0.5\n"),
        ("measures", "count", "count:\n  _target_: own_parts.Count\n"),
    ):
        (tmp_path / "my configs" / group).mkdir(parents=True)
        (tmp_path / "my configs" / group / f"{name}.yaml").write_text(leaf)
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    own = ["--config-dir", str(tmp_path / "my configs"), *SHORT, f"system.runs={tmp_path / 'runs'}"]
    both = ["regularizer=shrink", "measures=[count]"]
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    result = train(*own, *both, **path)
    assert result.returncode == 0, result.stderr
    assert "measure/count 3" in result.stdout
    result = train(*own, "regularizer=ed", "sampler=ends", **path)
    assert result.returncode == 0, result.stderr
    for wrong, message in {
        "regularizer.factr=1": "did you mean regularizer.factor",
        "sampler=end": "sampler=end: ",
        "regularizer.factor=x": "regularizer.factor=x",
    }.items():
        result = train(*own, *both, wrong, **path)
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("factor: 0.5", "regularizer._target_"),
        ("_target_: mine.Shrnk", "regularizer._target_=mine.Shrnk"),
        ("_target_: mine.Shrink.bild", "regularizer._target_=mine.Shrink.bild"),
        ("_target_: yours.Shrink", "regularizer._target_=yours.Shrink"),
        (
            "_target_: mine.Shrink",
            "'factor'",
        ),
        ("_target_: [mine.Shrink", "own.yaml"),
    ],
)
def test_errors_in_your_own_configs_print_one_line(leaf, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "regularizer").mkdir()
    (tmp_path / "regularizer" / "own.yaml").write_text(leaf)
    (tmp_path / "mine.py").write_text("class Shrink:\n    def __init__(self, factor): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception) as error:  # noqa: PT011, PT012, types and raising lines differ
        cfg = compose_config(["regularizer=own"], folders=[tmp_path])
        check_settings(cfg)
        instantiate(cfg.regularizer)
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "overrides", "suggestion"),
    [
        ("lr", [], "optimizer.lr"),
        ("zzz", [], "--cfg job"),
        ("measures.edd.pairs", [], "measures"),
        ("measures.ed.pair", ["measures=[ed]"], "measures.ed.pairs"),
        ("regularizer.lambda", ["regularizer=mixup"], "regularizer.alpha"),
        ("regularizer.wieght", ["regularizer=ed,sam"], "regularizer.weight"),
    ],
)
def test_an_unknown_key_suggests_existing_ones(key, overrides, suggestion):
    found = composition(ConfigCompositionException(), [*overrides, f"{key}=3"])
    assert f"'{key}'" in found
    assert suggestion in found


@pytest.mark.parametrize(
    ("regularizer", "symbol", "name"),
    [
        ("ed", "lambda", "weight"),
        ("ed", "r", "resolution"),
        ("ed", "K", "degree"),
        ("ed", "m", "components"),
        ("ed", "n_p", "pairs"),
        ("ed", "epsilon", "damping"),
        ("jacobian", "n_proj", "projections"),
    ],
)
def test_the_papers_symbols_suggest_the_key(regularizer, symbol, name):
    overrides = [f"regularizer={regularizer}", f"regularizer.{symbol}=3"]
    found = composition(ConfigCompositionException(), overrides)
    assert f"regularizer.{name}" in found


def test_an_import_error_in_your_own_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "regularizer").mkdir()
    (tmp_path / "regularizer" / "own.yaml").write_text("_target_: failing.Shrink")
    (tmp_path / "failing.py").write_text("from math import nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        check_settings(compose_config(["regularizer=own"], folders=[tmp_path]))


OWN_CONSTRUCTORS = """
from __future__ import annotations

class Base:
    def __init__(self, weight: float, name: str): pass

class Own(Base):
    def __init__(self, name: int, **rest): pass

class Typed(Base):
    def __init__(self, part: OnlyForTypeCheckers, **rest): pass

def make(weight: float): pass
"""


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("{_target_: own_kinds.Own, name: 3, weight: 1}", None),
        ("{_target_: own_kinds.Own, name: three, weight: 1}", "name=three"),
        ("{_target_: own_kinds.Own, name: 3, weight: x}", "weight=x"),
        ("{_target_: own_kinds.Typed, part: 3, weight: x}", "weight=x"),
        ("{_target_: own_kinds.make, weight: x}", "weight=x"),
        ("{_target_: own_kinds.make, weight: '???'}", None),  # another check reports missing values
    ],
)
def test_types_come_from_the_most_derived_constructor(leaf, message, tmp_path, monkeypatch):
    (tmp_path / "regularizer").mkdir()
    (tmp_path / "regularizer" / "own.yaml").write_text(leaf)
    (tmp_path / "own_kinds.py").write_text(OWN_CONSTRUCTORS)
    monkeypatch.syspath_prepend(tmp_path)
    rejected = pytest.raises(ValueError, match=f"^regularizer.{message}: ")
    with rejected if message else contextlib.nullcontext():
        check_settings(compose_config(["regularizer=own"], folders=[tmp_path]))


def test_every_system_setting_is_type_checked():
    whole = compose_config([])
    for key in set(whole.system) - set(SWITCHES):  # switches also accept auto
        cfg = whole.copy()
        cfg.system[key] = [1]
        with pytest.raises(ValueError, match=rf"^system\.{key}=\[1\]"):
            check_settings(cfg)


def test_settings_of_measures_are_type_checked():
    with pytest.raises(ValueError, match=r"measures\.ed\.pairs=many"):
        check_settings(compose_config(["measures=[ed]", "measures.ed.pairs=many"]))


def test_the_error_on_a_missing_module_suggests_pythonpath(tmp_path):
    small_run(tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("ed.tasks.", "my_tasks."))
    with pytest.raises(ValueError, match=r"^task\._target_=my_tasks.*PYTHONPATH$"):
        load_run(tmp_path, trust=True)


def test_an_unrelated_broken_file_does_not_hide_the_error(tmp_path, monkeypatch):
    (tmp_path / "regularizer").mkdir()
    (tmp_path / "regularizer" / "torn.yaml").write_text("weight: [")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path)])
    found = composition(ConfigCompositionException(), ["regularizer.rho=1"])
    assert "'regularizer.rho'" in found
    assert found.endswith("regularizer=asam, sam")


OWN_PARTS = """
from dataclasses import dataclass
from ed.core.nodes import UniformNodes
from ed.measures.base import Measure
from ed.regularizers.base import Regularizer

@dataclass(frozen=True)
class Ends(UniformNodes):
    shift: float = 0.0

class Shrink(Regularizer):
    def __init__(self, factor: float):
        self.factor = factor

    def objective(self, task, field, batch, state):
        return task.loss(self.factor * field(), batch)

class Count(Measure):
    def __call__(self, model, task):
        return {"": 3.0}
"""


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


def test_a_metric_without_the_eval_prefix_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("ed.tasks.image_task.ImageTask.metric", "acc")
    with pytest.raises(ValueError, match="eval/acc"):
        small_run(tmp_path / "run")


def test_other_processes_wait_for_the_one_that_reports(monkeypatch, capsys):
    """torchrun stops all processes when one exits, which could cut off the message."""
    from ed.engine import errors

    waits = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
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


def test_a_sweep_gives_every_run_its_own_folder(tmp_path):
    """A small version of the sweep in the README."""
    result = train(
        "-m", *SHORT, "seed=0,1", "regularizer=none,ed", f"system.runs={tmp_path}"
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    done = sorted(path.parent for path in tmp_path.rglob("DONE"))
    assert len(done) == 4
    assert {path.name for path in done} == {"seed0", "seed1"}
    assert len({path.parent for path in done}) == 2
    again = train("-m", *SHORT, "seed=0,1", "regularizer=none,ed", f"system.runs={tmp_path}")
    assert again.stdout.count("already done") == 4


def test_a_sweep_continues_after_a_failed_run(tmp_path):
    """Failures are printed immediately, and the last line lists all of them."""
    words = ["-m", *SMALL, f"system.runs={tmp_path}", "optimizer.lr=1e30,0,0.001"]
    result = train(*words)
    assert result.returncode == 1
    assert [path.parent.name for path in tmp_path.rglob("DONE")] == ["seed0"]
    diverged, rejected, last = result.stderr.splitlines()  # no traceback
    assert re.match("error: .*(diverged|not finite)", diverged)
    assert rejected.startswith("error: optimizer.lr=0: ")
    assert re.match("error: 2 .*optimizer.lr=1e\\+30; optimizer.lr=0", last)
    again = train(*words)
    assert again.returncode == 1
    assert again.stdout.count("already done") == 1


def test_a_stopped_sweep_starts_no_more_runs(tmp_path):
    words = ["-m", *SMALL, f"system.runs={tmp_path}", "seed=0,1", "system.max_minutes=1e-9"]
    result = train(*words)
    assert result.returncode == 75
    assert [path.parent.name for path in tmp_path.rglob("config.yaml")] == ["seed0"]
    assert result.stderr.count("\n") == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    extra = ["logger=wandb", "logger.mode=offline"]
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", *extra, "system.max_minutes=0")
    identifier = (tmp_path / "run" / "wandb_id").read_text()
    assert small_run(tmp_path / "run", *extra)["steps"] == 10
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(identifier in folder.name for folder in folders)  # "-1" follows in the same second


def test_wandb_groups_a_tables_runs_by_cell_and_names_them_by_seed(tmp_path, monkeypatch):
    """Starts the tracker as the launcher's commands do, and twice for the first run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs = expand(load_table("table1"), cells=["ed"], seeds=[0, 1], root=tmp_path)
    seen = []
    for run in (*runs, runs[0]):  # resumes the first run
        run.folder.mkdir(parents=True, exist_ok=True)
        cfg = compose_config([*command(run)[2:], "logger=wandb", "logger.mode=offline"])
        tracker = start_tracker(cfg, run.folder)
        seen.append((tracker.run.group, tracker.run.name, tracker.run.id))
        tracker.close()
    assert [(group, name) for group, name, _ in seen] == [
        ("table1/ed", "table1/ed/seed0"),
        ("table1/ed", "table1/ed/seed1"),
        ("table1/ed", "table1/ed/seed0"),
    ]
    assert seen[0] == seen[2]
    assert seen[0][2] != seen[1][2]


def test_wandb_logs_every_row_and_resumes(tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(
        log=lambda values, step: logged.append({"step": step, **values}), finish=lambda: None
    )
    wandb = SimpleNamespace(init=lambda **how: started.append(how) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    small_run(tmp_path, "logger=wandb")
    assert logged == read_rows(tmp_path / "metrics.jsonl")
    assert [how["resume"] for how in started] == ["allow"]  # "never" would fail when a run resumes


def test_a_requested_stop_is_reported_once_without_an_error(tmp_path):
    result = train(*SMALL, f"system.run_dir={tmp_path / 'run'}", "system.max_minutes=1e-9")
    assert result.returncode == 75
    stopped = [line for line in (result.stdout + result.stderr).splitlines() if "stopped" in line]
    assert len(stopped) == 1
    assert re.match(r"stopped and saved at step 1 of \d+", stopped[0])
    assert "stopped" in (tmp_path / "run" / "train.log").read_text()


def test_old_runs_use_the_default_of_a_new_setting(tmp_path):
    small_run(tmp_path)
    config = tmp_path / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "  space:" not in line))
    assert load_run(tmp_path, "cpu").task.space == "input"


def test_a_missing_setting_without_a_default_is_reported(capsys):
    leaf = {"_target_": "ed.models.clip.Towers", "architecture": "ViT-B-32"}
    with pytest.raises(InstantiationException) as error:
        instantiate(OmegaConf.create({"model": leaf}).model)
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "prompts" in printed
    assert printed.count("\n") == 1


def test_hydras_own_run_folder_is_rejected(tmp_path):
    result = train(*SMALL, f"hydra.run.dir={tmp_path}/mine")
    assert result.returncode == 1
    assert f"use system.run_dir={tmp_path}/mine" in result.stderr
    assert not (tmp_path / "mine").exists()


def test_csv_has_every_value_once_and_resumes(tmp_path):
    often = ["logger=csv", "system.save_seconds=0"]
    with pytest.raises(Interrupted):
        small_run(tmp_path, *often, "system.max_minutes=0")
    small_run(tmp_path, *often)
    with open(tmp_path / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [int(row["step"]) for row in found] == [row["step"] for row in rows]
    for line, row in zip(found, rows, strict=True):
        assert {k: float(v) for k, v in line.items() if v} == pytest.approx(row)


def test_tensorboard_has_every_value(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    small_run(tmp_path, "logger=tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if "train/loss" in row]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(row["step"], pytest.approx(row["train/loss"])) for row in rows]


def test_a_missing_logger_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"^logger=tensorboard: "):
        small_run(tmp_path, "logger=tensorboard")
