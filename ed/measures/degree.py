"""Effective degree of a model along paths between examples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ed.core.bases import Basis
from ed.core.estimator import estimate_each
from ed.core.field import Field
from ed.core.memory import Footprint
from ed.core.nodes import ChebyshevNodes
from ed.core.representation import Representation
from ed.core.validate import choice, count, positive
from ed.measures.base import Measure, fixed_subset, untouched

OUTPUTS = ("softmax", "raw")
ENDPOINTS = ("examples", "validation", "noise")


@dataclass(frozen=True)
class EffectiveDegree(Measure):
    """Mean ED over random paths. Defaults to the paper's protocol for trained models.

    Attributes:
        pairs: number of paths.
        resolution, degree, basis, components, weighting: settings of the `Representation`, with
            Chebyshev nodes.
        outputs: "softmax" or "raw" (logits). The paper's ED uses "softmax" and weighting="raw"; its
            ED_norm uses "raw" and weighting="normalised".
        endpoints: what paths connect: training "examples", "validation" examples, or "noise"
            (uniform pixels).
        memory_gib: memory budget for a chunk of forward passes.
        seed: seed for choosing examples and pairs.
    """

    pairs: int = 400
    resolution: int = 200
    degree: int = 40
    basis: Basis | str = "chebyshev"
    components: int | None = None
    weighting: str = "raw"
    outputs: str = "softmax"
    endpoints: str = "examples"
    memory_gib: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        choice("measures: outputs", self.outputs, OUTPUTS)
        choice("measures: endpoints", self.endpoints, ENDPOINTS)
        count("measures: pairs", self.pairs)
        positive("measures: memory_gib", self.memory_gib)
        _ = self.representation  # raises on impossible settings before training

    @cached_property  # warns once
    def representation(self) -> Representation:
        names = ("resolution", "degree", "basis", "components", "weighting")
        settings = {name: getattr(self, name) for name in names}
        return Representation(sampler=ChebyshevNodes(), **settings)

    def check(self, task) -> None:
        if self.outputs == "softmax" and not task.has_logits:
            raise ValueError(
                f"measures: outputs=softmax: {type(task).__name__} has no logits; set outputs=raw"
            )
        if self.endpoints == "validation" and not task.num_validation:
            raise ValueError(
                f"measures: endpoints=validation: {type(task).__name__} has no validation examples "
                "for measures; use endpoints=examples"
            )
        size = self._source(task)[0]  # 0 if unknown before the data is read
        possible = size * (size - 1) // 2
        if size > 0 and self.pairs > possible:
            raise ValueError(
                f"measures: pairs={self.pairs}: {size} examples form only {possible} pairs; use "
                f"at most {possible}"
            )
        if self.endpoints == "noise" and not task.has_noise:
            raise ValueError(
                "measures: endpoints=noise: requires an image task with task.space=input; use "
                "endpoints=examples"
            )

    def check_model(self, model: nn.Module, task) -> None:
        field, representation = self.field(model, task, task.probe()), self.representation
        try:
            Footprint.of(field).check(representation, self.memory_gib)
            how = {"softmax": self.outputs == "softmax", "class_dim": field.class_dim}
            representation.check(field(), **how)
        except ValueError as error:  # each message starts with the name of the setting
            raise ValueError(f"measures: {error}") from None

    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Returns {"": mean over paths, "_se": its standard error}."""
        return self.together([self], model, task)[0]

    @property
    def passes(self) -> tuple:
        return self.pairs, self.resolution, self.endpoints, self.memory_gib, self.seed

    @staticmethod
    @torch.no_grad()
    def together(measures, model: nn.Module, task) -> list[dict[str, float]]:
        """Computes variants that differ only in the fit, from the same forward passes."""
        walk = measures[0]
        with untouched(model):
            results = estimate_each(
                walk.field(model, task),
                readings=[(each.representation, each.outputs == "softmax") for each in measures],
                pairs=walk.pairs,
                memory_gib=walk.memory_gib,
                seed=walk.seed,
            )
        return [{"": result.mean, "_se": result.standard_error} for result in results]

    def field(self, model: nn.Module, task, batch: dict[str, Tensor] | None = None) -> Field:
        """Builds the field at the endpoints: a batch, or up to two examples per path."""
        if batch is None:
            size, examples = self._source(task)
            batch = examples(fixed_subset(size, 2 * self.pairs, self.seed))
        field = task.field(model, batch)
        if self.endpoints == "noise":
            draw = torch.Generator(field.x.device).manual_seed(self.seed)
            field = field.at(task.noise_like(field.x, draw))

        def forward(points, context):
            return field.at(points, context)()[:, task.penalised]

        return replace(field, forward=forward, output=None)

    def _source(self, task) -> tuple[int, Callable[[Tensor], dict[str, Tensor]]]:
        """Returns the number of examples, and the function that returns those of an index."""
        if self.endpoints == "validation":
            return task.num_validation, task.validation_examples
        return task.num_examples, task.examples
