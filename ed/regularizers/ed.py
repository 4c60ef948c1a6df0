"""Effective degree as a penalty (Algorithm 1 of the paper)."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ed.core.bases import Basis
from ed.core.fit import DAMPING
from ed.core.model_state import evaluating
from ed.core.nodes import RandomizedCosine, Sampler
from ed.core.pca import waits_for_device
from ed.core.penalty import Paths, check_anchored
from ed.core.representation import PAIRINGS, Representation
from ed.core.validate import choice, count, fraction, not_negative, optional
from ed.regularizers.base import COMPILATION, Regularizer, StepState, check_two_examples, cut

ENDPOINTS = ("batch", "noise")
RAMPS = ("sine", "cosine")
PENALISED, PLAIN = 0, 1  # variants of a step


def mean_degree(paths: Paths, outputs: Tensor) -> Tensor:
    """Returns the mean effective degree over paths, given outputs at their points."""
    return paths.degrees(outputs).mean()


class EDRegularizer(Regularizer):
    """task loss + lambda ED, on paths between examples of the minibatch."""

    penalty_label = "ED"
    mean_degree = staticmethod(mean_degree)  # compiled by `compile`

    def __init__(
        self,
        weight: float = 7.0,
        sampler: Sampler = RandomizedCosine(),  # noqa: B008, immutable
        *,
        pairs: int | None = None,
        pairing: str = "random",
        every: int = 1,
        resolution: int = 4,
        degree: int = 3,
        basis: Basis | str = "chebyshev",
        anchored: bool = True,
        components: int | None = None,
        weighting: str = "raw",
        damping: float = DAMPING,
        detach_pca: bool = False,
        ramp: float = 1 / 3,
        ramp_shape: str = "sine",
        endpoints: str = "batch",
        path_dropout: bool = True,
        scale: str = "paper",
    ):
        not_negative("regularizer.weight", weight)
        optional(count, "regularizer.pairs", pairs)
        choice("regularizer.pairing", pairing, PAIRINGS)
        count("regularizer.every", every)
        choice("regularizer.endpoints", endpoints, ENDPOINTS)
        choice("regularizer.ramp_shape", ramp_shape, RAMPS)
        fraction("regularizer.ramp", ramp)
        count("regularizer.degree", degree)  # a constant has effective degree 0
        if detach_pca and components is None:
            raise ValueError(
                "regularizer.detach_pca=true: requires PCA; set regularizer.components as well"
            )
        self.weight, self.pairs, self.anchored = weight, pairs, anchored
        self.ramp, self.ramp_shape, self.endpoints = ramp, ramp_shape, endpoints
        self.path_dropout, self.pairing, self.every = path_dropout, pairing, every
        try:
            fitted = {"resolution": resolution, "degree": degree, "components": components}
            how = {"sampler": sampler, "basis": basis, "damping": damping}
            how |= {"weighting": weighting, "scale": scale, "detach_pca": detach_pca}
            if anchored:
                check_anchored(resolution)
            self.representation = Representation(**fitted, **how)
        except ValueError as error:  # each message starts with the name of the setting
            raise ValueError(f"regularizer.{error}") from None
        if components is not None and waits_for_device(resolution):
            self.no_capture = f"PCA on {resolution} nodes waits for the device"

    def check(self, task, parts: int = 1) -> None:
        check_two_examples(task, parts, "paths need")
        if not task.has_logits:
            raise ValueError(
                f"regularizer=ed: {type(task).__name__} has no classes; set regularizer=none"
            )
        most = parts * (task.batch_size // parts) ** 2
        if self.pairs is not None and self.pairs > most:
            raise ValueError(
                f"regularizer.pairs={self.pairs}: {task.batch_size} examples (task.batch_size)"
                f"{cut(parts)} form only {most} pairs; use fewer, or null for half the batch"
            )
        if self.pairs is not None and self.pairs % parts:
            raise ValueError(
                f"regularizer.pairs={self.pairs}: use a multiple of {parts} for a batch{cut(parts)}"
            )
        if self.anchored and not task.has_labels:
            raise ValueError(
                f"regularizer.anchored=true: {type(task).__name__} has no labels; use false"
            )
        if self.endpoints == "noise" and not task.has_noise:
            raise ValueError(
                "regularizer.endpoints=noise: requires an image task with task.space=input; use "
                "regularizer.endpoints=batch"
            )

    def check_model(self, model: nn.Module, task) -> None:
        batch = task.probe()
        if batch is not None:
            field = task.field(model, batch)
            outputs = field()[:, task.penalised]
            try:
                self.representation.check(outputs, softmax=True, class_dim=field.class_dim)
            except ValueError as error:
                raise ValueError(f"regularizer.{error}") from None

    def compile(self, model: nn.Module) -> None:
        super().compile(model)
        self.mean_degree = torch.compile(mean_degree, **COMPILATION)

    def variant(self, step: int) -> int:
        return PENALISED if step % self.every == 0 else PLAIN

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        if state.variant == PLAIN:
            return super().objective(task, field, batch, state)
        if not self.path_dropout:
            field = replace(field, aside=partial(evaluating, field.module))
        ends = field
        if self.endpoints == "noise":
            ends = field.at(task.noise_like(field.x, state.generator))
        paths = Paths.draw(
            ends,
            self.representation,
            self._pairs(len(field.x), state.parts),
            labels=batch["label"] if self.anchored else None,
            pairing=self.pairing,
            generator=state.generator,
        )
        at_batch, on_paths = field.with_paths(paths.field)
        loss, report = task.loss(at_batch, batch)
        degree = self.mean_degree(paths, on_paths[:, task.penalised])
        # every k-th step has k times the weight, so the average penalty stays the same
        weight = self.weight * self.every * self.strength(state.progress)
        total = loss + weight * degree
        return total, report | {"penalty": degree.detach()}

    def strength(self, progress: Tensor) -> Tensor:
        """Returns the multiplier of lambda: rises from 0 to 1 over the ramp, then stays at 1."""
        if self.ramp == 0:
            return progress.new_ones(())
        t = (progress / self.ramp).clamp(max=1)
        if self.ramp_shape == "sine":
            return (t * math.pi / 2).sin()
        return (1 - (t * math.pi).cos()) / 2

    def _pairs(self, size: int, parts: int) -> int:
        """Returns the number of paths in a part; by default half its examples, as in the paper."""
        return size // 2 if self.pairs is None else self.pairs // parts
