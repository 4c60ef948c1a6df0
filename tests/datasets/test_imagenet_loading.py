"""Tests of ImageNet batches from worker processes, in a resumable order."""

import multiprocessing
import os
import signal
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from ed.datasets.imagenet import Source, Views, evaluation_batches, loading, training_batches
from tests.helpers.imagenet import InMemory, as_one_of_two
from tests.helpers.launching import wait_for


def stream(source: Source, start: int, *, seed: int = 0, workers: int = 0, repeat: int = 1):
    how = {"seed": seed, "device": "cpu", "workers": workers, "repeat": repeat}
    steps = range(start, 8)
    view = Views(size=16, randaugment=2).train
    return list(training_batches(source, view, batch_size=70, steps=steps, **how))


def test_batches_are_the_same_from_any_step_and_with_any_number_of_workers():
    source = InMemory(range(150))  # 2 batches of 70 per epoch, each loaded in two pieces
    whole = stream(source, 0)
    assert len(whole) == 8
    assert whole[0]["x"].shape == (70, 3, 16, 16)
    assert whole[0]["x"].dtype == torch.uint8
    for start, workers in ((3, 0), (4, 2)):
        for resumed, expected in zip(
            stream(source, start, workers=workers), whole[start:], strict=True
        ):
            assert torch.equal(resumed["x"], expected["x"])
            assert torch.equal(resumed["label"], expected["label"])
    assert not torch.equal(stream(source, 7, seed=1)[0]["label"], whole[7]["label"])


def test_every_epoch_has_its_own_order_and_augmentation():
    source = InMemory(range(70))
    batches = stream(source, 0)
    assert all(sorted(batch["label"].tolist()) == list(range(70)) for batch in batches)
    first, second = (batch["x"][batch["label"].argsort()] for batch in batches[:2])
    assert not torch.equal(batches[0]["label"], batches[1]["label"])
    assert (first != second).flatten(1).any(1).float().mean() > 0.9


def test_repeated_images_are_equally_frequent_and_differently_augmented():
    source = InMemory(range(35))
    (batch, *_) = stream(source, 0, repeat=2)
    assert sorted(batch["label"].tolist()) == sorted([*range(35), *range(35)])
    pairs = batch["x"][batch["label"].argsort()].unflatten(0, (35, 2))
    assert (pairs[:, 0] != pairs[:, 1]).flatten(1).any(1).float().mean() > 0.9


def test_two_processes_together_read_the_batches_of_one(monkeypatch):
    source = InMemory(range(150))
    whole, parts = stream(source, 6), []
    for rank in range(2):
        as_one_of_two(monkeypatch, rank)
        parts.append(stream(source, 6))
    for first, second, both in zip(*parts, whole, strict=True):
        assert len(first["label"]) == 35
        for name, value in both.items():
            assert torch.equal(torch.cat([first[name], second[name]]), value)


def test_loading_does_not_change_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stream(InMemory(range(70)), 7, workers=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("late", [0, 1], ids=["both started", "one starting"])
def test_workers_survive_stop_signals_and_end_with_their_batches(late, monkeypatch):
    """A scheduler signals all processes of a job, but the run must finish its step and save."""
    begin = loading._delay_stop_signals
    monkeypatch.setattr(
        loading, "_delay_stop_signals", lambda worker: (time.sleep(late * worker), begin(worker))
    )
    source, how = InMemory(range(100)), {"seed": 0, "device": "cpu", "workers": 2}
    view = Views(size=8).train
    others = multiprocessing.active_children()  # those of an earlier test may still be ending
    batches = training_batches(source, view, batch_size=10, steps=range(100), **how)
    next(batches)
    workers = [worker for worker in multiprocessing.active_children() if worker not in others]
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(worker.pid, number)
    assert len(list(islice(batches, 50))) == 50
    assert all(worker.is_alive() for worker in workers)
    batches.close()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)


def test_a_negative_number_of_workers_is_rejected():
    how = {"device": "cpu", "workers": -1}
    with pytest.raises(ValueError, match=r"system.workers=-1"):
        next(evaluation_batches(InMemory([0]), Views(size=8).evaluate, **how))


def test_selected_images_keep_the_given_order():
    source = InMemory(range(9))
    how = {"device": "cpu", "workers": 0, "batch_size": 2}
    batches = list(
        evaluation_batches(source, Views(size=8).evaluate, index=torch.tensor([7, 0, 3]), **how)
    )
    assert [batch["label"].tolist() for batch in batches] == [[7, 0], [3]]


def test_evaluation_loads_batches_in_pieces(monkeypatch):
    """Shared memory that suffices for training must suffice for evaluation, hours later."""
    sizes, get = [], loading._Rows.__getitems__

    def record(rows, keys):
        sizes.append(len(keys))
        return get(rows, keys)

    monkeypatch.setattr(loading._Rows, "__getitems__", record)
    how = {"device": "cpu", "workers": 0, "batch_size": 130}
    batches = list(evaluation_batches(InMemory(range(150)), Views(size=8).evaluate, **how))
    assert [len(batch["x"]) for batch in batches] == [130, 20]
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(150))
    assert sizes == [loading.PIECE, loading.PIECE, 130 - 2 * loading.PIECE, 20]


@pytest.mark.parametrize(("images", "expected"), [(2, 0), (3, 2)])
def test_no_worker_is_started_without_work(images, expected, monkeypatch):
    started = []

    def record(*args, num_workers, **settings):
        started.append(num_workers)
        return DataLoader(*args, num_workers=num_workers, **settings)

    monkeypatch.setattr(loading, "DataLoader", record)
    monkeypatch.setattr(loading, "PIECE", 2)
    source, view = InMemory(range(images)), Views(size=8).evaluate
    (batch,) = evaluation_batches(source, view, device="cpu", workers=9)
    assert batch["label"].tolist() == list(range(images))
    assert started == [expected]


def test_full_shared_memory_is_reported(monkeypatch):
    def full(rows):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>")

    monkeypatch.setattr(loading, "default_collate", full)
    with pytest.raises(ValueError, match=r"^system.workers=1: ") as error:
        stream(InMemory(range(70)), 7, workers=1)
    assert len(str(error.value).splitlines()) == 1
    wait_for(lambda: not multiprocessing.active_children(), "the worker to end")


def test_workers_are_forked_whatever_the_default_is(monkeypatch):
    """Others would need to pickle the source, i.e. to copy the list of files."""
    source = InMemory(range(70))
    source.unpicklable = lambda: None
    spawn = multiprocessing.get_context("spawn")  # Python 3.14 has another default than fork
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", spawn)
    (batch,) = stream(source, 7, workers=1)
    assert len(batch["label"]) == 70
