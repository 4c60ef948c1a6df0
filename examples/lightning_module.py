"""Add the ED penalty to a LightningModule and log ED."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ed
from ed.integrations.lightning import TrackED


class Classifier(pl.LightningModule):
    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = weight
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(self(x), labels) + self.weight * ed.penalty(self, x, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=2, callbacks=[TrackED(x)], accelerator="cpu", **quiet)
    trainer.fit(Classifier(), loader)
    print(f"ED {trainer.callback_metrics['ed']:.3f}")
