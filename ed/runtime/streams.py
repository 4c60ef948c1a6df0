"""Independent random streams.

Each consumer of randomness (initial weights, batch order, augmentation, regularizer) has its own
stream, a pure function of the run's seed, the stream's name and a counter. So a regularizer changes
neither initial weights nor batches, and resuming needs no generator state.
"""

import hashlib

import torch


def stream_seed(seed: int, name: str, counter: int = 0) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{counter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits


def generator(seed: int, name: str, counter: int = 0, device="cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(stream_seed(seed, name, counter))


def reseed(generator: torch.Generator, seed: int, name: str, counter: int) -> None:
    """Moves a generator to the start of a stream; a captured step keeps its generator."""
    generator.manual_seed(stream_seed(seed, name, counter))
