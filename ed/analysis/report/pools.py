"""An experiment that correlates measures over a pool of cells: its correlations and its points."""

from collections.abc import Sequence

from ed.analysis.collect import Row
from ed.analysis.correlation import cell_means, correlations
from ed.analysis.render import CORRELATION_MEANING
from ed.analysis.report.cells import anchor
from ed.analysis.report.markup import Html, join, tag
from ed.analysis.report.sortable import Field, sortable
from ed.analysis.spec import Table


def pool(table: Table, rows: Sequence[Row]) -> Html:
    """All variants of all measures; below, folded, the points they were computed from."""
    against = table.metrics[table.correlation.against]
    caption = f"Pearson correlation with the {against}. {CORRELATION_MEANING}"
    summary = tag("summary", f"The {len(table.cells)} points")
    points = tag("details", summary, _points(table, rows))
    return join(_correlations(table, rows), tag("p", caption), points)


def _correlations(table: Table, rows: Sequence[Row]) -> Html:
    body: list[list[Field]] = []
    for found in correlations(table, rows):
        known = found.r is not None
        name, variant = found.measure, table.metrics[found.metric]
        interval = f"{found.low:+.2f} to {found.high:+.2f}" if known else ""
        chosen = "selected" if found.selected else ""
        body.append(
            [
                (name, name),
                (variant, variant),
                (f"{found.r:+.2f}" if known else "", found.r),
                (interval, found.low),
                (f"{len(found.cells)} of {len(table.cells)}", len(found.cells)),
                (tag("strong", chosen) if chosen else "", chosen),
            ]
        )
    header = ["measure", "variant", "Pearson r", "95 % interval", "points", "variant shown"]
    return sortable(header, body)


def _points(table: Table, rows: Sequence[Row]) -> Html:
    means = [cell_means(table, rows, metric) for metric in table.metrics]
    body = []
    for name, cell in table.cells.items():
        link = tag("a", cell.label, href=f"#{anchor(cell.home)}")
        values = [own.get(name) for own in means]
        fields = [("" if value is None else f"{value:.4g}", value) for value in values]
        body.append([(link, cell.label), *fields])
    return sortable(["cell", *table.metrics.values()], body)
