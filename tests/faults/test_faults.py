"""Faults at random moments and places: `make test-faults`, and a short form in `make test`.

ED_FAULT_SEED repeats a campaign; ED_FAULTS=full is the long form (10 minutes).
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from ed.engine.main import load_run
from ed.models.weights import read_weights
from tests.faults import cases
from tests.faults.cases import EQUAL, ONE_LINE, SETUPS, attempt, judged
from tests.helpers.hostile import Payload, hostile_leaves, plant

FULL = os.environ.get("ED_FAULTS") == "full"
SEED = int(os.environ.get("ED_FAULT_SEED") or random.SystemRandom().randrange(10**6))
SHORT_SETUPS = ("grokking none", "pnn", "cifar10 ed")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
TABLE: dict[str, Counter] = {}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forked")


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Prints the seed and, at the end, how many cases of each kind ended how."""
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
    """Counts the cases of a campaign and fails where one ended otherwise than it may."""
    TABLE[kind] = Counter(ends.values())
    wrong = {case: end for case, end in ends.items() if end not in (EQUAL, ONE_LINE)}
    assert not wrong, f"seed {SEED}: {wrong}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An undisturbed run of every setup, with its seconds; and one stopped on its way."""
    root = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for setup in SETUPS if FULL else SHORT_SETUPS:
        whole, begun = root / setup / "whole", root / setup / "begun"
        attempt(lambda path=whole, setup=setup: cases.train(path, setup), root / "log")  # warm
        shutil.rmtree(whole)
        began = time.monotonic()
        code, printed = attempt(lambda p=whole, s=setup: cases.train(p, s), root / "log")
        assert code == 0, printed
        seconds = time.monotonic() - began
        attempt(lambda p=begun, s=setup: stopped(p, s), root / "log")
        attempt(lambda p=begun, s=setup: stopped(p, s), root / "log")  # a previous.pt as well
        found[setup] = (whole, begun, seconds)
    return found


def stopped(folder: Path, setup: str) -> None:
    from ed.engine.compose import compose_config
    from ed.engine.main import run

    settings = [f"system.run_dir={folder}", "system.max_minutes=0"]
    run(compose_config([*SETUPS[setup], *settings]), ["fault"])


def chance(kind: str) -> random.Random:
    return random.Random(f"{SEED} {kind}")


def test_kills_and_signals_at_random_moments(undisturbed, tmp_path):
    draw, ends = chance("kill"), {}
    for index in range(60 if FULL else 9):
        setup = list(undisturbed)[index % len(undisturbed)]
        whole, _, seconds = undisturbed[setup]
        number, delay = draw.choice(SIGNALS), draw.uniform(0, seconds)
        folder = tmp_path / f"run{index}"
        end = cases.killed(whole, folder, setup, number, delay)
        ends[f"{index} {setup} {number.name} after {delay:.2f} s"] = end
    note("kill or signal", ends)


def test_disks_that_are_full_at_random_levels(undisturbed, tmp_path):
    draw, ends = chance("full"), {}
    for index in range(40 if FULL else 6):
        setup = list(undisturbed)[index % len(undisturbed)]
        whole = undisturbed[setup][0]
        largest = max(path.stat().st_size for path in whole.iterdir())
        limit = int(largest ** draw.uniform(0.2, 1.0))
        end = cases.disk_full(whole, tmp_path / f"run{index}", setup, limit)
        ends[f"{index} {setup} {limit} bytes"] = end
    note("disk full", ends)


def flipped(draw: random.Random):
    def damage(content: bytes) -> bytes:
        place = draw.randrange(max(1, len(content)))
        changed = bytearray(content or b"\0")
        changed[place] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return damage


def truncated(draw: random.Random):
    return lambda content: content[: draw.randrange(len(content) + 1)]


# what of a run folder decides its result, or is read again; logs are for people
FILES = ("last.pt", "previous.pt", "metrics.jsonl", "meta.json", "config.yaml")


@pytest.mark.parametrize("kind", ["bit flip", "truncation"])
def test_damage_to_every_file(kind, undisturbed, tmp_path):
    draw, ends = chance(kind), {}
    make = flipped if kind == "bit flip" else truncated
    for index in range(100 if FULL else 10):
        setup = list(undisturbed)[index % len(undisturbed)]
        whole, begun, _ = undisturbed[setup]
        name = FILES[index % len(FILES)]
        folder = tmp_path / f"run{index}"
        end = cases.damaged(whole, begun, folder, setup, name, make(draw))
        ends[f"{index} {setup} {name}"] = end
    note(kind, ends)


def test_hostile_run_folders(undisturbed, tmp_path):
    whole, ends = undisturbed["grokking none"][0], {}
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
        # cut nowhere, it is the good file
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
