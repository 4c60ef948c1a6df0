"""Impossible combinations, found before data or device is touched. Each message names its key."""

from collections.abc import Iterable

from ed.core.validate import choice, count, optional
from ed.regularizers.base import Regularizer
from ed.runtime.processes import world_size
from ed.tasks.base import Task

PRECISIONS = ("bf16", "float32")
LOGGER_MODES = ("online", "offline", "shared", "disabled")  # wandb's
SWITCHES = ("compile", "kernels", "cuda_graph", "channels_last")  # of `system`


def check(cfg, task: Task, regularizer: Regularizer, measures: Iterable = ()) -> None:
    check_precision(cfg)
    choice("logger.mode", cfg.logger.get("mode", "online"), LOGGER_MODES)
    if not task.metric.startswith("eval/"):
        raise ValueError(
            f"{type(task).__name__}.metric is {task.metric!r}: call it eval/{task.metric}, here "
            "and in `evaluate`; tables and scripts/runs.py show what begins so"
        )
    if task.batch_size % count("accumulate", cfg.accumulate):
        raise ValueError(
            f"accumulate={cfg.accumulate}: must divide task.batch_size={task.batch_size}"
        )
    _check_sharing(cfg.accumulate, task)
    for name in SWITCHES:
        choice(f"system.{name}", cfg.system[name], ("auto", True, False))
    count("system.log_every", cfg.system.log_every)
    optional(count, "system.threads", cfg.system.threads)
    every = optional(count, "system.measure_every", cfg.system.measure_every)
    if cfg.system.activation_checkpointing and regularizer.no_checkpointing:
        raise ValueError(
            f"system.activation_checkpointing=true: {regularizer.no_checkpointing}; set false"
        )
    if every is not None and not cfg.measures:
        raise ValueError(
            f"system.measure_every={every}: there is nothing to measure; name some, e.g. "
            "measures=[ed,norm], or set null"
        )
    regularizer.check(task, cfg.accumulate * world_size())
    for measure in measures:
        if measure.reads_examples and type(task).examples is Task.examples:
            raise ValueError(
                f"measures: {type(task).__name__} gives no training examples to "
                f"{type(measure).__name__}; leave it out of measures"
            )
        measure.check(task)


def check_precision(cfg) -> None:
    choice("precision", cfg.precision, PRECISIONS)


def _check_sharing(accumulate: int, task: Task) -> None:
    """Whether a batch can be cut: by the processes, where there are several, and `accumulate`."""
    number, no_sharing = world_size(), task.no_sharing or task.no_parts
    if number > 1 and no_sharing:
        raise ValueError(
            f"{number} processes cannot train {type(task).__name__} together: {no_sharing}; "
            "start one process"
        )
    if accumulate > 1 and task.no_parts:
        raise ValueError(
            f"accumulate={accumulate}: {type(task).__name__} needs its batches whole, as "
            f"{task.no_parts}; set accumulate=1"
        )
    if task.batch_size % (accumulate * number):
        raise ValueError(
            f"task.batch_size={task.batch_size}: must divide evenly among {number} processes"
            + (f" x accumulate={accumulate}" if accumulate > 1 else "")
        )
