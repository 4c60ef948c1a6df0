"""Times the training step of every cell of a table, for the costs shown beside its accuracies."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmark_cases import Case
from benchmark_overhead import Timer, time_step
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ed.analysis.spec import Cell, SpecError
from ed.analysis.steps import COLUMNS, read_steps
from ed.analysis.tables import load_table
from ed.engine.compose import compose_config
from ed.regularizers.base import Regularizer
from ed.runtime.files import write_atomic

NETWORK = "vit_tiny"  # the model of these tables, and the case that stands for it


def time_tables(names: Sequence[str], case: Case, timer: Timer, commit: str, out: Path | None):
    """Times each distinct regularizer of these tables once; saves all steps after each cell."""
    cells = {cell.home: cell for name in names for cell in load_table(name).points.values()}
    settings = {home: regularizer_settings(cell) for home, cell in cells.items()}
    plain = time_step(case, Regularizer(), timer)
    if isinstance(plain, str):
        raise SpecError(f"{case.name}: {plain}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    steps = read_steps(out) if out else {}
    timed: dict[str, float | str] = {}
    for home, own in settings.items():
        key = json.dumps(own, sort_keys=True)
        if key not in timed:
            regularizer = instantiate(own)
            is_plain = type(regularizer) is Regularizer
            timed[key] = plain if is_plain else time_step(case, regularizer, timer)
        found = timed[key]
        if isinstance(found, str):
            print(f"{'/'.join(home)}: not timed ({found})", flush=True)
            continue
        ratio = found / plain
        print(f"{'/'.join(home)}: {1000 * found:.2f} ms, {ratio:.3f} x plain", flush=True)
        values = (*home, f"{1000 * found:.3f}", f"{ratio:.4f}", device, torch.__version__, commit)
        steps[home] = dict(zip(COLUMNS, values, strict=True))
        if out:
            write_atomic(out, _csv(steps))


def regularizer_settings(cell: Cell) -> dict:
    """Returns the regularizer's config in this cell."""
    config = compose_config(list(cell.arguments))
    model = cell.settings.get("model")
    if model != NETWORK:
        raise SpecError(f"{'/'.join(cell.home)}: model={model}; only tables of {NETWORK} are timed")
    return OmegaConf.to_container(config.regularizer, resolve=True)


def _csv(steps: dict[tuple[str, str], dict[str, str]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(steps[home] for home in sorted(steps))
    return text.getvalue()
