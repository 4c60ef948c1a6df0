"""Renders tables that correlate measures over a pool of cells as Markdown."""

from collections.abc import Sequence

from ed.analysis.collect import Row, finished
from ed.analysis.correlation import (
    FITTED,
    LEAST_POINTS,
    RESAMPLES,
    Correlation,
    Estimate,
    common_seeds,
    correlations,
    replicate_groups,
    train_alone,
)
from ed.analysis.markdown import plain_table
from ed.analysis.provenance import remarks
from ed.analysis.spec import Table
from ed.analysis.stats import summarise
from ed.runtime.runs import Status

CORRELATION = ("measure", "variant", "Pearson r", "95 % interval", "points", "")
CONTROLLED = ("measure", "variant", "r, fitted", "95 % interval", "points")
CONTROLLED += ("partial r", "95 % interval", "points")
CONTROLLED_TITLE = "Fitted networks only, and given the training accuracy"


def pool_sections(table: Table, rows: Sequence[Row]) -> list[str]:
    """Returns the correlations over a pool of cells, then the cells, as Markdown sections."""
    parts = []
    for deviations in sorted({row.deviations for row in rows} | {""}):
        here = [row for row in rows if row.deviations == deviations]
        parts += [f"## Reduced: {deviations}"] if deviations else []
        level = "###" if deviations else "##"
        against = table.metrics[table.correlation.against]
        found = correlations(table, here)
        parts += [f"{level} Correlation with the {against}", correlation_meaning(table, here)]
        parts.append(plain_table(CORRELATION, [correlation_fields(table, one) for one in found]))
        if table.correlation.train is not None:
            parts += [f"{level} {CONTROLLED_TITLE}", controlled_meaning(table, here)]
            parts.append(plain_table(CONTROLLED, [controlled_fields(table, one) for one in found]))
        begun = pool_fields(table, here)
        parts += [f"{level} Points", plain_table(pool_header(table), begun)] if begun else []
        found = _pool_remarks(table, here)
        parts += ["\n".join(f"- {remark}" for remark in found)] if found else []
    return parts


def correlation_meaning(table: Table, rows: Sequence[Row]) -> str:
    """Explains the table of correlations."""
    drawn, copies = "points", ""
    seeds, planned = len(common_seeds(table, rows)), len(table.seeds)
    averaged = "its seeds" if seeds == planned else f"{seeds} of {planned} seeds"
    if (key := table.correlation.replicates) is not None:
        count = len(set(replicate_groups(table).values()))
        drawn = f"the {count} settings without {key}"
        copies = (
            f" Networks that differ only in {key} can be near copies, so they are drawn together."
        )
    return (
        f"Each point is the mean of a cell over {averaged}. Intervals: bootstrap over {drawn}, "
        f"{RESAMPLES:,} resamples.{copies} The variant with the largest absolute r is selected, as "
        "the paper reports the best correlation over variants; this favours measures with many "
        "variants. The variant with the largest signed r is also marked."
    )


def correlation_fields(table: Table, found: Correlation) -> tuple[str, ...]:
    """Formats a variant's correlation over all points as a row; the columns are CORRELATION."""
    r, interval, points = estimate_fields(found.whole)
    place = f"{points} of {len(table.cells)}"
    return (found.measure, table.metrics[found.metric], r, interval, place, marks(found))


def controlled_fields(table: Table, found: Correlation) -> tuple[str, ...]:
    """Formats a variant's controlled correlations as a row; the columns are CONTROLLED."""
    both = (*estimate_fields(found.fitted), *estimate_fields(found.partial))
    return (found.measure, table.metrics[found.metric], *both)


def estimate_fields(estimate: Estimate) -> tuple[str, str, str]:
    """Formats r, its interval, and the number of points."""
    if estimate.r is None:
        return "-", "-", str(estimate.points)
    interval = f"{estimate.low:+.2f} to {estimate.high:+.2f}"
    return f"{estimate.r:+.2f}", interval, str(estimate.points)


def marks(found: Correlation) -> str:
    named = {"selected": found.selected, "largest r": found.largest}
    return ", ".join(name for name, holds in named.items() if holds)


def controlled_meaning(table: Table, rows: Sequence[Row]) -> str:
    """Explains the table of controlled correlations, with r of the training accuracy alone."""
    against, train = (
        table.metrics[m] for m in (table.correlation.against, table.correlation.train)
    )
    alone = train_alone(table, rows)
    r, interval, points = estimate_fields(alone)
    counted = "points" if table.correlation.replicates is None else "settings"
    known = "" if alone.r is None else f" The {train} alone has r = {r} ({interval}, n = {points})."
    return (
        f"A network that has not fitted its training set can have a small {against} whatever its "
        f"complexity.{known} Fitted: {train} above {FITTED:g} %, at least {LEAST_POINTS} "
        f"{counted}. Partial r: the correlation of the residuals after linear fits on the {train}."
    )


def pool_header(table: Table) -> tuple[str, ...]:
    return ("cell", "seeds", *table.metrics.values())


def pool_fields(table: Table, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns one row per cell with means over finished seeds; columns as in `pool_header`."""
    fields = []
    for cell in table.cells.values():
        own = [row for row in rows if row.home == cell.home and row.status == Status.DONE]
        means = [summarise(finished(own, metric)).mean for metric in table.metrics]
        if own:
            shown = ("-" if mean is None else f"{mean:.4g}" for mean in means)
            fields.append((cell.label, f"{len(own)} of {len(table.seeds)}", *shown))
    return fields


def _pool_remarks(table: Table, rows: Sequence[Row]) -> list[str]:
    """Lists each remark about runs once, with the cells it applies to."""
    cells: dict[str, list[str]] = {}
    for name, cell in table.cells.items():
        for remark in remarks([row for row in rows if row.home == cell.home]):
            cells.setdefault(remark, []).append(name)
    return [f"{remark} ({', '.join(names)})" for remark, names in cells.items()]
