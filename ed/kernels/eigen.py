"""Eigendecomposition of many small Gram matrices, in one launch and without host syncs.

On CUDA, `torch.linalg.eigh` syncs with the host and cannot be captured in a graph.
"""

import os
import shutil
from importlib.util import find_spec

import torch
from torch import Tensor

from ed.kernels.device import on_device_of_input

LARGEST = 16  # rows
# torch 2.7 was the first release with `tl.gather`; launching any kernel needs a C compiler
USABLE = (
    find_spec("triton") is not None
    and torch.__version__ >= (2, 7)
    and any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))
)


def applies(matrices: Tensor) -> bool:
    return USABLE and matrices.is_cuda and matrices.shape[-1] <= LARGEST


def eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eigenvalues (..., r), in no order, and eigenvectors of matrices (..., r, r)."""
    return torch.ops.ed.eigen(matrices)


@torch.library.custom_op("ed::eigen", mutates_args=())
@on_device_of_input
def _eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    from ed.kernels.eigen_kernels import eigen as kernel

    matrices, size = matrices.contiguous(), matrices.shape[-1]
    made, wide = _empty(matrices), max(2, 1 << (size - 1).bit_length())
    if matrices.numel() > 0:
        sweeps, number = 4 + size // 2, matrices.numel() // size**2
        how = {"num_warps": 4 if wide == LARGEST else 1, "EPS": torch.finfo(matrices.dtype).eps}
        kernel[(number,)](matrices, *made, sweeps, SIZE=size, WIDE=wide, **how)
    return made


@_eigen.register_fake
def _empty(matrices):
    return matrices.new_empty(matrices.shape[:-1]), matrices.new_empty(matrices.shape)
