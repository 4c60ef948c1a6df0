"""Independent random streams.

Initial weights, batch order, augmentation and regularizer each have their own stream, which depends
only on the run's seed, the stream's name and a counter. This way, a regularizer changes neither the
initial weights nor the batches, and resuming does not need the state of a generator.
"""

import hashlib

import torch


def stream_seed(seed: int, name: str, counter: int = 0) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{counter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch seeds have 63 bits


def generator(seed: int, name: str, counter: int = 0, device="cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(stream_seed(seed, name, counter))


def reseed(generator: torch.Generator, seed: int, name: str, counter: int) -> None:
    """Moves an existing generator to the start of a stream, as captured steps require."""
    generator.manual_seed(stream_seed(seed, name, counter))
