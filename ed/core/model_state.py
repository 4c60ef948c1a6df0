"""Context managers that change a model's mode and restore it exactly."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Locks out other threads that use this model or share a submodule with it."""
    with _making_locks:  # sort the modules, so that two threads cannot deadlock
        parts = sorted(model.modules(), key=id)
        locks = [_locks.setdefault(part, threading.RLock()) for part in parts]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts all submodules in eval mode; restores each one's own mode on exit.

    Also stops DDP from broadcasting buffers, so that one process can measure alone.
    """
    modules = list(model.modules())
    with (
        _attribute(modules, "training", False),
        _attribute(ddp_wrappers(model), "require_forward_param_sync", False),
    ):
        yield


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Lets batch norm use batch statistics without updating its running statistics.

    Used for points on paths, which are not data, and for perturbed weights (SAM). Also stops DDP
    from broadcasting buffers, which would modify them before the backward pass of an earlier call.
    """
    norms = batch_norms(model)
    instances = [norm for norm in norms if isinstance(norm, _InstanceNorm)]
    with (
        _attribute([n for n in norms if n not in instances], "track_running_stats", False),
        _attribute(instances, "momentum", 0.0),  # instance norm ignores the flag above
        _attribute(ddp_wrappers(model), "require_forward_param_sync", False),
    ):
        yield


def ddp_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def run_again(model: nn.Module) -> contextlib.AbstractContextManager:
    """Returns a context for re-running a forward pass in its original modes.

    Batch-norm buffers are restored on exit. Used for activation checkpointing.
    """
    modules, norms = list(model.modules()), batch_norms(model)
    training = [module.training for module in modules]
    tracking = [norm.track_running_stats for norm in norms]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        buffers = [buffer for norm in norms for buffer in norm.buffers()]
        before = [buffer.clone() for buffer in buffers]
        with (
            _attribute(modules, "training", *training),
            _attribute(norms, "track_running_stats", *tracking),
        ):
            try:
                yield
            finally:
                for buffer, old in zip(buffers, before, strict=True):
                    buffer.copy_(old)

    return again()


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Returns all batch norms, and instance norms that have running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        or (isinstance(module, _InstanceNorm) and module.running_mean is not None)
    ]


@contextlib.contextmanager
def _attribute(modules: Sequence[nn.Module], name: str, *values) -> Iterator[None]:
    """Sets an attribute to one value for all modules, or one value each; restores it on exit."""
    before = [getattr(module, name) for module in modules]
    try:
        for module, value in zip(modules, itertools.cycle(values), strict=False):
            setattr(module, name, value)
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, name, old)
