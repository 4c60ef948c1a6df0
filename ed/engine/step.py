"""One training step: eager on a CPU, compiled and captured in a CUDA graph on a GPU.

Steps never copy tensors to the host: the learning rate, the progress and the sums of reported
values stay on the device, and the host reads them only at log points.
"""

import contextlib
import logging
import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from ed.core.model_state import batch_norms, frozen_statistics
from ed.engine.activation_checkpointing import recompute_blocks
from ed.engine.optimizer import (
    OptimizerConfig,
    fixed_rate,
    lay_out_like_weights,
    set_learning_rate,
)
from ed.regularizers.base import Regularizer, StepState
from ed.runtime import processes
from ed.runtime.distributed import average_gradients
from ed.runtime.streams import reseed
from ed.tasks.base import Batch, Task

EAGER_STEPS = 3  # before capture, which needs compiled code, optimizer state and library handles
logger = logging.getLogger("ed")


class TrainStep:
    """Updates the model with one batch per call; `means()` returns the averaged metrics."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        regularizer: Regularizer,
        recipe: OptimizerConfig,
        *,
        device: torch.device,
        seed: int,
        accumulate: int = 1,
        bf16: bool = False,
        compile_model: bool = False,
        kernels: bool | str = False,
        capture: bool = False,
        recompute: bool = False,
    ):
        self.task, self.model, self.regularizer, self.recipe = task, model, regularizer, recipe
        self.device, self.seed, self.accumulate = device, seed, accumulate
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self.optimizer = recipe.build(model.named_parameters(), device)
        self.state = StepState(
            progress=torch.zeros((), device=device),
            generator=torch.Generator(device),
            parts=accumulate * processes.world_size(),
        )
        self.sums: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()  # number of steps in each sum
        self.names: dict[int, set[str]] = {}  # metric names of the objective, by variant
        self.reported: dict[int, tuple[str, ...]] = {}  # metric names of the whole step
        twice = "system.activation_checkpointing=true runs blocks twice" if recompute else None
        if recompute:
            recompute_blocks(model)
        if kernels and _allowed(regularizer.no_kernels, "using Triton kernels"):
            for part in model.modules():
                if hasattr(part, "kernels"):
                    part.kernels = kernels
        if compile_model and _allowed(twice, "compiled"):
            regularizer.compile(model)
        many = "several processes average their gradients" if processes.world_size() > 1 else None
        # checkpointing and several processes are untested in CUDA graphs
        no_capture = regularizer.no_capture or twice or many or fixed_rate(self.optimizer, device)
        self.capture = capture and _allowed(no_capture, "captured in a CUDA graph")
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # one per variant; all read `inputs`
        self.inputs: Batch = {}
        self.stream = torch.cuda.Stream() if self.capture else None
        self.eager_steps: Counter[int] = Counter()

    def __call__(self, batch: Batch, step: int) -> None:
        if not self.task.yields_share:
            batch = processes.share(batch)
        total = self.task.total_steps
        set_learning_rate(self.optimizer, self.recipe.lr_at(step, total, self.task.warmup_steps))
        self.state.progress.fill_(step / total)
        reseed(self.state.generator, self.seed, processes.own_stream("regularizer"), step)
        variant = self.regularizer.variant(step)
        self.state = replace(self.state, variant=variant)
        if not self.capture:
            self._update(batch)
        elif self.eager_steps[variant] < EAGER_STEPS:
            self._update_on_stream(batch)
            self.eager_steps[variant] += 1
        else:
            if variant not in self.graphs:
                self._record(batch)
            self._fill_inputs(batch)
            self.graphs[variant].replay()
        self.counts.update(self.reported[variant])

    def peek(self) -> dict[str, float]:
        """Returns mean metrics since the last `means()`, each over the steps that reported it.

        This waits for the device, so call it only to log and save.
        """
        counts = {name: self.counts[name] for name in self.sums if self.counts[name]}
        return {f"train/{name}": self.sums[name].item() / n for name, n in counts.items()}

    @torch.no_grad()
    def largest_weight(self) -> dict[str, float]:
        """Returns the largest absolute weight; it becomes NaN or inf one step before the loss."""
        largest = torch._foreach_norm(list(self.model.parameters()), math.inf)
        return {"largest weight": torch.stack(largest).amax().item()}

    def means(self) -> dict[str, float]:
        """Returns the same as `peek`, then resets the sums."""
        values = self.peek()
        for value in self.sums.values():
            value.zero_()
        self.counts.clear()
        return values

    def state_dict(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sums": dict(self.sums),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        stored = state["optimizer"]
        groups = zip(stored["param_groups"], self.optimizer.param_groups, strict=True)
        # keep the options for this device, e.g. fused kernels; torch would load the saved ones
        own = [own | {"params": saved["params"]} for saved, own in groups]
        self.optimizer.load_state_dict(stored | {"param_groups": own})
        lay_out_like_weights(self.optimizer)
        self.sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self.counts = Counter(state["counts"])

    def _update(self, batch: Batch) -> None:
        def closure(sync: bool = True, update_statistics: bool = True) -> dict[str, Tensor]:
            return self._gradients(batch, sync, update_statistics)

        report = self.regularizer.step(self.optimizer, closure)
        if processes.world_size() > 1:
            report = self._averaged(report)
        for name, value in report.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), device=self.device)
            self.sums[name].add_(value)
        self.reported[self.state.variant] = tuple(report)

    def _averaged(self, report: dict[str, Tensor]) -> dict[str, Tensor]:
        """Averages the report and the batch-norm running statistics over all processes.

        In training, batch norm uses only the part of the batch on each process.
        """
        norms = batch_norms(self.model)
        statistics = [b for norm in norms for b in norm.buffers() if b.is_floating_point()]
        means = processes.mean([*report.values(), *statistics])
        if statistics:
            torch._foreach_copy_(statistics, means[len(report) :])
        return dict(zip(report, means, strict=False))

    def _gradients(self, batch: Batch, sync: bool, update_statistics: bool) -> dict[str, Tensor]:
        """Computes the clipped gradients of the objective; returns the mean report."""
        self.optimizer.zero_grad(set_to_none=True)
        reports = []
        statistics = contextlib.nullcontext if update_statistics else frozen_statistics
        with statistics(self.model):
            for part in _split(batch, self.accumulate):
                with self.autocast:
                    field = self.task.field(self.model, part)
                    loss, report = self.regularizer.objective(self.task, field, part, self.state)
                (loss / self.accumulate).backward()
                self._check_names(report)
                reports.append(report)
        if sync:
            average_gradients(self.model.parameters())
        if self.recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        return {name: sum(r[name] for r in reports) / len(reports) for name in reports[0]}

    def _check_names(self, report: dict[str, Tensor]) -> None:
        """Raises if the reported names change, because a CUDA graph cannot change them."""
        names = self.names.setdefault(self.state.variant, set(report))
        if set(report) != names:
            raise ValueError(
                f"{type(self.regularizer).__name__} reports {', '.join(sorted(report))} after "
                f"{', '.join(sorted(names))}; report the same names at every step"
            )

    def _update_on_stream(self, batch: Batch) -> None:
        """Runs an eager step on the capture stream, because autograd remembers streams."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._update(batch)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, batch: Batch) -> None:
        """Captures a step in a CUDA graph without running it."""
        self.inputs = self.inputs or {name: value.clone() for name, value in batch.items()}
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.state.generator)
        torch.cuda.synchronize()
        # thread_local, because the thread that pins batches may allocate memory during capture
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._update(self.inputs)
        except RuntimeError as error:
            error.add_note(
                "The step was being captured in a CUDA graph, where nothing may wait for the "
                "device, e.g. by .item(); system.cuda_graph=false runs it without a graph"
            )
            raise
        self.graphs[self.state.variant] = graph

    def _fill_inputs(self, batch: Batch) -> None:
        """Copies a batch to the inputs of the graphs; `copy_` alone would broadcast one example."""
        expected, found = (
            {name: tuple(value.shape) for name, value in part.items()}
            for part in (self.inputs, batch)
        )
        if found != expected:
            raise ValueError(
                f"{type(self.task).__name__}.batches: the shapes changed from {expected} to "
                f"{found}, which a CUDA graph cannot do; set static_shapes = False in the task, or "
                "system.cuda_graph=false"
            )
        for name, value in batch.items():
            self.inputs[name].copy_(value)


def _split(batch: Batch, parts: int) -> list[Batch]:
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: chunk[i] for name, chunk in chunks.items()} for i in range(parts)]


def _allowed(reason: str | None, how: str) -> bool:
    if reason:
        logger.info("this step is not %s: %s", how, reason)
    return not reason
