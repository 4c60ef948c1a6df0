"""An experiment that correlates measures over a pool of cells: its correlations and its points."""

from collections.abc import Sequence

from ed.analysis.collect import Row
from ed.analysis.correlation import Correlation, cell_means, correlations
from ed.analysis.pools import (
    CONTROLLED,
    CONTROLLED_TITLE,
    CORRELATION,
    CORRELATION_MEANING,
    controlled_fields,
    controlled_meaning,
    correlation_fields,
)
from ed.analysis.report.cells import anchor
from ed.analysis.report.markup import Html, join, tag
from ed.analysis.report.sortable import Field, sortable
from ed.analysis.spec import Table


def pool(table: Table, rows: Sequence[Row]) -> Html:
    """All variants of all measures; below, folded, the points they were computed from."""
    against = table.metrics[table.correlation.against]
    found = correlations(table, rows)
    caption = f"Pearson correlation with the {against}. {CORRELATION_MEANING}"
    parts = [_correlations(table, found), tag("p", caption)]
    if table.correlation.train is not None:
        parts += [tag("h4", CONTROLLED_TITLE), _controlled(table, found)]
        parts.append(tag("p", controlled_meaning(table, rows)))
    summary = tag("summary", f"The {len(table.cells)} points")
    return join(*parts, tag("details", summary, _points(table, rows)))


def _correlations(table: Table, found: Sequence[Correlation]) -> Html:
    body: list[list[Field]] = []
    for one in found:
        *names, r, interval, points, chosen = correlation_fields(table, one)
        body.append(
            [
                *((name, name) for name in names),
                (r, one.whole.r),
                (interval, one.whole.low),
                (points, one.whole.points),
                (tag("strong", chosen) if chosen else "", chosen),
            ]
        )
    return sortable([*CORRELATION[:-1], "variant shown"], body)


def _controlled(table: Table, found: Sequence[Correlation]) -> Html:
    body: list[list[Field]] = []
    for one in found:
        order = [one.measure, table.metrics[one.metric]]
        for estimate in (one.fitted, one.partial):
            order += [estimate.r, estimate.low, estimate.points]
        body.append(list(zip(controlled_fields(table, one), order, strict=True)))
    return sortable(list(CONTROLLED), body)


def _points(table: Table, rows: Sequence[Row]) -> Html:
    means = [cell_means(table, rows, metric) for metric in table.metrics]
    body = []
    for name, cell in table.cells.items():
        link = tag("a", cell.label, href=f"#{anchor(cell.home)}")
        values = [own.get(name) for own in means]
        fields = [("" if value is None else f"{value:.4g}", value) for value in values]
        body.append([(link, cell.label), *fields])
    return sortable(["cell", *table.metrics.values()], body)
