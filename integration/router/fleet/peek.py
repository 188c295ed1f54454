"""The values of a generation request that determine its worker, read from its body without work that grows without end.

A short body is parsed. A long one would hold the interpreter for seconds, so it is searched only: the beginning of its
prompt is hashed as it is written, and its sequences are counted by the commas between its prompts. Nothing is checked
here: the worker reads the body itself, and reports its faults.
"""

from __future__ import annotations

import hashlib
import json
import re

from .balance import MAX_KEYS, num_sequences, prompt_keys

LONG_BYTES = 1 << 20  # a longer body is not parsed
_PIECE_BYTES = 512  # of a long prompt that are hashed together
_EDGE_BYTES = 1 << 14  # at both ends of a long body, where the number of samples is looked for
_PROMPT = re.compile(rb'"(?:input_ids|prompt_token_ids|token_ids|text|prompt|messages|input|system)"\s{0,16}:')
_CHATS = (b'"messages"', b'"input"')  # fields of one conversation; inside a text, quotes have backslashes before them
_SAMPLES = re.compile(rb'"n"\s{0,16}:\s{0,16}([0-9]{1,4})\b')
_BETWEEN_PROMPTS = (b"],[", b"], [", b'","', b'", "')  # of ids, and of texts
_MAX_SEQUENCES = 4096  # that a long body is counted as


def peek(body: bytes, routing_key: str | None) -> tuple[tuple[bytes, ...], int]:
    """Return the keys of a request's prompt, see `prompt_keys`, and its number of sequences. Changes nothing."""
    if len(body) > LONG_BYTES:
        keys = _keys_of_long(body) if routing_key is None else prompt_keys({}, routing_key)
        return keys, _sequences_of_long(body)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    told = values if isinstance(values, dict) else {}
    return prompt_keys(told, routing_key), num_sequences(told)


def _keys_of_long(body: bytes) -> tuple[bytes, ...]:
    found = _PROMPT.search(body, 0, _EDGE_BYTES)
    start = found.start() if found else 0
    keys, running = [], hashlib.blake2b(b"long", digest_size=16)
    for at in range(start, min(len(body), start + MAX_KEYS * _PIECE_BYTES), _PIECE_BYTES):
        running.update(body[at : at + _PIECE_BYTES])
        keys.append(running.digest())
    return tuple(keys)


def _sequences_of_long(body: bytes) -> int:
    is_chat = any(name in body for name in _CHATS)
    num_prompts = 1 if is_chat else 1 + max(map(body.count, _BETWEEN_PROMPTS))
    found = _SAMPLES.search(body[:_EDGE_BYTES]) or _SAMPLES.search(body[-_EDGE_BYTES:])
    num_samples = max(1, int(found[1])) if found else 1
    return min(num_prompts * num_samples, _MAX_SEQUENCES)
