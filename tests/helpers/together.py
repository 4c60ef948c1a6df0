"""The script that test_distributed.py runs in two processes; each records its results."""

import hashlib
import json
import signal
import sys
from pathlib import Path

import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ed
from ed.datasets.images import Images
from ed.engine import main
from ed.engine.optimizer import SGD
from ed.engine.step import TrainStep
from ed.runtime import processes
from tests.helpers.small import small_run
from tests.helpers.toy import Toy, config, convolution, training, vit
from tests.helpers.toy import run as train

METHODS = ("none", "mixup", "sam", "asam", "jacobian", "ed", "ed_fast")
PLAIN = ["optimizer=sgd", "task.augment=true"]  # AdamW would amplify rounding errors
LONG = ["regularizer=ed", "model.dropout=0.1", "task.epochs=2"]
UNEVEN = 499  # number of images; odd, so that two processes cannot split them evenly


def fingerprint(step) -> str:
    """Returns a hash of the weights, batch norm statistics and optimizer state."""
    optimizer = step.optimizer.state_dict()["state"].values()
    tensors = [*step.model.state_dict().values(), *(v for s in optimizer for v in s.values())]
    content = b"".join(torch.as_tensor(tensor).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()


def failure(folder: Path, *overrides: str) -> str:
    try:
        small_run(folder, *overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def stopped_by_one(folder: Path) -> str:
    """Returns how the long run ends if only one process gets a signal (in step 16)."""
    original = TrainStep.__call__

    def call(step, batch, number):
        original(step, batch, number)
        if processes.rank() == 1 and number == 15:
            signal.raise_signal(signal.SIGTERM)

    TrainStep.__call__ = call
    try:
        return failure(folder, *LONG)
    finally:
        TrainStep.__call__ = original


def watch_writes(folder: Path) -> list[str]:
    """Returns a list that collects all later writes by this process in `folder`."""
    written: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove"):
            return
        path, mode, *flags = arguments
        reads = event == "open" and (mode in ("r", "rb") or (mode is None and not flags[0] & 3))
        if not reads and str(path).startswith(str(folder)):
            written.append(f"{event} {path}")

    sys.addaudithook(hook)
    return written


def trained_fingerprints(folder: Path) -> dict[str, str]:
    """Returns each method's fingerprints after a full run and after a few steps with batch norm."""
    original, seen = main.train_in, {}

    def remember(run_folder, task, model, step, measures):
        summary = original(run_folder, task, model, step, measures)
        seen[run_folder.path.name] = fingerprint(step)
        return summary

    main.train_in = remember
    for name in METHODS:
        few = "task.batch_size=500"  # 4 steps
        small_run(folder / name, f"regularizer={name}", "model.dropout=0.1", few)
    main.train_in = original
    for name in METHODS:
        step = train(training(instantiate(config(name)), convolution()), 0, 3)
        seen[f"{name} with batch norm"] = fingerprint(step)
    return seen


def scores(folder: Path) -> dict[str, float]:
    """Returns scores on a number of images that the processes cannot split evenly."""
    trained = main.load_run(folder, "cpu")
    task, model = trained.task, trained.model
    images = Images(task.test.pixels[:UNEVEN], task.test.labels[:UNEVEN])
    with torch.no_grad():
        accuracy, loss = task.score(model, images)
        rows = processes.part(UNEVEN)
        ours = model(task.normalise(images.pixels[rows.start : rows.stop]))
        exact = processes.all_rows(ours, UNEVEN)
    return {"rows": len(ours), "acc": accuracy, "loss": loss, "logits": exact.double().sum().item()}


def float64_training():
    recipe = SGD(lr=0.1, weight_decay=0.01, momentum=0.9, max_grad_norm=0.5)
    return training(instantiate(config("none")), vit(), recipe=recipe, accumulate=2)


def float64_weights() -> dict[str, torch.Tensor]:
    return train(float64_training(), 0, 4).model.state_dict()


class Sharing(Toy):
    """Yields only the rows of this process, like a task with expensive examples."""

    yields_share = True


def weights_from_shares() -> dict[str, torch.Tensor]:
    step = float64_training()
    step.task = Sharing()
    for number, batch in zip(range(4), Toy().batches(step.model, 0), strict=False):
        step(processes.share(batch), number)
    return step.model.state_dict()


def gradients_in_a_loop_of_ones_own(rank: int, wrap=lambda model: model) -> list[torch.Tensor]:
    """Returns gradients of a penalised loss on one half of a batch, with batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    x, labels = (values.chunk(2)[rank] for values in (torch.randn(16, 6), torch.arange(16) % 3))
    network, generator = wrap(model), torch.Generator().manual_seed(rank)
    loss = nn.functional.cross_entropy(network(x), labels)
    (loss + 7 * ed.penalty(network, x, labels, generator=generator)).backward()
    return [weight.grad for weight in model.parameters()]


def measured_by_one(rank: int) -> list[float]:
    """Returns ED of a network with batch norm, wrapped and plain, measured by one process."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.randn(9, 6)
    wrapped = DistributedDataParallel(model)
    return [ed.estimate(one, x, pairs=5).mean for one in (wrapped, model) if rank == 0]


if __name__ == "__main__":
    here = Path(sys.argv[1])
    torch.set_num_threads(1)
    main.join()
    written = watch_writes(here)
    small_run(here / "plain", *PLAIN)
    draw = torch.rand(()).item()  # the stream's first draw, because PLAIN uses no dropout
    seen = {"fingerprints": trained_fingerprints(here), "scores": scores(here / "plain")}
    small_run(here / "whole", *LONG)
    seen["stopped"] = stopped_by_one(here / "killed")  # the next run resumes from here
    small_run(here / "killed", *LONG)
    seen["late"] = failure(here / "late", *LONG, "system.max_minutes=0")
    wild = ["optimizer.lr=1e30", "system.log_every=5"]
    seen["wild"] = failure(here / "wild", *wild)
    seen["draw"] = draw
    seen["rank"], seen["written"] = processes.rank(), written[:10]
    ours, shares = float64_weights(), weights_from_shares()
    seen["shares"] = all(torch.equal(ours[name], shares[name]) for name in ours)
    found = gradients_in_a_loop_of_ones_own(processes.rank(), DistributedDataParallel)
    seen["ddp"] = [gradient.tolist() for gradient in found]
    seen["measured"] = measured_by_one(processes.rank())
    if processes.rank() == 0:
        torch.save(ours, here / "float64.pt")
    (here.parent / f"seen{processes.rank()}.json").write_text(json.dumps(seen))
