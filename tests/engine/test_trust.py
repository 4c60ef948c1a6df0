"""Untrusted run folders cannot execute code, and reading their files takes bounded time."""

import re
import shutil
import time

import pytest
from omegaconf import OmegaConf

import scripts.measure as measure
import scripts.play as play
from ed.analysis.curves import read_curves
from ed.engine.compose import CONFIGS, GROUPS
from ed.engine.errors import explain
from ed.engine.main import load_run
from ed.engine.trust import (
    UntrustedConfig,
    check_targets,
    read_config,
    shipped_targets,
    stored_config,
)
from ed.models.named import transformers_model
from ed.models.text import TextClassifier
from ed.runtime.files import yaml_text
from ed.tasks.text_task import load_tokenizer
from tests.helpers.hostile import hostile_leaves, plant, write_remote_code
from tests.helpers.small import small_run

HOW = ("numpy", "torch", "hub", "os", "nested", "argument", "re-exported", "positional")
HOW += ("interpolated",)
ENTRY_POINTS = {
    "measure.py --run": lambda run: measure.main(["--run", str(run), "--device", "cpu"]),
    "play.py RUN": lambda run: play.main([str(run), "--device", "cpu"]),
    "load_run": lambda run: load_run(run, "cpu"),
}
ON_IMAGES = ["--data", "embedded", "--device", "cpu"]
LOADERS = {
    "model.name": lambda name: transformers_model(name, classes=2),
    "model.checkpoint": TextClassifier,
    "task.tokenizer": load_tokenizer,
    "--transformers": lambda name: measure.main(["--transformers", name, *ON_IMAGES]),
    "--random-weights": lambda name: measure.main(
        ["--transformers", name, "--random-weights", *ON_IMAGES]
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    small_run(folder, "measures=[norm]", "system.device=cpu")
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("key", ["task", "model"])
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_no_entry_point_builds_untrusted_targets(entry, key, copy, tmp_path, capsys):
    marker = tmp_path / "marker"
    plant(copy, key, hostile_leaves(tmp_path, marker)["numpy"])
    with pytest.raises(UntrustedConfig, match=rf"config\.yaml: {key}\._target_=") as error:
        ENTRY_POINTS[entry](copy)
    assert not marker.exists()
    assert explain(error.value) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("how", HOW)
def test_every_kind_of_untrusted_target_is_rejected(how, copy, tmp_path):
    marker = tmp_path / "marker"
    plant(copy, "model", hostile_leaves(tmp_path, marker)[how])
    with pytest.raises(ValueError, match=r"config\.yaml"):
        load_run(copy, "cpu")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("loader", "model_type"),
    [
        ("model.name", "own"),
        ("model.checkpoint", "own"),
        ("model.checkpoint", "vit"),  # known to transformers, but not as a text classifier
        ("task.tokenizer", "own"),
        ("--transformers", "own"),
        ("--transformers", "bert"),  # not an image classifier
        ("--random-weights", "bert"),
    ],
)
def test_code_in_model_folders_is_never_offered(loader, model_type, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    folder = write_remote_code(tmp_path / "model", model_type)
    with pytest.raises(ValueError, match=re.escape(folder)) as error:
        LOADERS[loader](folder)
    assert "\n" not in str(error.value)
    assert not asked


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("model.image_size", "ed.engine.loggers.Wandb"),
        ("model.image_size", "ed.models.vit.ViT"),
        ("model", "ed.engine.loggers.Wandb"),
        ("model", "ed.tasks.grokking.ModularArithmetic"),
        ("task", "ed.measures.norm.ParameterNorm"),
        ("own", "ed.models.vit.ViT"),
    ],
)
def test_parts_of_ed_are_built_only_in_their_place(key, target, copy):
    plant(copy, key, {"_target_": target})
    with pytest.raises(UntrustedConfig, match=re.escape(f"{key}._target_={target!r}")):
        load_run(copy, "cpu")


def test_trust_allows_any_target(copy, tmp_path):
    marker = tmp_path / "marker"
    plant(copy, "task", hostile_leaves(tmp_path, marker)["numpy"])
    (copy / "last.pt").unlink()  # it stores the original config; model.safetensors does not
    with pytest.raises(AttributeError):  # the planted object is not a task
        load_run(copy, "cpu", trust=True)
    assert marker.exists()


def test_resuming_builds_no_untrusted_measure(copy, tmp_path):
    marker = tmp_path / "marker"
    plant(copy, "measures.norm", hostile_leaves(tmp_path, marker)["numpy"])
    settings = ["measures=[norm]", "system.device=cpu"]
    with pytest.raises(UntrustedConfig, match=r"measures\.norm\._target_="):
        small_run(copy, *settings)
    assert not marker.exists()
    small_run(copy, *settings, "system.trust=true")
    assert marker.exists()


def test_measures_that_are_not_requested_are_not_built(copy, tmp_path):
    plant(copy, "measures.own", {"_target_": "own_parts.Count"})
    assert small_run(copy, "measures=[norm]", "system.device=cpu")["steps"] == 10


def test_shipped_configs_and_committed_runs_are_trusted():
    for group in GROUPS:
        assert shipped_targets(group)
        assert all(target.startswith("ed.") for target in shipped_targets(group))
    paths = sorted((CONFIGS.parent / "experiments").rglob("curves.parquet"))
    assert paths
    for path in paths:
        for record in read_curves(path).values():
            check_targets(OmegaConf.create(record.config), path)


def flow(depth: int) -> str:
    return "a: " + "[" * depth + "]" * depth


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
WRONG = {
    "bomb": BOMB,
    "merge bomb": "a: &a {x: 1}\n" + "".join(f"k{i}: *a\n" for i in range(50_001)),
    "loop": "a: &a [*a]\n",
    "deep flow": flow(5000),
    "deep block": "- " * 5000,
    "list": "- 1\n- 2\n",
    "nothing": "",
    "number": "3\n",
    "binary": b"\xff\xfe\x00\x01",
    "null bytes": b"a: \x00\n",
    "broken": "a: [1, 2\n",
    "part": "task: 3\n",
    "environment": "task: {_target_: a, data: '${oc.env:HOME}'}\n",
}


@pytest.mark.parametrize("kind", WRONG)
def test_damaged_config_is_rejected_quickly(kind, tmp_path):
    path = tmp_path / "config.yaml"
    text = WRONG[kind]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()  # CPU time, unaffected by other processes
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        stored_config(tmp_path)
    assert "\n" not in str(error.value)
    assert time.process_time() - began < 30  # expanding a YAML bomb would take hours


def test_yaml_aliases_are_allowed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\n")
    assert yaml_text(path) == path.read_text()
    assert OmegaConf.to_container(read_config(path)) == {"a": [1, 2], "b": [1, 2]}
