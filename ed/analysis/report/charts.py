"""Small inline SVG charts. Colours come from the style sheet, so they follow the theme."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ed.analysis.report.markup import Html, tag

WIDTH, HEIGHT = 320, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22
MAX_POINTS = 240  # more than the chart has pixels
STRIP_WIDTH, STRIP_HEIGHT, STRIP_MARGIN = 150, 20, 6

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic map of [low, high] to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, math.ceil((last - first + 1) / 4))
            powers = [10.0**e for e in range(first, last + 1, step)]
            return powers if len(powers) > 1 else [self.low, self.high]
        step = nice_step((self.high - self.low) or 1)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def nice_step(extent: float) -> float:
    """The 1-2-5 step that cuts `extent` into about four parts."""
    power = 10.0 ** math.floor(math.log10(extent / 4))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= extent / 4 * 0.999)


def line_chart(title: str, lines: dict[str, Points], *, log: bool = False) -> Html | None:
    """One line per entry over the steps of training; None where there is nothing to draw.

    `log` where no value is negative, as of PPO's loss many are; zeros are then left out.
    """
    log = log and not any(value < 0 for points in lines.values() for _, value in points)
    lines = {name: _thinned(_drawable(points, log)) for name, points in lines.items()}
    styles = {name: _style(place) for place, name in enumerate(lines)}  # as key() has them
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    x = Axis(0, max(p[0] for points in lines.values() for p in points), LEFT, WIDTH - RIGHT)
    values = [p[1] for points in lines.values() for p in points]
    y = Axis(min(values), max(values), HEIGHT - BOTTOM, TOP, log)
    paths = [
        tag("path", d=_path(points, x, y), class_=styles[name]) for name, points in lines.items()
    ]
    last = ", ".join(f"{name}: {points[-1][1]:.4g}" for name, points in lines.items())
    svg = tag(
        "svg", *_grid(x, y), *paths, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
        aria_label=f"{title} over training steps; at the end {last}",
    )  # fmt: skip
    return tag(
        "figure", tag("figcaption", f"{title}, by step" + (", log scale" if log else "")), svg
    )


def _style(place: int) -> str:
    """Six colours and dashes, then the same again as broad pale lines."""
    return f"line s{place % 6}" + (" again" if place >= 6 else "")


def key(names: Sequence[str]) -> Html:
    """Which line is which."""
    items = [tag("span", _key_line(i), name, class_="key-item") for i, name in enumerate(names)]
    return tag("p", *items, class_="key")


def interval_strip(
    paper: tuple[float | None, float | None],
    ours: tuple[float | None, float | None],
    extent: tuple[float, float],
) -> Html:
    """The paper's mean and std (square) above ours (dot), on a scale its column shares."""
    axis = Axis(*extent, STRIP_MARGIN, STRIP_WIDTH - STRIP_MARGIN)
    marks = []
    for (mean, std), height, kind in ((paper, 6, "paper"), (ours, 15, "ours")):
        if mean is None:
            continue
        if std is not None:
            ends = {"x1": _short(axis(mean - std)), "x2": _short(axis(mean + std))}
            marks.append(tag("line", **ends, y1=height, y2=height, class_=f"spread {kind}"))
        marks.append(_mark(kind, axis(mean), height))
    size = f"0 0 {STRIP_WIDTH} {STRIP_HEIGHT}"
    return tag("svg", *marks, viewBox=size, class_="strip", aria_hidden="true")


def _mark(kind: str, x: float, y: float) -> Html:
    if kind == "ours":
        return tag("circle", cx=_short(x), cy=y, r=3.5, class_="ours")
    return tag("rect", x=_short(x - 3), y=y - 3, width=6, height=6, class_="paper")


def _key_line(index: int) -> Html:
    line = tag("line", x1=1, x2=21, y1=4, y2=4, class_=_style(index))
    return tag("svg", line, viewBox="0 0 22 8", class_="key-line", aria_hidden="true")


def _grid(x: Axis, y: Axis) -> list[Html]:
    parts = []
    for value in y.ticks():
        height = _short(y(value))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height, class_="grid"))
        parts.append(_label(f"{value:.4g}", LEFT - 6, y(value) + 3.5, "end"))
    for value in x.ticks():
        anchor = "end" if x(value) > WIDTH - 24 else "middle"
        parts.append(_label(_steps(value), x(value), HEIGHT - 6, anchor))
    return parts


def _label(text: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", text, x=_short(x), y=_short(y), text_anchor=anchor)


def _steps(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _drawable(points: Points, log: bool) -> Points:
    return [p for p in points if math.isfinite(p[1]) and (not log or p[1] > 0)]


def _thinned(points: Points) -> Points:
    """Every n-th point, and the last."""
    step = math.ceil(len(points) / MAX_POINTS) or 1
    kept = list(points[::step])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _path(points: Points, x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{_short(x(step))} {_short(y(value))}" for step, value in points)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
