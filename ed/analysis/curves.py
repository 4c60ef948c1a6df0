"""curves.parquet: every logged value of a table's runs, with their configs and summaries.

The values are one long table:

    pandas.read_parquet("curves.parquet")    # cell, seed, step, metric, value

The rest is JSON in the file's metadata, by run:

    runs = json.loads(pyarrow.parquet.read_schema("curves.parquet").metadata[b"runs"])
    runs["ed/seed0"].keys()    # config, meta, done (null if unfinished), failure (empty if none)
"""

import functools
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

from ed.analysis.collect import CollectError
from ed.runtime.files import write_atomic
from ed.runtime.runs import Record

COLUMNS = ("cell", "seed", "step", "metric", "value")
FIELDS = ("config", "meta", "done", "failure")  # of a record, stored for each run
RUNS_DEPTH = 3  # a run's folder is runs/table/cell/seed0
PATH_START = (
    r"""(?:(?<=[ "'=:,([])|(?<=\\n)|(?<=file://))"""  # what precedes an absolute path in JSON
)

Key = tuple[str, int]  # cell and seed


def read_curves(path: Path) -> dict[Key, Record]:
    """Returns the records of a file, in order; logged values are loaded on first use."""
    if not path.exists():
        return {}
    import pyarrow.parquet as pq  # slow to import, and few callers need it

    rows = functools.cache(functools.partial(_read_rows, path))

    def record(name: str, about: dict) -> Record:
        known = {field: about[field] for field in FIELDS}
        return Record(source=f"{path}, {name}", history=lambda: rows().get(_key(name), []), **known)

    try:
        stored = json.loads(pq.read_schema(path).metadata[b"runs"])
        return {_key(name): record(name, about) for name, about in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None


def write_curves(path: Path, records: Mapping[Key, Record]) -> None:
    """Writes the records only if their content has changed; equal content may differ in bytes."""
    if not records:
        path.unlink(missing_ok=True)
    elif _content(read_curves(path)) != _content(records):
        write_atomic(path, _to_bytes(records))


def _read_rows(path: Path) -> dict[Key, list[dict]]:
    """Returns one dict per step, or several if a metric was logged repeatedly at that step."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path).to_pydict()
        columns = [table[name] for name in COLUMNS]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None
    found: dict[Key, list[dict]] = {}
    for cell, seed, step, metric, value in zip(*columns, strict=True):
        rows = found.setdefault((cell, seed), [])
        if not rows or rows[-1]["step"] != step or metric in rows[-1]:
            rows.append({"step": step})
        rows[-1][metric] = value
    return found


def _to_bytes(records: Mapping[Key, Record]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    about, values = _content(records)
    kinds = (pa.string(), pa.int64(), pa.int64(), pa.string(), pa.float64())
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)), metadata={"runs": about})
    columns = [[row[place] for row in values] for place in range(len(COLUMNS))]
    table = pa.table(columns, schema=schema)
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", use_dictionary=["cell", "metric"])
    return file.getvalue()


def _content(records: Mapping[Key, Record]) -> tuple[str, list[tuple]]:
    """Returns the content of a file: the JSON metadata of the runs and the rows of the table."""
    about = {f"{cell}/seed{seed}": _portable(record) for (cell, seed), record in records.items()}
    values = [
        (cell, seed, row["step"], metric, float(value))
        for (cell, seed), record in records.items()
        for row in record.history()
        for metric, value in row.items()
        if metric != "step"
    ]
    return json.dumps(about), values


def _portable(record: Record) -> dict:
    """Returns the fields to store, without the path of the folder that has `runs/`.

    That path means nothing on other machines, and it may contain a user's name.
    """
    text = json.dumps({field: getattr(record, field) for field in FIELDS})
    folder = Path((record.config.get("system") or {}).get("run_dir") or "")
    if folder.is_absolute() and len(folder.parents) > RUNS_DEPTH + 1:  # not /
        above = json.dumps(f"{folder.parents[RUNS_DEPTH]}/")[1:-1]
        text = re.sub(rf"{PATH_START}{re.escape(above)}", "", text)
    return json.loads(text)


def _key(name: str) -> Key:
    cell, seed = name.rsplit("/seed", 1)
    return cell, int(seed)


def _damaged(path: Path, error: Exception) -> CollectError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return CollectError(f"{path} is damaged ({reason}); restore it")
