"""Plots an estimate: outputs on a few paths, fitted polynomials, and the spectrum."""

from __future__ import annotations

import torch

from ed.core.bases import basis_of


def draw(estimate):
    """Draws an `Estimate` as a Matplotlib figure, without using pyplot."""
    from matplotlib.figure import Figure

    settings, curves = estimate.representation, estimate.curves
    figure = Figure(figsize=(3.2 * (len(curves) + 1), 2.8), layout="constrained")
    *paths, spectrum = figure.subplots(1, len(curves) + 1, squeeze=False)[0]
    fine = torch.linspace(0, 1, 400, dtype=torch.float64, device="cpu")
    basis = basis_of(settings.basis)(2 * fine - 1, settings.degree)
    kind = "output" if settings.components is None else "component"
    for axis, curve, degree in zip(paths, curves, estimate.values.tolist(), strict=False):
        fits = basis @ curve.coefficients.double().mT
        for place, output in enumerate(curve.outputs):
            color, label = f"C{place}", f"{kind} {output}"
            axis.plot(curve.nodes.numpy(), curve.values[:, place].numpy(), ".", c=color, ms=3)
            axis.plot(fine.numpy(), fits[:, place].numpy(), c=color, label=label)
        axis.set(title=f"{estimate.symbol} {degree:.3g}", xlabel="alpha")
        axis.legend(fontsize="small")
    spectrum.bar(range(len(estimate.spectrum)), estimate.spectrum.numpy())
    spectrum.set(title=str(estimate), xlabel="degree k", ylabel="mean |c_k|", yscale="log")
    return figure
