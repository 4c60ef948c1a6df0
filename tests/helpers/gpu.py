"""Small settings, steps and losses of GPU tests."""

import torch
from hydra.utils import instantiate

from ed.engine.compose import compose_config
from ed.engine.step import TrainStep

STAND_IN = ["task.data=embedded", "task.batch_size=100", "optimizer.lr=1e-4"]
IMAGENET = ["task=imagenet", "model=vit_s16", "task.data=embedded", "task.image_size=[32,32]"]
IMAGENET += ["task.batch_size=100", "model.width=64", "model.depth=2", "model.heads=2"]
IMAGENET += ["model.positions=sincos", "model.head=tanh"]


def make_step(overrides: list[str], *, bf16=False, **how) -> TrainStep:
    in_steps = {"task=grokking", "task=pnn"}  # the others count epochs
    length = ["task.epochs=10"] if in_steps.isdisjoint(overrides) else []
    cfg = compose_config([*length, *overrides])
    device = torch.device("cuda")
    torch.manual_seed(0)
    task, model = instantiate(cfg.task), instantiate(cfg.model).to(device)
    task.prepare(device, seed=0)
    regularizer, recipe = instantiate(cfg.regularizer), instantiate(cfg.optimizer)
    return TrainStep(task, model, regularizer, recipe, device=device, seed=0, bf16=bf16, **how)


def losses(step: TrainStep, start: int, stop: int) -> list[float]:
    seen = []
    batches = step.task.batches(step.model, start)
    for number, batch in zip(range(start, stop), batches, strict=False):
        step(batch, number)
        seen.append(step.means()["train/loss"])
    return seen
