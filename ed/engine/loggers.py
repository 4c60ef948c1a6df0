"""Loggers that receive all metrics: Weights & Biases, TensorBoard and CSV."""

import csv
import importlib
import io
import uuid
from pathlib import Path

from ed.core.validate import brief
from ed.runtime.files import read_bytes, read_rows, write_atomic
from ed.runtime.runs import METRICS, WANDB_ID


class Wandb:
    """Logs to Weights & Biases; a resumed run continues the same run there."""

    def __init__(self, *, project: str, mode: str, group: str | None, folder: Path, config: dict):
        wandb = _package("wandb", "wandb")
        identifier = folder / WANDB_ID
        if not identifier.exists():
            write_atomic(identifier, uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                project=project,
                mode=mode,
                group=group,
                dir=str(folder),
                name="/".join(folder.parts[-3:]),
                config=config,
                id=read_bytes(identifier).decode(),
                resume="allow",
            )
        except Exception as error:  # wandb raises its own types, e.g. without a key or network
            raise ValueError(
                f"logger=wandb: {brief(error).rstrip('.')}; log in with `wandb login` or "
                "WANDB_API_KEY, or set logger.mode=offline"
            ) from error

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Writes event files to tensorboard/ in the run folder."""

    def __init__(self, *, group: str | None, folder: Path, config: dict):
        self.module = _package("torch.utils.tensorboard", "tensorboard")
        self.folder, self.writer = folder / "tensorboard", None

    def log(self, values: dict[str, float], step: int) -> None:
        rows = [{"step": step, **values}]
        if self.writer is None:  # new session: rewrite from metrics.jsonl, which has this row
            rows = read_rows(self.folder.parent / METRICS)
            for file in self.folder.glob("events.out.tfevents.*"):
                file.unlink()
            # purge what an open TensorBoard has read from these files
            self.writer = self.module.SummaryWriter(str(self.folder), purge_step=0)
        for row in rows:
            for name in row.keys() - {"step"}:
                self.writer.add_scalar(name, row[name], row["step"])
        self.writer.flush()  # a kill would lose the values of the last two minutes

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Csv:
    """Writes metrics.csv in the run folder, with a column per metric and a row per log point."""

    def __init__(self, *, group: str | None, folder: Path, config: dict):
        self.folder, self.path, self.columns = folder, folder / "metrics.csv", []

    def log(self, values: dict[str, float], step: int) -> None:
        if {"step", *values} <= set(self.columns):
            with open(self.path, "a") as file:
                file.write(self._text([{"step": step, **values}]))
            return
        # new session or column: rewrite the file from metrics.jsonl, which already has this row
        rows = read_rows(self.folder / METRICS)
        self.columns = list(dict.fromkeys(key for row in rows for key in row))
        header = dict(zip(self.columns, self.columns, strict=True))
        write_atomic(self.path, self._text([header, *rows]))

    def close(self) -> None:
        pass

    def _text(self, rows: list[dict]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()


def _package(module: str, name: str):
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"logger={name}: run pip install {name}, or set logger=none") from error
