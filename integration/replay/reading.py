"""Receipts in files: lines of JSON in which receipts stand anywhere, and files of the samples that digests are of."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...rollout.proving.claim import with_values
from ...rollout.receipt import HASH, LISTS, digest_of, float_bits, is_in_full

logger = logging.getLogger(__name__)

_Digest = tuple[str, str]  # the hash of a list, and its length


def read_lines(path: str | Path) -> list[Any]:
    """Read a file of lines of JSON, or of one JSON value. A last line that its writer did not end, as a kill may leave
    it, is passed over with a warning. Raises ValueError naming the file and the line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        return [json.loads(data.decode("utf-8"))]
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except ValueError:
        pass  # several values: lines
    values: list[Any] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                values.append(json.loads(line.decode("utf-8")))
            except (ValueError, RecursionError) as error:
                if not values or number < len(lines):
                    raise ValueError(f"{path}, line {number}: is no JSON: {error}") from error
                logger.warning("%s, line %d: is passed over: its writer did not end it", path, number)
    return values


def receipts_in(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the receipts in JSON values, in their order: the values themselves, answers of a server, samples of a
    run. Those with digests are completed by the samples of the same values."""
    values = list(values)
    found = [receipt for receipt, _ in receipts_with_objects(values)]
    return completed(found, values) if not all(map(is_in_full, found)) else found


def receipts_with_objects(values: Iterable[Any]) -> Iterator[tuple[dict[str, Any], tuple[dict[str, Any], ...]]]:
    """Yield the receipts in values of any depth, in their order, with the objects around each: at most two, the
    innermost first."""
    waiting: list[tuple[Any, tuple[dict[str, Any], ...]]] = [(value, ()) for value in reversed(list(values))]
    while waiting:
        value, around = waiting.pop()
        if isinstance(value, dict) and _is_receipt(value):
            yield value, around
        elif isinstance(value, dict | list):
            outer = (value, *around[:1]) if isinstance(value, dict) else around
            waiting += [(part, outer) for part in reversed(_parts_of(value))]


def completed(receipts: Iterable[Mapping[str, Any]], values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return receipts with the tokens of samples in the place of their digests, where the values hold these samples.

    A sample is an object with `prompt_ids`, `token_ids` and `logprobs`; it belongs to the receipts that have the hashes
    of all three. The others stay as they are.
    """
    known: dict[tuple[_Digest | None, ...], dict[str, list[int]]] = {}
    for value in values:
        for sample in _samples(value):
            try:
                lists = {
                    "prompt": list(sample["prompt_ids"]),
                    "output": list(sample["token_ids"]),
                    "logprobs": float_bits(sample["logprobs"]),
                }
                known[tuple(_digest(lists[name]) for name in LISTS)] = lists
            except (TypeError, ValueError, OverflowError):  # of values that no engine gives: no receipt is of them
                continue
    done = []
    for receipt in receipts:
        found = None if is_in_full(receipt) else known.get(tuple(_digest(receipt.get(name)) for name in LISTS))
        done.append(dict(receipt) if found is None else with_values(receipt, found))
    return done


def _digest(value: object) -> _Digest | None:
    """Return the hash and length of a list, or of the digest in its place; None: it is neither."""
    if isinstance(value, list):
        value = digest_of(value) if all(type(one) is int for one in value) else None
    if not isinstance(value, Mapping):
        return None
    return str(value.get("sha256")), str(value.get("num"))


def _is_receipt(value: dict[str, Any]) -> bool:
    """Return whether an object is meant as a receipt: also one that has lost its hash, which is no proof then."""
    return {"format", "spans"} <= set(value) and (HASH in value or {"output", "seed"} <= set(value))


def _samples(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the samples in a value of any depth, in their order."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if all(isinstance(value.get(name), list) for name in ("prompt_ids", "token_ids", "logprobs")):
                yield value
            waiting += reversed(_parts_of(value))
        elif isinstance(value, list) and value and isinstance(value[0], dict | list):
            waiting += reversed(value)


def _parts_of(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)
