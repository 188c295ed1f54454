"""The rows of a data file, JSONL or Parquet, as Python objects."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_SUFFIX = ".parquet"
PYARROW_MISSING = "needs pyarrow, the extra `parquet`: pip install -e '.[parquet]'"


@dataclass(frozen=True)
class Row:
    """One row of a file."""

    place: str  # "file:line", or "file:row" of Parquet, both counted from 1
    read: Callable[[], object]  # its value; raises ValueError for a line that is no JSON


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a file, in their order: of Parquet (its name ends with .parquet) or of UTF-8 JSONL, whose lines
    of white space only are skipped. Raises ValueError naming the file that cannot be read."""
    return _of_parquet(path) if is_parquet(path) else _of_lines(path)


def is_parquet(path: str | Path) -> bool:
    """Return whether a file has the name of a Parquet file."""
    return Path(path).suffix.lower() == _SUFFIX


def why_unreadable(path: str | Path) -> str:
    """Return the fault of a Parquet file where pyarrow is not installed; empty: there is none."""
    if not is_parquet(path) or importlib.util.find_spec("pyarrow") is not None:
        return ""
    return f"{str(path)!r} {PYARROW_MISSING}"


def has_field(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a field; see `field_of`."""
    return field_of(row, name, row) is not row


def field_of(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a row's field; where no field has the whole name, of the nested one that the parts of the
    name between dots lead to, as in "reward_model.ground_truth". default: where there is neither."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of its objects that are null, at any depth, but for `content`. A column of
    Parquet has all fields in each of its objects, as null where an object has none."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _of_lines(path: str | Path) -> Iterator[Row]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{number}: not UTF-8 text") from error
    # Not splitlines(): it also splits at U+2028 and other characters, which JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Row(f"{path}:{number}", partial(_parsed, line))


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _of_parquet(path: str | Path) -> Iterator[Row]:
    if fault := why_unreadable(path):
        raise ValueError(fault)
    from pyarrow import ArrowException, parquet  # of an extra, and slow to import

    number = 0
    try:
        with open(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(use_threads=False):  # processes are forked later
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}:{number}", partial(_same, value))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ArrowException, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as Parquet, behind its first {number} rows: {why}") from error


def _same(value: object) -> object:
    return value
