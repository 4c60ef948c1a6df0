"""Where metrics go besides metrics.jsonl: Weights & Biases, TensorBoard, a CSV file."""

import csv
import importlib
import io
import uuid
from pathlib import Path

from ed.runtime.files import write_atomic
from ed.runtime.runs import WANDB_ID


class Wandb:
    """Logs to Weights & Biases. A resumed run stays one run there."""

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
                id=identifier.read_text(),
                resume="allow",
            )
        except Exception as error:  # wandb has its own classes: no key, no network
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"logger=wandb: {reason}; log in with `wandb login` or WANDB_API_KEY, or set "
                "logger.mode=offline"
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
        if self.writer is None:  # a resumed run replaces everything after its checkpoint
            self.writer = self.module.SummaryWriter(str(self.folder), purge_step=step)
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Csv:
    """Writes metrics.csv in the run folder: a column per metric, a line per log point."""

    def __init__(self, *, group: str | None, folder: Path, config: dict):
        self.path, self.rows = folder / "metrics.csv", None

    def log(self, values: dict[str, float], step: int) -> None:
        row = {"step": step, **values}
        first = self.rows is None
        if first:  # a resumed run replaces everything after its checkpoint
            self.rows = [row for row in self._earlier() if int(row["step"]) < step]
            self.columns = list(self.rows[0]) if self.rows else ["step"]
        new = [name for name in values if name not in self.columns]
        self.columns += new
        self.rows.append(row)
        if first or new:
            write_atomic(self.path, self._text(self.rows, header=True))
        else:
            with open(self.path, "a") as file:
                file.write(self._text([row], header=False))

    def close(self) -> None:
        pass

    def _earlier(self) -> list[dict]:
        if not self.path.exists():
            return []
        with open(self.path, newline="") as file:
            return [row for row in csv.DictReader(file) if row["step"]]

    def _text(self, rows: list[dict], *, header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _package(module: str, name: str):
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"logger={name}: pip install {name} first, or set logger=none") from error
