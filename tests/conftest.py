import os
from pathlib import Path

import pytest
import torch

# the same on every machine, whatever its cores; set OMP_NUM_THREADS to test with another number
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
ONEDNN = torch.backends.mkldnn.enabled
# a minute of tests over every room: `make test-smoke`
SMOKE = ("core", "regularizers", "engine/test_step.py", "analysis/test_spec.py")
SMOKE += ("runtime/test_runs.py", "package/test_layers.py", "package/test_leaves.py")
SMOKE += ("package/test_experiment_configs.py", "models/test_vit.py", "datasets/test_crops.py")
# the longest tests start first, so that no worker of pytest-xdist is left with one at the end
FIRST = ("runtime/test_distributed.py", "scripts/test_launch.py", "kernels", "faults")
FIRST += ("package/test_packaging.py", "package/test_integrations.py", "engine/test_resume.py")


def is_in(item: pytest.Item, places: tuple[str, ...]) -> bool:
    return item.path.relative_to(Path(__file__).parent).as_posix().startswith(places)


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
            item.add_marker(pytest.mark.skip(reason="starts a SLURM: run with make test-slurm"))


@pytest.fixture(autouse=True)
def same_draws_and_rounding() -> None:
    """Whatever ran before in this process: pytest-xdist deals tests out anew in every run."""
    torch.manual_seed(0)
    # torch turns it off for good once a product in bf16 has failed there, as on a CPU without bf16
    torch.backends.mkldnn.enabled = ONEDNN


@pytest.fixture(scope="session")
def full_data() -> Path:
    """The folder with the complete data sets, named by ED_DATA."""
    root = os.environ.get("ED_DATA")
    if not root:
        pytest.skip("needs the complete data sets: set ED_DATA to their folder")
    return Path(root)


@pytest.fixture
def table(tmp_path):
    """Two cells and a grid of two points, two seeds each."""
    from tests.helpers.tables import write_table

    return write_table(tmp_path)


@pytest.fixture
def bandit(monkeypatch):
    """Procgen played on a hand-made game: no engine is needed, so none need be installed."""
    from ed.tasks.procgen import ProcgenPPO
    from tests.helpers.games import Bandit

    monkeypatch.setattr("ed.tasks.procgen.engine_version", "{} 1.0".format)
    monkeypatch.setattr(
        ProcgenPPO, "make_games", lambda task, side, count, _: Bandit(count, task.levels[side][0])
    )
