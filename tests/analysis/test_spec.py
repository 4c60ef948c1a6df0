"""Experiment files: expansion into runs, and errors."""

import json
import os
from pathlib import Path

import pytest
import yaml

from ed.analysis.collect import collect
from ed.analysis.merging import merge
from ed.analysis.render import grid_lines, table_lines, to_markdown
from ed.analysis.spec import EXPERIMENTS, SpecError, expand
from ed.analysis.tables import load_table
from tests.helpers.tables import SPEC, fabricate, write_table

PLAIN = {name: SPEC["cells"][name] for name in ("baseline", "ed")}


def test_expansion_lists_every_cell_seed_and_grid_point(table):
    runs = expand(table, root=Path("runs"))
    assert [(run.cell, run.seed) for run in runs] == [
        (cell, seed) for cell in ("baseline", "ed", "rho-0.1", "rho-0.5") for seed in (0, 1)
    ]
    assert runs[2].folder == Path("runs/mini/ed/seed0")
    assert runs[2].overrides == (
        "task=cifar10",
        "task.epochs=300",
        "regularizer=ed",
        "regularizer.weight=1e-2",
        "seed=0",
    )
    assert runs[4].overrides[2:4] == ("regularizer=sam", "regularizer.rho=0.1")


def test_run_folders_depend_on_settings_but_not_on_the_selection(table):
    whole = {run.folder: run for run in expand(table)}
    chosen = expand(table, cells=["baseline", "sam", "ed"], seeds=[1])
    assert [run.cell for run in chosen] == ["baseline", "rho-0.1", "rho-0.5", "ed"]
    assert all(whole[run.folder] == run for run in chosen)
    one, other = (expand(table, sets=[f"task.epochs={n}"]) for n in (1, 2))
    folders = {run.folder for run in [*one, *other, *whole.values()]}
    assert len(folders) == 3 * len(whole)
    assert one[0].deviations == ("task.epochs=1",)
    # the last value wins
    assert dict(o.split("=") for o in one[0].overrides)["task.epochs"] == "1"
    assert one[0].folder.parts[1].startswith("mini@")
    alike = {expand(table, sets=[f"{part}.width=1"])[0].folder for part in ("task", "model")}
    assert len(alike) == 2
    several = ["task.epochs=1", "optimizer.lr=1"]
    assert expand(table, sets=several)[0].folder == expand(table, sets=several[::-1])[0].folder
    assert expand(table, cells=["ed", "ed"], seeds=[1, 1]) == expand(table, cells=["ed"], seeds=[1])


def test_settings_that_do_not_affect_results_are_not_deviations(table):
    (run, *_) = expand(table, sets=["system.log_every=5", "logger=wandb"], data=["/else"])
    assert run.deviations == ()
    assert run.folder == Path("runs/mini/baseline/seed0")
    assert {"system.log_every=5", "logger=wandb", "task.data=/else"} <= set(run.overrides)


def test_the_path_of_the_data_may_change_but_not_the_data_set(table):
    (run, *_) = expand(table, data=["/a=b/cifar10", "task.mnist=/mnist"])
    assert run.deviations == ()
    assert {"task.data=/a=b/cifar10", "task.mnist=/mnist"} <= set(run.overrides)
    with pytest.raises(SpecError, match=r"--data embedded: .* --set task.data=embedded"):
        expand(table, data=["embedded"])
    with pytest.raises(SpecError, match=r"--data task.epochs=1: .*task.data"):
        expand(table, data=["task.epochs=1"])


def test_settings_of_measures_are_deviations_if_the_table_shows_them(table, tmp_path):
    sets = ["measures.ed.pairs=10"]
    assert expand(table, sets=sets)[0].deviations == ()
    metrics = {"eval/acc": "accuracy", "measure/ed": "ED"}
    pool = write_table(tmp_path, "pool", metric=None, metrics=metrics)
    assert expand(pool, sets=sets)[0].deviations == tuple(sets)


def test_a_cell_may_reuse_runs_of_another_table(tmp_path):
    write_table(tmp_path)
    cells = {"same": {"same_as": "mini/ed", "paper": None}}
    borrower = write_table(tmp_path, "other", cells=cells, tuning={}, fixed=["task=glue"])
    (run, _) = expand(borrower)
    assert (run.table, run.cell) == ("mini", "ed")
    assert run.folder == Path("runs/mini/ed/seed0")
    assert "task=cifar10" in run.overrides


def test_a_cell_may_reuse_the_grid_of_another_table(tmp_path):
    pool = {"overrides": [], "grid": {"optimizer.lr": [1, 2]}, "paper": None}
    write_table(tmp_path, cells={"pool": pool}, tuning={})
    cells = {"same": {"same_as": "mini/pool", "paper": None}}
    borrower = write_table(tmp_path, "other", cells=cells, tuning={})
    assert list(borrower.cells) == ["same-1", "same-2"]
    runs = expand(borrower, seeds=[0])
    assert [run.folder for run in runs] == [Path(f"runs/mini/pool-{lr}/seed0") for lr in (1, 2)]
    assert [run.overrides[-2] for run in runs] == ["optimizer.lr=1", "optimizer.lr=2"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seeds": []}, "seeds"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"seeds": [-1]}, "seeds.0: -1"),
        ({"cells": {}}, "cells"),
        ({"metrics": {"eval/acc": "a"}}, "metrics"),
        ({"titel": "x"}, "'titel'; did you mean title"),
        ({"cells": {"a": {"paper": None}}}, "cells.a: "),
        ({"cells": {"a b": {"overrides": [], "paper": None}}}, "letters, digits"),
        ({"cells": {"a": {"overrides": ["x"], "paper": None}}}, "cells.a.overrides.0"),
        ({"cells": {"a": {"best_of": "b", "paper": None}}, "tuning": {}}, "best_of: b"),
        ({"metric": "eval/loss"}, "tuning rho: lower_is_better"),
        (
            {"tuning": {"rho": SPEC["tuning"]["rho"] | {"lower_is_better": "yes"}}},
            "tuning.rho.lower_is_better: 'yes'",
        ),
        ({"cells": {"a": {"same_as": "no/a", "paper": None}}}, "same_as: no/a"),
        ({"cells": {"a": {"overrides": [], "paper": {"eval/x": {"mean": 1}}}}}, "paper: eval/x"),
        (
            {"cells": {n: {"overrides": ["x=1"], "paper": None} for n in "ab"}},
            "cells a and b",
        ),
        ({"paper_seeds": None}, "paper_seeds: "),
        (
            {"cells": {n: {"overrides": [f"x={n}"], "label": "same", "paper": None} for n in "ab"}},
            "label 'same'",
        ),
        (
            {
                "metric": None,
                "metrics": {"eval/acc": "accuracy", "eval/f1": "F1"},
                "cells": {
                    n: {"best_of": "rho", "paper": {f"eval/{n}": {"mean": 1.0}}}
                    for n in ("acc", "f1")
                },
            },
            "cell f1: best_of: rho",
        ),
        (
            {"cells": SPEC["cells"] | {"rho-0.1": {"overrides": ["x=1"], "paper": None}}},
            "rho-0.1",
        ),
        (
            {
                "tuning": {
                    n: SPEC["tuning"]["rho"] | {"overrides": [f"x={n}"]} for n in ("rho", "ed")
                }
            },
            "name ed",
        ),
        (
            {
                "cells": {
                    "a": {"overrides": ["x=1"], "grid": {"y": [2]}, "paper": None},
                    "a-2": {"overrides": ["x=3"], "paper": None},
                }
            },
            "cell a-2",
        ),
        ({"seeds": [[0]]}, "seeds.0: [0]"),
        ({"seeds": [True]}, "seeds.0: True"),
        ({"fixed": "task=pnn"}, "fixed: 'task=pnn'"),
        ({"metric": ["eval/acc"]}, "metric: ['eval/acc']"),
        ({"metric": None, "metrics": ["eval/acc"]}, "metrics: ['eval/acc']"),
        ({"metric": None, "metrics": {"eval/acc": 3}}, "metrics.eval/acc: 3"),
        ({"digits": "two"}, "digits: 'two'"),
        ({"digits": True}, "digits: True"),
        ({"digits": -3}, "digits: -3; use a whole number from 0"),
        ({"digits": 100}, "digits: 100; use at most 10"),
        ({"paper_seeds": 0}, "paper_seeds: 0; use a whole number from 1"),
        ({"metric": ""}, "metric: ''; use a name"),
        (
            {"cells": {"a": {"overrides": [], "paper": {"mean": float("nan")}}}},
            "cells.a.paper.mean: nan; use a finite number",
        ),
        ({"fixed": ["task=pnn", "seed=3"]}, "fixed.1: seed: set by the launcher"),
        ({"fixed": ["system.run_dir=x"]}, "fixed.0: system.run_dir: set by the launcher"),
        ({"fixed": ["++task.epochs=3"]}, "fixed.0: ++task.epochs: write key=value, without +"),
        (
            {"cells": {"a": {"overrides": [], "grid": {"seed": [1, 2]}}}},
            "cells.a.grid.seed: seed: set by the launcher",
        ),
        ({"cells": {"a": {"overrides": [], "grid": {}}}}, "cells.a.grid: {}; use at least one"),
        ({"notes": "a remark"}, "notes: 'a remark'"),
        ({"notes": [3]}, "notes.0: 3"),
        ({"comparable": "no"}, "comparable: 'no'"),
        ({"tuning": ["rho"]}, "tuning: ['rho']"),
        (
            {"cells": {"a": {"overrides": [], "paper": None, "label": 3}}},
            "cells.a.label: 3",
        ),
        ({"cells": {"a": {"best_of": ["b"], "paper": None}}}, "cells.a.best_of: ['b']"),
        (
            {"cells": {"a": {"overrides": [], "paper": {"mean": "87,8"}}}},
            "cells.a.paper.mean: '87,8'",
        ),
        (
            {"cells": {"a": {"overrides": [], "grid": {"task.data": ["/x/y"]}, "paper": None}}},
            "cell a: grid: task.data=/x/y: ",
        ),
        ({"figure": "draw"}, "figure: 'draw'"),
        # reading a foreign file must not run code
        ({"figure": "subprocess:call"}, "figure: 'subprocess:call'"),
        ({"figure": "mine:draw"}, "figure: 'mine:draw'"),
        ({"figure": "ed.figures.style.os:draw"}, "figure: 'ed.figures.style.os:draw'"),
        ({"figure": "ed.figures.ranking:draw\n"}, "figure: 'ed.figures.ranking:draw\\n'"),
        ({"aggregate": "eval/x"}, "aggregate: eval/x"),
        ({"cost": {"baseline": "baseline"}}, "cost.full: "),
        ({"cost": {"baseline": 3, "full": "ed"}}, "cost.baseline: 3"),
        (
            {"cost": {"baseline": "baseline", "full": "ed", "ful": 1}},
            "'cost.ful'; did you mean full",
        ),
        ({"cost": {"baseline": "baseline", "full": "ed"}}, "cost: cell sam uses best_of"),
        (
            {"correlation": {"against": "eval/acc", "measures": {}}},
            "correlation: cell sam uses best_of",
        ),
        (
            {"cost": {"baseline": "basline", "full": "ed"}, "cells": PLAIN},
            "cost.baseline: basline; did you mean baseline",
        ),
        (
            {"cost": {"baseline": "baseline", "full": "de"}, "cells": PLAIN},
            "cost.full: de; did you mean ed",
        ),
        (
            {"cost": {"baseline": "ed", "full": "ed"}, "cells": PLAIN},
            "cost.full: ed is also cost.baseline",
        ),
        (
            {
                "cost": {"baseline": "baseline", "full": "ed"},
                "correlation": {"against": "eval/acc", "measures": {}},
            },
            "cost: a table with `correlation`",
        ),
        ({"correlation": {"against": "eval/x", "measures": {}}}, "correlation: eval/x"),
        ({"correlation": {"against": "eval/acc"}}, "correlation.measures: "),
        (
            {"cells": {"a": {"overrides": [], "papper": None}}},
            "'cells.a.papper'; did you mean paper",
        ),
        ({"cells": {"a": {"overrides": ["experiment=no_such"]}}}, "experiment=no_such"),
        (
            {"cells": {"a": {"overrides": [], "grid": {"task.epochs": []}, "paper": None}}},
            "cells.a.grid.task.epochs: []",
        ),
    ],
)
def test_errors_in_experiment_files_name_the_key(tmp_path, changes, complaint):
    with pytest.raises(SpecError, match=r"mini\.yaml") as error:
        write_table(tmp_path, **changes)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_the_readme_contains_the_command_that_generated_it(table):
    assert "Generated by `python scripts/table.py mini.yaml --commit`" in to_markdown(table, [])
    for name in ("pnn", os.path.relpath(EXPERIMENTS / "pnn.yaml")):
        assert "Generated by `python scripts/table.py pnn --commit`" in to_markdown(
            load_table(name), []
        )


def test_a_cell_with_a_grid_stands_for_all_its_points(tmp_path):
    cells = {
        "sam": {"overrides": [], "grid": {"optimizer.lr": [1, 2]}, "paper": None},
        "asam": {"overrides": [], "grid": {"optimizer.lr": [3, 4]}, "paper": None},
        "samples": {"overrides": ["optimizer.lr=5"], "paper": None},
    }
    table = write_table(tmp_path, cells=cells, tuning=None)
    assert [run.cell for run in expand(table, cells=["sam"], seeds=[0])] == ["sam-1", "sam-2"]
    assert [run.cell for run in expand(table, cells=["sam-2"], seeds=[0])] == ["sam-2"]
    with pytest.raises(SpecError, match="--cells sa: "):
        expand(table, cells=["sa"])


def test_none_in_a_grid_becomes_null(tmp_path):
    cells = {"a": {"overrides": [], "grid": {"regularizer.components": [None, 3]}, "paper": None}}
    runs = expand(write_table(tmp_path, cells=cells, tuning=None), seeds=[0])
    assert [run.overrides[-2] for run in runs] == [
        "regularizer.components=null",
        "regularizer.components=3",
    ]


def test_missing_and_duplicate_keys_raise(tmp_path):
    path = tmp_path / "t.yaml"
    text = yaml.safe_dump(SPEC, sort_keys=False)
    path.write_text(text.replace("title: A table\n", ""))
    with pytest.raises(SpecError, match="title: "):
        load_table(str(path))
    path.write_text(text.replace("  ed:\n", "  baseline:\n"))
    with pytest.raises(SpecError, match=r"line 1[0-9]: .*'baseline'"):
        load_table(str(path))


def test_errors_on_unknown_names_suggest_the_nearest(table):
    with pytest.raises(SpecError, match="did you mean baseline"):
        expand(table, cells=["basline"])
    with pytest.raises(SpecError, match="did you mean mini"):
        load_table("minni", table.path.parent)
    with pytest.raises(SpecError, match="--seeds 7"):
        expand(table, seeds=[7])
    with pytest.raises(SpecError, match=r"--set 'task.epochs'"):
        expand(table, sets=["task.epochs"])
    for text in ("seed=1", "system.run_dir=/else"):
        with pytest.raises(SpecError, match=f"--set {text}: "):
            expand(table, sets=[text])
    for value in ("nan", "[nan]", "[1,[-inf]]", "{a:nan}", "{a:[1,{b:inf}]}", "{nan:1}"):
        with pytest.raises(SpecError, match=r"^--set regularizer.weight=.* finite$"):
            expand(table, sets=[f"regularizer.weight={value}"])
    with pytest.raises(SpecError, match=r"--set task.epochs"):
        expand(table, sets=["task.epochs=1", "task.epochs=2"])


def test_the_best_grid_point_is_selected_by_the_metric_of_the_cell(tmp_path):
    """The table's first metric is accuracy, but the cell's metric is the Matthews correlation."""
    table = write_table(
        tmp_path,
        metric=None,
        cells={"sam": {"best_of": "rho", "paper": {"eval/matthews": {"mean": None}}}},
        metrics={"eval/acc": "accuracy", "eval/matthews": "Matthews", "best/matthews": "best"},
    )
    runs = expand(table, root=tmp_path)
    for run, accuracy, matthews in zip(runs, (90, 90, 70, 70), (10, 10, 30, 34), strict=True):
        fabricate(run, accuracy)
        done = {"last": {"eval/acc": accuracy, "eval/matthews": matthews}, "steps": 1, "seconds": 1}
        done["best"] = {"eval/matthews": matthews + 5}
        (run.folder / "DONE").write_text(json.dumps(done))
    rows = merge(collect(table, [tmp_path], warn=pytest.fail))
    (line,) = table_lines(table, rows)
    assert (line.metric, line.ours.mean) == ("eval/matthews", 32)
    assert line.remarks == ["rho-0.5: the best of 2 of 2 grid points"]
    assert [(line.metric, line.ours.mean) for line in grid_lines(table, rows)] == [
        ("eval/matthews", 10),
        ("eval/matthews", 32),
    ]
    assert rows[0].last["best/matthews"] == 15
    assert "the best evaluation" in to_markdown(table, rows)


def test_a_table_named_like_the_parent_folder_is_rejected(tmp_path):
    (tmp_path / "...yaml").write_text(yaml.safe_dump(SPEC))
    with pytest.raises(SpecError, match=r"\.\.\.yaml"):
        load_table(str(tmp_path / "...yaml"))


def test_overrides_with_line_breaks_are_rejected(tmp_path):
    cells = SPEC["cells"] | {"evil": {"overrides": ["seed=1\ntouch x"], "paper": None}}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(SPEC | {"cells": cells}))
    with pytest.raises(SpecError, match=r"cells\.evil\.overrides"):
        load_table(str(tmp_path / "evil.yaml"))


def test_your_own_table_needs_no_paper_values(tmp_path):
    cells = {"plain": {"overrides": ["regularizer=none"]}, "ed": {"overrides": ["regularizer=ed"]}}
    table = write_table(tmp_path, place=None, cells=cells, tuning=None)
    assert "None" not in to_markdown(table, [])
