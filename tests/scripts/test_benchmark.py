"""scripts/benchmark.py: step times, the overhead table and the estimators."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ed.analysis.steps import COLUMNS, STEPS, read_steps
from ed.kernels.attention import TOKENS
from ed.kernels.block import pays, supported
from ed.kernels.rowwise import WIDTHS
from tests.helpers.commands import run_command

ROOT = Path(__file__).parents[2]


def quick(out: Path, *words: str) -> list[list[str]]:
    """Benchmarks one network and returns the cells of the tables it writes."""
    command = ["scripts/benchmark.py", "--quick", "--cases", "vit_tiny", *words]
    done = run_command([*command, "--out", str(out)])
    assert done.returncode == 0, done.stderr[-3000:]
    return table_cells(out.read_text())


def table_cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_benchmark_runs_and_times_every_method(tmp_path):
    rows = quick(tmp_path / "benchmark.md")
    spent = {cells[0].split(",")[0]: cells[1] for cells in rows[1:]}
    assert set(spent) == {
        "ordinary eager loop", "plain", "ED", "ED with PCA 3", "mixup", "sam", "asam", "jacobian"
    }  # fmt: skip
    assert all(float(milliseconds) > 0 for milliseconds in spent.values())


def test_the_overhead_table_uses_the_measured_times(tmp_path):
    header, ours, paper, *beside = quick(tmp_path / "overhead.md", "--table")
    assert header[3:] == [
        "ED (efficiency)", "ED (performance)", "ED with PCA 3", "mixup", "SAM", "ASAM", "Jacobian"
    ]  # fmt: skip
    assert all(float(cell) > 0 for cell in ours[1:])
    (row,) = (dict(zip(paper, cells, strict=True)) for cells in beside)
    assert row["our ratio"] == ours[3]
    text = (tmp_path / "overhead.md").read_text()
    assert f"torch {torch.__version__}" in text  # part of the machine's description
    assert "Not run" not in text


def test_the_estimators_are_compared(tmp_path, monkeypatch):
    """The ResNet gets smaller images, because its 400 passes would take the longest."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    cases = importlib.import_module("benchmark_cases")  # the command runs in a fork
    small = replace(cases.CPU_CASES["resnet18"], inputs=cases.images(8))
    monkeypatch.setitem(cases.CPU_CASES, "resnet18", small)
    out = tmp_path / "estimator.md"
    done = run_command(["scripts/benchmark.py", "--quick", "--estimator", "--out", str(out)])
    assert done.returncode == 0, done.stderr[-3000:]
    header, *rows = table_cells(out.read_text())
    passes = header.index("passes, fixed")
    assert [row[passes] for row in rows] == ["400"] * 5
    assert all(int(row[passes + 1]) < 400 for row in rows)


def test_the_networks_of_the_estimators_are_fixed():
    done = run_command(["scripts/benchmark.py", "--estimator", "--cases", "vit_tiny"])
    assert done.returncode == 2
    assert "drop --cases" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a GPU, for minutes")
def test_kernels_are_not_timed_on_a_cpu():
    done = run_command(["scripts/benchmark.py", "--kernels"])
    assert done.returncode == 2
    assert "--kernels: our kernels need a GPU" in done.stderr


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchmark_kernels")


def test_kernels_are_timed_where_they_apply(kernels):
    for shape in kernels.SHAPES:
        model = shape.case.build()
        assert model.pos_embed.shape[1:] == (shape.tokens, shape.width)
        assert shape.tokens <= TOKENS
        assert WIDTHS[0] <= shape.width <= WIDTHS[1]
        assert all(map(supported, model.blocks))


def test_kernels_are_used_where_they_were_faster():
    _, *rows = table_cells((ROOT / "experiments/results/speed/kernels.md").read_text())
    assert len(rows) > 1
    for _, width, tokens, *_, ratio in rows:
        assert pays(int(tokens), int(width)) == (float(ratio) < 1)


@pytest.mark.gpu
def test_kernels_and_torch_are_timed_on_a_gpu(kernels, monkeypatch, tmp_path):
    benchmark = importlib.import_module("benchmark")
    monkeypatch.setattr(benchmark, "SHAPES", (kernels.Shape("small", 192, 32, 8, 8, depth=1),))
    benchmark.bench_kernels(tmp_path / "kernels.md")
    row = table_cells((tmp_path / "kernels.md").read_text())[1]
    assert row[:4] == ["small", "192", "17", "8"]
    assert all(float(cell) > 0 for cell in row[4:])


def test_the_table_of_kernels_has_both_times_and_their_ratio(kernels):
    row = kernels.time_shape(kernels.SHAPES[0], lambda case, ours: 0.003 if ours else 0.004)
    text = kernels.kernels_text([row], "a machine")
    assert table_cells(text)[1][1:] == ["192", "65", "256", "4.00", "3.00", "0.750"]


@pytest.fixture
def overhead(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchmark_overhead")


def test_skipped_methods_are_listed(overhead):
    cases = importlib.import_module("benchmark_cases").CPU_CASES
    seconds = {"Regularizer": 0.002, "Sam": 0.005}

    def timer(case, regularizer):
        if case is cases["bert"]:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        # ED (performance) uses this many pairs
        if getattr(regularizer, "pairs", None) == case.batch:
            raise torch.OutOfMemoryError
        return seconds.get(type(regularizer).__name__, 0.003)

    rows = {name: overhead.time_methods(case, timer) for name, case in cases.items()}
    assert rows["vit_b32"].ratios["SAM"] == pytest.approx(2.5)
    assert rows["bert"].missing == {"plain": "needs the package transformers"}
    assert rows["vit_tiny"].missing == {"ED (performance)": "out of GPU memory"}
    assert "regularizer=mixup" in rows["procgen"].missing["mixup"]  # PPO has no labels
    text = overhead.overhead_text(rows, "a machine")
    first, _ = table_cells(text)[-2:]
    assert first[1:4] == ["6.14", "9.75", "1.59"]
    assert "small BERT, length 32, plain: needs the package transformers" in text


CELLS = """
title: "steps"
metric: eval/acc
seeds: [0]
fixed: [experiment=cifar10_vit_tiny]
cells:
  baseline: {overrides: [regularizer=none]}
  ed: {overrides: [regularizer=ed, regularizer.pairs=4]}
  too_many: {overrides: [regularizer=ed, regularizer.pairs=65]}
"""


def test_the_cells_of_tables_are_timed(tmp_path):
    table, out = tmp_path / "steps.yaml", tmp_path / "steps.csv"
    table.write_text(CELLS)
    out.write_text(f"{','.join(COLUMNS)}\nother,cell,1.0,1.0,cpu,2.0,unknown\n")
    command = ["scripts/benchmark.py", "--quick", "--tables", str(table), "--out", str(out)]
    done = run_command(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steps/too_many: not timed" in done.stdout  # 8 examples form 64 pairs
    found = read_steps(out)
    assert set(found) == {("other", "cell"), ("steps", "baseline"), ("steps", "ed")}
    assert all(float(step["x plain"]) > 0 for step in found.values())
    assert float(found["steps", "baseline"]["x plain"]) == 1


@pytest.mark.parametrize(("words", "saved"), [((), True), (("--quick",), False)])
def test_a_smoke_test_on_a_gpu_keeps_the_committed_steps(words, saved, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    benchmark, outs = importlib.import_module("benchmark"), []
    monkeypatch.setattr(benchmark, "CUDA", True)
    monkeypatch.setattr(benchmark, "time_tables", lambda *given: outs.append(given[-1]))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--tables", "ed_fast", *words])
    benchmark.main()
    assert outs == [STEPS if saved else None]


def test_only_tables_of_one_network_are_timed(tmp_path):
    done = run_command(["scripts/benchmark.py", "--quick", "--tables", "grokking"])
    assert done.returncode != 0
    assert "model=" in done.stderr


def test_only_one_benchmark_runs_at_a_time():
    done = run_command(["scripts/benchmark.py", "--table", "--estimator"])
    assert done.returncode == 2
    assert "--estimator" in done.stderr
