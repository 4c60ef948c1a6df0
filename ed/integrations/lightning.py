"""Lightning callback: `Trainer(callbacks=[TrackED(images)])` logs ED during training."""

from lightning.pytorch import Callback, LightningModule, Trainer

from ed.core.validate import count
from ed.integrations import track


class TrackED(Callback):
    """Logs the effective degree of the module as `name`, every `every` epochs.

    Args:
        inputs: fixed examples, as `inputs` of `ed.estimate`, or a function that takes the module
            and returns an `ed.Field`.
        settings: arguments of `ed.estimate`. Defaults to 50 paths, 50 nodes per path, degree 20.
    """

    def __init__(self, inputs, *, every: int = 1, name: str = "ed", **settings):
        self.inputs, self.every, self.name = inputs, count("every", every), name
        self.settings = settings

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every == 0:
            # all ranks have the same weights and paths, so they compute the same value
            value = track(pl_module, self.inputs, **self.settings)
            pl_module.log(self.name, value, rank_zero_only=True)
