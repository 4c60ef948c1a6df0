"""The Hugging Face hub, where it may be out of reach.

Its libraries repeat every request for half a minute before they look into their cache, and a model
takes several requests. Here the hub is asked once; where it does not answer, the cache is all.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TRIES, PAUSE = 2, 1.0  # a second try, as names are looked up in vain now and then; seconds


@contextlib.contextmanager
def hub_or_cache(source: str) -> Iterator[None]:
    """To load `source`, a hub id, or a folder, which needs no hub.

    Inside, the hub's libraries ask it if it answers. If not, they use their cache at once, and what
    is not there is a ConnectionError. Import them before: they note the mode when imported.
    """
    from huggingface_hub import constants

    # offline by the user's own wish: nothing to find out, and the libraries say what is missing
    settled = constants.HF_HUB_OFFLINE or Path(source).is_dir()
    wrong = None if settled else unanswered(constants.ENDPOINT)
    if wrong is None:
        yield
        return
    with _offline(constants, sys.modules.get("datasets.config")):
        try:
            yield
        except OSError as error:  # of several kinds, which blame a setting that nobody made
            raise ConnectionError(f"{wrong}, and its cache does not have it") from error
    _tell(f"{wrong}: what its cache has is used; HF_HUB_OFFLINE=1 does not ask first")


@functools.cache
def unanswered(endpoint: str) -> str | None:
    """Why the hub cannot be had; None where it answers, whatever it says. Asked once a process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # with the user's proxies and certificates

    for attempt in range(TRIES):
        time.sleep(PAUSE if attempt else 0)
        try:
            get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return None
        except Exception as error:  # of one HTTP library or another, as the version has it
            reason = " ".join(str(error).split()) or type(error).__name__
    return f"{endpoint} does not answer ({reason})"


@functools.cache
def _tell(text: str) -> None:
    print(text, file=sys.stderr)


@contextlib.contextmanager
def _offline(*modules) -> Iterator[None]:
    """As if HF_HUB_OFFLINE=1 had been set when these modules (None: not there) were imported."""
    found = [(module, module.HF_HUB_OFFLINE) for module in modules if module is not None]
    try:
        for module, _ in found:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, before in found:
            module.HF_HUB_OFFLINE = before
