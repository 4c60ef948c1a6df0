import gc
import os
import sys
from pathlib import Path

import pytest
import torch

gc.disable()  # imports create many objects and no garbage; enabled again after collection
# one thread regardless of core count; set OMP_NUM_THREADS to test with more
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# torch prefers this variable, and some tests set OMP_NUM_THREADS for a command
os.environ.pop("MKL_NUM_THREADS", None)
ONEDNN = torch.backends.mkldnn.enabled
# tests fork commands, which autograd forbids once it has a thread for a GPU; its first backward
# starts one per device, and torch.compile registers a CUDA device even if there is none
torch.zeros((), requires_grad=True).backward()
# a one-minute subset that covers every package: `make test-smoke`
SMOKE = ("core", "regularizers", "engine/test_step.py", "analysis/test_spec.py")
SMOKE += ("runtime/test_runs.py", "package/test_layers.py", "package/test_leaves.py")
SMOKE += ("package/test_experiment_configs.py", "models/test_vit.py", "datasets/test_crops.py")
# start the longest tests first so that none of them delays the end of a pytest-xdist run
FIRST = ("runtime/test_distributed.py", "scripts/test_launch.py", "kernels", "faults")
FIRST += ("package/test_packaging.py", "package/test_integrations.py", "engine/test_resume.py")


def is_in(item: pytest.Item, places: tuple[str, ...]) -> bool:
    return item.path.relative_to(Path(__file__).parent).as_posix().startswith(places)


def pytest_collection_finish():
    """Excludes imported modules from garbage collection, also in forked commands."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not is_in(item, FIRST))
    for item in items:
        if is_in(item, SMOKE):
            item.add_marker(pytest.mark.smoke)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in (config.option.markexpr or ""):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if item.get_closest_marker("slurm") and "slurm" not in (config.option.markexpr or ""):
            item.add_marker(
                pytest.mark.skip(reason="starts a SLURM cluster: run with make test-slurm")
            )


@pytest.fixture(autouse=True)
def reset_torch_state() -> None:
    """Makes tests independent of their order, which pytest-xdist changes in every run."""
    torch.manual_seed(0)
    # torch permanently disables oneDNN after a failed bf16 product, e.g. on a CPU without bf16
    torch.backends.mkldnn.enabled = ONEDNN


@pytest.fixture(scope="session")
def full_data() -> Path:
    """The folder with the complete datasets, taken from ED_DATA."""
    root = os.environ.get("ED_DATA")
    if not root:
        pytest.skip("needs the complete datasets: set ED_DATA to their folder")
    return Path(root)


@pytest.fixture
def table(tmp_path):
    """A table with two cells and a grid of two points, each with two seeds."""
    from tests.helpers.tables import write_table

    return write_table(tmp_path)


@pytest.fixture
def bandit(monkeypatch):
    """Replaces Procgen's games with a hand-made game that needs no engine."""
    from ed.tasks.procgen import ProcgenPPO
    from tests.helpers.games import Bandit

    monkeypatch.setattr("ed.tasks.procgen.engine_version", "{} 1.0".format)
    monkeypatch.setattr(
        ProcgenPPO, "make_games", lambda task, side, count, _: Bandit(count, task.levels[side][0])
    )


PERMANENT: set[str] = set()  # names of modules that are not a test's own


@pytest.fixture(autouse=True)
def forget_temporary_modules(tmp_path_factory):
    """Unloads modules that a test wrote itself, as another test may use the same names."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    # a copy, because garbage collection can import modules, even during list(...)
    modules = sys.modules.copy()
    for name in modules.keys() - PERMANENT:
        if (getattr(modules[name], "__file__", None) or "").startswith(folder):
            sys.modules.pop(name, None)
        else:
            PERMANENT.add(name)
