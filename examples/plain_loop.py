"""Measure and penalise ED in a plain PyTorch loop."""

import torch
from torch import nn
from torch.nn import functional as F

import ed


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws points on two interleaved noisy spirals."""
    labels = torch.randint(2, (count,))
    radius = torch.rand(count)
    angle = 6 * radius + torch.pi * labels
    x = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.03 * torch.randn_like(x), labels


def train(weight: float, steps: int = 300) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x, labels = data(128)
        loss = F.cross_entropy(model(x), labels) + weight * ed.penalty(model, x, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    x, labels = data(500)
    for weight in (0, 0.3):
        model = train(weight)
        accuracy = (model(x).argmax(1) == labels).float().mean()
        print(f"weight {weight}: accuracy {accuracy:.3f}, {ed.estimate(model, x, pairs=100)}")
