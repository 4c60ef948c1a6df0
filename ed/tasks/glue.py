"""GLUE sentence classification (RTE, MRPC, CoLA)."""

from pathlib import Path

import torch
from torch import Tensor

from ed.core.validate import choice
from ed.datasets.images import unreadable
from ed.runtime.hub import hub_or_cache
from ed.tasks.text_task import TextTask

COLUMNS = {"rte": ("sentence1", "sentence2"), "mrpc": ("sentence1", "sentence2")}
COLUMNS |= {"cola": ("sentence",)}
METRICS = {"rte": "eval/acc", "mrpc": "eval/acc", "cola": "eval/matthews"}


class Glue(TextTask):
    """Fine-tunes on a GLUE task; evaluates on its validation split, as test labels are hidden."""

    def __init__(self, data: str = "nyu-mll/glue", name: str = "rte", **settings):
        choice("task.name", name, COLUMNS)
        super().__init__(data, **settings)  # rejects unknown settings
        self.name, self.metric = name, METRICS[name]

    def load(self, split: str) -> tuple[list[list[str]], list[int]]:
        table = load_split(self.data, self.name, split)
        missing = {*COLUMNS[self.name], "label"} - set(table.column_names)
        if missing:
            raise ValueError(
                f"task.data={self.data}: task.name={self.name} needs column "
                f"{', '.join(sorted(missing))}; found {', '.join(table.column_names)}"
            )
        texts = [table[column].to_pylist() for column in COLUMNS[self.name]]
        return texts, table["label"].to_pylist()

    def score(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        matched = 100 * matthews(logits.argmax(-1), labels)
        return super().score(logits, labels) | {"eval/matthews": matched}


def matthews(predictions: Tensor, labels: Tensor) -> float:
    """Returns the Matthews correlation of binary values; 0 if either argument is constant."""
    both = torch.stack([predictions, labels]).double()  # of binary values, it is Pearson's
    return torch.corrcoef(both)[0, 1].nan_to_num().item()


def load_split(data: str, name: str, split: str):
    """Loads one split of a GLUE task as an Arrow table, from the hub or a local copy."""
    folder = Path(data).expanduser()
    remedy = f"a folder with {name}/{split}-*.parquet, or a reachable hub id like nyu-mll/glue"
    if data.startswith((".", "/", "~")) and not folder.is_dir():
        raise FileNotFoundError(f"task.data={data}: no such folder; use {remedy}")
    try:
        if folder.is_dir():
            return _read_parquet(folder / name, split)
        import datasets  # slow to import

        datasets.disable_progress_bars()
        with hub_or_cache(data):
            return datasets.load_dataset(data, name, split=split).with_format("arrow")[:]
    except Exception as error:  # datasets raises many types: offline, unknown id, bad files
        raise unreadable(f"task.data={data}: {name}, split {split!r},", error, remedy) from error


def _read_parquet(folder: Path, split: str):
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise FileNotFoundError(f"no such files in {folder}")
    return pa.concat_tables([parquet.read_table(file) for file in files])
