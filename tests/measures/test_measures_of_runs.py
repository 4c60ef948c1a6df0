"""Measures during and after training: which are computed, stored and left alone."""

import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from ed.engine.loop import Interrupted, _Session
from ed.engine.main import run
from ed.measures.base import Measure
from ed.measures.norm import ParameterNorm
from ed.runtime.files import read_rows
from ed.runtime.runs import read_done
from tests.helpers.small import SMALL_GROKKING, small_config, small_run, weights


def test_a_resumed_run_finishes_its_measures(tmp_path, monkeypatch):
    """If a run stops between measures, the same command computes the remaining ones."""

    def stop(self, model, task):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"": 1.0}

    with monkeypatch.context() as patch:
        patch.setattr(ParameterNorm, "__call__", stop)
        with pytest.raises(Interrupted, match="sharpness"):
            small_run(tmp_path / "run", "measures=[norm,sharpness]", "system.measure_every=1")
    assert not (tmp_path / "run" / "DONE").exists()
    last = small_run(tmp_path / "run", "measures=[norm,sharpness]")["last"]
    assert {"measure/norm", "measure/sharpness_0.05"} < set(last)
    assert last["measure/norm"] != 1.0


MEASURED = [
    "measures=paper",
    "measures.ed.pairs=5",
    "measures.ed.resolution=50",
    "measures.ed_norm.pairs=5",
    "measures.ed_norm.resolution=50",
    "measures.sharpness.examples=300",
    "measures.sharpness.method=worst",
    "measures.sharpness.steps=2",
    "measures.adaptive_sharpness.examples=300",
]


def test_measures_are_in_the_summary_and_do_not_change_training(tmp_path):
    """Measures must not change the random numbers of dropout or of the regularizer."""
    extra = ["regularizer=ed", "model.dropout=0.1", "task.epochs=2"]
    plain = small_run(tmp_path / "plain", *extra)
    summary = small_run(tmp_path / "measured", *extra, *MEASURED, "system.measure_every=1")
    expected = {"ed", "ed_se", "ed_norm", "ed_norm_se", "norm", "gap", "gap_train", "gap_test"}
    expected |= {f"sharpness_{rho}" for rho in ("0.01", "0.05", "0.1")}
    expected |= {f"adaptive_sharpness_{rho}" for rho in ("0.01", "0.05", "0.1", "0.5", "1")}
    done = json.loads((tmp_path / "measured" / "DONE").read_text())
    assert {f"measure/{key}" for key in expected} | set(plain["last"]) == set(done["last"])
    assert done["last"] == summary["last"]
    # on a CPU, both use the same precision
    assert done["last"]["measure/gap_test"] == done["last"]["eval/acc"]
    text = (tmp_path / "measured" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows if "measure/ed" in row] == [10, 20]
    assert {key: summary["last"][key] for key in plain["last"]} == plain["last"]
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "measured")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_finished_run_computes_only_missing_measures(tmp_path, capsys):
    """Running the same command with other measures or settings loads the checkpoint."""
    folder = tmp_path / "run"
    few = ["measures.ed.pairs=3", "measures.ed.resolution=50"]
    first = small_run(folder, "measures=[ed,norm]", *few)
    before = weights(folder)
    sharp = ["measures=[ed,sharpness]", *few, "measures.sharpness.examples=50"]
    second = small_run(folder, *sharp)
    assert "measuring it: sharpness\n" in capsys.readouterr().out
    assert first["last"].items() < second["last"].items()
    assert "measure/sharpness_0.05" in second["last"]
    assert read_done(folder) == second
    assert all(torch.equal(before[key], value) for key, value in weights(folder).items())
    assert small_run(folder, *sharp) == second
    assert "measuring it" not in capsys.readouterr().out
    more = small_run(folder, "measures=ed", "measures.ed.pairs=4", *few[1:])
    assert more["last"]["measure/ed"] != first["last"]["measure/ed"]
    stored = OmegaConf.load(folder / "config.yaml").measures
    assert stored.ed.pairs == 4
    assert set(stored) == {"ed", "norm", "sharpness"}


class Killed(BaseException):
    """Stands for a kill, after which no cleanup writes anything."""


def die_at_replacement(monkeypatch, count: int) -> None:
    replace, left = os.replace, [count]

    def replace_or_die(source, target):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_or_die)


@pytest.mark.parametrize("finished", [True, False])
def test_values_never_stand_beside_settings_of_others_after_a_kill(finished, tmp_path, monkeypatch):
    """Kills a run before every file that it replaces while it stores new measures."""
    old, new = (
        ["measures=ed", f"measures.ed.pairs={pairs}", "measures.ed.resolution=50"]
        for pairs in (3, 4)
    )
    expected = {
        pairs: small_run(tmp_path / f"{pairs}", *words, base=SMALL_GROKKING)["last"]["measure/ed"]
        for pairs, words in ((3, old), (4, new))
    }
    assert expected[3] != expected[4]
    kills = 0
    while True:
        folder = shutil.copytree(tmp_path / "3", tmp_path / f"killed{kills}")
        if not finished:
            (folder / "DONE").unlink()
        with monkeypatch.context() as patch:
            die_at_replacement(patch, kills)
            try:
                small_run(folder, *new, base=SMALL_GROKKING)
                break
            except Killed:
                kills += 1
        done, stored = read_done(folder), OmegaConf.load(folder / "config.yaml").measures
        if done is not None and "ed" in stored:
            assert done["last"]["measure/ed"] == expected[stored.ed.pairs]
        last = small_run(folder, *old, base=SMALL_GROKKING)["last"]
        assert last == read_done(folder)["last"]
        assert last["measure/ed"] == expected[3]
        rows = read_rows(folder / "metrics.jsonl")
        assert [row["measure/ed"] for row in rows if "measure/ed" in row][-1] == expected[3]
    assert kills >= 5


def test_new_values_of_a_measure_replace_all_old_ones(tmp_path):
    """The radii of the sharpness name its metrics."""
    sharpness = ["measures=sharpness", "measures.sharpness.examples=50"]
    first = small_run(tmp_path, *sharpness, "measures.sharpness.radii=[0.1]")
    second = small_run(tmp_path, *sharpness, "measures.sharpness.radii=[0.2]")
    assert "measure/sharpness_0.1" in first["last"]
    measured = [key for key in second["last"] if key.startswith("measure/")]
    assert measured == ["measure/sharpness_0.2"]


def test_a_summary_has_no_measures_of_an_earlier_session(tmp_path):
    small_run(tmp_path, "measures=norm", base=SMALL_GROKKING)
    (tmp_path / "DONE").unlink()  # as if killed after the last row
    summary = small_run(tmp_path, "measures=gap", base=SMALL_GROKKING)
    assert list(OmegaConf.load(tmp_path / "config.yaml").measures) == ["gap"]
    assert "measure/norm" not in summary["last"]


class Precision(Measure):
    """A measure that returns whether it runs in bf16."""

    def __init__(self, evaluates: bool):
        self.evaluates = evaluates

    def __call__(self, model, task):
        return {"": float(torch.is_autocast_enabled("cpu"))}


def test_only_evaluations_use_the_precision_of_the_run():
    """Other measures run in full precision, because rounding to bf16 would increase ED."""
    step = SimpleNamespace(autocast=torch.autocast("cpu", torch.bfloat16))
    measures = {"weights": Precision(False), "evaluation": Precision(True)}
    found = _Session(None, None, step, None, measures).measure()
    assert found == {"measure/weights": 0, "measure/evaluation": 1}


class Plain(Measure):
    """A custom measure that does not define equality; one of its values is infinite."""

    def __call__(self, model, task):
        return {"": 1.0, "_wild": math.inf}


def test_a_measure_without_equality_is_computed_once(tmp_path, capsys):
    cfg = small_config(tmp_path / "run")
    cfg.measures = {"plain": {"_target_": f"{__name__}.Plain"}}
    summaries = [run(cfg, ["small"]) for _ in range(2)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["last"]["measure/plain"] == 1
    assert "measure/plain_wild" not in summaries[0]["last"]
    assert "Infinity" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    printed = capsys.readouterr().out
    assert "already done" in printed
    assert "measuring it" not in printed


def test_a_finished_run_without_checkpoint_reports_missing_measures(tmp_path, capsys):
    summary = small_run(tmp_path / "run", "system.keep_checkpoint=false")
    assert small_run(tmp_path / "run", "measures=norm") == summary
    printed = capsys.readouterr().out
    assert "already done" in printed
    assert "not measured: norm;" in printed


def test_the_stored_config_lists_the_computed_measures(tmp_path):
    """This also holds for runs that were stopped and resumed with other measures."""
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", "measures=ed", "system.max_minutes=0")
    small_run(tmp_path / "run", "measures=norm")
    assert list(OmegaConf.load(tmp_path / "run" / "config.yaml").measures) == ["norm"]
