"""Collecting rows from generated run folders."""

import dataclasses
import json
import math
from statistics import fmean

import pytest
import yaml

from ed.analysis.collect import CollectError, Row, collect, collect_run, seed_differences
from ed.analysis.merging import merge
from ed.analysis.recipes import target_of
from ed.analysis.render import to_markdown
from ed.analysis.spec import expand
from ed.engine.compose import compose_config
from ed.engine.run import RunFolder
from ed.runtime.runs import METRICS, Status, read_metrics
from tests.helpers.tables import fabricate, write_table

ONE_CELL = {"plain": {"overrides": ["regularizer=none"]}}


def test_rows_have_the_status_of_their_runs(table, tmp_path):
    runs = expand(table, root=tmp_path)
    fabricate(runs[0])
    # from an earlier attempt
    (runs[0].folder / "FAILED").write_text("exit 1: error: before that\n")
    # the run was killed while writing its last line
    tail = '{"step": 12, "eval/acc": NaN}\n{"step": 15, "eval/a'
    fabricate(runs[1], done=False, tail=tail)
    for run, error in ((runs[2], "too bad"), (runs[3], "diverged: train/loss = nan")):
        fabricate(run, done=False)
        (run.folder / "FAILED").write_text(f"exit 1: error: {error}\n")
    done, stopped, failed, diverged, pending, *_ = (collect_run(run, table) for run in runs)
    assert (done.status, done.last, done.best) == ("done", {"eval/acc": 80.0}, 81.0)
    assert (done.steps, done.seconds, done.device, done.torch) == (20, 3.5, "cpu", "2.0")
    assert (done.commit, done.dirty) == ("abcdef0123", False)
    # the code was copied without its git history
    session = {"device": "cpu", "commit": "abcdef0123", "dirty": None}
    (runs[0].folder / "meta.json").write_text(json.dumps({"sessions": [session]}))
    copied = collect_run(runs[0], table)
    assert (copied.dirty, copied.total_steps) == (None, 20)  # total_steps comes from the summary
    assert copied.torch == ""
    (runs[0].folder / "meta.json").unlink()
    assert collect_run(runs[0], table).dirty is None
    assert (stopped.status, stopped.steps, stopped.total_steps) == ("stopped", 12, 20)
    assert stopped.last == {"eval/acc": 80.0}  # NaN is skipped; results files cannot store it
    assert (failed.status, failed.error) == ("failed", "exit 1: error: too bad")
    assert diverged.status == Status.DIVERGED
    assert pending.status == "pending"


def test_late_metrics_are_means_over_the_last_tenth_of_training(tmp_path):
    labels = {"late/acc": "accuracy", "eval/acc": "at the end"}
    table = write_table(tmp_path, metric=None, metrics=labels, tuning=None, cells=ONE_CELL)
    finished, begun = expand(table, root=tmp_path)
    values = {10: 1.0, 180: 2.0, 181: 70.0, 190: 80.0, 200: 90.0}
    for run, steps in ((finished, 200), (begun, 190)):
        fabricate(run, 90.0, done=run is finished)
        rows = [{"step": step, "eval/acc": value} for step, value in values.items()]
        text = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= steps)
        (run.folder / METRICS).write_text(text + f'{{"step": {steps}, "eval/acc": NaN}}\n')
    rows = [collect_run(run, table) for run in (finished, begun)]
    assert rows[0].last == {"late/acc": 80.0, "eval/acc": 90.0}
    assert rows[0].best == 91.0
    assert rows[1].last["late/acc"] == fmean([2.0, 70.0, 80.0])  # of the steps so far
    assert "from the last step and the last tenth of training" in to_markdown(table, rows)
    (begun.folder / METRICS).write_text("")
    assert collect_run(begun, table).last == {}


def test_a_run_on_several_machines_lists_all_of_them(table, tmp_path):
    run = expand(table, root=tmp_path)[0]
    fabricate(run, done=False)
    first = {"device": "cpu", "commit": "a", "dirty": True, "steps": 15, "versions": {"torch": "2"}}
    second = first | {"device": "gpu", "commit": "b", "dirty": False, "steps": 20}
    (run.folder / "meta.json").write_text(json.dumps({"sessions": [first, second, second]}))
    row = collect_run(run, table)
    assert (row.device, row.torch, row.commit) == ("cpu + gpu", "2", "a + b")
    assert (row.dirty, row.total_steps) == (True, 20)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("hello", "line 2"),
        ("[1]", "line 2"),
        ('{"loss": 1}', "line 2"),
        ('{"step": 9, "loss": "low"}', "line 2"),
        ('{"step": 2}', "line 2: step 2"),
    ],
)
def test_an_invalid_line_is_reported(tmp_path, line, complaint):
    path = tmp_path / METRICS
    path.write_text(f'{{"step": 5}}\n{line}\n{{"step": 10}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl") as error:
        read_metrics(tmp_path)
    assert complaint in str(error.value)


def test_an_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 5}\n{"step": 1')
    assert read_metrics(tmp_path) == [{"step": 5}]
    path.write_text('{"step": 5}\n{"step": 5}')  # only the newline is missing
    assert read_metrics(tmp_path) == [{"step": 5}, {"step": 5}]
    path.write_text('{"step": 5}\n{"step": 1\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_a_folder_with_a_different_run_is_rejected(table, tmp_path):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 5}))
    with pytest.raises(CollectError, match=r"seed=5.* 0: "):
        collect_run(run, table)
    other = {"regularizer": config["regularizer"] | {"_target_": "ed.regularizers.sam.Sam"}}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config | other))
    with pytest.raises(CollectError, match=r"_target_=ed\.regularizers\.sam\.Sam"):
        collect_run(run, table)
    config["task"]["epochs"] = 20
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CollectError, match=r"task\.epochs=20.* 300: ") as error:
        collect_run(run, table)
    assert f"move {run.folder} away" in str(error.value)
    del config["task"]
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CollectError, match=r"no task.* cifar10.*; move "):
        collect_run(run, table)


def test_a_finished_run_without_its_config_is_rejected(table, tmp_path):
    """It may have other settings, and the launcher would give it the config of the table."""
    run = expand(table, root=tmp_path)[0]
    fabricate(run)
    (run.folder / "config.yaml").unlink()
    with pytest.raises(CollectError, match=rf"{run.folder} has DONE, but no config\.yaml; copy "):
        collect_run(run, table)


def test_a_different_config_choice_is_a_different_run(table, tmp_path):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    meta = {"sessions": [{"command": "train.py task=cifar10_mini task.epochs=300 regularizer=ed"}]}
    (run.folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CollectError, match=r"task=cifar10_mini.* cifar10: "):
        collect_run(run, table)


def test_settings_that_do_not_affect_results_may_differ(table, tmp_path):
    sets = ["system.save_seconds=30", "logger.mode=offline", "measures.ed.pairs=2"]
    run, other = (expand(table, cells=["ed"], sets=s, root=tmp_path)[0] for s in ([], sets))
    fabricate(run)
    assert other.folder == run.folder
    assert collect_run(other, table).status == "done"


def test_seeds_with_different_measure_settings_are_reported(table, tmp_path):
    """Memory limits and other radii are ignored, and so are measures that the table lacks."""
    runs = expand(table, cells=["ed"], root=tmp_path)
    for run, pairs, bound in zip(runs, (400, 2), (1, 4), strict=True):
        fabricate(run)
        measures = {"ed": {"pairs": pairs, "memory_gib": bound}, "sharpness": {"radii": [1, bound]}}
        with open(run.folder / "config.yaml", "a") as file:
            file.write(yaml.safe_dump({"measures": measures}))
    rows = [collect_run(run, table) for run in runs]
    assert seed_differences(rows, table) == []
    measured = dataclasses.replace(table, metrics={"measure/ed": "", "measure/sharpness_1": ""})
    expected = "mini/ed: seeds differ in measures.ed.pairs: 400 (seed 0), 2 (seed 1)"
    assert seed_differences(rows, measured) == [expected]


def test_seeds_with_different_training_settings_are_reported(table, tmp_path):
    runs = expand(table, cells=["ed"], root=tmp_path)
    for run in runs:
        fabricate(run)

    def differences():
        return seed_differences([collect_run(run, table) for run in runs], table)

    assert differences() == []
    path = runs[1].folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    unimportant = {"system": {"device": "cpu"}, "added": "later"}
    path.write_text(yaml.safe_dump(config | unimportant))
    assert differences() == []
    for number, precision in enumerate(("bf16", "float32")):
        path = runs[number].folder / "config.yaml"
        path.write_text(yaml.safe_dump(config | {"seed": number, "precision": precision}))
    expected = "mini/ed: seeds differ in precision: bf16 (seed 0), float32 (seed 1)"
    assert differences() == [expected]


def test_a_changed_default_is_a_different_run(table, tmp_path):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    path = run.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["regularizer"]["pairs"] = 64
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(CollectError, match=r"regularizer\.pairs=64.* null: "):
        collect_run(run, table)


@pytest.mark.parametrize("epochs", [None, 7])
def test_debug_replaces_a_recipe_but_not_the_tables_own_settings(tmp_path, epochs):
    fixed = ["experiment=cifar10_vit_tiny", *([] if epochs is None else [f"task.epochs={epochs}"])]
    table = write_table(tmp_path, fixed=fixed)
    (run, *_) = expand(table, cells=["ed"], sets=["debug=tiny"], root=tmp_path)
    config = compose_config([*run.arguments, f"system.run_dir={run.folder}"])
    assert config.task.epochs == (epochs or 1)  # debug=tiny has 1
    RunFolder(run.folder, config).close()
    assert collect_run(run, table).status == Status.PENDING
    config.task.epochs = 300  # as in the recipe
    (run.folder / "config.yaml").unlink()
    RunFolder(run.folder, config).close()
    with pytest.raises(CollectError, match=r"task\.epochs=300"):
        collect_run(run, table)


@pytest.mark.parametrize("area", [None, [0.08, 1.0]])
def test_the_area_of_a_crop_counts_only_for_resized_crops(tmp_path, area):
    """Runs with padding may have another area, or none if they are older than the setting."""
    for crop in ("pad", "resized"):
        fixed = ["task=cifar10", f"task.crop={crop}", "task.crop_area=[0.5,1.0]"]
        table = write_table(tmp_path, crop, fixed=fixed)
        run = expand(table, cells=["ed"], root=tmp_path)[0]
        run.folder.mkdir(parents=True)
        config = {
            "seed": 0,
            "task": {"_target_": target_of("task", "cifar10"), "crop": crop},
            "regularizer": {"_target_": target_of("regularizer", "ed"), "weight": 0.01},
        }
        if area is not None:
            config["task"]["crop_area"] = area
        (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
        if crop == "pad":
            collect_run(run, table)
            continue
        with pytest.raises(CollectError, match=r"task\.crop_area"):
            collect_run(run, table)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "seed: ["),
        ("DONE", ""),
        ("DONE", "[]"),
        ("DONE", '{"last": {}, "best": {}}'),
        ("DONE", '{"last": {"a": 1%s}, "best": {}, "steps": 1, "seconds": 1}' % ("0" * 400)),
        ("meta.json", "[]"),
        ("meta.json", '{"sessions": [{"steps": "x"}]}'),
    ],
)
def test_a_damaged_file_is_reported_in_one_line(table, tmp_path, name, text):
    run = expand(table, root=tmp_path)[0]
    fabricate(run)
    (run.folder / name).write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is asserted below
        collect_run(run, table)
    assert str(error.value).startswith(f"{run.folder / name} ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("last", "complaint"),
    [
        ({"eval/acc": math.nan}, "eval/acc is nan"),
        ({"eval/loss": 1.0}, "eval/acc.*eval/loss"),
    ],
)
def test_a_summary_without_the_tables_metrics_is_rejected(table, tmp_path, last, complaint):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    summary = json.loads((run.folder / "DONE").read_text())
    (run.folder / "DONE").write_text(json.dumps(summary | {"last": last}))
    with pytest.raises(CollectError, match=complaint):
        collect_run(run, table)


def test_two_different_runs_of_the_same_cell_raise(table, tmp_path):
    for root, accuracy in (("a", 80.0), ("b", 81.0)):
        fabricate(expand(table, root=tmp_path / root)[0], accuracy)
    with pytest.raises(CollectError, match="mini/baseline/seed0") as error:
        merge(collect(table, [tmp_path / "a", tmp_path / "b"], warn=pytest.fail))
    assert all(str(tmp_path / root / "mini/baseline/seed0") in str(error.value) for root in "ab")


def test_merging_prefers_finished_runs_then_the_later_source():
    def row(status, steps=None, **more):
        return Row("t", "c", 0, status=status, steps=steps, **more)

    assert merge([row("stopped", 5), row("done", 9)]) == [row("done", 9)]
    assert merge([row("done", 9), row("failed", 3)]) == [row("done", 9)]
    assert merge([row("stopped", 5), row("stopped", 7), row("pending")]) == [row("stopped", 7)]
    assert merge([row("done", 9, device="a"), row("done", 9)]) == [row("done", 9, device="a")]
    for ours, theirs in ({"steps": 9}, {"steps": 8}), ({"best": 1.0}, {"best": 2.0}):
        with pytest.raises(CollectError):
            merge([row("done", **ours), row("done", **theirs)])
