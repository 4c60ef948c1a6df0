"""Rejects impossible combinations of settings before any data is loaded."""

from collections.abc import Iterable

from ed.core.validate import choice, count, not_negative, optional
from ed.regularizers.base import Regularizer
from ed.runtime.processes import world_size
from ed.tasks.base import Task

PRECISIONS = ("bf16", "float32")
LOGGER_MODES = ("online", "offline", "shared", "disabled")  # modes of wandb.init
SWITCHES = ("compile", "kernels", "cuda_graph", "channels_last")  # keys in `system`


def check(cfg, task: Task, regularizer: Regularizer, measures: Iterable = ()) -> None:
    check_precision(cfg)
    choice("logger.mode", cfg.logger.get("mode", "online"), LOGGER_MODES)
    name = type(task).__name__
    if not task.metric.startswith("eval/"):
        raise ValueError(
            f"{name}.metric is {task.metric!r}: rename it to eval/{task.metric}, also in `evaluate`"
        )
    _check_split(count("accumulate", cfg.accumulate), task)
    for switch in SWITCHES:
        choice(f"system.{switch}", cfg.system[switch], ("auto", True, False))
    if cfg.system.cuda_graph is True and not task.static_shapes:
        raise ValueError(
            f"system.cuda_graph=true: the batches of {name} differ in shape; use auto, or batches "
            "of one shape (task.padding=fixed for text)"
        )
    count("system.log_every", cfg.system.log_every)
    optional(count, "system.threads", cfg.system.threads)
    optional(count, "system.workers", cfg.system.workers, least=0)
    not_negative("system.save_seconds", cfg.system.save_seconds)
    optional(not_negative, "system.max_minutes", cfg.system.max_minutes)
    every = optional(count, "system.measure_every", cfg.system.measure_every)
    if cfg.system.activation_checkpointing and regularizer.no_checkpointing:
        raise ValueError(
            f"system.activation_checkpointing=true: {regularizer.no_checkpointing}; set it to false"
        )
    if every is not None and not cfg.measures:
        raise ValueError(
            f"system.measure_every={every}: there is nothing to measure; add measures, e.g. "
            "measures=[ed,norm], or set it to null"
        )
    regularizer.check(task, cfg.accumulate * world_size())
    for measure in measures:
        if measure.reads_examples and type(task).examples is Task.examples:
            raise ValueError(
                f"measures: {type(measure).__name__} needs training examples, but {name} has "
                "none; remove it from measures"
            )
        measure.check(task)


def check_precision(cfg) -> None:
    choice("precision", cfg.precision, PRECISIONS)


def _check_split(accumulate: int, task: Task) -> None:
    """Raises if a batch cannot be split among the processes and `accumulate` parts."""
    number, name, size = world_size(), type(task).__name__, task.batch_size
    reason = task.no_sharing or task.no_parts
    if number > 1 and reason:
        raise ValueError(f"{number} processes cannot train {name} together: {reason}; use one")
    if accumulate > 1 and task.no_parts:
        raise ValueError(f"accumulate={accumulate}: {task.no_parts}; set accumulate=1 for {name}")
    if size % (accumulate * number):
        raise ValueError(
            f"task.batch_size={size}: must be a multiple of accumulate={accumulate} x {number} "
            "processes"
        )
