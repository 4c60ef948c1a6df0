"""Settings of grokking runs, and the task and the model that they build."""

import torch
from hydra.utils import instantiate

from ed.engine.compose import compose_config

GROKKING = ["task=grokking", "model=grokking", "precision=float32", "regularizer=none"]
GROKKING += ["optimizer.lr=0.001", "optimizer.betas=[0.9,0.98]", "optimizer.weight_decay=0"]
GROKKING += ["optimizer.schedule=constant", "measures=grokking", "system.device=cpu"]
KOKER = ["model.norm=stream", "model.bias=true", "model.activation=gelu"]
KOKER += ["model.positions=learned"]


def built(*overrides, seed=0):
    """Returns the prepared task and the model for a config."""
    cfg = compose_config([*GROKKING, *overrides])
    torch.manual_seed(seed)
    task, model = instantiate(cfg.task), instantiate(cfg.model)
    task.check_model(model)
    task.prepare(torch.device("cpu"), seed=seed)
    return task, model
