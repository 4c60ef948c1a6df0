"""Train anything of the paper: `python train.py --help` lists the parts and their settings."""

import os
import signal

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ed.engine.errors import explain, or_explain

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `explain`, not Hydra's own printer
GROUPS = ("task", "model", "regularizer")


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    # torch is loaded only once there is something to train
    from ed.core.processes import first_to_fail
    from ed.engine.distributed import leave
    from ed.engine.main import run

    choices = HydraConfig.get().runtime.choices
    try:
        run(cfg, [choices[group] for group in GROUPS])
    except Exception as error:
        code = explain(error, aloud=first_to_fail(error))
        if "SUBMITIT_EXECUTOR" in os.environ:
            requeue(error)
            raise  # reaches the sweep that submitted us, which never hears of an exit
        leave(code)


def requeue(error: Exception) -> None:
    """Hands USR2, once the run has saved, to submitit, which puts the job back into the queue."""
    handler = signal.getsignal(signal.SIGUSR2)
    if signal.SIGUSR2 in getattr(error, "signals", ()) and callable(handler):
        handler(signal.SIGUSR2, None)


if __name__ == "__main__":
    or_explain(main)  # where the config does not compose; `main` itself explains the rest
