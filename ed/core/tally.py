"""Accumulates coefficients and effective degrees over chunks of paths."""

from __future__ import annotations

import torch
from torch import Tensor

from ed.core.fit import applied, fit_matrix, widened
from ed.core.outputs import beside, by_path
from ed.core.pca import principal_scores
from ed.core.representation import Representation, over_positions
from ed.core.result import Curve, Estimate

PATHS_SHOWN, OUTPUTS_SHOWN = 3, 3


class Tally:
    """Computes effective degrees from outputs that arrive a few nodes at a time.

    Coefficients are linear in the outputs, so the pieces of a path can be summed. PCA is not
    linear and needs all outputs of a path at once.
    """

    def __init__(self, representation: Representation, softmax: bool, class_dim: int | None):
        self.representation, self.softmax, self.class_dim = representation, softmax, class_dim
        self.degrees: list[Tensor] = []
        self.spectra: list[Tensor] = []
        self.curves: list[Curve] = []

    def begin(self, nodes: Tensor) -> None:
        """Starts a group of paths with nodes (P, r) or (r,)."""
        settings = self.representation
        self.nodes, self.done = nodes, 0
        self.total: Tensor | None = None
        self.held: list[Tensor] = []
        self.shown: list[Tensor] = []
        if settings.components is None:
            basis, damping = settings.basis, settings.damping
            self.matrix = fit_matrix(widened(nodes), settings.degree, basis=basis, damping=damping)

    def take(self, outputs: Tensor, paths: int) -> None:
        """Adds outputs (P * n, ...) at the next n nodes of all paths in the group."""
        values = by_path(outputs, paths, self.class_dim).to(self.nodes.dtype)
        values = values.softmax(-1) if self.softmax else values
        count = values.shape[-2]
        if self.representation.components is not None:
            self.held.append(values)
        else:
            columns = self.matrix[..., self.done : self.done + count]
            part = applied(beside(values, columns, 2), values)
            self.total = part if self.total is None else self.total + part
            self._show(values)
        self.done += count

    def end(self) -> None:
        """Finishes the group once all its nodes have been added."""
        settings = self.representation
        if settings.components is not None:
            values = torch.cat(self.held, dim=-2)
            coefficients = settings.coefficients(values, beside(values, self.nodes, 1))
            self._show(principal_scores(self._few(values), settings.components))
        else:
            assert self.total is not None  # `take` has been called
            coefficients = self.total.to(self.nodes.dtype).mT
        self._add_curves(coefficients)
        self.total, self.held = None, []
        degrees = settings.degrees(coefficients)
        self.degrees.append(over_positions(degrees, 1))
        self.spectra.append(over_positions(coefficients.abs().mean(-2), 2).sum(0))

    def estimate(self, ends: Tensor) -> Estimate:
        values = torch.cat(self.degrees).cpu()
        check_finite(values)
        spectrum = torch.stack(self.spectra).sum(0) / len(values)
        points = torch.full_like(values, self.representation.resolution, dtype=torch.long)
        return Estimate(
            values, spectrum.cpu(), self.representation, ends, points, tuple(self.curves)
        )

    def _show(self, values: Tensor) -> None:
        """Keeps the largest outputs of the first paths for plots, chosen at the first nodes."""
        few = self._few(values)
        if not len(few):
            return
        flat = few.mT.reshape(len(few), -1, few.shape[-2])  # (P, outputs, n)
        if not self.shown:
            self.picked = flat.amax(-1).topk(min(OUTPUTS_SHOWN, flat.shape[1])).indices
        index = self.picked.unsqueeze(-1).expand(-1, -1, flat.shape[-1])
        self.shown.append(flat.gather(1, index))

    def _add_curves(self, coefficients: Tensor) -> None:
        few = self._few(coefficients)
        if not len(few):
            return
        few = few.reshape(len(few), -1, few.shape[-1])
        values = torch.cat(self.shown, dim=-1).mT.cpu()
        for path, (picked, fits) in enumerate(zip(self.picked, few, strict=True)):
            nodes = self.nodes if self.nodes.dim() == 1 else self.nodes[path]
            curve = Curve(nodes.cpu(), values[path], fits[picked].cpu(), picked.tolist())
            self.curves.append(curve)

    def _few(self, values: Tensor) -> Tensor:
        """Selects the paths from (P, ...) that plots still need."""
        return values[: PATHS_SHOWN - len(self.curves)]


def highest_curve(nodes: Tensor, values: Tensor, coefficients: Tensor) -> Curve:
    """Selects the largest outputs from (r, C) or (S, r, C) on one path, with their fits."""
    flat = values.mT.reshape(-1, values.shape[-2])
    picked = flat.amax(-1).topk(min(OUTPUTS_SHOWN, len(flat))).indices
    fits = coefficients.reshape(-1, coefficients.shape[-1])[picked]
    return Curve(nodes.cpu(), flat[picked].mT.cpu(), fits.cpu(), picked.tolist())


def check_finite(values: Tensor) -> None:
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ValueError(
            f"outputs: not finite on {bad} of {len(values)} paths; check weights and input scaling"
        )
