"""Files of which a reader never sees half, or notices that they are damaged."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

SEAL = b"sha256 "  # begins the archive comment of a checkpoint; the digest in hex follows
SEAL_SIZE = len(SEAL) + 64
PACKAGE = Path(__file__).resolve().parent
INSTALLED = (PACKAGE / "_app").is_dir()  # from a wheel, not in a clone
# holds train.py, configs, experiments and scripts
APP = PACKAGE / "_app" if INSTALLED else PACKAGE.parent
HOME = Path.cwd() if INSTALLED else APP  # where scripts put runs and reports by default
LOCK_TRIES, LOCK_PAUSE = 4, 0.05  # seconds


def write_atomic(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Removes what killed writers of a file left beside it; a live one's `write_atomic` fails."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_rows(path: Path) -> list[dict]:
    """One JSON value per line; a last line that a kill cut short is left out."""
    *lines, cut = path.read_text().split("\n") if path.exists() else [""]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
    with contextlib.suppress(ValueError):
        rows.append(json.loads(cut))  # of a whole file it is empty
    return rows


def lock(file) -> bool:
    """Takes the lock on an open file, unless another process keeps it.

    A few tries: `launch.py` holds locks for a moment, to see whether they are free. OSError where
    the file system knows no locks.
    """
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE)
    return False


def seal(content: memoryview) -> bytes:
    """The comment to append to a zip archive, which every torch file is: the digest of the rest.

    Changes the last two bytes of `content`, the length of that comment. Zip readers, torch's among
    them, ignore comments, so a sealed file stays a plain torch file.
    """
    content[-2:] = SEAL_SIZE.to_bytes(2, "little")
    return SEAL + hashlib.sha256(content).hexdigest().encode()


def is_sealed(content: bytes) -> bool:
    return content[-SEAL_SIZE:].startswith(SEAL)


def check_seal(content: bytes) -> None:
    """Raises ValueError unless the contents match the digest at their end."""
    if not is_sealed(content):
        raise ValueError("no digest at its end: cut short, or from another version of ed")
    with memoryview(content) as view:
        digest = hashlib.sha256(view[:-SEAL_SIZE]).hexdigest().encode()
    if not content.endswith(digest):
        raise ValueError("its contents do not match their digest")
