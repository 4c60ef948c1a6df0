"""Pretrained text encoders with a classification head, seen from their embedding space."""

import inspect

import torch
from torch import Tensor, nn


class TextClassifier(nn.Module):
    """Embeddings (N, L, D) and their mask (N, L) -> logits (N, classes).

    The model is cut behind its embedding block (word + position + segment, layer norm, dropout):
    `embed` runs that block, `forward` everything after it, so that paths between sentences can run
    in the space that the encoder receives. Works for any `AutoModelForSequenceClassification` whose
    encoder has an embedding block and accepts `inputs_embeds`: BERT, RoBERTa, DistilBERT, MPNet,
    ELECTRA.
    """

    def __init__(self, checkpoint: str, *, classes: int):
        super().__init__()
        self.model = _load(checkpoint, classes)
        base = self.model.base_model
        accepted = inspect.signature(base.forward).parameters
        if not hasattr(base, "embeddings") or "inputs_embeds" not in accepted:
            raise ValueError(
                f"model.checkpoint={checkpoint}: {type(base).__name__} has no embedding block that "
                "`inputs_embeds` can stand for; use BERT, RoBERTa, DistilBERT, MPNet or ELECTRA"
            )
        self.embedding_block = base.embeddings
        wanted = inspect.signature(base.embeddings.forward).parameters
        self.takes_segments = "token_type_ids" in wanted
        base.embeddings = _Given()

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


def _load(checkpoint: str, classes: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()  # it warns that the head is new, which is the point
    logging.disable_progress_bar()
    try:
        return AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=classes)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.checkpoint={checkpoint}: no weights could be had "
            f"({str(error).splitlines()[0]}). Give the name of a hub model, or a folder with "
            "config.json, weights and tokenizer"
        ) from error
