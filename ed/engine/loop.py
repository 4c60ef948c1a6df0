"""The training loop, shared by all tasks and regularizers."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ed.core import validate
from ed.core.model_state import evaluating
from ed.engine.checkpoint import load_checkpoint, other_config, save_checkpoint, save_weights
from ed.engine.metrics import Metrics, brief, check_finite
from ed.engine.run import RunFolder, resolved
from ed.engine.step import TrainStep
from ed.measures.base import in_groups
from ed.runtime import processes, runs
from ed.runtime.console import RunView, duration, interactive
from ed.runtime.signals import STOP_SIGNALS, stop_requests
from ed.tasks.base import Batch, Task

# types of a checkpoint's values
STATE = {"training": dict, "task": object, "rng": list, "step": int, "seconds": (int, float)}
STATE |= {"threads": int, "metrics": str, "config": dict}
logger = logging.getLogger("ed")


class Interrupted(RuntimeError):
    """Raised when a run saves and stops early; the same command resumes it.

    Attributes:
        signals: the signals received; empty if the run reached system.max_minutes.
    """

    def __init__(self, message: str, signals: Sequence[int] = ()):
        super().__init__(message)
        self.signals = tuple(signals)


def train(
    task: Task, model: nn.Module, step: TrainStep, run: RunFolder, *, tracker, measures: dict
) -> dict:
    """Trains to the end and returns the summary; raises `Interrupted` after an early stop."""
    session = _Session(task, model, step, run, measures)
    start = session.resume()
    metrics = Metrics(
        run.path,
        total=task.total_steps,
        start=start,
        saved=session.saved_metrics,
        tracker=tracker,
        writes=run.writes,
    )
    batches = task.batches(model, start)  # closed below, because it may own worker processes
    with contextlib.closing(metrics), contextlib.closing(batches), stop_requests() as stop:
        if run.writes and interactive():
            metrics.view = _view(task, step, metrics)
        _take_steps(session, _numbered(batches, start, task), metrics, stop)
        # no steps were left, e.g. for a published model or a finished run without its metrics
        if start == task.total_steps and not metrics.evaluated(start):
            metrics.log(task.total_steps, session.evaluate())
        # after the last save, because measuring may take a long time
        if measures:
            metrics.begin(f"measuring {', '.join(measures)}")
        measured = session.measure(stop)
        run.withdraw(measures)
        metrics.log(task.total_steps, measured)
    summary = metrics.summary(task.metric, task.higher_is_better)
    if not summary["best"]:
        name, others = type(task).__name__, ", ".join(summary["last"]) or "nothing under eval/"
        logger.warning("%s.evaluate never returned its metric %s: %s", name, task.metric, others)
    summary["last"] |= measured
    summary |= {"steps": task.total_steps, "seconds": round(session.seconds, 1)}
    if run.writes and task.total_steps:  # published models have zero steps and their own file
        save_weights(run.path, model)
    run.finish(summary, measures)
    return summary


def _view(task: Task, step: TrainStep, metrics: Metrics) -> RunView:
    return RunView(
        task.total_steps,
        metrics.start,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        best=metrics.best(task.metric, task.higher_is_better),
        labels={"train/penalty": step.regularizer.penalty_label},
    )


def _take_steps(session: "_Session", batches, metrics: Metrics, stop: Sequence[int]) -> None:
    """Trains on all batches; logs, evaluates, measures and saves when due."""
    task, step, path = session.task, session.step, session.run.path
    system = session.run.cfg.system
    log_every, measure_every = system.log_every, system.measure_every
    save_seconds = system.save_seconds
    limit = math.inf if system.max_minutes is None else 60 * system.max_minutes
    saved_at = began = time.monotonic()
    checked = metrics.start
    evaluations = {step: n for n, step in enumerate(task.evaluation_steps(), start=1)}
    for done, batch in batches:
        step(batch, done - 1)
        metrics.advance(done)
        now = time.monotonic()
        last = done == task.total_steps
        late, due, asked = _agree(now - began >= limit, now - saved_at >= save_seconds, stop)
        if done % log_every == 0 or last:
            values = step.means()
            check_finite(values, checked, done, path)
            checked = done
            metrics.log(done, values | {"time/step_s": metrics.pace(done)})
        if done in evaluations or last:
            metrics.begin("evaluating")
            values = session.evaluate()
            check_finite(values, done - 1, done, path)  # the only check of the last update
            metrics.log(done, values)
            if not last and measure_every and evaluations[done] % measure_every == 0:
                metrics.begin("measuring")
                metrics.log(done, session.measure())
        if (last or asked or late or due) and task.can_save(done):
            check_finite(step.peek() | step.largest_weight(), checked, done, path)
            session.save(done, metrics)
            saved_at = time.monotonic()
            if (asked or late) and not last:
                reached = f"step {done} of {task.total_steps}"
                raise Interrupted(f"stopped and saved at {reached}", asked)


def _numbered(batches: Iterator[Batch], start: int, task: Task) -> Iterator[tuple[int, Batch]]:
    """Yields (step, batch), with steps counted from 1; raises if there are too few batches."""
    done = start
    for done, batch in zip(range(start + 1, task.total_steps + 1), batches, strict=False):
        yield done, batch
    if done < task.total_steps:
        raise ValueError(
            f"{type(task).__name__}.batches ended after {done} of total_steps={task.total_steps}; "
            "it must repeat its data"
        )


class _Session:
    """The objects whose state a checkpoint stores, and the run's total training time."""

    def __init__(
        self, task: Task, model: nn.Module, step: TrainStep, run: RunFolder, measures: dict
    ):
        self.task, self.model, self.step, self.run = task, model, step, run
        self.measures = measures
        self.saved_metrics: str | None = None
        self.earlier_seconds, self.began = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.began

    def resume(self) -> int:
        """Loads the newest intact checkpoint and returns its step, or 0 if there is none."""
        state = load_checkpoint(self.run.path, self._misfit)
        steps = processes.gather(None if state is None else state["step"])
        if len(set(steps)) > 1:
            raise ValueError(
                f"the processes found checkpoints of different steps in {self.run.path}: {steps}; "
                "set system.runs to a folder that all machines share"
            )
        if state is not None:
            self._load(state)
        processes.copy_from_first([*self.model.parameters(), *self.model.buffers()])
        return 0 if state is None else state["step"]

    def _misfit(self, state: dict) -> str | None:
        """Returns the reason a checkpoint does not belong to this run, or None if it does."""
        if lacking := sorted(STATE.keys() - state.keys()):
            return f"it has no {', '.join(lacking)}"
        if wrong := [key for key, kind in STATE.items() if not isinstance(state[key], kind)]:
            return f"it has an invalid {', '.join(wrong)}"
        if not 0 <= state["step"] <= self.task.total_steps:
            return f"its step {state['step']} is not within 0 and {self.task.total_steps}"
        return other_config(state, runs.identity(resolved(self.run.cfg)))

    def _load(self, state: dict) -> None:
        path, before, now = self.run.path, len(state["rng"]), processes.world_size()
        if before != now:  # batches and random draws would be split differently
            raise ValueError(
                f"{path} was started with {before} processes and cannot resume with {now}: use "
                f"{before} processes or another system.run_dir"
            )
        try:
            self.step.load_state_dict(state["training"])
            self.task.load_state_dict(state["task"])
            rng = state["rng"][processes.rank()]
            torch.set_rng_state(rng["cpu"])
            if self.step.device.type == "cuda" and "cuda" in rng:
                torch.cuda.set_rng_state(rng["cuda"])
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint in {path} does not fit this run ({validate.brief(error)}): move "
                "it, or use another system.run_dir"
            ) from error
        self.earlier_seconds, self.saved_metrics = state["seconds"], state["metrics"]
        threads, current = state["threads"], torch.get_num_threads()
        if self.step.device.type == "cpu" and threads != current:
            logger.warning(
                f"{path} was started with {threads} threads and resumes with {current}: results "
                "may differ in the last digits from an uninterrupted run; set "
                f"system.threads={threads}"
            )
        logger.info("resuming %s at step %d", path, state["step"])

    def save(self, step: int, metrics: Metrics) -> None:
        rng = {"cpu": torch.get_rng_state()}
        if self.step.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        state = {
            "training": self.step.state_dict(),
            "task": self.task.state_dict(),
            "rng": processes.gather(rng),
            "step": step,
            "seconds": self.seconds,
            "threads": torch.get_num_threads(),
            "metrics": metrics.text(),
            "config": runs.identity(resolved(self.run.cfg)),
        }
        if self.run.writes:
            metrics.sync()
            save_checkpoint(self.run.path, state)
        processes.wait_for_all()  # no process may exit while rank 0 is writing

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        # compiling for the shapes of evaluation costs more than it saves
        with evaluating(self.model), self.step.autocast, torch.compiler.set_stance("force_eager"):
            return _numbers(self.task.evaluate(self.model))

    def measure(self, stop: Sequence = ()) -> dict[str, float]:
        """Runs every measure on the current model, without changing it.

        Args:
            stop: stop requests, checked between measures; pass them only after the last save.
        """
        values = {}
        for group in in_groups(self.measures):
            *_, asked = _agree(False, False, stop)
            if asked:
                name = next(iter(group))
                raise Interrupted(f"stopped before measure {name}; the model is saved", asked)
            members = list(group.values())
            # bf16 is too coarse for polynomial fits; pure evaluations use the training precision
            precision = self.step.autocast if members[0].evaluates else contextlib.nullcontext()
            with precision, torch.compiler.set_stance("force_eager"):
                found = members[0].together(members, self.model, self.task)
            for name, numbers in zip(group, found, strict=True):
                values |= {f"measure/{name}{key}": x for key, x in _numbers(numbers).items()}
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            logger.warning("%s is %s: left out", name, values.pop(name))  # e.g. radius too large
        return values


def _numbers(values: dict) -> dict[str, float]:
    """Converts tensors, which a user's own task or measure may return, for the JSON log."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return values | {name: value.item() for name, value in tensors.items()}


def _agree(late: bool, due: bool, stop: Sequence[int]) -> tuple[bool, bool, Sequence[int]]:
    """Combines the flags of all processes, so that all save and stop at the same step."""
    late, due, *asked = processes.anyone(late, due, *(number in stop for number in STOP_SIGNALS))
    return late, due, [number for number, yes in zip(STOP_SIGNALS, asked, strict=True) if yes]


def describe(summary: dict) -> str:
    """Summarises a finished run in one line."""
    last = brief(dict(sorted(summary["last"].items())))
    values = "  ".join(f"{value:.4g}" for value in summary["best"].values())
    best = f"  (best {values})" if values else ""  # PPO has no best value until an episode ends
    return f"{last}{best}  in {duration(summary['seconds'])}"
