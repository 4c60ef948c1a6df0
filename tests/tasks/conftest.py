"""Fixtures of tests of GLUE."""

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.helpers.text import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from tests.helpers.text import write_sentences

    return write_sentences(tmp_path_factory.mktemp("glue"))
