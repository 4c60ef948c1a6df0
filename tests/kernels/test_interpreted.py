"""Runs the other files of this folder with Triton's interpreter if there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
PASSED = {"test_blocks.py": 27, "test_convolution.py": 30, "test_eigen.py": 20}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run the kernels")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted")
def test_interpreted():
    """One new process runs all files, because the interpreter must be enabled before imports."""
    files = [Path(__file__).with_name(name) for name in PASSED]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{sum(PASSED.values())} passed" in done.stdout, done.stdout[-3000:]
