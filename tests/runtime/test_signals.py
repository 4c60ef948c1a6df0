"""Stop signals are collected, a second Ctrl-C stops immediately, and SIGUSR1 prints the stacks."""

import os
import signal
import subprocess
import sys

import pytest

from ed.runtime.signals import stop_requests

HANGING = """
import time
from ed.engine.errors import or_explain

def wait_forever():
    print("waiting", flush=True)
    time.sleep(600)

or_explain(wait_forever)
"""


def test_second_ctrl_c_stops_immediately():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigusr1_shows_where_a_script_hangs_without_ending_it():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HANGING], **pipes) as process:
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGUSR1)
        assert any(line.endswith("in wait_forever\n") for line in process.stderr)
        assert process.poll() is None
        process.kill()
