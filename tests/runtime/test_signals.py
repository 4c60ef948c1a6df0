"""Stop signals are collected, and a second Ctrl-C stops immediately."""

import signal

import pytest

from ed.runtime.signals import stop_requests


def test_second_ctrl_c_stops_immediately():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
