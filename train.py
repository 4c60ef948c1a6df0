"""Train anything of the paper: `python train.py --help` lists the parts and their settings."""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ed.engine.errors import explain

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `explain`, not Hydra's own printer
GROUPS = ("task", "model", "regularizer")


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    from ed.engine.main import run  # torch is loaded only once there is something to train

    choices = HydraConfig.get().runtime.choices
    try:
        run(cfg, [choices[group] for group in GROUPS])
    except Exception as error:
        sys.exit(explain(error))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # the config does not compose
        sys.exit(explain(error))
