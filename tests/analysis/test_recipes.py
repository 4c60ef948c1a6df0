"""`experiment=` in a table expands to the settings that Hydra composes."""

import pytest
from omegaconf import OmegaConf

from ed.analysis.recipes import choice_of, expanded
from ed.analysis.spec import SpecError, expand
from ed.engine.compose import CONFIGS, compose_config
from scripts.launch import command
from tests.helpers.small import quick_config
from tests.helpers.tables import write_table

NAMES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def own_configs(folder, **files: str) -> list[str]:
    """Writes experiment configs; returns the override that adds their folder."""
    (folder / "experiment").mkdir()
    for name, text in files.items():
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return [f"hydra.searchpath=['file://{folder}']"]


@pytest.mark.parametrize("name", NAMES)
def test_an_expanded_experiment_composes_to_the_same_config(name):
    overrides = expanded([f"experiment={name}"])
    assert quick_config(*overrides) == quick_config(f"experiment={name}")


def test_overrides_take_precedence_over_an_experiment():
    overrides = ["task.frames=7", "experiment=procgen", "experiment=procgen_fruitbot"]
    found = expanded(overrides)
    assert not any(text.startswith("experiment=") for text in found)
    assert {"task=procgen", "task.game=fruitbot"} <= set(found)
    assert dict(text.split("=", 1) for text in found)["task.frames"] == "7"
    assert compose_config(list(found)) == compose_config(overrides)


def test_a_table_may_use_an_experiment(tmp_path):
    fixed = ["experiment=cifar10_vit_tiny", "task.epochs=100"]
    (run, *_) = expand(write_table(tmp_path, fixed=fixed), cells=["ed"])
    assert {"task=cifar10", "optimizer.lr=0.005", "task.epochs=100"} <= set(run.overrides)
    assert run.arguments[:2] == tuple(fixed)
    assert "experiment=cifar10_vit_tiny" in command(run)
    (point, *_) = expand(write_table(tmp_path, fixed=fixed), cells=["rho-0.1"])
    assert "regularizer.rho=0.1" in point.arguments


def test_your_own_experiment_is_found_on_the_search_path(tmp_path):
    own = own_configs(
        tmp_path,
        mine="defaults: [parent]\ntask: {epochs: 3}\nseed: ${oc.env:SEED}",
        parent="task: {augment: null, crop_area: [0.5, 1.0]}",
    )
    found = expanded([*own, "experiment=mine"])
    assert found == ("task.augment=null", "task.crop_area=[0.5,1.0]", "task.epochs=3", *own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [mine]", "experiment=mine: "),
        ("defaults: [glue_rtee]", "experiment=glue_rtee: "),
        ("task: [", "mine.yaml"),
        ("- a list", "mine.yaml"),
    ],
)
def test_errors_in_an_experiment_name_the_table_and_the_experiment(tmp_path, text, message):
    fixed = [*own_configs(tmp_path, mine=text), "experiment=mine"]
    with pytest.raises(SpecError, match=r"mini\.yaml") as error:
        write_table(tmp_path, fixed=fixed)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_experiment_cannot_be_changed_at_launch(table):
    with pytest.raises(SpecError, match="--set experiment=glue"):
        expand(table, sets=["experiment=glue"])


@pytest.mark.parametrize("choice", ["ed", "ed_fast", "ed_performance", "none", "sam", "asam"])
def test_choice_of_finds_the_config_file(choice):
    config = OmegaConf.to_container(compose_config([f"regularizer={choice}"]), resolve=True)
    assert choice_of("regularizer", config["regularizer"]) == choice
    assert choice_of("regularizer", {"_target_": "mine.Own", "weight": 7.0}) is None
