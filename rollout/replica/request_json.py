"""Encode and decode the part of a request that a follower needs, once per sequence: sampling settings, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..kept_kv import KeptKV, KVStart
from ..media.images import Images
from ..request_options import Begun, Renewal, RequestOptions
from ..sampling_params import SamplingParams
from ..sequences.request import Request
from ..sequences.sequence import Sequence as TokenSequence

_CONTROLLERS_OWN = {"n", "stop", "stop_regex", "stream_interval", "custom_params", "no_stop_trim",
                    "skip_special_tokens", "kept_special_tokens", "spaces_between_special_tokens", "json_schema",
                    "regex", "ebnf", "structural_tag", "jump_forward", "draft_token_ids", "speculation", "renewal",
                    "begun", "stream_when_final", "takes_back", "return_receipt", "base_id"}  # fmt: skip


def request_json(request: Request, num_output: int = 0) -> bytes:
    """Encode a request's settings without the defaults. num_output: the last of its known tokens that are output, of an
    answer that goes on; the request itself may be as it arrived."""
    data: dict[str, Any] = {"id": request.id, "index": request.index, "seed": request.seed}
    data["params"] = {k: v for k, v in changed(request.params).items() if k not in _CONTROLLERS_OWN}
    if num_output:
        data["num_output"] = num_output
    data["options"] = {k: v for k, v in changed(request.options).items() if k not in _CONTROLLERS_OWN}
    return json.dumps(data, separators=(",", ":"), default=list).encode()


def request_of(data: bytes, token_ids: Sequence[int], images: Images | None = None) -> Request:
    """Decode a follower's request, with the images of its prompt. It has the fields that a step reads."""
    given = json.loads(data)
    sequence = TokenSequence(given["id"], token_ids)
    sequence.num_prompt_tokens -= given.get("num_output", 0)
    return Request(
        sequence, SamplingParams(**given["params"]), options_of(given["options"]),
        given["index"], given["seed"], 0.0, 0, None, images=images,
    )  # fmt: skip


def options_of(given: Mapping[str, Any]) -> RequestOptions:
    """Decode a request's options from JSON values."""
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if (renewal := options.get("renewal")) is not None:
        options["renewal"] = Renewal(tuple(renewal["token_ids"]), renewal["seed"], renewal["index"])
    if (begun := options.get("begun")) is not None:
        spans = tuple((version, digest, start) for version, digest, start in begun["spans"])
        token_ids, logprobs = tuple(begun["token_ids"]), tuple(begun["logprobs"])
        kept = kv_starts_of(begun["kv_starts"])
        options["begun"] = Begun(token_ids, logprobs, spans, begun["seed"], begun["index"], kept)
    return RequestOptions(**options)


def kv_starts_of(given: Iterable[Any]) -> tuple[KVStart, ...]:
    """Decode a completion's `kv_starts` from JSON values."""
    return tuple(KVStart(start, tuple(KeptKV(*run) for run in kept)) for start, kept in given)


def changed(value: Any) -> dict[str, Any]:
    """Return the fields of settings that have not their default."""
    default = type(value)()
    pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in pairs if v != getattr(default, name)}
