"""Builds and trains the run of a composed config, and loads trained runs."""

import contextlib
import inspect
import logging
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ed.core.model_state import evaluating
from ed.core.validate import count
from ed.engine.check import check
from ed.engine.checkpoint import load_checkpoint, trained_weights, warn_if_damaged
from ed.engine.loop import Interrupted, describe, train
from ed.engine.metrics import LogFile, TerminalHandler
from ed.engine.run import RunFolder, check_classes, earlier_sessions, resolved
from ed.engine.settings import check_leaf, check_settings
from ed.engine.step import TrainStep
from ed.engine.trust import check_targets, read_config, stored_config, targets
from ed.models.weights import load_weights
from ed.runtime import console, processes, runs
from ed.runtime.distributed import join, local_device
from ed.runtime.files import INSTALLED
from ed.runtime.streams import stream_seed
from ed.tasks.base import Task

logger = logging.getLogger("ed")


def run(cfg: DictConfig, names: list[str]) -> dict:
    """Trains or resumes the run of a config and returns its summary.

    Processes started by torchrun or srun train one run together.

    Args:
        names: parts of the folder name, e.g. ["cifar10", "vit_tiny", "ed"].
    """
    join()
    if "classes" in cfg.task and cfg.task.classes is None:
        check_leaf("task", cfg.task)
        cfg.task.classes = instantiate(cfg.task).classes  # count the classes in the data
    check_settings(cfg)
    digest = runs.digest(resolved(cfg))
    default = Path(cfg.system.runs, "adhoc", "-".join([*names, digest]), f"seed{cfg.seed}")
    path = Path(cfg.system.run_dir or default)
    check_same_run(f"{path}, config {digest}, seed {cfg.seed}")
    try:
        summary = _run(cfg, path)
    except Interrupted:  # wait, because torchrun stops all processes when one exits
        processes.wait_for_all()
        raise
    processes.wait_for_all()
    return summary


def _run(cfg: DictConfig, path: Path) -> dict:
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    recipe, measures = instantiate(cfg.optimizer), build_measures(cfg)
    check(cfg, task, regularizer, measures.values())
    task.workers = cfg.system.workers  # in `system`, because it does not affect results
    device = choose_device(cfg.system.device)
    if console.interactive():
        console.print_facts({"device": device_name(device), "folder": str(path)})
    if cfg.system.cuda_graph is True and device.type != "cuda":
        raise ValueError(f"system.cuda_graph=true: {device} does not support CUDA graphs; use auto")
    torch.use_deterministic_algorithms(cfg.system.deterministic)
    if cfg.system.threads is not None:
        torch.set_num_threads(cfg.system.threads)
    torch.manual_seed(stream_seed(cfg.seed, "init"))
    model = build_model(cfg, device)
    task.check_model(model)
    task.prepare(device, cfg.seed)
    check_steps(task)
    check_examples(task, measures)
    with torch.no_grad(), evaluating(model):
        for part in (regularizer, *measures.values()):
            part.check_model(model, task)
    torch.manual_seed(stream_seed(cfg.seed, processes.own_stream("dropout")))

    writes = processes.rank() == 0
    with contextlib.closing(RunFolder(path, cfg, writes=writes)) as folder:
        log_to(path / runs.LOG if writes else None)
        # rank 0 decides, because other machines may see the folder later or not at all
        summary = processes.gather(runs.read_done(path))[0]
        if summary is not None:
            report_end("already done", cfg, task, path, summary)
            if writes:
                warn_if_damaged(path)
            names = processes.gather(unmeasured(cfg, measures, path, task) if writes else None)[0]
            if not names:
                return summary
            measures = {name: measures[name] for name in names}
        step = make_step(cfg, task, model, regularizer, recipe, device)
        summary = train_in(folder, task, model, step, measures)
        report_end("done", cfg, task, path, summary)
        return summary


def check_steps(task: Task) -> None:
    """Checks the step counts, which a user's own task may leave unchecked."""
    for name, least in (("total_steps", 0), ("eval_steps", int(task.total_steps > 0))):
        count(f"{type(task).__name__}.{name}", getattr(task, name, least), least=least)


def check_examples(task: Task, measures: dict) -> None:
    """Checks measures again, because the number of examples is now known."""
    for name, measure in measures.items():
        if measure.reads_examples and not task.num_examples:
            raise ValueError(
                f"measures: {name} needs training examples, but {type(task).__name__}.num_examples "
                "is 0; set it to the number that `examples` can return, at the latest in `prepare`"
            )
        measure.check(task)


def report_end(how: str, cfg: DictConfig, task, path: Path, summary: dict) -> None:
    """Reports a finished run in train.log, and on the terminal as a panel or a line."""
    logger.log(console.plain_level(), "%s: %s  %s", how, path, describe(summary))
    if console.interactive():
        title = f"{how} in {console.duration(summary['seconds'])}"
        console.print_result(title, closing_facts(cfg, task, path, summary))


def closing_facts(cfg: DictConfig, task, path: Path, summary: dict) -> dict[str, str]:
    """Returns what to print about a finished run: results, folder and a suggested next command."""
    facts = {}
    for metric, best in summary["best"].items():
        last = summary["last"].get(metric, best)
        facts[console.label(metric)] = f"{console.number(last)}  (best {console.number(best)})"
    degree, error = (summary["last"].get(f"measure/{key}") for key in ("ed", "ed_se"))
    facts["ED"] = "not measured" if degree is None else console.number(degree)
    facts["ED"] += "" if error is None else f" ± {console.number(error)}  (standard error)"
    facts["folder"] = str(path)
    if degree is None and task.num_examples and cfg.system.keep_checkpoint:
        command = "ed-measure" if INSTALLED else "python scripts/measure.py"
        more = "" if task.has_logits else " --raw-outputs"
        more += "" if all(name.startswith("ed.") for name in targets(cfg)) else " --trust"
        facts["next"] = f"{command} \\\n    --run {shlex.quote(str(path))}{more}"
    elif not INSTALLED:
        facts["next"] = f"python scripts/runs.py \\\n    {shlex.quote(str(path.parent))}"
    return facts


def check_same_run(ours: str) -> None:
    """Raises if the processes were started with different configs or folders."""
    first, *others = processes.gather(ours)
    for number, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"the processes have different runs: {first} (rank 0), {other} (rank {number}); "
                "use one torchrun or srun per run, or start several runs with -m"
            )


def make_step(cfg: DictConfig, task, model, regularizer, recipe, device) -> TrainStep:
    """Builds the training step, by default compiled and captured on a GPU if shapes are static."""
    system, fast = cfg.system, device.type == "cuda" and task.static_shapes
    if wants_channels_last(model, device, system.channels_last):
        model.to(memory_format=torch.channels_last)
    compile_model = fast if system.compile == "auto" else system.compile
    if compile_model:  # after eight versions of a function, torch stops compiling it
        torch.compiler.reset()  # drops those of earlier runs in this process
    return TrainStep(
        task,
        model,
        regularizer,
        recipe,
        device=device,
        seed=cfg.seed,
        accumulate=cfg.accumulate,
        bf16=uses_bf16(cfg, device),
        compile_model=compile_model,
        kernels=fast and "auto" if system.kernels == "auto" else system.kernels,
        capture=fast if system.cuda_graph == "auto" else system.cuda_graph,
        recompute=system.activation_checkpointing,
    )


def uses_bf16(cfg: DictConfig, device: torch.device) -> bool:
    return cfg.precision == "bf16" and device.type == "cuda"


def wants_channels_last(model: nn.Module, device: torch.device, choice: bool | str) -> bool:
    """Returns whether to store weights channels last, which is faster for convolutions on a GPU.

    Activations use the format of the weights. Models with a single convolution are transformers,
    whose patch embedding gains nothing from it.
    """
    if choice != "auto":
        return choice
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return device.type == "cuda" and convolutions > 1


def build_model(cfg: DictConfig, device: torch.device) -> nn.Module:
    """Builds the model on its device; passes `device` to constructors that have this parameter."""
    wanted = inspect.signature(get_method(cfg.model._target_)).parameters
    where = {"device": str(device)} if "device" in wanted else {}
    return instantiate(cfg.model, **where).to(device)


def build_measures(cfg: DictConfig) -> dict:
    """Builds the measures of a config, by name."""
    built = {}
    for name, leaf in (cfg.get("measures") or {}).items():
        try:
            built[name] = instantiate(leaf, _convert_="all")
        except InstantiationException as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            reason = str(error.__cause__).removeprefix("measures: ")
            separator = "." if re.match(r"\w+(\[\d+\])?=", reason) else ": "
            raise ValueError(f"measures.{name}{separator}{reason}") from error
    return built


def unmeasured(cfg: DictConfig, measures: dict, path: Path, task) -> list[str]:
    """Returns the measures to take on a finished run, or [] if its final checkpoint is gone.

    These are the measures that are missing or were taken with other settings.
    """
    stored = read_config(path / runs.CONFIG).get("measures") or {}
    leaves = {name: leaf for name, leaf in stored.items() if name in measures}
    earlier = OmegaConf.create({"measures": leaves})
    if not cfg.system.trust:
        check_targets(earlier, path / runs.CONFIG, own=targets(cfg))
    taken = build_measures(earlier)
    # compare objects and configs: older configs lack newer keys, and classes may not define ==
    missing = [
        name
        for name, measure in measures.items()
        if taken.get(name) != measure and leaves.get(name) != cfg.measures[name]
    ]
    if not missing:
        return []
    state = load_checkpoint(path)
    reached = 0 if state is None else state["step"]  # a published model trains for zero steps
    if reached == task.total_steps:
        logger.info("measuring it: %s", ", ".join(missing))
        return missing
    logger.warning(
        "not measured: %s; the run finished without these measures or with other settings, and its "
        "final checkpoint is gone. To measure, train again with another system.run_dir",
        ", ".join(missing),
    )
    return []


def train_in(folder: RunFolder, task: Task, model, step: TrainStep, measures: dict) -> dict:
    """Trains in an open folder; logs the session in meta.json and any error in train.log."""
    cfg, number = folder.cfg, processes.world_size()
    name = device_name(step.device)
    details = {"processes": number, "threads": torch.get_num_threads()} | task.provenance()
    folder.open_session(name, task.total_steps, **details)
    if number > 1:
        name = f"{number} processes, each on {name}"
    start = "%s on %s: %d steps"
    logger.log(console.plain_level(), start, folder.path, name, task.total_steps)
    tracker = start_tracker(cfg, folder.path) if folder.writes else None
    try:
        summary = train(task, model, step, folder, tracker=tracker, measures=measures)
    except BaseException as error:
        reason = str(error) or type(error).__name__  # a second Ctrl-C has no message
        logger.debug("stopped: %s", reason)  # only in train.log; `explain` prints errors
        raise
    finally:
        if tracker is not None:
            tracker.close()
    if folder.writes and not cfg.system.keep_checkpoint:
        for file in (*runs.CHECKPOINTS, runs.WEIGHTS):
            (folder.path / file).unlink(missing_ok=True)
    return summary


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with its task and config.

    Attributes:
        model: in eval mode, on the device.
        task: includes its data unless the run was loaded with `data=False`.
        config: the run's config.yaml.
    """

    model: nn.Module
    task: Task
    config: DictConfig


def load_run(
    folder: str | Path,
    device: str | torch.device = "auto",
    *,
    data: bool = True,
    trust: bool = False,
) -> LoadedRun:
    """Loads a trained model with its task and config from a run folder.

    Args:
        folder: contains config.yaml, and last.pt or model.safetensors.
        device: auto, cpu, cuda or cuda:N.
        data: whether to load the task's data.
        trust: whether to build classes from outside ed, which can run arbitrary code.
    """
    folder = Path(folder)
    if not runs.is_run(folder):
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {runs.CONFIG}")
    cfg = stored_config(folder, trust=trust)
    weights = trained_weights(folder, runs.identity(resolved(cfg)))
    if weights is None:
        remedy = "train with system.keep_checkpoint=true"
        if not runs.is_done(folder):
            remedy = "it ended before its first save; finish its training"
        raise FileNotFoundError(f"{folder} has no checkpoint: {remedy}")
    if runs.read_done(folder) is None and not (folder / runs.WEIGHTS).exists():
        logger.warning("%s has not finished: these are the weights of its last checkpoint", folder)
    for name in ("task", "model"):
        check_leaf(name, cfg[name])
    with torch.random.fork_rng(devices=[]):  # new weights are random until they are loaded
        task, where = instantiate(cfg.task), choose_device(device, "device=")
        if data:
            task.prepare(where, cfg.seed)
            check_classes(folder, earlier_sessions(folder), task.provenance())
        model = load_weights(build_model(cfg, where), weights, str(folder), into=runs.CONFIG)
    return LoadedRun(model.eval(), task, cfg)


def choose_device(name: str | torch.device, option: str = "system.device=") -> torch.device:
    name = str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise ValueError(f"{option}{name}: use auto, cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{option}{name}: torch sees no CUDA device; use {option}cpu")
    if device.type == "cuda" and processes.world_size() > 1:
        return local_device(name)
    if device.type == "cuda" and device.index is not None:
        gpus = torch.cuda.device_count()
        if device.index >= gpus:
            raise ValueError(f"{option}{name}: torch sees {gpus} GPUs; use {option}cuda")
        torch.cuda.set_device(device)  # the default for streams, random states and kernels
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def start_tracker(cfg: DictConfig, folder: Path):
    """Builds the logger of a config, or returns None if it is disabled."""
    if cfg.logger.get("mode") == "disabled":
        return None
    settings = OmegaConf.to_container(cfg, resolve=True)
    # partial, because `instantiate` would also instantiate the config it is given
    return instantiate(cfg.logger, _partial_=True)(folder=folder, config=settings)


def log_to(path: Path | None) -> None:
    """Replaces the log handlers: logs to the terminal and `path`, or nowhere if it is None."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.disabled = False  # Hydra disables it before every job
    handlers = [TerminalHandler(sys.stdout), LogFile(path)] if path else [logging.NullHandler()]
    handlers[0].setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
