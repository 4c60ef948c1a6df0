"""Fixtures of tests of GLUE and of your own data."""

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.helpers.text import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from tests.helpers.text import write_sentences

    return write_sentences(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
