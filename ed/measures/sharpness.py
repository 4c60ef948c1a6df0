"""Sharpness: how much the training loss rises within a ball of radius rho around the weights.

The ball is ||e / T|| <= rho with T = 1 (plain), or T = |w| elementwise (adaptive, which does not
depend on how scale is distributed between consecutive layers). Both methods search over u = e / T,
for which the ball is ||u|| <= rho and the gradient is T g:

    step   one SAM step (Foret et al.; Kwon et al.): u = rho T g / ||T g||, so that
           e = rho g / ||g||, or e = rho w^2 g / || |w| g || if adaptive
    worst  projected gradient ascent with the step-size rule of Auto-PGD (Croce & Hein), as in
           Andriushchenko et al.; its first iterate is `step`

The model is in eval mode, the loss is the task's, in float64 from the outputs on, and training
examples are not augmented. Below a loss of about 1e-9, the network's own float32 limits it. By
default, one search covers all selected examples. With `group`, each group of examples has its own
search, and the increases are averaged over examples (m-sharpness, as in da Silva et al.).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ed.core.fit import widened
from ed.core.validate import choice, count, each, optional, positive
from ed.measures.base import Measure, fixed_subset, in_batches, untouched
from ed.runtime.streams import generator

METHODS = ("step", "worst")
MOMENTUM = 0.75  # weight of the new direction; also the required fraction of successful steps
TINY = 1e-12  # avoids division by zero

Tensors = list[Tensor]


@dataclass(frozen=True)
class Sharpness(Measure):
    """Increase in loss, L(w + e) - L(w), for each radius.

    Attributes:
        radii: values of rho.
        adaptive: use T = |w| instead of 1.
        method: "step" or "worst".
        steps: number of gradient steps of the worst-case search, for each radius.
        examples: size of a fixed subset of the training examples; None uses all.
        group: examples per search; None uses one search for all.
        batch_size: examples per pass; affects memory, not the result.
        seed: seed for choosing the subset and groups.
    """

    radii: tuple[float, ...] = (0.01, 0.05, 0.1)
    adaptive: bool = False
    method: str = "step"
    steps: int = 20
    examples: int | None = None
    group: int | None = None
    batch_size: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        choice("measures: method", self.method, METHODS)
        each(positive, "measures: radii", self.radii)
        count("measures: steps", self.steps)
        count("measures: batch_size", self.batch_size)
        optional(count, "measures: group", self.group)
        optional(count, "measures: examples", self.examples)

    def check(self, task) -> None:
        if task.no_parts is None:
            return
        # num_examples is 0 if unknown before the data is read
        sizes = [size for size in (self.group, self.examples, task.num_examples) if size]
        if not sizes or min(sizes) > self.batch_size:
            raise ValueError(
                f"measures: batch_size={self.batch_size}: {type(task).__name__} needs all examples "
                f"of a search in one pass, as {task.no_parts}; set group={self.batch_size}, or "
                "raise batch_size to the value of group or examples"
            )

    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Returns {"_<rho>": increase in loss}."""
        with untouched(model):
            groups = self.groups(task.num_examples)
            # the last group may be smaller
            rises = [[len(i) * rise for rise in self.rises(model, task, i)] for i in groups]
        means = [math.fsum(each) / sum(map(len, groups)) for each in zip(*rises, strict=True)]
        return {f"_{rho:g}": mean for rho, mean in zip(self.radii, means, strict=True)}

    def groups(self, size: int) -> Sequence[Tensor]:
        """Returns the indices of the examples in each search."""
        index = fixed_subset(size, self.examples, self.seed)
        if self.group is None:
            return [index]
        # shuffle, as data may be sorted by class
        order = torch.randperm(len(index), generator=generator(self.seed, "groups"))
        return index[order].split(self.group)

    def rises(self, model: nn.Module, task, index: Tensor) -> list[float]:
        """Returns the increase in loss on these examples for each radius."""
        surface = Surface(model, task, index, self)
        if self.method == "step":
            found = [one_step(surface, rho) for rho in self.radii]
        else:
            found = [worst_case(surface, rho, self.steps) for rho in self.radii]
        surface.leave()
        return found


class Surface:
    """The loss as a function of u, at weights w + T u."""

    def __init__(self, model: nn.Module, task, index: Tensor, settings: Sharpness):
        self.model, self.task, self.index = model, task, index
        parts = in_batches(task, index, settings.batch_size)
        # keep the examples if they fit in one pass, so that images are decoded only once
        self.batches = list(parts) if len(index) <= settings.batch_size else None
        self.batch_size = settings.batch_size
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.centre = [weight.detach().clone() for weight in self.weights]
        self.scales = [w.abs() if settings.adaptive else torch.ones_like(w) for w in self.centre]
        self.loss, self.slope = self.gradient([torch.zeros_like(w) for w in self.centre])

    def value(self, u: Tensors) -> float:
        self._move(u)
        with torch.no_grad():
            return float(sum(loss.double() for loss in self._parts()))

    def gradient(self, u: Tensors) -> tuple[float, Tensors]:
        """Returns the loss and its gradient with respect to u."""
        self._move(u)
        total, sums = 0.0, [torch.zeros_like(weight) for weight in self.weights]
        with torch.enable_grad():
            for loss in self._parts():
                slopes = torch.autograd.grad(
                    loss, self.weights, allow_unused=True, materialize_grads=True
                )
                torch._foreach_add_(sums, slopes)
                total += loss.detach().double()
        return float(total), torch._foreach_mul(sums, self.scales)

    def leave(self) -> None:
        """Restores the weights."""
        self._move([torch.zeros_like(weight) for weight in self.weights])

    def _parts(self) -> Iterator[Tensor]:
        """Yields the contribution of each batch to the mean loss."""
        batches = self.batches or in_batches(self.task, self.index, self.batch_size)
        for batch, share in batches:
            # in float32, the loss of confident outputs would be 0
            outputs = widened(self.task.field(self.model, batch)())
            loss, _ = self.task.loss(outputs, batch)
            yield loss * share

    def _move(self, u: Tensors) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.centre)
            torch._foreach_add_(self.weights, torch._foreach_mul(self.scales, u))


def one_step(surface: Surface, rho: float) -> float:
    return surface.value(_of_length(surface.slope, rho)) - surface.loss


def worst_case(surface: Surface, rho: float, steps: int) -> float:
    """Returns the largest increase found by gradient ascent in the ball ||u|| <= rho.

    Starts at the centre, with momentum and steps of length 2 rho. At each checkpoint, the search
    halves the step length and returns to the best point if fewer than three quarters of the steps
    since the last checkpoint increased the loss. It also does so if the best loss has not improved
    since the last checkpoint, unless that checkpoint already halved the length.
    """
    checkpoints, length = _checkpoints(steps), 2 * rho
    point = before = best = [torch.zeros_like(w) for w in surface.centre]
    loss = highest = surface.loss
    slope = best_slope = surface.slope
    ups, last_check, highest_then, halved = 0, 0, loss, False
    for step in range(1, steps + 1):
        ahead = _into_ball(torch._foreach_add(point, _of_length(slope, length)), rho)
        if step > 1:
            drift = torch._foreach_sub(point, before)
            ahead = torch._foreach_lerp(torch._foreach_add(point, drift), ahead, MOMENTUM)
            ahead = _into_ball(ahead, rho)
        before, point = point, ahead
        earlier, (loss, slope) = loss, surface.gradient(point)
        ups += loss > earlier
        if loss > highest:
            highest, best, best_slope = loss, point, slope
        if step in checkpoints:
            stuck = not halved and highest == highest_then
            halved = ups < MOMENTUM * (step - last_check) or stuck
            if halved:
                length, point, before, loss, slope = length / 2, best, best, highest, best_slope
            ups, last_check, highest_then = 0, step, highest
    return highest - surface.loss


def _checkpoints(steps: int) -> set[int]:
    """Returns Auto-PGD's checkpoints: at 22 %, 41 %, 57 %, ... of the steps.

    Each gap is 3 percentage points smaller than the previous one, but at least 6.
    """
    places, gap = [22], 22  # integers, as 0.22 + 0.19 + 0.16 + 0.13 is not exactly 0.7 in floats
    while places[-1] < 100:
        gap = max(gap - 3, 6)
        places.append(places[-1] + gap)
    return {math.ceil(place * steps / 100) for place in places}


def _of_length(direction: Tensors, length: float) -> Tensors:
    # the squares of a confident network's gradients would underflow
    largest = nn.utils.get_total_norm(direction, math.inf)
    direction = torch._foreach_div(direction, largest.clamp(min=torch.finfo(largest.dtype).tiny))
    norm = nn.utils.get_total_norm(direction)
    return torch._foreach_mul(direction, length / norm.clamp(min=TINY))


def _into_ball(u: Tensors, rho: float) -> Tensors:
    norm = nn.utils.get_total_norm(u)
    return torch._foreach_mul(u, (rho / (norm + TINY)).clamp(max=1))
