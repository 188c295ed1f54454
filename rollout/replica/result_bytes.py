"""Encode and decode the sampling rank's results of a step."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from ..sequences.step import NewToken, ScheduledSequence, SequenceResult

_HEADER = struct.Struct("<ii")  # number of results, bytes of JSON after them
_EXTRAS = ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "listed_logprobs", "prompt_listed_logprobs",
           "masked_prob", "was_only_choice", "jump_logprobs", "jump_top_logprobs", "jump_listed_logprobs",
           "accepted", "kept_ids")  # fmt: skip


def results_bytes(results: Sequence[SequenceResult]) -> bytes:
    """Encode a step's results, in the order of its schedule: tokens, log-probabilities and requested extras."""
    tokens = array("i", (-1 if r.token_id is None else r.token_id for r in results))
    logprobs = array("d", (0.0 if r.logprob is None else r.logprob for r in results))
    found = ((i, [getattr(r, name) for name in _EXTRAS]) for i, r in enumerate(results))
    extras = {i: values for i, values in found if any(map(_is_given, values))}
    text = json.dumps(extras, separators=(",", ":")).encode() if extras else b""
    return _HEADER.pack(len(results), len(text)) + tokens.tobytes() + logprobs.tobytes() + text


def results_from(data: bytes, items: Sequence[ScheduledSequence]) -> list[SequenceResult]:
    """Decode the results of `results_bytes`. items: the step's schedule."""
    num, num_text = _HEADER.unpack_from(data)
    assert num == len(items), f"{num} results for {len(items)} sequences"
    tokens, logprobs = array("i"), array("d")
    at = _HEADER.size
    tokens.frombytes(data[at : at + 4 * num])
    logprobs.frombytes(data[at + 4 * num : at + 12 * num])
    extras = json.loads(data[at + 12 * num : at + 12 * num + num_text] or b"{}")
    results = []
    for index, (item, token, logprob) in enumerate(zip(items, tokens, logprobs, strict=True)):
        sampled: dict[str, Any] = {} if token < 0 else {"token_id": token, "logprob": logprob}
        more = {name: as_tuples(v) for name, v in zip(_EXTRAS, extras.get(str(index), ()), strict=False)}
        more["accepted"] = tuple(NewToken(*token) for token in more.get("accepted", ()))
        results.append(SequenceResult(item.id, item.incarnation, item.num_tokens, **sampled, **more))
    return results


def _is_given(value: object) -> bool:
    """Return whether an extra is not its default: None, False or (). The probability 0.0 is none of these."""
    return value is not None and value is not False and value != ()


def as_tuples(value: Any) -> Any:
    """Turn the lists of a JSON value into tuples, inner ones too."""
    return tuple(as_tuples(v) for v in value) if isinstance(value, list) else value
