"""Compares plain steps of ViTs with `ed.kernels` to the same steps with torch's operators.

The shapes are the networks in use and the extreme shapes that the kernels support.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmark_cases import Case, images, vit

from ed.analysis.markdown import plain_table

HEADER = ("network", "width", "tokens", "batch", "torch, ms", "kernels, ms", "kernels / torch")
LEGEND = (
    "Plain training steps of ViTs with 12 blocks, compiled, in bf16, with random inputs: with "
    "torch's operators (system.kernels=false) and with our kernels (system.kernels=true)."
)


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    image: int
    patch: int
    batch: int = 256
    depth: int = 12

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    @property
    def case(self) -> Case:
        build = partial(vit, self.image, self.patch, self.width, self.depth, 10)
        return Case(self.name, build, images(self.image), 10, self.batch, self.batch // 2)


SHAPES = (
    Shape("ViT-Tiny/4, 32x32", 192, 32, 4),
    Shape("ViT-Tiny/14, 224x224", 192, 224, 14),
    Shape("width 256, patch 4, 32x32", 256, 32, 4),
    Shape("ViT-S/4, 32x32", 384, 32, 4),
    Shape("ViT-S/16, 224x224", 384, 224, 16),
    Shape("ViT-S/14, 224x224", 384, 224, 14),
)


def time_shape(shape: Shape, timer: Callable[[Case, bool], float]) -> list[str]:
    """Returns a row of the table; `timer(case, kernels)` returns seconds per step."""
    plain, ours = (timer(shape.case, kernels) for kernels in (False, True))
    sizes = (shape.name, f"{shape.width}", f"{shape.tokens}", f"{shape.batch}")
    return [*sizes, f"{1000 * plain:.2f}", f"{1000 * ours:.2f}", f"{ours / plain:.3f}"]


def kernels_text(rows: Sequence[Sequence[str]], machine: str) -> str:
    parts = ("# Kernels of ViT blocks", f"{machine}.", LEGEND, plain_table(HEADER, rows))
    return "\n\n".join(parts) + "\n"
