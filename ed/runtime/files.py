"""Atomic writes, and readers that detect damaged files."""

import contextlib
import errno
import fcntl
import hashlib
import html
import json
import os
import stat
import time
from pathlib import Path
from typing import IO

import yaml

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if installed
YAML_DEPTH, YAML_NODES = 50, 100_000  # ed's own files have 5 levels and a few hundred nodes
FORMULA = ("=", "+", "-", "@", "\t", "\r")
SEAL = b"sha256 "  # prefix of the digest, which is the archive comment of a checkpoint
SEAL_SIZE = len(SEAL) + 64
STAMP = "ed_sha256"  # metadata key of the digest in a safetensors file
BLANK = b"0" * 64  # its value while the digest is computed
PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (PACKAGE / "_app").is_dir()  # installed from a wheel, not run from a clone
APP = PACKAGE / "_app" if INSTALLED else PACKAGE.parent  # contains train.py, configs, scripts, ...
HOME = Path.cwd() if INSTALLED else APP  # default location of runs and reports
LOCK_TRIES, LOCK_PAUSE = 4, 0.05  # the pause is in seconds


def write_atomic(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with create(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # report this file, not the temporary one
        raise
    finally:
        with contextlib.suppress(OSError):  # must not hide the error above
            temporary.unlink(missing_ok=True)


def create(path: Path) -> IO[bytes]:
    """Creates a file and opens it for writing; replaces a file or link of this name."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def open_in_run(path: Path, mode: str) -> IO:
    """Opens a file in a run folder to write; raises ValueError if it is a link or a pipe.

    A link in a foreign folder could lead to any file of the user.
    """
    foreign = ValueError(f"{path} is a link or a pipe, not a file of a run; remove it")
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # the latter, because opening a pipe may block

    def opener(name: str, given: int) -> int:
        return os.open(name, given | flags, 0o666)

    try:
        file = open(path, mode, opener=opener)  # noqa: SIM115, closed by the caller
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise foreign from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise foreign
    return file


def read_bytes(path: Path) -> bytes:
    """Reads a file; raises ValueError for a pipe or device, which may never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a link to itself; remove it") from None
        raise
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # reading a folder raises OSError
        raise ValueError(f"{path} is a pipe or a device, not a file; remove it")
    return path.read_bytes()


def refuse_control(text: str, given: str) -> None:
    """Raises ValueError if `text` contains newlines or other control characters."""
    bad = next((character for character in str(text) if not character.isprintable()), None)
    if bad is not None:
        raise ValueError(f"{given}: contains the control character {bad!r}; remove it")


def csv_text(text: str) -> str:
    """Escapes HTML and, with an apostrophe, text that a spreadsheet would run as a formula."""
    text = html.escape(text, quote=False)
    return f"'{text}" if _like_formula(text) else text


def from_csv_text(text: str) -> str:
    """Inverts `csv_text`."""
    text = text[1:] if text[:1] == "'" and _like_formula(text[1:]) else text
    return html.unescape(text)


def _like_formula(text: str) -> bool:
    try:
        float(text)  # -1 is a number, not a formula
    except ValueError:
        return text.lstrip("'").startswith(FORMULA)
    return False


def sweep(path: Path) -> None:
    """Removes temporary files left by killed writers. Do not call it during writes to `path`."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path, kind: type = dict):
    """Reads a JSON file; raises ValueError if it is invalid or its value is not a `kind`."""
    content = read_bytes(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path} does not contain a {kind.__name__}")
    return value


def read_rows(path: Path) -> list[dict]:
    """Reads one JSON value per line; skips an incomplete last line, left by a kill."""
    try:
        *lines, cut = read_bytes(path).decode().split("\n") if path.exists() else [""]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: restore it") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
    with contextlib.suppress(ValueError, RecursionError):
        rows.append(json.loads(cut))  # fails if it is empty or incomplete
    return rows


def yaml_text(path: Path) -> str:
    """Reads a YAML file and checks that it is safe to parse.

    Raises ValueError if it is not UTF-8 YAML, is nested deeper than YAML_DEPTH, or has more than
    YAML_NODES values after expanding aliases (a "billion laughs" attack).
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not YAML: it is not UTF-8 text; restore it") from None
    try:
        reason = _too_large(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if reason is not None:
        raise ValueError(f"{path} is not an ed file: {reason}")
    return text


def _too_large(text: str) -> str | None:
    """Returns the reason a YAML text is unsafe to parse, or None. Reads only parser events."""
    sizes: dict[str, int] = {}  # number of nodes by anchor
    open_nodes: list[tuple[str | None, int]] = []  # anchor and number of nodes before it
    count = 0
    for event in yaml.parse(text, YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 0)
            if event.anchor in (anchor for anchor, _ in open_nodes):
                return f"*{event.anchor} contains itself"
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, count - 1))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if len(open_nodes) > YAML_DEPTH:
            return f"nested deeper than {YAML_DEPTH} levels"
        if count > YAML_NODES:
            return f"more than {YAML_NODES:,} values"
    return None


def lock(file) -> bool:
    """Locks an open file; returns False if another process holds the lock.

    Tries a few times, because `launch.py` briefly takes locks to check whether they are free.
    Raises OSError if the file system does not support locks.
    """
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE)
    return False


def seal(content: memoryview) -> bytes:
    """Returns a digest to append to a torch file, as the comment of its zip archive.

    Sets the last two bytes of `content` to the length of the comment. Zip readers, including torch,
    ignore comments, so a sealed file is still a plain torch file.
    """
    content[-2:] = SEAL_SIZE.to_bytes(2, "little")
    return SEAL + hashlib.sha256(content).hexdigest().encode()


def is_sealed(content: bytes) -> bool:
    return content[-SEAL_SIZE:].startswith(SEAL)


def check_seal(content: bytes) -> None:
    """Raises ValueError unless the content matches the digest at its end."""
    if not is_sealed(content):
        raise ValueError("it has no digest at its end: truncated, or from another version of ed")
    with memoryview(content) as view:
        digest = hashlib.sha256(view[:-SEAL_SIZE]).hexdigest().encode()
    if not content.endswith(digest):
        raise ValueError("its contents do not match the digest")


def stamp(content: bytes) -> bytes:
    """Replaces the BLANK digest in a safetensors file with the digest of the whole file."""
    return content.replace(BLANK, hashlib.sha256(content).hexdigest().encode(), 1)


def check_stamp(content: bytes, digest: str) -> None:
    """Raises ValueError unless `stamp` returns this content with this digest."""
    if stamp(content.replace(digest.encode(), BLANK, 1)) != content:
        raise ValueError("its contents do not match the digest")
