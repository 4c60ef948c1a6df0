"""Tests of aggregated returns against closed forms, and of the learning-curve figure."""

import itertools
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from ed.analysis.collect import Row, evaluation
from ed.analysis.findings import finding
from ed.analysis.render import to_latex, to_markdown
from ed.analysis.returns import (
    HARD_RANGES,
    Aggregate,
    aggregates,
    gain_over_games,
    interquartile_interval,
    interquartile_mean,
    normalised_return,
    stratified_resamples,
)
from ed.analysis.spec import SpecError
from ed.analysis.tables import load_table
from ed.analysis.verdicts import Experiment, Verdict, headline
from ed.envs.procgen import GAMES
from ed.figures.learning_curves import WINDOW, draw, mean_and_error, smoothed
from ed.figures.style import MEAN, SEED, STYLE

SHOWN = ("dodgeball", "fruitbot", "jumper", "starpilot")


class Run(Row):
    """A run whose curves are straight lines from 0 to `last`."""

    def history(self):
        for step in range(100, self.steps + 1, 100):
            part = step / self.total_steps
            yield {"step": step} | {evaluation(name): part * x for name, x in self.last.items()}


def short_runs(final, seeds=(0, 1, 2)) -> list[Run]:
    table = load_table("procgen_short")
    return [
        Run(
            *(table.name, cell, seed, "", "done", 1000, 1000),
            {"late/test_return": final(cell, seed), "late/train_return": final(cell, seed) + 1},
        )
        for cell, seed in itertools.product(table.cells, seeds)
    ]


def curves(axis, look=SEED) -> list[np.ndarray]:
    """Returns the y values of the lines with the width of `look`; SEED lines are not smoothed."""
    return [line.get_ydata() for line in axis.lines if line.get_linewidth() == look["linewidth"]]


# Appendix C of Cobbe et al. (2020), hard mode, in their order
PUBLISHED = """coinrun 5 10, starpilot 1.5 35, caveflyer 2 13.4, dodgeball 1.5 19,
fruitbot -0.5 27.2, chaser 0.5 14.2, miner 1.5 20, jumper 1 10, leaper 1.5 10, maze 4 10,
bigfish 0 40, heist 2 10, climber 1 12.6, plunder 3 30, ninja 2 10, bossfight 0.5 13"""


def test_normalised_return_is_linear_between_the_published_bounds():
    assert set(HARD_RANGES) == set(GAMES)
    for game, *bounds in map(str.split, PUBLISHED.split(",")):
        low, high = map(float, bounds)
        found = normalised_return(np.array([low, (low + high) / 2, high]), game)
        np.testing.assert_allclose(found, [0, 0.5, 1], atol=1e-15, err_msg=game)
    assert len(GAMES) == len(PUBLISHED.split(","))


def test_interquartile_mean_of_known_scores():
    assert interquartile_mean(np.arange(1, 13)) == 6.5  # the mean of 4 to 9
    assert interquartile_mean([0, 1, 2, 1000]) == 1.5  # excludes the lowest and the highest score
    assert interquartile_mean([3.0]) == 3
    assert interquartile_mean([1, 2, 6]) == 3  # excludes none: a quarter of three is less than one
    scores = np.arange(24).reshape(12, 2)
    np.testing.assert_array_equal(interquartile_mean(scores, axis=0), [11, 12])


def test_no_aggregate_before_every_seed_has_a_score():
    assert np.isnan(interquartile_mean([0, 1, 2, np.nan]))  # not the mean of the others
    early = np.array([[np.nan, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    for found in interquartile_interval([early, np.ones((4, 2))], np.random.default_rng(0)):
        np.testing.assert_array_equal(found, [np.nan, 1])


def test_resamples_keep_every_game_and_its_number_of_seeds():
    scores = [np.array([1.0, 2.0]), np.array([10.0, 20.0, 30.0])]
    drawn = stratified_resamples(scores, np.random.default_rng(0), count=4000)
    assert drawn.shape == (4000, 5)
    assert set(drawn[:, :2].ravel()) == {1, 2}
    assert set(drawn[:, 2:].ravel()) == {10, 20, 30}
    assert (drawn[:, 0] == drawn[:, 1]).mean() == pytest.approx(0.5, abs=0.03)  # with replacement


def test_interval_depends_on_the_generator_and_the_spread():
    rng = np.random.default_rng(1)
    constant = [np.full((3, 5), 0.4), np.full((3, 5), 0.4)]
    for found in interquartile_interval(constant, rng):
        np.testing.assert_allclose(found, 0.4)
    scores = [rng.normal(size=200), rng.normal(size=200)]
    first, again, other = (
        interquartile_interval(scores, np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    mean, low, high = first
    assert low < mean < high
    # the 25 % trimmed mean of a normal sample has a standard deviation of sqrt(1.198 / n)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(1.198 / 400), rel=0.15)


def test_error_band_is_the_standard_error():
    mean, error = mean_and_error(np.array([[1.0, 4.0], [3.0, 4.0], [5.0, 4.0]]))
    np.testing.assert_allclose(mean, [3, 4])
    np.testing.assert_allclose(error, [2 / np.sqrt(3), 0])


def test_smoothing_averages_over_its_window_and_keeps_gaps():
    values = np.random.default_rng(0).normal(size=201)
    values[:5] = np.nan
    found = smoothed(values)
    assert np.isnan(found[:5]).all()
    half = WINDOW // 2
    assert found[100] == pytest.approx(values[100 - half : 101 + half].mean())
    assert found[-1] == pytest.approx(values[-1 - half :].mean())  # shorter window at the end
    np.testing.assert_allclose(smoothed(np.full(201, 3.0)), 3)


def test_panels_show_the_means_of_the_runs():
    table = load_table("procgen_short")
    runs = short_runs(lambda cell, seed: 10 + seed + 5 * cell.startswith("ed"))
    figure = draw(table, runs)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["Dodgeball (n = 3)", "FruitBot (n = 3)"]
    assert titles[-1] == "4 games, interquartile mean, 95 % interval"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "PPO", "PPO + ED", "unseen levels, smoothed mean ± standard error", "not smoothed",
        "training levels, smoothed",
    ]  # fmt: skip
    train, test = figure.axes[0].lines[:2]  # PPO on Dodgeball
    assert test.get_xdata()[-1] == 10  # million frames
    assert test.get_ydata()[100] == pytest.approx(5.5)  # smoothing does not change straight lines
    assert train.get_ydata()[100] == pytest.approx(6)
    assert [seed[-1] for seed in curves(figure.axes[0])] == pytest.approx([10, 11, 12, 15, 16, 17])
    finals = [[normalised_return(10 + s, g) for s in range(3)] for g in SHOWN]
    aggregate = curves(figure.axes[-1])[0][-1]
    assert aggregate == pytest.approx(interquartile_mean(np.ravel(finals)))


def test_nothing_is_drawn_before_the_first_episode_has_ended():
    runs = short_runs(lambda *_: 3.0)
    figure = draw(load_table("procgen_short"), runs)
    for axis in (figure.axes[0], figure.axes[-1]):  # curves start at step 100 of 1,000
        values = axis.lines[0].get_ydata()
        assert np.isnan(values[:20]).all()
        assert np.isfinite(values[20:]).all()


def test_one_seed_has_no_error_band():
    figure = draw(load_table("procgen_short"), short_runs(lambda *_: 3.0, seeds=(0,)))
    (legend,) = figure.legends
    assert "unseen levels, smoothed" in [text.get_text() for text in legend.get_texts()]
    assert figure.axes[-1].get_title() == "4 games, interquartile mean"
    assert not figure.axes[-1].collections


def test_easy_games_are_not_normalised_like_hard_ones():
    runs = [replace(run, deviations="task.mode=easy") for run in short_runs(lambda *_: 3.0)]
    table = load_table("procgen_short")
    assert len(draw(table, runs).axes) == 4
    assert aggregates(table, runs) == []


def test_aggregates_are_interquartile_means_over_all_games():
    table = load_table("procgen_short")
    runs = short_runs(lambda cell, seed: 4.0 + seed + 2 * cell.startswith("ed"))
    finals = [normalised_return(4.0 + s, g) for g in SHOWN for s in range(3)]
    plain, ed = aggregates(table, runs)
    assert (plain.method, ed.method) == ("none", "ed")
    assert (plain.games, plain.runs) == ("4 games", 12)
    assert plain.mean == pytest.approx(np.mean(sorted(finals)[3:9]))
    assert plain.low < plain.mean < plain.high
    assert aggregates(table, runs) == [plain, ed]  # bitwise reproducible
    lacking = [run for run in runs if run.seed == 0 or not run.cell.endswith("jumper")]
    assert aggregates(table, lacking)[0].low is None  # one game has only one seed
    (one, _) = aggregates(table, [run for run in runs if run.seed == 0])
    assert one.mean == pytest.approx(np.mean(sorted(finals[::3])[1:3]))
    assert one.low is None


def test_the_headline_compares_unrounded_returns_and_counts_both_methods():
    table = load_table("procgen_short")
    runs = short_runs(lambda cell, seed: 4.0 + 1e-3 * cell.startswith("ed"))
    few = [run for run in runs if run.seed == 0 or not run.cell.startswith("ed")]
    (row,) = headline([Experiment(load_table("procgen"), []), Experiment(table, few)])
    before, after = row.ours.split(" normalised")[0].split(" → ")
    assert before.split(" (")[0] == after  # only the first has an interval
    assert "12 and 4 runs" in row.ours
    assert "12 and 4 runs" in finding(Experiment(table, few))
    assert row.verdict == Verdict.DIRECTION


def test_the_interval_of_a_gain_adds_the_half_widths_in_quadrature():
    """Symmetric intervals of half-widths 3 and 4 give a half-width of 5."""
    before = Aggregate("none", "4 games", 12, 10.0, 7.0, 13.0)
    after = Aggregate("ed", "4 games", 12, 12.0, 8.0, 16.0)
    assert gain_over_games(before, after) == pytest.approx((2.0, -3.0, 7.0))
    assert gain_over_games(before, replace(after, low=None, high=None)) == (2.0, None, None)


def test_a_gain_within_the_spread_over_seeds_is_unclear():
    table = load_table("procgen_short")
    runs = short_runs(lambda cell, seed: 4.0 + seed + 0.01 * cell.startswith("ed"))
    (row,) = headline([Experiment(load_table("procgen"), []), Experiment(table, runs)])
    assert row.verdict == Verdict.UNCLEAR


def test_the_headline_uses_the_shortened_table_until_the_real_one_has_a_result():
    table, runs = load_table("procgen_short"), short_runs(lambda *_: 4.0)
    begun = [replace(run, table="procgen", status="stopped") for run in runs[:1]]
    known = [Experiment(load_table("procgen"), begun), Experiment(table, runs)]
    (row,) = headline(known)
    assert row.table == table.name
    assert row.ours.endswith("shortened")


@pytest.mark.parametrize("key", ["task.game", "regularizer", "task.frames"])
def test_a_cell_without_its_game_method_or_length_is_rejected(key):
    table, runs = load_table("procgen_short"), short_runs(lambda cell, seed: 1.0)
    name, cell = next(iter(table.cells.items()))
    kept = tuple(text for text in cell.overrides if not text.startswith(f"{key}="))
    table = replace(table, cells=table.cells | {name: replace(cell, overrides=kept)})
    with pytest.raises(ValueError, match=rf"{table.path}: cell {name}: .*{key}"):
        aggregates(table, runs)


def test_each_table_is_followed_by_its_aggregate():
    table = load_table("procgen_short")
    rows = [
        Row(table.name, cell, 0, deviations, "done", last=dict.fromkeys(table.metrics, 5.0))
        for cell in table.cells
        for deviations in ("", "task.frames=70000")
    ]
    text = to_markdown(table, rows)
    whole, reduced = text.split("## Reduced: task.frames=70000")
    finals = sorted(normalised_return(5.0, game) for game in SHOWN)
    line = f"| PPO, 4 games | {np.mean(finals[1:3]):.3f} | - | 4 |"
    for part, title in (
        (whole, "\n## Games together: norm"),
        (reduced, "\n### Games together: norm"),
    ):
        assert title in part
        assert line in part
    lacking = [row for row in rows if row.cell != "none-jumper"]
    assert "| PPO, 3 of 4 games | " in to_markdown(table, lacking)


def test_methods_are_compared_on_the_games_that_both_play():
    """ED has the same returns as PPO, but not yet on the game with the highest ones."""
    table = load_table("procgen_short")
    runs = short_runs(lambda cell, seed: 10.0 if cell.endswith("jumper") else 4.0)
    some = [run for run in runs if run.cell != "ed-jumper"]
    plain, ed = aggregates(table, some)
    assert (plain.games, plain.runs, plain.mean) == (ed.games, ed.runs, ed.mean)
    assert plain.games == "3 of 4 games"
    (row,) = headline([Experiment(load_table("procgen"), []), Experiment(table, some)])
    assert "(3 of 4 games, 9 runs per method)" in row.ours
    assert row.ours.count(f"{plain.mean:.3f} ({plain.low:.3f} to {plain.high:.3f})") == 2
    assert "over 3 of 4 games: PPO 0." in finding(Experiment(table, some))
    last = draw(table, some).axes[-1]
    assert last.get_title().startswith("3 of 4 games")
    np.testing.assert_allclose(*(line.get_ydata() for line in last.lines[::2]))
    assert aggregates(table, [r for r in runs if r.cell in ("none-jumper", "ed-jumper")]) == []


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("games", ["jumper", ""], ids=["one game", "all games"])
def test_the_legend_fits_into_the_figure(games, seeds):
    runs = [run for run in short_runs(lambda *_: 4.0, seeds) if run.cell.endswith(games)]
    with matplotlib.rc_context(STYLE):
        figure = draw(load_table("procgen_short"), runs)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_a_shortened_table_is_marked_in_every_format():
    table = load_table("procgen_short")
    rows = [
        Row(table.name, cell, 0, status="done", last=dict.fromkeys(table.metrics, 5.0))
        for cell in table.cells
    ]
    assert "SHORTENED to 10 M frames" in to_markdown(table, rows).splitlines()[0]
    assert r"\multicolumn{5}{l}{Procgen, hard levels, SHORTENED to 10 M frames" in to_latex(
        table, rows
    )
    assert r"\multicolumn" not in to_latex(load_table("procgen"), [])


def test_unfinished_runs_are_drawn_up_to_their_last_step():
    """After 3 of 10 M frames, the curve and the aggregate end at 3 M on an axis of 10 M."""
    runs = [
        replace(run, steps=300, status="stopped") if run.cell == "none-jumper" else run
        for run in short_runs(lambda *_: 10.0, seeds=(0,))
    ]
    figure = draw(load_table("procgen_short"), runs)
    jumper = next(axis for axis in figure.axes if axis.get_title() == "Jumper (n = 1)")
    together = figure.axes[-1]
    for look, axis in itertools.product((SEED, MEAN), (jumper, together)):
        reached = np.isfinite(curves(axis, look)[0])
        assert reached[20:61].all()
        assert not reached[61:].any()
    assert curves(jumper)[0][60] == pytest.approx(3)
    assert jumper.lines[0].get_xdata()[60] == pytest.approx(3)
    assert jumper.get_xlim()[1] == 10
    assert np.isfinite(curves(together)[1][61:]).all()  # ED's runs are complete


def test_an_unfinished_run_has_no_final_return():
    table = load_table("procgen_short")
    runs = [
        replace(run, steps=300, status="stopped") if run.cell.endswith("jumper") else run
        for run in short_runs(lambda *_: 10.0, seeds=(0,))
    ]
    plain, ed = aggregates(table, runs)
    assert (plain.games, plain.runs) == (ed.games, ed.runs) == ("3 of 4 games", 3)
    assert "| PPO, 3 of 4 games |" in to_markdown(table, runs)


def test_numbers_of_seeds_follow_the_order_of_the_methods():
    runs = short_runs(lambda *_: 3.0)
    fewer = [run for run in runs if run.seed == 0 or run.cell.startswith("none")]
    figure = draw(load_table("procgen_short"), fewer)
    assert figure.axes[0].get_title() == "Dodgeball (n = 3/1)"


def test_one_game_has_no_aggregate_and_no_runs_give_no_figure():
    table = load_table("procgen_short")
    runs = [run for run in short_runs(lambda *_: 3.0, seeds=(0,)) if run.cell == "none-jumper"]
    figure = draw(table, runs)
    assert [axis.get_title() for axis in figure.axes] == ["Jumper (n = 1)"]
    assert draw(table, []) is None


def test_two_cells_with_the_same_game_and_method_are_rejected():
    table = load_table("procgen_short")
    again = replace(table.cells["ed-dodgeball"], name="strong", home=("procgen_short", "strong"))
    both = replace(table, cells=table.cells | {"strong": again})
    rows = short_runs(lambda cell, seed: 5.0)
    rows += [replace(row, cell="strong") for row in rows if row.cell == "ed-dodgeball"]
    with pytest.raises(SpecError, match=r"cell strong: .*task\.game=dodgeball"):
        aggregates(both, rows)
