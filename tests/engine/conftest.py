import shutil

import pytest

from tests.helpers.small import SMALL_GROKKING, small_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a small finished run; do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    small_run(folder, base=SMALL_GROKKING)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of `finished`, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")
