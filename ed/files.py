"""Writing files so that a reader never sees half of one."""

import json
import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb" if isinstance(content, bytes) else "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n")
