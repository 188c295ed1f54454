"""Faults of a model folder's files that can be told without its weights' bytes: files that are cut, absent or no JSON.

transformers and its libraries say what is wrong and not in which file, or pass over it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from .stored_tensors import INDEX_FILE, SINGLE_FILE

GENERATION_CONFIG = "generation_config.json"
_OBJECTS = (
    *("config.json", GENERATION_CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("processor_config.json", "preprocessor_config.json"),
)
_LFS = b"version https://git-lfs"  # the beginning of the text that Git LFS leaves in a file's place
_MAX_HEADER = 100_000_000  # bytes, safetensors' own limit


def folder_faults(folder: Path) -> list[str]:
    """Return what is wrong with the files of a model folder, each with its file's name."""
    faults = [fault for name in _OBJECTS if (fault := json_fault(folder / name))] + weight_faults(folder)
    return faults or _index_faults(folder)


def _index_faults(folder: Path) -> list[str]:
    """Return what only transformers misses in a readable index, where it reads one."""
    if (folder / SINGLE_FILE).exists() or not (folder / INDEX_FILE).exists():
        return []
    has_metadata = "metadata" in _json_object(folder / INDEX_FILE)[0]
    return [] if has_metadata else [f'{INDEX_FILE} has no table metadata: write "metadata": {{}} into it']


def json_fault(path: Path) -> str:
    """Return why a file is no JSON object; empty where it is one, or is not there."""
    return _json_object(path)[1] if path.exists() else ""


def weight_faults(folder: Path) -> list[str]:
    """Return what is wrong with the weights of a folder, as far as names, headers and sizes tell. A folder without
    safetensors has none."""
    if (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    elif (folder / INDEX_FILE).exists():
        index, fault = _json_object(folder / INDEX_FILE)
        if fault:
            return [fault]
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            return [f"{INDEX_FILE} has no table weight_map of the file of each tensor"]
        names = sorted(set(files.values()))
    else:
        return []
    return [fault for name in names if (fault := _weights_fault(folder / name, name))]


def _json_object(path: Path) -> tuple[dict[str, Any], str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty" if not path.stat().st_size else error
        return {}, f"{path.name} cannot be read as JSON: {reason}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name} is no JSON object")


def _weights_fault(path: Path, name: str) -> str:
    """Return what is wrong with a file of weights; empty: nothing that its header and size tell."""
    if not name.endswith(".safetensors"):
        return f"{INDEX_FILE} names {name}, which is no safetensors file"
    try:
        with open(path, "rb") as file:
            start, size = file.read(len(_LFS)), path.stat().st_size
            if start == _LFS:
                return f"{name} is a pointer of Git LFS and not the weights: `git lfs pull` fetches them"
            length = struct.unpack("<Q", start[:8])[0] if size >= 8 else 0
            if not 0 < length <= _MAX_HEADER:
                return f"{name} is {'empty' if not size else f'no safetensors file ({size} bytes)'}"
            file.seek(8)
            header = file.read(length) if 8 + length <= size else b""
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if not header:
        return f"{name} is cut: {size} bytes, and its header alone ends at {8 + length}"
    try:
        ends = [one["data_offsets"][1] for key, one in json.loads(header).items() if key != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return f"{name} is no safetensors file: its header is damaged"
    if size == whole:
        return ""
    return f"{name} {'is cut' if size < whole else 'is too long'}: {size} bytes and not {whole}"
