"""Random faults: killed runs, full disks, and damaged or malicious files.

`make test` runs a short version. ED_FAULTS=full (`make test-faults`) runs the full version, which
takes 10 minutes on two cores. ED_FAULT_SEED sets the seed, to repeat a campaign.
"""

import itertools
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from ed.engine.main import load_run
from ed.models.weights import read_weights
from tests.faults import cases
from tests.faults.cases import EQUAL, ONE_LINE, Setup, attempt, judged, spread
from tests.faults.setups import preload, setups, write_data
from tests.helpers.hostile import Payload, hostile_leaves, plant

FULL = os.environ.get("ED_FAULTS") == "full"
SEED = int(os.environ.get("ED_FAULT_SEED") or random.SystemRandom().randrange(10**6))
SHORT_SETUPS = ("grokking none", "pnn none", "cifar10 ed", "procgen none")  # need no data files
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
TABLE: dict[str, Counter] = {}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forked")


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Prints the seed and, for each kind of fault, how often each outcome occurred."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nfaults, seed {SEED} (repeat: ED_FAULT_SEED={SEED})")
        print(f"{'kind of case':28} {'cases':>6} {EQUAL:>10} {ONE_LINE:>15} {'other':>6}")
        for kind, ends in TABLE.items():
            other = ends.total() - ends[EQUAL] - ends[ONE_LINE]
            counts = f"{ends[EQUAL]:>10} {ends[ONE_LINE]:>15} {other:>6}"
            print(f"{kind:28} {ends.total():>6} {counts}")


def note(kind: str, ends: dict[str, str]) -> None:
    """Records how the cases of a campaign ended and fails if any outcome is a bug."""
    TABLE[kind] = Counter(ends.values())
    wrong = {case: end for case, end in ends.items() if end not in (EQUAL, ONE_LINE)}
    assert not wrong, f"seed {SEED}: {wrong}"


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, tuple[Setup, float]]:
    """Returns each setup with the duration of its undisturbed run in seconds."""
    root = tmp_path_factory.mktemp("undisturbed")
    data = root / "data"
    chosen = {n: o for n, o in setups(data).items() if FULL or n in SHORT_SETUPS}
    with pytest.MonkeyPatch.context() as patch:  # keeps the user's caches clean
        patch.setenv("ED_CACHE", str(root / "cache"))
        if FULL:
            data.mkdir()
            patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
            preload()
            code, printed = attempt(lambda: write_data(data), root / "data.log")
            assert code == 0, printed
        found = {n: Setup(n, tuple(o), root / n.replace(" ", "-")) for n, o in chosen.items()}
        for setup in found.values():
            cases.composed(setup.overrides)
        seconds = spread({n: partial(cases.undisturbed, s) for n, s in found.items()}, root)
        yield {name: (setup, seconds[name]) for name, setup in found.items()}


@pytest.fixture(scope="module")
def begun(references, tmp_path_factory) -> dict[str, Path]:
    """Returns one stopped run per task, with ED if the task supports it."""
    root = tmp_path_factory.mktemp("begun")
    last = {name.split()[0]: name for name in references}
    return {name: cases.begun(references[name][0], root / name) for name in last.values()}


def campaign(kind: str, work: dict[str, Callable[[], str]], folder: Path) -> None:
    note(kind, spread(work, folder))


def chance(kind: str) -> random.Random:
    return random.Random(f"{SEED} {kind}")


def test_kills_and_signals_at_random_moments(references, tmp_path):
    """The full version covers every task with every regularizer it supports."""
    draw, work = chance("kill"), {}
    for index in range(max(60, len(references)) if FULL else 4):
        setup, seconds = list(references.values())[index % len(references)]
        number, delay = draw.choice(SIGNALS), draw.uniform(0, seconds)
        case = f"{index} {setup.name} {number.name} after {delay:.2f} s"
        work[case] = partial(cases.killed, setup, tmp_path / f"run{index}", number, delay)
    campaign("kill or signal", work, tmp_path)


def test_disks_that_fill_up_at_random_sizes(references, begun, tmp_path):
    draw, work = chance("full"), {}
    for index in range(40 if FULL else 4):
        setup, _ = references[list(begun)[index % len(begun)]]
        largest = max(path.stat().st_size for path in setup.whole.iterdir())
        limit = int(largest ** draw.uniform(0.2, 1.0))
        case = f"{index} {setup.name} {limit} bytes"
        work[case] = partial(cases.disk_full, setup, tmp_path / f"run{index}", limit)
    campaign("disk full", work, tmp_path)


def flipped(draw: random.Random):
    def damage(content: bytes) -> bytes:
        place = draw.randrange(max(1, len(content)))
        changed = bytearray(content or b"\0")
        changed[place] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return damage


def truncated(draw: random.Random):
    return lambda content: content[: draw.randrange(len(content) + 1)]


# files that a resumed run reads
FILES = ("last.pt", "previous.pt", "metrics.jsonl", "meta.json", "config.yaml")
FINISHED = ("DONE", "model.safetensors")  # files of a finished run


@pytest.mark.parametrize("kind", ["bit flip", "truncation"])
def test_damaged_files(kind, references, begun, tmp_path):
    draw, work = chance(kind), {}
    make = flipped if kind == "bit flip" else truncated
    sources = list(begun.items()) if FULL else [draw.choice(list(begun.items()))]
    for (title, stopped), name in itertools.product(sources, FILES + FINISHED):
        setup = references[title][0]
        source = setup.whole if name in FINISHED else stopped
        own = random.Random(draw.random())  # forked workers cannot share a generator
        folder = tmp_path / f"run{len(work)}"
        case = f"{len(work)} {setup.name} {name}"
        work[case] = partial(cases.damaged, setup, source, folder, name, make(own))
    campaign(kind, work, tmp_path)


def test_hostile_run_folders(references, tmp_path):
    whole, ends = references["grokking none"][0].whole, {}
    marker = tmp_path / "marker"
    leaves = hostile_leaves(tmp_path, marker)
    for how, leaf in leaves.items():
        for key in ("task", "model"):
            folder = shutil.copytree(whole, tmp_path / f"{how} {key}")
            plant(folder, key, leaf)
            work = attempt(lambda f=folder: load_run(f, "cpu"), tmp_path / "log")
            end = judged(*work, lambda: False)
            ends[f"{how} in {key}"] = "FOREIGN CODE RAN" if marker.exists() else end
    note("hostile run folder", ends)


def test_hostile_weights(tmp_path):
    marker, ends = tmp_path / "marker", {}
    draw = chance("weights")
    good = tmp_path / "good.pt"
    torch.save({"a": torch.arange(50.0)}, good)
    torch.save(Payload(marker), tmp_path / "payload.pt")
    torch.save({"a": [Payload(marker)]}, tmp_path / "inner.pt")
    for index in range(30 if FULL else 8):
        (tmp_path / f"cut{index}.pt").write_bytes(truncated(draw)(good.read_bytes()))
        (tmp_path / f"cut{index}.safetensors").write_bytes(draw.randbytes(64))
    for path in sorted({*tmp_path.glob("*.pt"), *tmp_path.glob("*.safetensors")} - {good}):
        work = attempt(lambda p=path: read_weights(p, f"--weights {p}"), tmp_path / "log")
        # a random truncation may remove nothing
        end = judged(*work, lambda p=path: p.read_bytes() == good.read_bytes())
        ends[path.name] = "FOREIGN CODE RAN" if marker.exists() else end
    note("hostile weights", ends)


HEAD = "title: a\nplace: b\nmetric: eval/acc\nseeds: [0]"
HOSTILE_TABLES = {
    "...yaml": "title: a",
    "deep.yaml": "a: " + "[" * 5000,
    "bomb.yaml": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "python.yaml": "!!python/object/apply:os.mkdir [MARKER]",
    "list.yaml": "- 1",
    "null.yaml": "",
    "cells.yaml": f"{HEAD}\nfixed: []\ncells: {{'../x': {{overrides: [], paper: null}}}}",
    "line.yaml": f'{HEAD}\nfixed: ["a=1\\nb"]\ncells: {{x: {{overrides: [], paper: null}}}}',
}


def test_hostile_experiment_files(tmp_path):
    marker, ends = tmp_path / "marker", {}
    for name, text in HOSTILE_TABLES.items():
        path = tmp_path / name
        path.write_text(text.replace("MARKER", str(marker)))
        work = attempt(lambda p=path: expand(load_table(str(p))), tmp_path / "log")
        end = judged(*work, lambda: False)
        ends[name] = "FOREIGN CODE RAN" if marker.exists() else end
    note("hostile experiment file", ends)
