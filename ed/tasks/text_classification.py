"""Classification of your own texts, from a CSV, JSON or Parquet file, a folder or the hub."""

from functools import cached_property

from ed.core.validate import fraction
from ed.datasets.images import check_column, count_classes, load_table, split_names
from ed.datasets.splits import evaluation_split, held_out
from ed.tasks.text_task import TextTask

REMEDY = "a csv, json or parquet file, a folder with train and validation files, or a hub id"


class TextClassification(TextTask):
    """Fine-tunes a text encoder on your own texts and labels.

    Labels are integers from 0, or names, which are numbered in alphabetical order. Without an
    evaluation split, a fraction `holdout` of the texts is held out, the same for every seed.
    """

    def __init__(
        self,
        data: str,
        *,
        text: str = "text",
        pair: str | None = None,
        label: str = "label",
        classes: int | None = None,
        split: str | None = None,
        holdout: float = 0.2,
        split_seed: int = 0,
        **settings,
    ):
        fraction("task.holdout", holdout, zero=False, one=False)
        self.data, self.label = data, label
        self.texts = [text] if pair is None else [text, pair]
        self.split, self.holdout, self.split_seed = split, holdout, split_seed
        super().__init__(data, classes=classes or self._count_classes(), **settings)

    def load(self, split: str) -> tuple[list[list[str]], list[int]]:
        splits = split_names(self.data, "task.data", REMEDY)
        name = evaluation_split(splits, self.split, self.data)
        wanted = name if split == "validation" and name is not None else "train"
        table = self._table(wanted)
        if name is None:
            indices = held_out(len(table), self.holdout, self.split_seed)
            table = table.select((indices[0] if split == "train" else indices[1]).tolist())
        texts = [list(table[column]) for column in self.texts]
        return texts, self._numbers(list(table[self.label]))

    def _table(self, split: str):
        table = load_table(self.data, split, "task.data", REMEDY)
        columns = {"text": self.texts[0], "pair": self.texts[-1], "label": self.label}
        for key, column in columns.items():
            if column not in table.column_names:
                raise ValueError(
                    f"task.{key}={column}: task.data={self.data} has only the columns "
                    f"{', '.join(table.column_names)}"
                )
        labels, what = table[self.label][:], f"task.data={self.data}, split {split!r}"
        named = any(isinstance(label, str) for label in labels)
        check_column(labels, str if named else int, f"{what}: column {self.label!r}")
        for column in self.texts:
            check_column(table[column][:], str, f"{what}: column {column!r}")
        return table

    def provenance(self) -> dict[str, str]:
        names = self._names()
        return {"class_names": ", ".join(names)} if names else {}

    @cached_property
    def _train_labels(self) -> list:
        return list(self._table("train")[self.label])

    def _count_classes(self) -> int:
        return count_classes(self._numbers(self._train_labels), f"task.data={self.data}")

    def _names(self) -> list[str]:
        """Returns the label names in alphabetical order, or [] if labels are numbers."""
        labels = set(self._train_labels)
        return sorted(labels) if any(isinstance(label, str) for label in labels) else []

    def _numbers(self, labels: list) -> list[int]:
        names = self._names()
        unknown = [label for label in labels if names and label not in names]
        if unknown:
            raise ValueError(
                f"task.data={self.data}: label {unknown[0]!r} is not in the training set"
            )
        return [names.index(label) for label in labels] if names else [int(x) for x in labels]
