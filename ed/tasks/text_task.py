"""Base class of text tasks: sentence classification, with paths in embedding space."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.validate import choice, counts
from ed.datasets.batches import Batch, shuffled_batches
from ed.datasets.images import check_column
from ed.models.text import NO_CODE, checkpoint_source
from ed.runtime import processes
from ed.runtime.hub import hub_or_cache
from ed.tasks.base import EpochTask, check_warmup

PADDINGS = ("fixed", "dynamic")
EVAL_BATCH = 256
MULTIPLE = 8  # pad lengths to a multiple of this, for faster attention kernels


@dataclass(frozen=True)
class Sentences:
    """Tokenised sentences: ids, segments and mask (N, L), labels (N,), and lengths (N,) on the CPU.

    L is the padded length of the longest sentence, not the maximum allowed.
    """

    ids: Tensor
    segments: Tensor
    mask: Tensor
    labels: Tensor
    lengths: Tensor

    def batch(self, index: Tensor, length: int | None) -> Batch:
        """Returns the rows in `index`, truncated to `length` tokens if given."""
        width = slice(length)
        return {
            "ids": self.ids[index, width],
            "segments": self.segments[index, width],
            "mask": self.mask[index, width],
            "label": self.labels[index],
        }


class TextTask(EpochTask):
    """Fine-tunes a text encoder on `load("train")` and evaluates it on `load("validation")`."""

    metric = "eval/acc"
    has_labels = True

    def __init__(
        self,
        data: str,
        *,
        tokenizer: str | None = "bert-base-uncased",
        epochs: int = 10,
        warmup_epochs: float = 0,
        batch_size: int = 32,
        max_length: int = 128,
        padding: str = "fixed",
        eval_every: int = 1,
        classes: int = 2,
    ):
        if tokenizer is None:  # in task=text_classification, the name of the model
            raise ValueError(
                "task.tokenizer=null: texts need a text model; set model=transformers and "
                "model.name=VALUE"
            )
        choice("task.padding", padding, PADDINGS)
        counts("task", epochs=epochs, batch_size=batch_size, eval_every=eval_every)
        counts("task", max_length=max_length, classes=classes)
        check_warmup("epochs", warmup_epochs, epochs)
        self.data, self.tokenizer = data, tokenizer
        self.epochs, self.warmup_epochs, self.batch_size = epochs, warmup_epochs, batch_size
        self.max_length, self.padding = max_length, padding
        self.eval_every, self.classes = eval_every, classes
        self.static_shapes = padding == "fixed"

    def load(self, split: str) -> tuple[list[list[str]], list[int]]:
        """Returns texts, as one list per column (two for sentence pairs), and labels."""
        raise NotImplementedError

    def check_model(self, model: nn.Module) -> None:
        longest = getattr(model, "longest", None)
        if longest is None:
            raise ValueError(
                f"{type(self).__name__} needs a text model like model=bert_base, not "
                f"{type(model).__name__}"
            )
        classes = getattr(model, "classes", self.classes)
        if classes != self.classes:
            raise ValueError(f"model.classes={classes}: must equal task.classes={self.classes}")
        if self.max_length > longest:
            raise ValueError(
                f"task.max_length={self.max_length}: the model takes at most {longest} tokens"
            )
        tokens, rows = len(self._loaded_tokenizer), getattr(model, "vocabulary", None)
        if rows is not None and tokens > rows:
            raise ValueError(
                f"task.tokenizer={self.tokenizer}: has {tokens} tokens, but the model has only "
                f"{rows} word embeddings; use the model's own tokenizer"
            )

    @cached_property
    def _loaded_tokenizer(self):
        return load_tokenizer(self.tokenizer)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.seed, self.device = seed, device
        self.train, self.validation = (
            self._tokenise(split, self._loaded_tokenizer, device)
            for split in ("train", "validation")
        )
        self.num_examples = len(self.train.labels)
        self.count_steps(self.num_examples)

    def _tokenise(self, split: str, tokenizer, device) -> Sentences:
        """Tokenises all sentences of a split and pads them to the same length."""
        texts, labels = self.load(split)
        what = f"task.data={self.data}, split {split!r}"
        check_column(labels, int, f"{what}: labels")
        for column in texts:
            check_column(column, str, f"{what}: texts")
        if min(labels) < 0 or max(labels) >= self.classes:
            raise ValueError(
                f"task.classes={self.classes}: labels of task.data={self.data} range from "
                f"{min(labels)} to {max(labels)}"
            )
        special = tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
        if self.max_length < special + len(texts):
            raise ValueError(
                f"task.max_length={self.max_length}: the tokenizer adds {special} tokens to each "
                f"example; use at least {special + len(texts)}"
            )
        encoded = tokenizer(
            *texts, truncation=True, max_length=self.max_length, return_token_type_ids=True
        )
        lengths = torch.tensor([len(row) for row in encoded["input_ids"]])
        width = min(self.max_length, -(-int(lengths.max()) // MULTIPLE) * MULTIPLE)
        mask = torch.arange(width) < lengths[:, None]
        ids = _padded(encoded["input_ids"], mask, tokenizer.pad_token_id)
        segments = _padded(encoded["token_type_ids"], mask, tokenizer.pad_token_type_id)
        tensors = (ids, segments, mask.long(), torch.tensor(labels, dtype=torch.long))
        return Sentences(*(tensor.to(device) for tensor in tensors), lengths=lengths)

    def batches(self, model, start: int) -> Iterator[Batch]:
        steps = range(start, self.total_steps)
        # dynamic padding looks up lengths on the CPU, so the order stays there
        how = {"seed": self.seed, "device": self.device if self.static_shapes else "cpu"}
        for _, index in shuffled_batches(self.num_examples, self.batch_size, steps, **how):
            yield self.examples(index)

    def examples(self, index: Tensor) -> Batch:
        return self.train.batch(index.to(self.device), self._longest(self.train, index))

    def _longest(self, sentences: Sentences, index: Tensor) -> int | None:
        """Returns the length of a batch's longest sentence, or None with fixed padding."""
        return None if self.padding == "fixed" else int(sentences.lengths[index].max())

    def field(self, model: nn.Module, batch: Batch) -> Field:
        return Field(
            forward=lambda embeddings, context: model(embeddings, context["mask"]),
            x=model.embed(batch["ids"], batch["segments"]),
            context={"mask": batch["mask"]},
            module=model,
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        outputs, labels = [], self.validation.labels
        ours = processes.part(len(labels))
        for index in torch.arange(ours.start, ours.stop).split(EVAL_BATCH):
            length = self._longest(self.validation, index)
            batch = self.validation.batch(index.to(self.device), length)
            outputs.append(self.field(model, batch)())
        logits = processes.all_rows(torch.cat(outputs).float(), len(labels))
        return self.score(logits, labels)

    def score(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Returns metrics for the logits (N, C) and labels (N,) of a whole split."""
        return {
            "eval/acc": 100 * (logits.argmax(-1) == labels).float().mean().item(),
            "eval/loss": F.cross_entropy(logits, labels).item(),
        }


def _padded(rows: list[list[int]], mask: Tensor, value: int) -> Tensor:
    """Pads rows with `value` to the shape of `mask` (N, L); much faster than the tokenizer."""
    table = torch.full(mask.shape, value)
    table[mask] = torch.tensor(list(chain.from_iterable(rows)))
    return table


def load_tokenizer(name: str):
    from transformers import AutoTokenizer

    source = checkpoint_source(name)
    try:
        with hub_or_cache(source):
            return AutoTokenizer.from_pretrained(source, use_fast=True, **NO_CODE)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"task.tokenizer={name}: could not be loaded ({str(error).splitlines()[0]}); use a hub "
            "model, or a folder with its tokenizer files"
        ) from error
