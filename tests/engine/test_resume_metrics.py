"""Resumed runs restore damaged metrics from their checkpoints."""

import json

import pytest
import torch

from ed.engine.loop import Interrupted
from ed.runtime.runs import read_done
from tests.helpers.small import SMALL_GROKKING, assert_same_run, small_run


def _doubled(lines):
    return [line for line in lines for _ in range(2)]


DAMAGED_ROWS = {
    "emptied": lambda lines: [],
    "cut": lambda lines: lines[:3],
    "without its best": lambda lines: lines[4:],
    "doubled": _doubled,
    "changed": lambda lines: [line.replace('"eval/acc": ', '"eval/acc": 9') for line in lines],
    "shuffled": lambda lines: lines[::-1],
    "foreign": lambda lines: ["[1]\n", *lines],
    "no JSON": lambda lines: ["\0\0\n", *lines],
    "longer": lambda lines: [*lines, *lines[-1:]],
}


@pytest.mark.parametrize("damage", DAMAGED_ROWS)
def test_damaged_rows_are_restored_from_the_checkpoint(damage, tmp_path):
    """The best value must not come from a damaged row."""
    settings = {"base": [*SMALL_GROKKING, "measures=norm", "task.eval_every=2"]}
    whole = small_run(tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", "system.max_minutes=0", **settings)
    with pytest.raises(Interrupted):  # stops again, one step later
        small_run(tmp_path / "run", "system.max_minutes=0", **settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(DAMAGED_ROWS[damage](metrics.read_text().splitlines(True))))
    resumed = small_run(tmp_path / "run", **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert (resumed["last"], resumed["best"]) == (whole["last"], whole["best"])


def test_only_measures_are_kept_after_the_final_checkpoint(tmp_path):
    settings = {"base": [*SMALL_GROKKING, "measures=norm"]}
    whole = small_run(tmp_path, **settings)
    (tmp_path / "DONE").unlink()  # as if killed after the last row
    metrics = tmp_path / "metrics.jsonl"
    rows = metrics.read_text()
    metrics.write_text(rows + '{"step": 10, "eval/acc": 99.9}\n')
    resumed = small_run(tmp_path, **settings)
    assert (resumed["last"], resumed["best"]) == (whole["last"], whole["best"])
    assert metrics.read_text() == rows


def test_finished_run_keeps_measures_if_metrics_are_lost(tmp_path):
    small_run(tmp_path, "measures=norm", base=SMALL_GROKKING)
    (tmp_path / "metrics.jsonl").write_text("")
    summary = small_run(tmp_path, "measures=[norm,gap]", base=SMALL_GROKKING)
    assert {"measure/norm", "measure/gap", "eval/acc"} <= set(summary["last"])
    assert read_done(tmp_path) == summary


def test_changing_the_number_of_threads_warns(tmp_path, capsys):
    before = torch.get_num_threads()
    try:
        with pytest.raises(Interrupted):
            small_run(tmp_path, "system.max_minutes=0", "system.threads=1", base=SMALL_GROKKING)
        small_run(tmp_path, "system.threads=2", base=SMALL_GROKKING)
    finally:
        torch.set_num_threads(before)
    assert "system.threads=1" in capsys.readouterr().out
    sessions = json.loads((tmp_path / "meta.json").read_text())["sessions"]
    assert [session["threads"] for session in sessions] == [1, 2]
