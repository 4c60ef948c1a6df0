"""API calls with known types and errors; checked by mypy, never run."""

from typing import assert_type

from torch import Tensor, nn

import ed


def measure(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    assert_type(ed.estimate(model, x, pairs=10), ed.Estimate)
    assert_type(ed.estimate(model, x).mean, float)
    assert_type(ed.compare(model, model, x), ed.Comparison)
    assert_type(ed.Field.of(model, x), ed.Field)
    assert_type(ed.penalty(ed.Field.at_layer(model, "0", x), labels=labels), Tensor)
    assert_type(ed.load_run("runs/mine"), ed.LoadedRun)
    assert_type(ed.load_run("runs/mine").model, nn.Module)


def mistaken(model: nn.Module, x: Tensor) -> None:
    ed.estimate(model, x, pairs="many")  # type: ignore[arg-type]
    ed.penalty(model, x, labels=[0, 1])  # type: ignore[arg-type]
    ed.compare(model, inputs=x)  # type: ignore[call-arg]
    ed.Field(model, "x")  # type: ignore[arg-type]
    ed.estimates(model, x)  # type: ignore[attr-defined]
