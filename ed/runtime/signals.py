"""Signals that ask a process to save and stop, or to print what it is doing."""

import contextlib
import faulthandler
import io
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # Ctrl-C, kill, SLURM's warning


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects stop signals in a list, which the caller checks when it can stop.

    A second Ctrl-C stops immediately.
    """
    requests: list[int] = []

    def ask(number: int, _) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(number)

    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_stacks_on_request() -> None:
    """Makes `kill -USR1 PID` print the stack of every thread, even if the process hangs in C."""
    # replaced streams, as in notebooks and tests, have no file descriptor
    with contextlib.suppress(io.UnsupportedOperation, AttributeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
