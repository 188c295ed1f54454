"""The small JSON files of a run: each holds one object, and is complete or as it was before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....weight_sync.disk.atomic_folder import flush
from ...failures import FileFailed, files_of


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object to a file, which is on the disk before it has its name. Raises FileFailed."""
    partial = path.with_name(f".{path.name}.partial")
    with files_of(path):
        partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
        flush(partial)
        os.replace(partial, path)


def read_json(path: Path, kinds: Mapping[str, type | tuple[type, ...]], advice: str) -> dict[str, Any]:
    """Read the object of a file, which has fields of these kinds at least. Raises FileFailed, with the advice, for a
    file that is absent or damaged."""
    with files_of(path, "read", advice):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFailed(f"{path} cannot be read: it is damaged ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise FileFailed(f"{path} cannot be read: it holds no object; {advice}")
    for name, kind in kinds.items():
        found = value.get(name)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise FileFailed(f"{path} cannot be read: its {name} is {found!r:.100}; {advice}")
    return value
