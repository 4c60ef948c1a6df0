"""Access to the Hugging Face hub, with a quick fallback to the local cache.

The hub's libraries retry each of several requests for half a minute before they use their cache.
This module contacts the hub first; if it does not answer, only the cache is used.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TRIES, PAUSE = 2, 1.0  # the pause is in seconds; DNS lookups sometimes fail


@contextlib.contextmanager
def hub_or_cache(source: str) -> Iterator[None]:
    """Context for loading `source`, a hub id or a local folder.

    If the hub does not answer, its libraries use their cache immediately; raises ConnectionError if
    `source` is not in it. Import the libraries first, because they read the offline mode on import.
    """
    from huggingface_hub import constants

    skip = constants.HF_HUB_OFFLINE or Path(source).is_dir()
    wrong = None if skip else unanswered(constants.ENDPOINT)
    if wrong is None:
        yield
        return
    with _offline(constants, sys.modules.get("datasets.config")):
        try:
            yield
        except OSError as error:  # its message blames the offline mode, which the user did not set
            raise ConnectionError(f"{wrong}, and it is not in the cache") from error
    _print_once(f"{wrong}: using the cache; set HF_HUB_OFFLINE=1 to skip this check")


@functools.cache
def unanswered(endpoint: str) -> str | None:
    """Returns the reason the hub does not answer, or None if it does; checks only once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # uses the user's proxies and certificates

    for attempt in range(TRIES):
        time.sleep(PAUSE if attempt else 0)
        try:
            get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return None
        except Exception as error:  # the exception type depends on the version of the hub library
            reason = " ".join(str(error).split()) or type(error).__name__
    return f"{endpoint} does not answer ({reason})"


@functools.cache
def _print_once(text: str) -> None:
    print(text, file=sys.stderr)


@contextlib.contextmanager
def _offline(*modules) -> Iterator[None]:
    """Sets HF_HUB_OFFLINE in modules that have read it on import; skips None."""
    found = [(module, module.HF_HUB_OFFLINE) for module in modules if module is not None]
    try:
        for module, _ in found:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, before in found:
            module.HF_HUB_OFFLINE = before
