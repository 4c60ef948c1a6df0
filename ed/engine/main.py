"""From a composed config to a finished run."""

import contextlib
import inspect
import logging
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ed.engine.check import check
from ed.engine.checkpoint import load_checkpoint, remove_checkpoints, trained_weights
from ed.engine.loop import Cadence, Interrupted, describe, train
from ed.engine.metrics import LogFile, TerminalHandler, duration
from ed.engine.run import RunFolder, default_folder, resolved
from ed.engine.settings import check_leaf, check_settings
from ed.engine.step import TrainStep
from ed.engine.trust import check_targets, read_config, stored_config, targets
from ed.runtime import console, processes, runs
from ed.runtime.distributed import join, local_device
from ed.runtime.files import INSTALLED
from ed.runtime.streams import stream_seed
from ed.tasks.base import Task

logger = logging.getLogger("ed")


def run(cfg: DictConfig, names: list[str]) -> dict:
    """Trains what the config says in its own folder, or goes on there. Returns the summary.

    Where torchrun or srun started several processes for it, they train together.

    Args:
        names: what the folder is called by, e.g. ["cifar10", "vit_tiny", "ed"].
    """
    join()
    fill_in_classes(cfg)
    check_settings(cfg)
    path = Path(cfg.system.run_dir or default_folder(cfg, names))
    check_same_run(cfg, path)
    try:
        summary = _run(cfg, path)
    except Interrupted:  # all of them, so that the first to leave does not end the others early
        processes.wait_for_all()
        raise
    processes.wait_for_all()
    return summary


def _run(cfg: DictConfig, path: Path) -> dict:
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    recipe, measures = instantiate(cfg.optimizer), build_measures(cfg)
    check(cfg, task, regularizer, measures.values())
    task.workers = cfg.system.workers  # not the task's own setting: it cannot change a result
    device = choose_device(cfg.system.device)
    if console.interactive():
        console.print_facts({"device": device_name(device), "folder": str(path)})
    if cfg.system.cuda_graph is True and device.type != "cuda":
        raise ValueError(f"system.cuda_graph=true: {device} has no CUDA graphs; leave it at auto")
    torch.use_deterministic_algorithms(cfg.system.deterministic)
    if cfg.system.threads is not None:
        torch.set_num_threads(cfg.system.threads)
    torch.manual_seed(stream_seed(cfg.seed, "init"))
    model = build_model(cfg, device)
    task.check_model(model)
    task.prepare(device, cfg.seed)
    for measure in measures.values():
        measure.check(task)  # again, now that it knows how many examples there are
    torch.manual_seed(stream_seed(cfg.seed, processes.own_stream("dropout")))

    writes = processes.rank() == 0
    with contextlib.closing(RunFolder(path, cfg, writes=writes)) as folder:
        log_to(path / runs.LOG if writes else None)
        # the first decides: on another machine the folder may be another one, or seen later
        summary = processes.gather(folder.done)[0]
        if summary is not None:
            report_end("already done", cfg, task, path, summary)
            names = processes.gather(unmeasured(cfg, measures, path, task) if writes else None)[0]
            if not names:
                return summary
            measures = {name: measures[name] for name in names}
        step = make_step(cfg, task, model, regularizer, recipe, device)
        summary = train_in(folder, cfg, task, model, step, measures)
        report_end("done", cfg, task, path, summary)
        return summary


def report_end(how: str, cfg: DictConfig, task, path: Path, summary: dict) -> None:
    """Reports a finished run: a panel on a terminal, a line in the log and elsewhere."""
    logger.log(console.plain_level(), "%s: %s  %s", how, path, describe(summary))
    if console.interactive():
        title = f"{how} in {duration(summary['seconds'])}"
        console.print_result(title, closing_facts(cfg, task, path, summary))


def closing_facts(cfg: DictConfig, task, path: Path, summary: dict) -> dict[str, str]:
    """What a finished run reached, its folder, and a command that is useful next."""
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
        facts["next"] = f"{command} \\\n    --run {shlex.quote(str(path))}{more}"
    elif not INSTALLED:
        facts["next"] = f"python scripts/runs.py \\\n    {shlex.quote(str(path.parent))}"
    return facts


def fill_in_classes(cfg: DictConfig) -> None:
    """Replaces task.classes=null by the number in the data, which models and config.yaml need."""
    if "classes" in cfg.task and cfg.task.classes is None:
        cfg.task.classes = instantiate(cfg.task).classes


def check_same_run(cfg: DictConfig, path: Path) -> None:
    """Tasks of one srun are one run here; elsewhere they may be meant as several."""
    ours = f"{path}, config {runs.digest(resolved(cfg))}, seed {cfg.seed}"
    first, *others = processes.gather(ours)
    for number, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"the processes were given different runs: rank 0 has {first}, rank {number} has "
                f"{other}. Start them by one command, and several runs by -m or one after another"
            )


def make_step(cfg: DictConfig, task, model, regularizer, recipe, device) -> TrainStep:
    """The training step; on a GPU with static shapes compiled and captured unless told not to."""
    fast = device.type == "cuda" and task.static_shapes
    if wants_channels_last(model, device, cfg.system.channels_last):
        model.to(memory_format=torch.channels_last)
    return TrainStep(
        task,
        model,
        regularizer,
        recipe,
        device=device,
        seed=cfg.seed,
        accumulate=cfg.accumulate,
        bf16=uses_bf16(cfg, device),
        compile_model=fast if cfg.system.compile == "auto" else cfg.system.compile,
        kernels=fast if cfg.system.kernels == "auto" else cfg.system.kernels,
        capture=fast if cfg.system.cuda_graph == "auto" else cfg.system.cuda_graph,
        recompute=cfg.system.activation_checkpointing,
    )


def uses_bf16(cfg: DictConfig, device: torch.device) -> bool:
    return cfg.precision == "bf16" and device.type == "cuda"


def wants_channels_last(model: nn.Module, device: torch.device, choice: bool | str) -> bool:
    """Whether pictures lie channels last in memory, which a GPU's convolutions are fastest in.

    Weights that lie so make every activation lie so: batches may come as they are. A single
    convolution is the patch embedding of a transformer, which gains nothing.
    """
    if choice != "auto":
        return choice
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return device.type == "cuda" and convolutions > 1


def build_model(cfg: DictConfig, device: torch.device) -> nn.Module:
    """The model of a config, on its device, where some also compute what they begin with."""
    wanted = inspect.signature(get_method(cfg.model._target_)).parameters
    where = {"device": str(device)} if "device" in wanted else {}
    return instantiate(cfg.model, **where).to(device)


def build_measures(cfg: DictConfig) -> dict:
    """The measures of a config, by their names."""
    leaves = cfg.get("measures") or {}
    return {name: build_measure(leaf) for name, leaf in leaves.items()}


def build_measure(leaf: DictConfig):
    return instantiate(leaf, _convert_="all")


def unmeasured(cfg: DictConfig, measures: dict, path: Path, task) -> list[str]:
    """Measures that a finished run was not given, or with other settings, and can be given now."""
    stored = read_config(path / runs.CONFIG).get("measures") or {}
    leaves = {name: leaf for name, leaf in stored.items() if name in measures}
    if not cfg.system.trust:
        built = OmegaConf.create({"measures": leaves})
        check_targets(built, path / runs.CONFIG, own=targets(cfg))
    taken = {name: build_measure(leaf) for name, leaf in leaves.items()}
    # equal as measures: a default may have had no key then; as text: a class may know no equality
    missing = [
        name
        for name, measure in measures.items()
        if taken.get(name) != measure and leaves.get(name) != cfg.measures[name]
    ]
    if not missing:
        return []
    state = load_checkpoint(path, logger.warning)
    reached = 0 if state is None else state["step"]  # a published model has no step to reach
    if reached == task.total_steps:
        logger.info("measuring it: %s", ", ".join(missing))
        return missing
    logger.warning(
        "it was finished without these measures, or with other settings of them: %s; there is no "
        "checkpoint of its end to take them of. Train it anew in another folder (system.run_dir)",
        ", ".join(missing),
    )
    return []


def train_in(
    folder: RunFolder, cfg: DictConfig, task, model, step: TrainStep, measures: dict
) -> dict:
    """Trains in an open folder, and notes there what ran and how it ended."""
    minutes = cfg.system.max_minutes
    cadence = Cadence(
        log_steps=cfg.system.log_every,
        save_seconds=cfg.system.save_seconds,
        max_seconds=None if minutes is None else 60 * minutes,
        measure_evals=cfg.system.measure_every,
    )
    name = device_name(step.device)
    folder.open_session(
        name,
        task.total_steps,
        processes=processes.world_size(),
        threads=torch.get_num_threads(),
        provenance=task.provenance(),
    )
    if processes.world_size() > 1:
        name = f"{processes.world_size()} processes, each on {name}"
    start = "%s on %s: %d steps"
    logger.log(console.plain_level(), start, folder.path, name, task.total_steps)
    tracker = start_tracker(cfg, folder.path) if folder.writes else None
    try:
        summary = train(task, model, step, folder, cadence, tracker, measures)
    except BaseException as error:
        logger.debug("stopped: %s", error)  # for the file: the terminal has it from `explain`
        raise
    finally:
        if tracker is not None:
            tracker.close()
    if folder.writes and not cfg.system.keep_checkpoint:
        remove_checkpoints(folder.path)
    return summary


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and where it comes from.

    Attributes:
        model: in eval mode, on the device.
        task: with its data loaded, unless `load_run` was called with `data=False`.
        config: the run's config.yaml.
    """

    model: nn.Module
    task: Task
    config: DictConfig


def load_run(
    folder: str | Path, device: str = "auto", *, data: bool = True, trust: bool = False
) -> LoadedRun:
    """Opens a run folder: the trained model in eval mode, with its task and config.

    Args:
        folder: holds config.yaml, and last.pt or model.safetensors.
        device: auto, cpu, cuda or cuda:N.
        data: load the task's data as well; False where only the model is wanted.
        trust: also build parts that are not ed's, which runs code that the folder names.
    """
    folder = Path(folder)
    if not runs.is_run(folder):
        raise FileNotFoundError(f"{folder} is no run folder: it holds no {runs.CONFIG}")
    cfg = stored_config(folder, trust=trust)
    weights = trained_weights(folder, logger.warning)
    if weights is None:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint: train there first, with system.keep_checkpoint=true"
        )
    for name in ("task", "model"):
        check_leaf(name, cfg[name])
    task, where = instantiate(cfg.task), choose_device(device)
    if data:
        task.prepare(where, cfg.seed)
    model = build_model(cfg, where)
    model.load_state_dict(weights)
    return LoadedRun(model.eval(), task, cfg)


def choose_device(name: str, option: str = "system.device=") -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{option}{name}: torch sees no CUDA device; use {option}cpu")
    if name.startswith("cuda") and processes.world_size() > 1:
        return local_device(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"{option}{name}: use auto, cpu or cuda")
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            found = f"torch sees {torch.cuda.device_count()} GPUs, counted from 0"
            raise ValueError(f"{option}{name}: {found}; use {option}cuda for the first")
        # the current one, too: streams, random states and kernels go there, wherever tensors are
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def start_tracker(cfg: DictConfig, folder: Path):
    """One of `ed.engine.loggers`; None where metrics.jsonl is all."""
    if cfg.logger.get("mode") == "disabled":
        return None
    settings = OmegaConf.to_container(cfg, resolve=True)
    # partial: Hydra would build the parts of a config that it is given as an argument
    return instantiate(cfg.logger, _partial_=True)(folder=folder, config=settings)


def log_to(path: Path | None) -> None:
    """Lines to the terminal and to the run's own log; a second run in this process starts over.

    Of several processes the first alone has a log.
    """
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.disabled = False  # Hydra's logging setup, which runs before every job, switches it off
    if path is None:
        logger.addHandler(logging.NullHandler())
        return
    terminal, file = TerminalHandler(sys.stdout), LogFile(path)
    terminal.setLevel(logging.INFO)
    for handler in (terminal, file):
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
