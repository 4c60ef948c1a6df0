"""Tests that kernels run on the device of their inputs, which may not be the current one."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ed.kernels
from ed.kernels.device import on_device_of_input


def test_operators_run_on_the_device_of_their_first_argument(monkeypatch):
    current, x = [], torch.zeros(2)

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.clear()

    @on_device_of_input
    def operator(x, size):
        return *current, x, size

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    assert operator(x, 5) == (x, x, 5)
    assert not current


@pytest.mark.parametrize(
    "path", sorted(Path(ed.kernels.__file__).parent.glob("*.py")), ids=lambda path: path.stem
)
def test_all_operators_run_there(path):
    text = path.read_text()
    operators = re.findall(r"@torch\.library\.custom_op\(.*\)\n(.*)\n", text)
    assert operators.count("@on_device_of_input") == text.count("custom_op(")
