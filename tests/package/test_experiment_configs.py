"""Tests that experiment configs compose and pass checks, and that mistakes raise clear errors."""

import sys

import pytest
import yaml
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ed.engine.check import check
from ed.engine.compose import CONFIGS, compose_config
from ed.engine.errors import composition
from ed.engine.main import build_measures
from ed.engine.run import resolved
from ed.engine.settings import check_settings
from ed.runtime.runs import identity
from tests.helpers.small import composed, quick_config

NAMES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
CHOSEN = {"clip_soup": ["model.index=1"]}  # settings without a default
# may be set explicitly, even to the default
NAMED = ("task.name", "task.game", "task.frames", "task.epochs", "task.crop")


def settings(config: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        found |= settings(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_and_passes_the_checks(name):
    cfg = quick_config(f"experiment={name}", *CHOSEN.get(name, []))
    check_settings(cfg)  # also rejects unknown keys
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    instantiate(cfg.optimizer)
    check(cfg, task, regularizer, build_measures(cfg).values())


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_has_a_title_and_only_changed_settings(name):
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")
    assert max(map(len, lines)) <= 100
    raw = yaml.safe_load("\n".join(lines))
    defaults = raw.pop("defaults")
    groups = {k: v for entry in defaults if isinstance(entry, dict) for k, v in entry.items()}
    choices = [f"{key.removeprefix('override /')}={value}" for key, value in groups.items()]
    parents = [f"experiment={entry}" for entry in defaults if isinstance(entry, str)]
    before = composed(*parents, *choices)
    for key, value in settings(raw).items():
        assert key in NAMED or OmegaConf.select(before, key) != value, (
            f"{key} already has this value without {name}"
        )


def test_the_demo_is_the_default():
    demo, default = (resolved(compose_config(words)) for words in (["experiment=demo"], []))
    assert identity(demo) == identity(default)


def test_the_command_line_and_debug_override_an_experiment():
    cfg = compose_config(
        ["optimizer.lr=1", "experiment=cifar10_vit_tiny", "model=vit_micro", "debug=tiny"]
    )
    assert (cfg.optimizer.lr, cfg.model.width, cfg.task.epochs) == (1, 64, 1)
    nodes = compose_config(["experiment=cifar10_vit_tiny", "regularizer=ed_performance"]).sampler
    # the same as without an experiment
    assert nodes == compose_config(["sampler=chebyshev"]).sampler


def test_an_unknown_experiment_lists_the_choices(monkeypatch):
    overrides = ["experiment=glue_rtee"]
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    with pytest.raises(MissingConfigException) as error:
        compose_config(overrides)
    found = composition(error.value, overrides)
    assert found.startswith("experiment=glue_rtee: ")
    assert "\n" not in found
    assert all(name in found for name in ("glue_rte", "procgen_starpilot", "demo"))


def test_an_unknown_key_suggests_keys_of_the_experiment():
    words = ["experiment=procgen", "task.framse=3"]
    with pytest.raises(ConfigCompositionException) as error:
        compose_config(words)
    assert "task.frames" in composition(error.value, words)


@pytest.mark.parametrize(
    "name", ["cifar10_vit_tiny", "imagenet_vit_s16", "clip_b32", "mnist_cifar"]
)
def test_missing_data_raises_a_one_line_error(name, tmp_path):
    shifts = ["task.shifts=null"] if name == "clip_b32" else []
    cfg = compose_config([f"experiment={name}", f"task.data={tmp_path / 'nowhere'}", *shifts])
    with pytest.raises((ValueError, FileNotFoundError), match=r"task\.data") as error:
        instantiate(cfg.task).prepare("cpu", cfg.seed)
    assert "\n" not in str(error.value)
