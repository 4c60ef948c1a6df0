"""Result classes: effective degree of a model, and the difference between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ed.core.bases import basis_name
from ed.core.representation import Representation

SYMBOLS = {"raw": "ED", "normalised": "ED_norm", "quadratic": "quadratic ED"}
NORMAL_95 = 1.96  # half-width of a 95 % interval in standard errors


@dataclass(frozen=True, eq=False)  # == on tensors is elementwise
class Curve:
    """A few outputs on one path, for plots.

    Attributes:
        nodes: (r,), positions alpha on the path.
        values: (r, n), the largest outputs or the first principal components.
        coefficients: (n, K + 1), the fitted polynomials.
        outputs: indices of the n outputs.
    """

    nodes: Tensor
    values: Tensor
    coefficients: Tensor
    outputs: list[int]


class _Mean:
    """Mean over paths and its uncertainty, given values (P,) on paths between `ends` (2, P)."""

    values: Tensor
    ends: Tensor
    prediction_error: float

    @property
    def mean(self) -> float:
        return self.values.mean().item()

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; nan for a single path."""
        return math.hypot(standard_error(self.values, self.ends), self.prediction_error)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean; too narrow below about 50 examples or paths."""
        half = NORMAL_95 * self.standard_error
        return self.mean - half, self.mean + half

    def __float__(self) -> float:
        return self.mean

    def __repr__(self) -> str:  # short, because notebooks show it
        return f"<{type(self).__name__}: {self}>"

    def __format__(self, spec: str) -> str:
        return format(self.mean, spec) if spec else str(self)


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(_Mean):
    """Effective degree of a model.

        result = ed.estimate(model, x)
        print(result)              # ED 0.0629 +- 0.0053 (400 paths)
        print(f"{result:.2f}")     # 0.06
        float(result), result.interval, result.to_dict()
        result.plot("paths.png")

    Attributes:
        values: (P,), effective degree of each path.
        spectrum: (K + 1,), mean |c_k| over paths and outputs.
        representation: settings of the fit. With resolution="auto", `representation.resolution` is
            the largest number of nodes on any path.
        ends: (2, P), indices of the two examples that each path connects.
        points: (P,), number of nodes on each path.
        curves: the first paths, for `plot`.
        prediction_error: part of the standard error that is due to predicting values. With
            resolution="auto", ED on some paths is predicted (`ed.core.adaptive`).
    """

    values: Tensor
    spectrum: Tensor
    representation: Representation
    ends: Tensor
    points: Tensor
    curves: tuple[Curve, ...] = ()
    prediction_error: float = 0.0

    @property
    def passes(self) -> int:
        """Number of points at which the model was evaluated."""
        return int(self.points.sum())

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.representation.weighting]

    def __str__(self) -> str:
        error = with_error(self.mean, self.standard_error)
        return f"{self.symbol} {error} ({len(self.values)} paths)"

    def to_dict(self) -> dict:
        """Returns the result as plain numbers, lists and strings, for JSON."""
        settings = ("resolution", "degree", "components", "scale")
        return {
            "symbol": self.symbol,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "interval": list(self.interval),
            "paths": len(self.values),
            "passes": self.passes,
            "basis": basis_name(self.representation.basis),
            **{name: _plain(getattr(self.representation, name)) for name in settings},
            "values": self.values.tolist(),
            "spectrum": self.spectrum.tolist(),
            "ends": self.ends.tolist(),
        }

    def plot(self, path=None):
        """Plots paths, fits and spectrum with Matplotlib; saves the figure if `path` is given."""
        from ed.core.plot import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(_Mean):
    """Difference in effective degree between two models on the same paths: first - second."""

    first: Estimate
    second: Estimate

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """(P,), difference on each path."""
        return self.first.values - self.second.values

    @property
    def ends(self) -> Tensor:  # type: ignore[override]
        return self.first.ends

    @property
    def prediction_error(self) -> float:  # type: ignore[override]
        return math.hypot(self.first.prediction_error, self.second.prediction_error)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.first.symbol} {self.first.mean:.4g} - {self.second.mean:.4g} = "
            f"{with_error(self.mean, self.standard_error)}, 95 % interval [{low:.4g}, {high:.4g}] "
            f"({len(self.values)} paths)"
        )


def _plain(value):
    """Converts numpy's numbers to Python's."""
    return value.item() if hasattr(value, "item") else value


def standard_error(values: Tensor, ends: Tensor) -> float:
    """Standard error of the mean of values (P,) on paths between examples `ends` (2, P).

    The square root of (P / (P - 1) sum_p e_p^2 + sum_{p, q} e_p e_q) / P^2, where e_p is a path's
    deviation from the mean, and the second sum is over different paths p, q with a common end. The
    second sum estimates a variance, so it is clamped at 0. It accounts for paths that share an
    example and are therefore correlated.
    """
    count = len(values)
    if count < 2:
        return math.nan
    deviations = values.double() - values.double().mean()
    alone = deviations.square().sum().item()
    by_end = deviations.new_zeros(int(ends.max()) + 1)
    by_end.index_add_(0, ends.flatten(), deviations.repeat(2))
    shared = by_end.square().sum().item() - 2 * alone
    return math.sqrt(alone * count / (count - 1) + max(shared, 0.0)) / count


def with_error(mean: float, error: float) -> str:
    """Formats "mean +- error", with the error to two significant digits."""
    known = math.isfinite(error) and error > 0
    digits = max(0, 1 - math.floor(math.log10(error))) if known else 4
    return f"{mean:.{digits}f} +- {error:.{digits}f}"
