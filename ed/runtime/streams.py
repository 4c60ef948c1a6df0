"""Random streams that do not touch each other.

Every consumer of randomness (initial weights, batch order, augmentation, regularizer) has a stream
of its own, derived from the run's seed, the stream's name and a counter. So another regularizer
changes neither initial weights nor batches, and a resumed run needs no stored generator state: the
stream of step n is a pure function of n.
"""

import hashlib

import torch


def stream_seed(seed: int, name: str, counter: int = 0) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{counter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits


def generator(seed: int, name: str, counter: int = 0, device="cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(stream_seed(seed, name, counter))


def reseed(generator: torch.Generator, seed: int, name: str, counter: int) -> None:
    """Moves an existing generator to the start of a stream (a captured step keeps its own)."""
    generator.manual_seed(stream_seed(seed, name, counter))
