"""The one training loop, for every task and every regularizer."""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ed.core.model_state import evaluating
from ed.engine.checkpoint import load_checkpoint, save_checkpoint, save_weights
from ed.engine.metrics import Metrics, brief, check_finite, duration
from ed.engine.run import RunFolder, resolved
from ed.engine.step import TrainStep
from ed.measures.base import in_groups
from ed.runtime import processes, runs
from ed.runtime.console import RunView, interactive
from ed.tasks.base import Batch, Task

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
STATE = {"training", "task", "rng", "step", "seconds", "threads", "metrics", "config"}
logger = logging.getLogger("ed")


class Interrupted(RuntimeError):
    """The run stopped early on request, saved; the same command goes on.

    Attributes:
        signals: the requests that came as signals; none where `max_seconds` were over.
    """

    def __init__(self, message: str, signals: Sequence[int] = ()):
        super().__init__(message)
        self.signals = tuple(signals)


@dataclass(frozen=True)
class Cadence:
    """How often the loop looks up from its work.

    Attributes:
        log_steps: steps between rows of training metrics.
        save_seconds: least time between checkpoints.
        max_seconds: save and stop after this long; None: never.
        measure_evals: evaluations between measurements; None: at the end only.
    """

    log_steps: int
    save_seconds: float
    max_seconds: float | None = None
    measure_evals: int | None = None

    def measures_at(self, evaluation: int) -> bool:
        return self.measure_evals is not None and evaluation % self.measure_evals == 0


def train(
    task: Task,
    model: nn.Module,
    step: TrainStep,
    run: RunFolder,
    cadence: Cadence,
    tracker,
    measures: dict,
) -> dict:
    """Trains to the end, or raises `Interrupted` once saved. Returns the summary of the run."""
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
    batches = task.batches(model, start)  # closed at the end: it may have processes of its own
    with contextlib.closing(metrics), contextlib.closing(batches), _stop_requests() as stop:
        if run.writes and interactive():
            metrics.view = _view(task, step, metrics)
        _take_steps(session, _numbered(batches, start, task), metrics, cadence, stop)
        # nothing was left to train: a published model, or a run whose rows are lost
        if start == task.total_steps and not metrics.evaluated(start):
            metrics.log(task.total_steps, session.evaluate())
        # after the last save: measuring may take long, and what is trained is safe by then
        if measures:
            metrics.begin(f"measuring {', '.join(measures)}")
        metrics.log(task.total_steps, session.measure(stop))
    summary = metrics.summary(task.metric, task.higher_is_better)
    summary |= {"steps": task.total_steps, "seconds": round(session.seconds, 1)}
    if run.writes and task.total_steps:  # zero steps: a published model, which has a file already
        save_weights(run.path, model)
    run.finish(summary)
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


def _take_steps(session: "_Session", batches, metrics: Metrics, cadence: Cadence, stop) -> None:
    """Trains on numbered batches; logs, evaluates, measures and saves when each is due."""
    task, step, path = session.task, session.step, session.run.path
    saved_at = began = time.monotonic()
    checked = metrics.start
    evaluations = {step: n for n, step in enumerate(task.evaluation_steps(), start=1)}
    for done, batch in batches:
        step(batch, done - 1)
        metrics.advance(done)
        now = time.monotonic()
        last = done == task.total_steps
        late = cadence.max_seconds is not None and now - began >= cadence.max_seconds
        late, due, asked = _agree(late, now - saved_at >= cadence.save_seconds, stop)
        if done % cadence.log_steps == 0 or last:
            values = step.means()
            check_finite(values, checked, done, path)
            checked = done
            metrics.log(done, values | {"time/step_s": metrics.pace(done)})
        if done in evaluations or last:
            metrics.begin("evaluating")
            values = session.evaluate()
            check_finite(values, done - 1, done, path)  # the only check on the last update
            metrics.log(done, values)
            if not last and cadence.measures_at(evaluations[done]):
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
    """Batches, each with the number of steps that are done with it, until all are."""
    done = start
    for done, batch in zip(range(start + 1, task.total_steps + 1), batches, strict=False):
        yield done, batch
    if done < task.total_steps:
        raise ValueError(
            f"{type(task).__name__}.batches ended after {done} of total_steps="
            f"{task.total_steps}: it must go on, epoch after epoch"
        )


class _Session:
    """What belongs together in a checkpoint, and the clock of the whole run."""

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
        """Loads the newest good checkpoint and returns its step, 0 where there is none."""
        state = load_checkpoint(self.run.path, logger.warning, self._misfit)
        self._check_same_checkpoint(state)
        if state is not None:
            self._load(state)
        processes.copy_from_first([*self.model.parameters(), *self.model.buffers()])
        return 0 if state is None else state["step"]

    def _check_same_checkpoint(self, state: dict | None) -> None:
        steps = processes.gather(None if state is None else state["step"])
        if len(set(steps)) > 1:
            raise ValueError(
                f"the processes find checkpoints of different steps in {self.run.path}: {steps}. "
                "Its file system must be one that all machines share; see system.runs"
            )

    def _misfit(self, state: dict) -> str | None:
        """Why a checkpoint is not one of this run."""
        lacking = sorted(STATE - set(state))
        if lacking:
            return f"it lacks {', '.join(lacking)}"
        difference = self.run.difference(state["config"])
        return difference and f"it has another config: {difference}"

    def _load(self, state: dict) -> None:
        before, now = len(state["rng"]), processes.world_size()
        if before != now:  # batches are cut otherwise, and so are the draws of a regularizer
            raise ValueError(
                f"{self.run.path} was begun with {before} processes and cannot go on with {now}: "
                f"start {before}, or begin anew in another folder with system.run_dir"
            )
        try:
            self.step.load_state_dict(state["training"])
            self.task.load_state_dict(state["task"])
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"the checkpoint in {self.run.path} does not fit this run ({reason}): move it "
                "away, or begin anew in another folder with system.run_dir"
            ) from error
        rng = state["rng"][processes.rank()]
        torch.set_rng_state(rng["cpu"])
        if self.step.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
        self.earlier_seconds = state["seconds"]
        self.saved_metrics, threads = state["metrics"], state["threads"]
        if self.step.device.type == "cpu" and threads != torch.get_num_threads():
            logger.warning(
                "%s was begun with %d threads and goes on with %d: its results may differ in the "
                "last digits from those of an uninterrupted run; set system.threads=%d",
                self.run.path,
                threads,
                torch.get_num_threads(),
                threads,
            )
        logger.info("resuming %s at step %d", self.run.path, state["step"])

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
        processes.wait_for_all()  # whoever goes first must not end the one that writes

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        # eager: the shapes differ from training's, and compiling for them costs more than it saves
        with evaluating(self.model), self.step.autocast, torch.compiler.set_stance("force_eager"):
            return self.task.evaluate(self.model)

    def measure(self, stop: Sequence = ()) -> dict[str, float]:
        """Every measure of the model as it stands, which it leaves exactly so.

        In the weights' own precision: a polynomial of degree 40 or a rise of the loss at a small
        radius would drown in the rounding of bf16. What only evaluates does it as `evaluate`, to
        find the same numbers. `stop` is heeded between measures: only where everything is saved,
        as after training.
        """
        values = {}
        for group in in_groups(self.measures):
            *_, asked = _agree(False, False, stop)
            if asked:
                name = next(iter(group))
                raise Interrupted(f"stopped before measure {name}; what is trained is saved", asked)
            members = list(group.values())
            precision = self.step.autocast if members[0].evaluates else contextlib.nullcontext()
            with precision, torch.compiler.set_stance("force_eager"):
                found = members[0].together(members, self.model, self.task)
            for name, numbers in zip(group, found, strict=True):
                values |= {f"measure/{name}{suffix}": value for suffix, value in numbers.items()}
        wild = [name for name, value in values.items() if not math.isfinite(value)]
        for name in wild:  # a radius may be too large for a model; the others still count
            logger.warning("%s is %s: left out", name, values.pop(name))
        return values


def _agree(late: bool, due: bool, stop: Sequence[int]) -> tuple[bool, bool, Sequence[int]]:
    """What any process wants, so that all save and stop after the same step."""
    late, due, *asked = processes.anyone(late, due, *(number in stop for number in STOP_SIGNALS))
    return late, due, [number for number, yes in zip(STOP_SIGNALS, asked, strict=True) if yes]


@contextlib.contextmanager
def _stop_requests():
    """A list that becomes true once someone asked us to stop: Ctrl-C, SIGTERM, SLURM's USR2.

    A request is granted after the step, once saved; a second Ctrl-C stops at once.
    """
    requests: list[int] = []

    def ask(number: int, _) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(number)

    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(summary: dict) -> str:
    """One line about a finished run."""
    last = brief(dict(sorted(summary["last"].items())))
    values = "  ".join(f"{value:.4g}" for value in summary["best"].values())
    best = f"  (best {values})" if values else ""  # PPO: none before an episode has ended
    return f"{last}{best}  in {duration(summary['seconds'])}"
