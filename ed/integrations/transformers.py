"""Hugging Face Trainer: `TrackED` logs ED, and `EDTrainer` adds the penalty to the loss."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import ed
from ed.core.validate import count
from ed.integrations import track


def field_of(model: nn.Module, batch: Mapping[str, Tensor]) -> ed.Field:
    """Builds the field of a classifier on a batch of pixels or token embeddings."""
    if "pixel_values" in batch:
        return ed.Field.of(lambda x: model(pixel_values=x), batch["pixel_values"], module=model)
    return ed.Field.from_text(model, batch)


class TrackED(TrainerCallback):
    """Callback that logs ED: `TrackED(trainer, inputs, every=1, name="ed", **settings)`.

    See `ed.integrations.lightning.TrackED` for all arguments but the first.
    """

    def __init__(self, trainer: Trainer, inputs, *, every: int = 1, name: str = "ed", **settings):
        self.trainer, self.inputs, self.every = trainer, inputs, count("every", every)
        self.name, self.settings = name, settings

    def on_epoch_end(self, args, state, control, model: nn.Module, **_) -> None:
        if round(state.epoch) % self.every == 0:
            self.trainer.log({self.name: track(model, self.inputs, **self.settings)})


class EDTrainer:
    """Mixin that adds ed_weight * label-anchored ED: `class MyTrainer(EDTrainer, Trainer)`."""

    ed_weight = 7.0  # lambda
    ed_settings: Mapping = {}  # arguments of ed.penalty, e.g. {"components": 3}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.get("labels")  # super() may remove them
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            if labels is None:
                raise ValueError("EDTrainer: the batch has no labels to anchor paths; add a column")
            # Trainer divides the loss by the number of accumulation steps, unless already done
            scaled = getattr(self, "loss_is_scaled_for_ga", None)
            if scaled is None:  # the rule of Trainer.training_step
                counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                scaled = counted or self.compute_loss_func is not None
            steps = self.current_gradient_accumulation_steps if scaled else 1
            penalty = ed.penalty(field_of(model, inputs), labels=labels, **self.ed_settings)
            loss = loss + self.ed_weight / steps * penalty
        return (loss, outputs) if return_outputs else loss
