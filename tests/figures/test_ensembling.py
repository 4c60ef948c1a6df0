"""The figure of weight ensembling: accuracy under shift over accuracy on the test set."""

from dataclasses import replace

import pytest

from ed.analysis.collect import Row
from ed.analysis.tables import load_table
from ed.figures import ensembling
from ed.runtime.runs import Record


def row_of(cell: str, seed: int, shift: float, *, middle: float = 0.5) -> Row:
    """Returns a finished run with accuracies 60 + 10 alpha + shift and 50 + 5 alpha + shift."""
    values = {"step": 9}
    for alpha in (0.0, middle, 1.0):
        values[f"measure/ensembling/alpha{alpha:g}/acc"] = 60 + 10 * alpha + shift
        values[f"measure/ensembling/alpha{alpha:g}/acc_ood"] = 50 + 5 * alpha + shift
        values[f"measure/ensembling/alpha{alpha:g}/acc_blur"] = -1.0  # not in the figure
    return Row("clip_ood", cell, seed, status="done", record=logged(values))


def logged(values: dict) -> Record:
    return Record("", config={}, meta={}, done=None, failure="", history=lambda: [values])


def test_the_figure_averages_seeds_and_has_one_axis_per_model():
    table = load_table("clip_ood")
    rows = [row_of("b32", seed, shift=seed) for seed in (0, 2)]
    rows += [row_of("b32_ed", 0, shift=3.0), row_of("b16_ed", 0, shift=9.0)]
    axes = ensembling.draw(table, rows).axes
    assert len(axes) == 2  # one axis per model
    labels = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes]
    ends = [r"$\alpha = 0$, zero-shot", r"$\alpha = 1$, fine-tuned"]
    both = ["CLIP ViT-B/32, mean of 2 seeds", "CLIP ViT-B/32 + ED, 1 seed"]
    assert labels == [[*both, "one seed", *ends], ["CLIP ViT-B/16 + ED, 1 seed", *ends]]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes[0].lines}
    assert drawn[both[0]] == [[61, 51], [66, 53.5], [71, 56]]
    assert [drawn[end] for end in ends] == [[[61, 51], [63, 53]], [[71, 56], [73, 58]]]
    assert ensembling.draw(table, []) is None
    assert ensembling.draw(table, [replace(rows[1], status="stopped")]) is None
    without = logged({"step": 9, "measure/ensembling/alpha1/acc": 7})  # evaluated without shifts
    assert ensembling.draw(table, [replace(rows[0], record=without)]) is None


def test_seeds_with_different_alphas_cannot_be_averaged():
    rows = [row_of("b32", seed, 0.0, middle=middle) for seed, middle in ((0, 0.5), (1, 0.4))]
    with pytest.raises(ValueError, match=r"b32.*alphas"):
        ensembling.draw(load_table("clip_ood"), rows)
