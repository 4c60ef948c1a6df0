"""Sharpness-aware minimisation (Foret et al., 2021) and adaptive SAM (Kwon et al., 2021)."""

import torch
from torch import Tensor, nn

from ed.core.validate import choice, not_negative
from ed.regularizers.base import Regularizer

TINY = 1e-12  # avoids division by a zero gradient norm
SCOPES = ("weights", "all")


class Sam(Regularizer):
    """Descends along the gradient at w + e, with e = rho g / ||g||.

    Both gradients use the same minibatch. Gradient clipping affects only the second one, as e does
    not depend on the length of g. With several processes, each computes e from its own examples,
    as in Foret et al.
    """

    def __init__(self, rho: float = 0.05):
        self.rho = not_negative("regularizer.rho", rho)

    def step(self, optimizer: torch.optim.Optimizer, closure) -> dict[str, Tensor]:
        report = closure(sync=False)
        named = _with_gradient(optimizer)
        weights = list(named.values())
        before = [torch.empty_like(weight) for weight in weights]
        with torch.no_grad():
            torch._foreach_copy_(before, weights)  # one kernel, where clones take one per tensor
            torch._foreach_add_(weights, self.ascent(named))
        closure(update_statistics=False)  # keep those of the original weights
        with torch.no_grad():
            torch._foreach_copy_(weights, before)  # subtracting e would not restore w exactly
        optimizer.step()
        return report

    def ascent(self, named: dict[str, nn.Parameter]) -> list[Tensor]:
        """Returns the perturbation e, one tensor per parameter."""
        gradients = [weight.grad for weight in named.values()]
        return self._of_radius_rho(gradients, gradients)

    def _of_radius_rho(self, directions: list[Tensor], measured: list[Tensor]) -> list[Tensor]:
        """rho * directions / ||measured||, with one norm over all tensors."""
        norm = nn.utils.get_total_norm(measured)
        return torch._foreach_mul(directions, self.rho / (norm + TINY))


class Asam(Sam):
    """SAM in a ball that scales with the weights: e = rho T^2 g / ||T g||, T diagonal.

    With scope="weights", as in the authors' code, T = |w| + eta for parameters whose name contains
    "weight", and 1 for all others. With scope="all", another common form, T = |w| for every
    parameter, without eta; this needs a larger rho.
    """

    def __init__(self, rho: float = 0.5, *, eta: float = 0.01, scope: str = "weights"):
        super().__init__(rho)
        self.eta = not_negative("regularizer.eta", eta)
        self.scope = choice("regularizer.scope", scope, SCOPES)

    def ascent(self, named: dict[str, nn.Parameter]) -> list[Tensor]:
        scales = self.scales(named)
        once = _products({name: weight.grad for name, weight in named.items()}, scales)
        twice = _products(once, scales)
        return self._of_radius_rho(list(twice.values()), list(once.values()))

    def scales(self, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns the diagonal of T for the parameters where it is not 1, in their shapes."""
        scaled = {name: w for name, w in named.items() if self.scope == "all" or "weight" in name}
        if not scaled:
            return {}
        scales = torch._foreach_abs(list(scaled.values()))
        if self.scope == "weights":
            torch._foreach_add_(scales, self.eta)
        return dict(zip(scaled, scales, strict=True))


def _products(vectors: dict[str, Tensor], scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiplies the vectors that have a scale with it."""
    if not scales:
        return vectors
    scaled = torch._foreach_mul([vectors[name] for name in scales], list(scales.values()))
    return vectors | dict(zip(scales, scaled, strict=True))


def _with_gradient(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns the parameters that have a gradient, by their names in the optimizer."""
    return {
        name: weight
        for group in optimizer.param_groups
        for name, weight in zip(group["param_names"], group["params"], strict=True)
        if weight.grad is not None
    }
