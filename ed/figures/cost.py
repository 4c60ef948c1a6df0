"""Plots accuracy against step time, one point per cell with a step time.

Dots are means with their standard deviation, small dots are seeds. The dashed line is the
accuracy of the baseline. On the lower axis, triangles mark cells far below the others, and rings
cells without a finished run.
"""

import math
from collections.abc import Collection, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from ed.analysis.collect import Row
from ed.analysis.costs import Gain, gains
from ed.analysis.numbers import mean_and_std
from ed.analysis.spec import SpecError, Table
from ed.figures.labels import place_labels
from ed.figures.ranking import OURS, REFERENCE, SINGLE, break_below, primary_title
from ed.figures.style import FAINT, WIDTH, legend_handles, method_colour

CHEAP = 1.25  # the cost that a cheap method may have, times the plain step
LIMIT = {"color": FAINT, "linewidth": 0.7, "linestyle": ":"}
BELOW = {"marker": "v", "markersize": 6, "linestyle": "none"}
PENDING = {"marker": "o", "markersize": 5.5, "linestyle": "none", "markerfacecolor": "white"}
TICKS = (0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
DOT = 4  # points: half the room that a dot takes


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws accuracy against step time; None if no cell has both.

    Step times are read from ../speed/steps.csv beside the table's results.
    """
    if table.cost is None:
        raise SpecError(f"{table.path}: cost: this key is missing, and {table.figure} needs it")
    known = [one for one in gains(table, rows) if one.step is not None]
    found = [one for one in known if one.values]
    if not found:
        return None
    figure = Figure(figsize=(WIDTH, 4.2))
    axis = figure.subplots()
    edge = break_below([one.ours.mean for one in found])
    below = [one for one in found if edge is not None and one.ours.mean < edge]
    for one in found:
        if one not in below:
            _draw_point(axis, one)
    baseline = next((one for one in found if one.cell.name == table.cost.baseline), None)
    if baseline is not None:
        axis.axhline(baseline.ours.mean, zorder=0, **REFERENCE)
    _finish(axis, table, known)
    on_axis = {one.cell.name: PENDING for one in known if not one.values}
    on_axis |= {one.cell.name: BELOW for one in below}
    for one in known:
        look = on_axis.get(one.cell.name)
        if look is not None:
            axis.plot(one.ratio, axis.get_ylim()[0], color=_colour(one), clip_on=False, **look)
    _legend(figure, found, reference=baseline is not None, on_axis=on_axis.values())
    figure.draw_without_rendering()  # fixes the layout, on which the places of labels depend
    _label(axis, table, known, on_axis)
    return figure


def _colour(one: Gain) -> str:
    return method_colour(one.cell.settings.get("regularizer", ""))


def _ends(one: Gain) -> tuple[float, float]:
    """Returns the ends of the bar: one standard deviation from the mean."""
    return one.ours.mean - (one.ours.std or 0), one.ours.mean + (one.ours.std or 0)


def _draw_point(axis: Axes, one: Gain) -> None:
    """Draws the mean, its standard deviation and the seeds."""
    ours, colour = one.ours, _colour(one)
    if ours.std is not None:
        axis.plot((one.ratio, one.ratio), _ends(one), color=colour, linewidth=OURS["linewidth"])
        for value in one.values:
            axis.plot(one.ratio, value, color=colour, **SINGLE)
    axis.plot(one.ratio, ours.mean, color=colour, **OURS)


def _finish(axis: Axes, table: Table, known: Sequence[Gain]) -> None:
    """Sets limits, ticks and titles; the margins leave room for labels."""
    ratios = [1, CHEAP, *(one.ratio for one in known)]
    margin = math.pow(max(ratios) / min(ratios), 0.12)
    low, high = min(ratios) / margin, max(ratios) * margin
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.margins(y=0.15)
    axis.set_ylim(axis.get_ylim())  # keeps the limits if more is drawn
    axis.axvline(CHEAP, zorder=0, **LIMIT)
    look = {"fontsize": 8, "color": FAINT, "ha": "center", "va": "bottom"}
    axis.text(CHEAP, 1.01, f"{CHEAP:g} x", transform=axis.get_xaxis_transform(), **look)
    axis.xaxis.set_major_locator(FixedLocator([x for x in TICKS if low <= x <= high]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_xlabel("step time (x plain step)")
    axis.set_ylabel(primary_title(table))
    axis.grid(axis="y", color="0.92", linewidth=0.6)
    axis.set_axisbelow(True)


def _label(axis: Axes, table: Table, known: Sequence[Gain], on_axis: Collection[str]) -> None:
    """Writes the name of each cell; cells below the axis get their number."""
    points, texts, taken = [], [], []
    for one in known:
        low = one.cell.name in on_axis
        point = (one.ratio, axis.get_ylim()[0] if low else one.ours.mean)
        points.append(point)
        taken.append(_room(axis, point, () if low else (*one.values, *_ends(one))))
        number = mean_and_std(one.ours.mean, one.ours.std, table.digits) if one.values else None
        texts.append(f"{one.cell.label}: {number}" if low and one.values else one.cell.label)
    lines = [line.get_window_extent().padded(4) for line in axis.lines if line.get_zorder() == 0]
    place_labels(axis, points, texts, taken=taken, avoided=lines)


def _room(axis: Axes, point: tuple[float, float], values: Sequence[float]) -> Bbox:
    """Returns the box on the screen of a dot and of other values on its vertical."""
    places = axis.transData.transform([point, *((point[0], value) for value in values)])
    room = DOT * axis.figure.dpi / 72
    (x, low), high = places.min(axis=0), places[:, 1].max()
    return Bbox.from_extents(x - room, low - room, x + room, high + room)


def _legend(
    figure: Figure, found: Sequence[Gain], *, reference: bool, on_axis: Collection[dict]
) -> None:
    several = any(len(one.values) > 1 for one in found)
    looks = {"mean ± std": OURS, "one seed": SINGLE} if several else {}
    looks |= {"off the scale": BELOW} if BELOW in on_axis else {}
    looks |= {"pending": PENDING} if PENDING in on_axis else {}
    looks |= {"baseline": REFERENCE} if reference else {}
    if looks:
        handles = legend_handles(looks)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
