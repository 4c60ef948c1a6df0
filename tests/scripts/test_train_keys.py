"""train.py on the command line: mistyped keys, choices and configs of your own."""

import contextlib
import os
import re
import sys

import pytest
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate

from ed.engine.check import SWITCHES
from ed.engine.compose import compose_config, sampler_is_unused
from ed.engine.errors import composition, explain
from ed.engine.main import load_run
from ed.engine.settings import check_settings
from tests.helpers.small import small_run
from tests.helpers.training import SHORT, train

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["regularizer=ed", "-m", "seed=0,1"], "seed=0,1: must not follow an option; put -m "),
        (["--config-name", "foo"], "--config-name foo: no such config; "),
    ],
)
def test_wrong_options_are_explained(words, message):
    result = train(*words)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


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
        ("regularizer=[ed,sam]", "regularizer=[ed,sam]: regularizer has one choice per run; "),
        ("seed=0,1", "error: seed=0,1: put -m before all settings for a sweep; "),
        ("model=pnn,impala", "error: model=pnn,impala: put -m before all settings for a sweep\n"),
        ("task=3", "task=3: no such choice; Choices: cifar10, "),
        ("debug=true", "debug=true: no such choice; Choices: tiny"),
        ("+experiment=pnn", "+experiment=pnn: use experiment=pnn"),
        ("+task=pnn", "+task=pnn: use task=pnn"),
        ("--lr=1", "--lr=1: no such option; "),
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


def test_a_measure_without_a_name_is_reported(tmp_path):
    (tmp_path / "measures").mkdir()
    (tmp_path / "measures" / "own.yaml").write_text("_target_: ed.measures.norm.ParameterNorm\n")
    with pytest.raises(ValueError, match=r"^measures\._target_=ed\.measures"):
        check_settings(compose_config(["measures=[own]"], folders=[tmp_path]))


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
