"""Evaluate a model without training it: python scripts/evaluate.py [group=choice] [key=value ...]

Takes the settings of train.py and evaluates the initial model. For CLIP, this prints the zero-shot
accuracies, or those of a fine-tuned model with model.weights=FILE. Only task, model, precision,
seed, system.device and system.workers have an effect; measures are rejected.

    python scripts/evaluate.py task=clip_finetune model=clip_b32 task.data=/folder
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.engine.errors import explain, or_explain


def main(overrides: list[str]) -> int:
    if not overrides or {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    try:
        for name, value in evaluate(overrides).items():
            print(f"{name:24} {value:.4g}")
    except Exception as error:
        return explain(error)
    return 0


def evaluate(overrides: list[str]) -> dict[str, float]:
    """Evaluates the initial model in the same way as training does."""
    import torch
    from hydra.utils import instantiate

    from ed.engine.check import check_precision
    from ed.engine.compose import compose_config
    from ed.engine.main import build_model, choose_device, uses_bf16
    from ed.engine.settings import check_settings
    from ed.runtime.streams import stream_seed

    cfg = compose_config(overrides)
    check_settings(cfg)
    check_precision(cfg)
    if cfg.measures:
        raise ValueError(
            f"measures=[{','.join(cfg.measures)}]: not supported here; use train.py, or add "
            "'measures=[]'"
        )
    device, task = choose_device(cfg.system.device), instantiate(cfg.task)
    if task.no_evaluation:
        raise ValueError(f"{type(task).__name__}: {task.no_evaluation}")
    task.workers = cfg.system.workers
    torch.manual_seed(stream_seed(cfg.seed, "init"))  # as in training
    model = build_model(cfg, device).eval()
    task.check_model(model)
    task.prepare(device, cfg.seed)
    task.log_remarks()
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(cfg, device))
    with torch.no_grad(), bf16:
        return task.evaluate(model)


if __name__ == "__main__":
    sys.exit(or_explain(lambda: main(sys.argv[1:])))
