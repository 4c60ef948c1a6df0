"""Grokking: equations, data split, batches, measures, training and figure."""

import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ed.analysis.tables import load_table
from ed.core.nodes import ChebyshevNodes
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.figures.grokking import PANELS, draw, transition
from ed.measures.degree import EffectiveDegree
from ed.runtime.runs import read_metrics
from ed.tasks.grokking import OPERATIONS, equations
from tests.helpers.grokking import GROKKING, KOKER, built

SMALL = [*GROKKING, "task.modulus=7", "model.width=32", "task.train_fraction=0.5"]


PAPER = ("measure/ed", "measure/sharpness_0.05", "measure/adaptive_sharpness_0.05", "measure/norm")
VARIANTS = {key for panel in PANELS for key in (panel.main, *panel.others)} - {*PAPER}


def test_division_is_the_inverse_of_multiplication():
    a, b, c = equations("division", 97).unbind(1)
    assert len(a) == 97 * 96
    assert torch.equal(b * c % 97, a)
    assert len((97 * a + b).unique()) == len(a)  # each pair (a, b) occurs once
    assert b.min() == 1


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"division"}))
def test_operations_agree_with_integer_arithmetic(operation):
    formula = {
        "addition": lambda x, y: x + y,
        "subtraction": lambda x, y: x - y,
        "multiplication": lambda x, y: x * y,
        "quadratic": lambda x, y: x * x + x * y + y * y,
        "cubic": lambda x, y: x * x * x + x * y,
    }[operation]
    expected = [[x, y, formula(x, y) % 11] for x in range(11) for y in range(11)]
    assert equations(operation, 11).tolist() == expected


def test_the_split_is_fixed_and_disjoint():
    (task, _), (other, _) = built(), built(seed=1)
    assert len(task.train["ids"]) == task.num_examples == 2794
    assert len(task.validation["ids"]) == 6518
    rows = torch.cat([task.train["ids"], task.validation["ids"]])
    assert len(rows.unique(dim=0)) == 9312
    assert torch.equal(task.train["ids"], other.train["ids"])  # does not depend on the seed
    ids, label = task.train["ids"], task.train["label"]
    assert torch.equal(ids[:, 2] * label % 97, ids[:, 0])
    assert (ids[:, 1] == 97).all()
    assert (ids[:, 3] == 98).all()


def test_a_batch_is_at_most_half_of_the_training_equations():
    task, model = built()
    assert task.batch_size == 512
    epoch = [batch for batch, _ in zip(task.batches(model, 0), range(5), strict=False)]
    seen = torch.cat([batch["ids"] for batch in epoch])
    assert len(seen.unique(dim=0)) == 5 * 512
    known = {tuple(row) for row in task.train["ids"].tolist()}
    assert known.issuperset(map(tuple, seen.tolist()))
    # half of 21, rounded up
    assert built("task.modulus=7", "task.train_fraction=0.5")[0].batch_size == 11


def test_evaluation_steps_combine_a_geometric_and_a_regular_grid():
    task, _ = built("task.steps=1000", "task.eval_every=300", "task.eval_per_decade=2")
    assert task.evaluation_steps() == [1, 3, 10, 32, 100, 300, 316, 600, 900, 1000]
    steps = built()[0].evaluation_steps()
    assert steps[0] == 1
    assert steps[-1] == 10**6
    assert {10**power for power in range(7)} | {990_000} <= set(steps)
    assert 150 < len(steps) < 250


def test_a_float64_loss_keeps_gradients_that_vanish_in_float32():
    batch = {"label": torch.tensor([0, 1])}
    gradients = {}
    for precision in ("float32", "float64"):
        task, _ = built("task.modulus=7", f"task.loss_precision={precision}")
        logits = (20.0 * torch.eye(2, 9)).requires_grad_()
        loss, report = task.loss(logits, batch)
        (gradients[precision],) = torch.autograd.grad(loss, logits)
        assert loss.dtype == report["loss"].dtype == getattr(torch, precision)
    assert gradients["float32"][0, 0] == 0  # the gradient is p - 1, and p rounds to 1
    # float64 rounds a logit of 20 by up to 2e-15, which is 1e-7 relative to 1 - p
    p = 1 / (1 + 8 * math.exp(-20))
    expected = torch.tensor(-8 * math.exp(-20) * p / 2)
    torch.testing.assert_close(gradients["float64"][0, 0], expected, rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx(8 * math.exp(-20), rel=1e-5)


def test_training_and_validation_equations_are_evaluated_separately():
    """Evaluates a model that knows the training equations and fails on all others."""
    task, _ = built("task.modulus=7", "task.train_fraction=0.5", "task.warmup_steps=3")
    assert task.warmup_steps == 3
    ids, labels = task.train["ids"].tolist(), task.train["label"].tolist()
    known = {tuple(row): label for row, label in zip(ids, labels, strict=True)}

    class Parrot:
        def embed(self, ids):
            return ids

        def __call__(self, ids):
            answers = [known.get(tuple(row), 8) for row in ids.tolist()]  # token 8 is not a number
            return 50.0 * F.one_hot(torch.tensor(answers), 9)

    found = task.evaluate(Parrot())
    assert (found["eval/train_acc"], found["eval/acc"]) == (100, 0)
    assert found["eval/train_loss"] < 1e-6
    assert found["eval/loss"] == pytest.approx(50, rel=1e-4)


def test_outputs_at_path_ends_equal_outputs_on_equations():
    task, model = built("task.modulus=7")
    field = task.field(model, task.train)
    first, second = torch.tensor([0, 3]), torch.tensor([1, 4])
    ends = field.between(first, second, torch.tensor([0.0, 1.0]))().unflatten(0, (2, 2))
    torch.testing.assert_close(ends[:, 0], field()[second])
    torch.testing.assert_close(ends[:, 1], field()[first])
    inside = field.between(first, second, ChebyshevNodes()(torch.zeros(8)))
    assert inside.x.shape == (16, 4, 128)


def test_ed_is_measured_on_training_and_on_validation_equations():
    task, model = built("task.modulus=7")
    known, new = task.examples(torch.arange(5)), task.validation_examples(torch.arange(5))
    for part, found in ((task.train, known), (task.validation, new)):
        assert all(torch.equal(found[name], part[name][:5]) for name in part)
    size, choice = task.num_validation, {"resolution": 8, "degree": 4, "pairs": 10}
    assert size == len(task.validation["label"])
    with_new = EffectiveDegree(endpoints="validation", **choice)
    on_training, on_validation = EffectiveDegree(**choice)(model, task), with_new(model, task)
    assert on_training != on_validation
    task.train, task.num_examples = task.validation, size
    assert EffectiveDegree(**choice)(model, task) == on_validation
    task.num_validation = 0
    with pytest.raises(ValueError, match="endpoints=validation"):
        with_new.check(task)


def test_the_experiment_measures_every_variant():
    """ED of probabilities and logits, raw and normalised, on both parts; several radii."""
    measures = compose_config(["experiment=grokking"]).measures
    degrees = [m for m in measures.values() if m._target_.endswith("EffectiveDegree")]
    assert {(m.pairs, m.resolution, m.degree) for m in degrees} == {(200, 64, 40)}
    variants = {(m.outputs, m.weighting, m.endpoints) for m in degrees}
    parts = ("examples", "validation")
    assert variants == set(product(("softmax", "raw"), ("raw", "normalised"), parts))
    assert {0.01, 0.05, 0.1} <= set(measures.sharpness.radii)
    assert {0.01, 0.05, 0.1, 0.5, 1.0} <= set(measures.adaptive_sharpness.radii)


def test_a_float64_loss_is_not_frozen_by_the_optimizer():
    """Adam divides by sqrt(v) + eps, so gradients far below eps no longer move the weights."""
    cells = load_table("grokking_search").cells
    for name in ("product_float64", "division_float64"):
        cfg = compose_config(["experiment=grokking_koker", *cells[name].overrides])
        assert (cfg.task.loss_precision, cfg.optimizer.eps) == ("float64", 1e-20)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.modulus=9"], "task.modulus=9"),
        (["task.operation=power"], "task.operation=power"),
        (["task.train_fraction=1"], "task.train_fraction=1"),
        (["task.eval_per_decade=0"], "task.eval_per_decade=0"),
        (["task.steps=1e6"], "task.steps=1000000.0"),
        (["task.warmup_steps=-1"], "task.warmup_steps=-1"),
        (["model.numbers=96"], "model.numbers=97"),
        (["model.heads=3"], "model.width=128"),
        (["model.heads=0"], "model.heads=0"),
        (["model.norm=none"], "model.norm=none"),
        (["model.dropout=1"], "model.dropout=1"),
        (["model.bias=2"], "model.bias=2"),
        (["model.activation=tanh"], "model.activation=tanh"),
        (["model.positions=none"], "model.positions=none"),
        (["task.loss_precision=float16"], "task.loss_precision=float16"),
    ],
)
def test_invalid_settings_are_rejected(overrides, message):
    with pytest.raises(Exception, match=message):
        built(*overrides)


def test_an_incompatible_model_is_rejected():
    with pytest.raises(ValueError, match="task=grokking"):
        built("task.modulus=7")[0].check_model(nn.Linear(2, 2))


@pytest.mark.parametrize("variant", [[], [*KOKER, "task.loss_precision=float64"]])
def test_a_short_run_learns_the_training_equations(variant, tmp_path):
    settings = [*SMALL, *variant, "task.steps=150", "task.eval_every=100", "task.eval_per_decade=2"]
    settings += ["system.measure_every=2", f"system.run_dir={tmp_path / 'run'}"]
    settings += [f"measures.{name}.pairs=10" for name in ("ed", "ed_norm")]
    summary = run(compose_config(settings), ["grokking"])
    assert summary["last"]["eval/train_acc"] == 100.0
    assert summary["last"]["eval/train_loss"] < 0.2
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/acc" in row] == [1, 3, 10, 32, 100, 150]
    # at every second evaluation and at the end
    measured = [row for row in rows if "measure/ed" in row]
    assert [row["step"] for row in measured] == [3, 32, 150]
    assert {*PAPER, *VARIANTS} <= {*measured[-1], "eval/loss", "eval/train_loss"}


def history(
    steps=(1, 10, 100, 1000), accuracies=(1.0, 2.0, 60.0, 99.0), measures=PAPER
) -> list[dict]:
    rows = [{"step": step, "train/loss": 1.0} for step in steps]
    for row, accuracy in zip(rows, accuracies, strict=True):
        row |= dict.fromkeys(measures, accuracy / 10)
        row |= {"eval/acc": accuracy, "eval/loss": 1.0, "eval/train_loss": 0.5}
    return rows


class Drawn:
    """The attributes of a collected row that a figure uses."""

    def __init__(self, seed: int, rows: list[dict], cell: str = "division"):
        self.seed, self.home, self.rows = seed, ("grokking", cell), rows

    def history(self) -> list[dict]:
        return self.rows


def test_the_figure_shows_every_run_and_its_transition():
    table = load_table("grokking")
    slow = history(accuracies=(1.0, 2.0, 3.0, 4.0))
    assert transition(history()) == 100
    assert transition(slow) is None
    figure = draw(table, [Drawn(0, history()), Drawn(1, slow), Drawn(0, history(), "decay")])
    assert len(figure.axes) == 5
    assert figure.axes[0].get_title("left") == f"{table.cells['division'].label} (n = 2)"
    degree = next(axis for axis in figure.axes if axis.get_ylabel() == "ED")
    lines = sorted(degree.lines, key=lambda line: line.get_linewidth())
    curves = [list(line.get_ydata()) for line in lines if len(line.get_xdata()) == 4]
    other, *seeds, mean = curves
    assert other == [0.1, 0.2, 6.0, 9.9]
    assert seeds == [[0.1, 0.2, 6.0, 9.9], [0.1, 0.2, 0.3, 0.4]]
    assert mean == pytest.approx([0.1, 0.2, 3.15, 5.15])
    marks = [line.get_xdata()[0] for line in degree.lines if len(line.get_xdata()) == 2]
    assert marks == [100]
    peaks = [tuple(line.get_xydata()[0]) for line in degree.lines if len(line.get_xdata()) == 1]
    assert peaks == [(100, 6)]
    assert degree.get_xscale() == "log"
    figure.draw_without_rendering()


def test_the_figure_selects_a_cell_with_a_transition():
    table = load_table("grokking")
    slow = history(accuracies=(1.0, 2.0, 3.0, 4.0))
    figure = draw(table, [Drawn(0, slow), Drawn(0, history(), "decay")])
    assert table.cells["decay"].label in figure.axes[0].get_title("left")
    (legend,) = figure.legends
    others = [text.get_text() for text in legend.get_texts()][-1]
    assert others == f"no transition: {table.cells['division'].label}"
    figure = draw(table, [Drawn(0, history()), Drawn(0, history(), "decay")])
    others = [text.get_text() for text in figure.legends[0].get_texts()][-1]
    assert others == f"other transitions: {table.cells['decay'].label}"
    figure = draw(table, [Drawn(0, slow)])
    looks = [text.get_text() for text in figure.legends[0].get_texts()]
    assert looks == ["validation loss", "training loss"]  # nothing else is drawn


def test_the_figure_leaves_out_the_points_of_tuning_grids():
    table = load_table("grokking")
    figure = draw(table, [Drawn(0, history()), Drawn(0, history(), "rate-0.1")])
    assert figure.axes[0].get_title("left") == f"{table.cells['division'].label} (n = 1)"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any("transition" in label for label in labels)
    assert draw(table, [Drawn(0, history(), "rate-0.1")]) is None


def test_the_figure_shows_the_variants_that_were_logged():
    table, every = load_table("grokking"), history(measures=(*PAPER, *VARIANTS))
    figure = draw(table, [Drawn(0, every)])
    assert len(figure.axes) == len(PANELS)
    for panel, axis in zip(PANELS, figure.axes, strict=True):
        curves = [line for line in axis.lines if len(line.get_xdata()) == 4]
        assert len(curves) == 1 + len(panel.others)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "ED on validation equations" in labels
    assert "other radii: 0.01, 0.1, 0.5, 1" in labels
    figure.draw_without_rendering()


def test_runs_without_history_give_no_figure():
    for rows in ([], [{"step": 1, "train/loss": 1.0}]):
        assert draw(load_table("grokking"), [Drawn(0, rows)]) is None
