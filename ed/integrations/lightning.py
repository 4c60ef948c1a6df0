"""Lightning: `Trainer(callbacks=[TrackED(images)])` logs ED during training."""

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import ed
from ed.core.validate import count
from ed.integrations import track


class TrackED(Callback):
    """Logs the effective degree of the module under `name`, every `every` epochs.

    Args:
        inputs: (N, ...) fixed examples for `module(inputs)`, or a function from the module to an
            `ed.Field`.
        settings: arguments of `ed.estimate`; by default 50 paths with 50 nodes, degree 20.
    """

    def __init__(
        self,
        inputs: Tensor | Callable[[nn.Module], ed.Field],
        *,
        every: int = 1,
        name: str = "ed",
        **settings,
    ):
        self.inputs, self.every, self.name = inputs, count("every", every), name
        self.settings = settings

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every == 0:
            # all ranks have the same weights and draw the same paths, so their values agree
            value = track(pl_module, self.inputs, **self.settings)
            pl_module.log(self.name, value, rank_zero_only=True)
