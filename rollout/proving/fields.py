"""The fields of a receipt, as docs/guides/receipts.md lists them: what is missing or of a wrong kind in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..model.supported import DTYPES
from ..receipt import GRAMMAR_SETTINGS

_MOST = 2**63  # integers beyond it are no tensor's
_Check = Callable[[Any], bool]


def wrong_fields(receipt: Mapping[str, Any]) -> list[str]:
    """Name every field that is missing or of a wrong kind, but for tokens, log-probabilities and settings, which are
    read elsewhere."""
    wrong = [f"{name} is no {kind}" for name, (is_right, kind) in _FIELDS.items() if not is_right(receipt.get(name))]
    grammar = receipt.get("grammar")
    if grammar is not None and not _is_grammar(grammar):
        wrong.append("grammar is no object with a mode, the engine's settings and its jumps")
    if not _is_digest(receipt.get("images")):
        wrong.append("images is no SHA-256")
    return wrong


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_digest(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_seed(value: object) -> bool:
    return type(value) is int and -_MOST <= value < _MOST


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


_are_ids = _is_list_of(_is_count)


def _is_run_of_kv(value: Any) -> bool:
    return _is_object(value) and _is_digest(value.get("digest", 0)) and _is_count(value.get("end"))


_are_runs_of_kv = _is_list_of(_is_run_of_kv)


def _is_span(value: Any) -> bool:
    return (
        _is_object(value)
        and _is_text(value.get("version"))
        and _is_digest(value.get("digest", 0))
        and _is_count(value.get("start"))
        and _is_count(value.get("end"))
        and _are_runs_of_kv(value.get("kept_kv"))
    )


def _is_finish(value: Any) -> bool:
    if not _is_object(value) or value.get("type") not in ("stop", "length", "abort", "ignored"):
        return False
    matched, message = value.get("matched"), value.get("message")
    return (matched is None or _is_text(matched) or _is_count(matched)) and (message is None or _is_text(message))


def _is_guarantee(value: Any) -> bool:
    if not _is_object(value) or not _is_object(value.get("versions", {})):
        return False
    dtype, k_blocks = value.get("dtype", "float32"), value.get("k_blocks", 1)
    return _is_text(dtype) and dtype in DTYPES and _is_count(k_blocks) and k_blocks > 0


def _is_jump(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_count(value[0]) and all(map(_are_ids, value[1:]))


_are_jumps = _is_list_of(_is_jump)


def _is_grammar(value: Any) -> bool:
    if not _is_object(value) or not _is_text(value.get("mode")) or not _are_jumps(value.get("jumps")):
        return False
    return all(type(value.get(name, 0)) in (bool, int) for name in GRAMMAR_SETTINGS)


_FIELDS: dict[str, tuple[_Check, str]] = {
    "engine": (_is_text, "text"),
    "number": (_is_count, "number of 0 or more"),
    "previous": (_is_text, "text"),
    "id": (_is_text, "text"),
    "index": (_is_count, "number of 0 or more"),
    "seed": (_is_seed, "int64"),
    "settings": (_is_object, "object"),
    "finish": (_is_finish, "object with a type (stop, length, abort or ignored) and what matched"),
    "max_model_len": (_is_count, "number of 0 or more"),
    "eos": (_are_ids, "list of token ids"),
    "spans": (_is_list_of(_is_span), "list of objects with version, digest, start, end and kept_kv"),
    "guarantee": (
        _is_guarantee,
        "object with values by name (a dtype of an engine, a number of k_blocks), and versions by library",
    ),
}
