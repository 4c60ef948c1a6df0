"""Measures during and after training: which are computed, stored and left alone."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from ed.engine.loop import Interrupted, _Session
from ed.engine.main import run
from ed.measures.base import Measure
from ed.measures.norm import ParameterNorm
from ed.runtime.runs import read_done
from tests.helpers.small import small_config, small_run, weights


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
    assert list(stored) == ["ed", "norm", "sharpness"]


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
