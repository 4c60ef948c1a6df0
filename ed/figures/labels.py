"""Places labels beside points, where they cover neither each other nor the points."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from ed.figures.style import FAINT

SIZE = 8  # of the font
GAP = 7  # points between a dot and a label on its left or right
HEIGHTS = [0, *(sign * half / 2 for half in range(1, 21) for sign in (1, -1))]  # in lines of text
SIDES = {"left": 0.0, "right": 1.0, "center": 0.5}  # where the dot is, as a part of the width
# costs of a place, in half lines
OUTSIDE, COVERING, CROSSING, SOFT, APART, CLOSE = 5000, 1000, 200, 3, 2, 1
NEAR = 1.5  # lines of text up to which a label needs no line to its dot
SWEEPS = 4  # each chooses every place again, given the others

Point = tuple[float, float]
Segment = tuple[Point, Point]


@dataclass(frozen=True)
class Place:
    """A place on the screen for a label; `height` is in lines of text, from its dot."""

    box: Bbox
    side: str
    height: float

    @property
    def apart(self) -> bool:
        """Whether the label needs a line to its dot."""
        return abs(self.height) > NEAR

    @property
    def anchor(self) -> Point:
        """The point of the label that is nearest to its dot."""
        x = self.box.x0 + SIDES[self.side] * self.box.width
        if self.side != "center":
            return x, (self.box.y0 + self.box.y1) / 2
        return x, self.box.y0 if self.height > 0 else self.box.y1


def place_labels(
    axis: Axes,
    points: Sequence[Point],
    texts: Sequence[str],
    *,
    taken: Sequence[Bbox],
    avoided: Sequence[Bbox],
) -> None:
    """Writes each text near its point, with a thin line to the point if they are apart.

    The limits and the layout of the axis must be final.

    Args:
        taken: the box of each point on the screen, with its error bar.
        avoided: boxes that labels cover only if other places are worse, such as lines.
    """
    dots = [tuple(axis.transData.transform(point)) for point in points]
    sizes = [_size(axis, text) for text in texts]
    choices = [list(_choices(axis, *both)) for both in zip(dots, sizes, strict=True)]
    inside = axis.get_window_extent().padded(-5)  # keeps labels off the axes
    gap = GAP * axis.figure.dpi / 72
    chosen = [own[0] for own in choices]

    def cost(index: int, place: Place) -> float:
        others = [i for i in range(len(texts)) if i != index]
        dot, around = dots[index], [box for i in others for box in (taken[i], chosen[i].box)]
        found = OUTSIDE * (not _contains(inside, place.box)) + 2 * abs(place.height)
        found += COVERING * _overlaps(place.box, [taken[index], *around])
        found += CROSSING * _boxes_entered(dot, place.anchor, around)
        found += CLOSE * _overlaps(place.box.padded(gap), around) + APART * place.apart
        for leader in ((dots[i], chosen[i].anchor) for i in others if chosen[i].apart):
            crossing = place.apart and _segments_cross((dot, place.anchor), leader)
            found += CROSSING * (crossing + _boxes_entered(*leader, [place.box]))
        return found + SOFT * _overlaps(place.box, avoided) + (place.side == "center")

    for _, index in itertools.product(range(SWEEPS), range(len(texts))):
        chosen[index] = min(choices[index], key=partial(cost, index))
    for point, text, place in zip(points, texts, chosen, strict=True):
        _write(axis, point, text, place)


def _size(axis: Axes, text: str) -> tuple[float, float]:
    """Returns the width and height of a text on the screen."""
    trial = axis.text(0, 0, text, fontsize=SIZE)
    box = trial.get_window_extent()
    trial.remove()
    return box.width, box.height


def _choices(axis: Axes, dot: Point, size: tuple[float, float]) -> Iterator[Place]:
    gap = {"left": GAP, "right": -GAP, "center": 0}
    for height, side in itertools.product(HEIGHTS, SIDES):
        left = dot[0] + gap[side] * axis.figure.dpi / 72 - SIDES[side] * size[0]
        low = dot[1] + (height - 0.5) * size[1]
        yield Place(Bbox.from_bounds(left, low, *size), side, height)


def _write(axis: Axes, point: Point, text: str, place: Place) -> None:
    x, y = axis.transData.transform(point)
    middle = (place.box.y0 + place.box.y1) / 2
    offset = [72 / axis.figure.dpi * apart for apart in (place.anchor[0] - x, middle - y)]
    beside = (SIDES[place.side], 0.5 if place.side != "center" else float(place.height < 0))
    leader = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
    written = axis.annotate(
        text,
        point,
        offset,
        textcoords="offset points",
        ha=place.side,
        va="center",
        fontsize=SIZE,
        arrowprops=leader | {"relpos": beside} if place.apart else None,
        bbox={"pad": 0, "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )
    written.set_in_layout(False)  # the layout is final


def _overlaps(box: Bbox, others: Sequence[Bbox]) -> int:
    return sum(box.overlaps(other) for other in others)


def _contains(outer: Bbox, box: Bbox) -> bool:
    across = outer.x0 <= box.x0 and box.x1 <= outer.x1
    return bool(across and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def _boxes_entered(start: Point, end: Point, boxes: Sequence[Bbox]) -> int:
    """Returns how many boxes the line between two points enters, checked at 9 points of it."""
    boxes = [box for box in boxes if not box.contains(*start)]  # no place could avoid these
    parts = [part / 10 for part in range(1, 10)]
    line = [[a + part * (b - a) for a, b in zip(start, end, strict=True)] for part in parts]
    return sum(any(box.contains(*point) for point in line) for box in boxes)


def _segments_cross(one: Segment, other: Segment) -> bool:
    """Whether two segments have a point in common that is not an end of either."""
    (a, b), (c, d) = one, other
    return _turn(a, b, c) * _turn(a, b, d) < 0 and _turn(c, d, a) * _turn(c, d, b) < 0


def _turn(a: Point, b: Point, c: Point) -> float:
    """Returns a positive number if a, b, c turn left, a negative one if they turn right."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
