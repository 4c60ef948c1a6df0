"""From a composed config to a finished run."""

import logging
import sys
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ed.core.streams import stream_seed
from ed.engine.check import check
from ed.engine.loop import Cadence, describe, train
from ed.engine.metrics import Wandb
from ed.engine.run import RunFolder, default_folder
from ed.engine.step import TrainStep

logger = logging.getLogger("ed")


def run(cfg: DictConfig, names: list[str]) -> dict:
    """Trains what the config says in its own folder, or goes on there. Returns the summary.

    Args:
        names: what the folder is called by, e.g. ["cifar10", "vit_tiny", "ed"].
    """
    task, regularizer = instantiate(cfg.task), instantiate(cfg.regularizer)
    recipe = instantiate(cfg.optimizer)
    check(cfg, task, regularizer)
    device = choose_device(cfg.system.device)
    torch.use_deterministic_algorithms(cfg.system.deterministic)
    torch.manual_seed(stream_seed(cfg.seed, "init"))
    model = instantiate(cfg.model).to(device)
    task.prepare(device, cfg.seed)
    task.check_model(model)
    torch.manual_seed(stream_seed(cfg.seed, "dropout"))

    folder = cfg.system.run_dir or default_folder(cfg, names)
    run_folder = RunFolder(Path(folder), cfg)
    log_to(run_folder.path / "train.log")
    summary = run_folder.done
    if summary is not None:
        logger.info("already done: %s  %s", folder, describe(summary))
        return summary
    fast = device.type == "cuda" and task.static_shapes
    step = TrainStep(
        task,
        model,
        regularizer,
        recipe,
        device=device,
        seed=cfg.seed,
        accumulate=cfg.accumulate,
        bf16=cfg.precision == "bf16" and device.type == "cuda",
        compile_model=fast if cfg.system.compile == "auto" else cfg.system.compile,
        capture=fast if cfg.system.capture == "auto" else cfg.system.capture,
    )
    minutes = cfg.system.max_minutes
    cadence = Cadence(
        log_steps=cfg.system.log_every,
        save_seconds=cfg.system.save_seconds,
        max_seconds=None if minutes is None else 60 * minutes,
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    run_folder.open_session(name, task.total_steps)
    logger.info("%s on %s: %d steps", folder, name, task.total_steps)
    tracker = start_tracker(cfg, run_folder.path)
    try:
        summary = train(task, model, step, run_folder, cadence, tracker)
    except BaseException as error:
        logger.error("stopped: %s", error)
        raise
    finally:
        if tracker is not None:
            tracker.close()
        run_folder.close()
    logger.info("done: %s  %s", folder, describe(summary))
    return summary


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"system.device={name}: torch sees no CUDA device; use system.device=cpu")
    return torch.device(name)


def start_tracker(cfg: DictConfig, folder: Path) -> Wandb | None:
    if cfg.logger.mode == "disabled":
        return None
    settings = OmegaConf.to_container(cfg, resolve=True)
    return Wandb(**cfg.logger, folder=folder, config=settings)


def log_to(path: Path) -> None:
    """Lines to the terminal and to the run's own log; a second run in this process starts over."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(path)):
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
