"""Fixtures of correlations and of the report page: its text, a small folder, a browser window."""

from pathlib import Path

import numpy as np
import pytest

from ed.analysis.report.page import build_page
from tests.helpers.browser import browser, missing
from tests.helpers.once import once, shared_folder
from tests.helpers.report import Page, write_small


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return once(shared_folder(tmp_path_factory, "report"), "page", build_page)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Contains an experiment with a finished run and a failed one."""
    return write_small(tmp_path)


@pytest.fixture(scope="module")
def opened(text, tmp_path_factory):
    if missing() is not None:
        pytest.skip(f"needs {missing()}: make test-browser installs it")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "index.html").write_text(text)
    (folder / "blank.html").write_text("<!doctype html>")
    with browser(folder) as found:
        found.resize(1280, 1000)
        yield found, folder / "index.html"
        assert found.console() == []  # no test logged an error


@pytest.fixture
def window(opened):
    """Opens the page anew, so that no test depends on what another one clicked."""
    found, page = opened
    found.open(page.with_name("blank.html"))  # a reload would keep the values of inputs
    found.open(page)
    return found


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    """The metrics of the eight cells in tests/helpers/correlation.py."""
    noise = np.random.default_rng(0).normal(size=(3, 8))
    gap = np.arange(8.0)
    return {
        "measure/gap": gap,
        "measure/a": gap + noise[0],
        "measure/b": -2 * gap + 0.1 * noise[1],
        "measure/c": noise[2],
    }
