"""Small runs for tests: a handful of steps of a tiny ViT on the embedded pictures, or of others."""

from pathlib import Path

import torch

from ed.engine.compose import compose_config
from ed.engine.main import run

SMALL = [
    "debug=tiny",
    "task.batch_size=200",  # 10 steps in the one epoch
    "task.eval_every=1",
    "model.patch=16",
    "model.width=32",
    "model.depth=1",
    "model.heads=2",
    "system.log_every=1",
]

SMALL_GROKKING = [
    "task=grokking",
    "task.modulus=7",
    "task.steps=10",
    "task.eval_every=4",
    "model=grokking",
    "model.width=32",
    "system.device=cpu",
    "system.log_every=1",
]


def small_config(folder: Path, *overrides: str, base=SMALL):
    return compose_config([*base, f"system.run_dir={folder}", *overrides])


def small_run(folder: Path, *overrides: str, base=SMALL) -> dict:
    return run(small_config(folder, *overrides, base=base), ["small"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from ed.engine.checkpoint import load_checkpoint

    return load_checkpoint(folder, print)["training"]["model"]
