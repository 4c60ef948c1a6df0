"""The IMPALA convolutional network for PPO on Procgen."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ed.kernels.convolution import convolve, pool


class Impala(nn.Module):
    """Maps images (N, 3, 64, 64) in [0, 1] to action logits and the value, (N, actions + 1).

    Three stages (convolution, max-pool, two residual blocks) and one hidden layer, shared by an
    actor and a critic head.
    """

    custom_operators = True  # those of ed.kernels.convolution, on a GPU

    def __init__(
        self,
        *,
        actions: int = 15,
        channels: Sequence[int] = (16, 32, 32),
        hidden: int = 256,
        image_size: Sequence[int] = (64, 64),
    ):
        super().__init__()
        widths = [3, *channels]
        self.stages = nn.Sequential(*(Stage(a, b) for a, b in zip(widths, channels, strict=False)))
        with torch.no_grad():
            features = self.stages(torch.zeros(1, 3, *image_size)).numel()
        self.hidden = nn.Linear(features, hidden)
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)
        for head, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def forward(self, x: Tensor) -> Tensor:
        features = self.hidden(self.stages(x).flatten(1).relu()).relu()
        return torch.cat([self.actor(features), self.critic(features)], dim=-1)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.blocks = nn.Sequential(Residual(outputs), Residual(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(pool(convolve(x, self.convolution)))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(convolve(x, self.first, relu=True), self.second, relu=True, residual=x)
