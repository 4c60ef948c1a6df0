"""The config of every cell in every experiment file composes and passes all checks."""

import re

import pytest
from hydra.utils import instantiate
from omegaconf.errors import ConfigAttributeError

from ed.analysis.spec import Run, expand, nested, parse_value
from ed.analysis.tables import load_table
from ed.engine.check import check
from ed.engine.compose import GROUPS, compose_config
from ed.engine.main import build_measures
from ed.engine.settings import check_settings
from ed.figures.files import drawing
from scripts.table import all_names
from tests.helpers.small import SMALL, quick_config


def all_cells() -> list[Run]:
    """Returns the first seed of every cell; cells shared between tables appear once."""
    tables = [load_table(name) for name in all_names()]
    runs = [run for table in tables for run in expand(table, seeds=table.seeds[:1])]
    return list({run.folder: run for run in runs}.values())


def test_quick_configs_equal_composed_ones():
    """The next test and all small runs rely on this."""
    run = next(run for run in all_cells() if run.table == "correlation_clip")
    assert any("." in argument.split("=")[0] for argument in run.arguments)
    small = [*SMALL, "regularizer=ed", "measures=[ed]", "measures.ed.pairs=3", "optimizer.lr=1e-4"]
    small += ["task.image_size=[16,16]", "+task.other={a: [x]}", "logger.project='a b'", "seed=3"]
    for words in (list(run.arguments), small):
        assert quick_config(*words) == compose_config(words)
    with pytest.raises(ConfigAttributeError, match="nothing"):
        quick_config(*run.arguments, "task.nothing=1")


@pytest.mark.parametrize("run", all_cells(), ids=lambda run: f"{run.table}/{run.cell}")
def test_every_cell_composes_and_passes_all_checks(run):
    cfg = quick_config(*run.arguments)
    for key, text in dict(override.split("=", 1) for override in run.overrides).items():
        if key not in GROUPS:
            assert nested(cfg, key) == parse_value(text), f"{key} differs from the cell"
    if "sampler" in cfg.regularizer:  # must not be overridden by the regularizer's default
        assert cfg.regularizer.sampler == cfg.sampler
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    instantiate(cfg.optimizer)
    check_settings(cfg)
    check(cfg, task, regularizer, build_measures(cfg).values())


def test_every_header_has_command_and_cost():
    for name in all_names():
        path = load_table(name).path
        header = re.match(r"(#.*\n)+", path.read_text())
        assert header, f"{path} has no header"
        for needed in (f"python scripts/launch.py {name}", " run"):
            assert needed in header.group(), f"{path}: the header lacks {needed!r}"
        assert max(map(len, path.read_text().splitlines())) <= 100


def test_headers_have_the_right_number_of_runs():
    for name in all_names():
        table = load_table(name)
        count = int(re.search(r"# (\d+) runs?\b", table.path.read_text()).group(1))
        assert count == len(expand(table)), name


@pytest.mark.parametrize(
    ("name", "network", "row", "steps", "stated"),
    [
        ("table1", "ViT-Tiny", "plain, 256", 58_500, "# h a run for the baseline"),
        ("table1", "ViT-Tiny", "sam, 256", 58_500, "# h for SAM"),
        ("table1", "ViT-Tiny", "jacobian, 256", 58_500, "# h for the Jacobian"),
        ("table1_100", "ViT-Tiny", "ED, 256 + 256", 19_500, "# s for ED"),
        ("basis", "ViT-Tiny", "ED, 256 + 256", 58_500, "# h a run"),
        ("correlation_vit", "ViT-Tiny", "plain, 512", 19_400, ", # and [0-9]+ s a run"),
        ("correlation_resnet18", "ResNet18", "plain, 256", 39_000, "#, [0-9]+ and [0-9]+ s a run"),
        ("clip_ood", "ViT-B/32", "ED, 512 + 512", 25_020, "# h a run"),
        ("procgen", "Procgen update", "plain, 4096", 36_600, "# h a run"),
        ("procgen", "Procgen update", "ED, 4096 + 8192", 36_600, "with ED # h"),
    ],
)
def test_times_in_headers_agree_with_the_benchmark(name, network, row, steps, stated):
    """# stands for the number. The benchmark varies by about 5 % between runs."""
    path = load_table(name).path
    section = (
        (path.parent / "results" / "speed" / "benchmark.md").read_text().split(f"## {network}")[1]
    )
    step = float(re.search(rf"\| {re.escape(row)} \| ([\d.]+)", section).group(1)) / 1000
    header = " ".join(re.match(r"(#.*\n)+", path.read_text()).group().split("\n# "))
    assert "computed from benchmark.md" in header
    number = re.search(stated.replace("#", r"(\d+\.?\d*)"), header).group(1)
    expected = steps * step / (3600 if " h" in stated else 1)
    half_digit = 0.5 * 10 ** -len(number.partition(".")[2])
    assert float(number) == pytest.approx(expected, abs=0.05 * expected + half_digit)


@pytest.mark.parametrize("name", [name for name in all_names() if load_table(name).figure])
def test_figure_functions_exist(name):
    assert callable(drawing(load_table(name)))
