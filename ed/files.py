"""Files of which a reader never sees half, or notices that they are damaged."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

import yaml

YAML_DEPTH, YAML_NODES = 50, 100_000  # at most; our own files have 5 levels and some hundred nodes
FORMULA = ("=", "+", "-", "@", "\t", "\r")
SEAL = b"ed-checkpoint-1\n"  # the first bytes of a checkpoint; a digest of the rest follows
DIGEST_SIZE = 32
LOCK_TRIES, LOCK_PAUSE = 4, 0.05  # seconds


def write_atomic(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # not the temporary one, and none at all where the disk is full
        raise
    finally:
        temporary.unlink(missing_ok=True)


def refuse_control(text: str, given: str) -> None:
    """Raises ValueError for newlines and other control characters, which could end a line."""
    bad = next((character for character in str(text) if not character.isprintable()), None)
    if bad is not None:
        raise ValueError(f"{given}: holds the control character {bad!r}; leave it out")


def csv_text(text: str) -> str:
    """Text that no spreadsheet takes for a formula: one that begins like it gets an apostrophe."""
    return f"'{text}" if _like_formula(text) else text


def from_csv_text(text: str) -> str:
    """The inverse of `csv_text`."""
    return text[1:] if text[:1] == "'" and _like_formula(text[1:]) else text


def _like_formula(text: str) -> bool:
    try:
        float(text)  # -1 is a number
    except ValueError:
        return text.lstrip("'").startswith(FORMULA)
    return False


def sweep(path: Path) -> None:
    """Removes what killed writers of a file left beside it; a live one's `write_atomic` fails."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path, kind: type = dict):
    """The JSON value in a file; ValueError, naming the file, where it is none of this kind."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path} does not hold a {kind.__name__}")
    return value


def read_rows(path: Path) -> list[dict]:
    """One JSON value per line; a last line that a kill cut short is left out."""
    try:
        *lines, cut = path.read_text().split("\n") if path.exists() else [""]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: restore it") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
    with contextlib.suppress(ValueError, RecursionError):
        rows.append(json.loads(cut))  # of a whole file it is empty
    return rows


def yaml_text(path: Path) -> str:
    """The text of a YAML file, once it is sure that parsing it ends.

    ValueError, naming the file: not UTF-8, nested deeper than YAML_DEPTH, or more than YAML_NODES
    values, where every alias counts as what it repeats (a bomb is a few lines of aliases).
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not YAML: it is not UTF-8 text; restore it") from None
    try:
        reason = _too_large(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if reason is not None:
        raise ValueError(f"{path} is not a file of ed: {reason}")
    return text


def _too_large(text: str) -> str | None:
    """Why a YAML text must not be parsed; reads its events only, which takes no recursion."""
    sizes: dict[str, int] = {}  # of anchored nodes
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and nodes before it
    count = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 0)  # an alias inside its own anchor: a loop
            if event.anchor in (anchor for anchor, _ in open_nodes):
                return f"*{event.anchor} repeats itself without end"
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


def seal(content) -> bytes:
    """What stands before the contents of a checkpoint, so that any damage to them is noticed."""
    return SEAL + hashlib.sha256(content).digest()


def unseal(content: memoryview) -> memoryview:
    """The contents behind the seal; ValueError where they are not those that were sealed."""
    header = len(SEAL) + DIGEST_SIZE
    if content[: len(SEAL)] != SEAL:
        raise ValueError("not a checkpoint of ed")
    if content[:header] != seal(content[header:]):
        raise ValueError("its contents do not match their digest")
    return content[header:]
