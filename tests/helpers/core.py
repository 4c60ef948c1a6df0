"""Random numbers and a small network for tests of ed/core."""

import torch
from hypothesis import HealthCheck
from torch import nn

# settings of tests with random examples, which must pass on a busy machine
ANY_SPEED = {"deadline": None, "derandomize": True}
ANY_SPEED |= {"suppress_health_check": [HealthCheck.too_slow]}


def uniform(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))
