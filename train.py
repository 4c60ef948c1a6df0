"""Train a model: `python train.py --help` lists the config groups and their settings."""

import os
import signal
import sys

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ed.engine.compose import SINGLE
from ed.engine.errors import INTERRUPTED, explain, or_explain
from ed.runtime.console import interactive, is_first, print_facts, working
from ed.runtime.files import refuse_control
from ed.runtime.slurm import require_cluster

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises errors instead of printing them
GROUPS = ("task", "model", "regularizer")
failed: list[str] = []  # the overrides of each failed run in the sweep


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    job = HydraConfig.get()
    choices, overrides = job.runtime.choices, job.overrides.task
    if is_first():
        announce(cfg, choices)
    with working("loading PyTorch"):
        from ed.engine.compose import sampler_is_unused
        from ed.engine.main import run
        from ed.runtime.distributed import leave
        from ed.runtime.processes import first_to_fail, world_size

    if sampler_is_unused(cfg, overrides) and is_first():
        why = f"regularizer={choices['regularizer']} uses no sampler"
        print(f"warning: sampler={choices['sampler']} has no effect: {why}", file=sys.stderr)
    try:
        run(cfg, [choices[group] for group in GROUPS])
    except Exception as error:
        code = explain(error, show=first_to_fail(error))
        if "SUBMITIT_EXECUTOR" in os.environ:
            requeue(error)
            raise  # submitit reports exceptions to the sweep, but not exit codes
        if job.mode == RunMode.MULTIRUN and code != INTERRUPTED and world_size() == 1:
            own = [word for word in overrides if word not in sys.argv]  # specific to this run
            failed.append(" ".join(own or overrides))
            return  # exiting would end the whole sweep
        leave(code)


def announce(cfg: DictConfig, choices: dict[str, str]) -> None:
    """Prints what is about to be trained, on one line if the output is not a terminal."""
    sign = "λ" if interactive() else "weight"  # the encoding may not support Greek letters
    strengths = {"weight": sign, "rho": "rho", "alpha": "alpha"}
    facts = {group: choices[group] for group in GROUPS}
    for key, name in strengths.items():
        value = OmegaConf.select(cfg, f"regularizer.{key}")
        facts["regularizer"] += f", {name} = {value:g}" if isinstance(value, int | float) else ""
    facts["seed"] = str(cfg.seed)
    if interactive():
        print_facts(facts)
    else:
        print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)


def requeue(error: Exception) -> None:
    """Forwards SIGUSR2 to submitit, which requeues the job. Call it after the run has saved."""
    handler = signal.getsignal(signal.SIGUSR2)
    if signal.SIGUSR2 in getattr(error, "signals", ()) and callable(handler):
        handler(signal.SIGUSR2, None)


def check_words(words: list[str]) -> None:
    """Rejects words that Hydra would misunderstand, and SLURM sweeps when there is no cluster.

    Also rejects control characters: submitit would copy a newline into its job script.
    """
    if unknown := get_args_parser().parse_known_args(words)[1]:
        if unknown[0].startswith("-"):
            raise ValueError(f"{unknown[0]}: no such option; set keys without dashes, as key=value")
        raise ValueError(f"{unknown[0]}: must not follow an option; put -m before all settings")
    sweeps = {"-m", "--multirun"} & set(words)
    for word in words:
        refuse_control(word, repr(word))
        key, _, value = word.partition("=")
        if key.lstrip("+") == "hydra.run.dir":
            raise ValueError(f"{word}: has no effect in ed; use system.run_dir={value}")
        if key in SINGLE and value.startswith("["):
            sweep = f"-m {key}={value.strip('[]')}"
            raise ValueError(f"{word}: {key} has one choice per run; for a sweep, use {sweep}")
        if key.startswith("+") and key.lstrip("+") in (*SINGLE, "experiment"):
            raise ValueError(f"{word}: use {word.lstrip('+')}")
        if sweeps and key == "hydra/launcher" and value.endswith("slurm"):
            require_cluster(word, "remove it to run the sweep on this machine")


if __name__ == "__main__":
    or_explain(lambda: check_words(sys.argv[1:]))
    or_explain(main)  # explains config errors; `main` handles all others
    if failed:
        sys.exit(f"error: {len(failed)} of the sweep's runs failed: {'; '.join(failed)}")
