"""The last events of a stream that is aborted while no worker has it: the client keeps what it has of the answer.

They are those of a worker that aborts it, as far as the router knows the answer: of what a worker tells at an answer's
end only (log-probabilities of the prompt, receipts), nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...http.edge.bodies import parse_object_off_loop
from ..fleet.aborted import NAMED, Aborted
from .progress import Part, Progress

_HEAD = ("id", "request_id", "object", "created", "model", "output_mode")  # of each event of OpenAI's wires
# Of a choice that ends without further output.
_NOTHING: dict[str, object] = {
    "delta": {"content": ""}, "text": "", "token_ids": [], "response_token_ids": [], "logprobs": None,
    "matched_stop": None, "stop_reason": None,
}  # fmt: skip


async def last_events(aborted: Aborted, progress: Progress, max_lists: int) -> bytes:
    """Make the events that end an aborted stream, of which the client has a part. Raises `aborted` where the router has
    not kept enough of it, and for streams whose end repeats or closes what they had begun."""
    if aborted.call.path in NAMED:
        raise aborted
    values = await parse_object_off_loop(aborted.call.body, max_lists)
    return await asyncio.to_thread(_last_events, aborted, progress, values)


def _last_events(aborted: Aborted, progress: Progress, values: Mapping[str, object]) -> bytes:
    is_generate = aborted.call.path == "/generate"
    _, fresh = aborted.forms({**values, "rid": progress.rids} if is_generate else values, None)
    parts = progress.parts
    newest = [None if one is None else _read(one.newest) for one in parts]
    if len(fresh) < len(parts) or not any(newest) or {} in newest:
        raise aborted
    if is_generate:
        ends = [
            new if part is None or last is None else _end_of_generate(part, last, new)
            for part, last, new in zip(parts, newest, fresh, strict=False)
        ]
    else:
        head = {name: value for name, value in next(filter(None, newest)).items() if name in _HEAD}
        ends = [head | _end_of_openai(part, last, new) for part, last, new in zip(parts, newest, fresh, strict=False)]
    events = [end for part, end in zip(parts, ends, strict=True) if part is None or not part.has_ended]
    if len(fresh) > len(parts) and not progress.has_usage:
        events.append(head | {"choices": [], "usage": _usage(parts, len(progress.rids) or 1)})
    return b"".join([*(f"data: {json.dumps(event)}\n\n".encode() for event in events), b"data: [DONE]\n\n"])


def _read(event: bytes) -> dict[str, Any]:
    """Return the object of an event, {} where it is none."""
    try:
        value = json.loads(event.removeprefix(b"data: "))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _end_of_generate(part: Part, last: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, object]:
    """Repeat an event, which has the whole output so far, as the last one of its sequence."""
    told, ended = last.get("meta_info"), new["meta_info"]
    own = {name: value for name, value in ended.items() if name in ("finish_reason", "input_token_logprobs")}
    digest = part.spans[-1][1] if part.spans else None
    more = {"weight_digest": digest, "weight_versions": _versions(part), "response_sent_to_client_ts": time.time()}
    return {**last, "meta_info": {**(told if isinstance(told, dict) else ended), **own, **more}}


def _end_of_openai(part: Part | None, last: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, object]:
    """Make the choice and the usage of the last event of a sequence, without further output."""
    [choice] = new["choices"]
    if part is None or last is None:
        return {"choices": [choice]}
    given = last.get("choices")
    known = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else {}
    ended = {name: value for name, value in _NOTHING.items() if name in known}
    ended |= {name: choice[name] for name in ("index", "finish_reason", "finish_message")}
    if "token_ids" in choice:
        ended["weight_versions"] = _versions(part)
    return {"choices": [ended]} | ({"usage": last["usage"]} if "usage" in last else {})


def _versions(part: Part) -> list[dict[str, object]]:
    ends = [*(start for _, _, start in part.spans[1:]), len(part.token_ids)]
    return [
        {"version": version, "start": start, "end": end, "digest": digest}
        for (version, digest, start), end in zip(part.spans, ends, strict=True)
    ]


def _usage(parts: Sequence[Part | None], num_prompts: int) -> dict[str, object]:
    """Count the tokens of all sequences. A prompt with several samples counts once."""
    known = [one or Part() for one in parts]
    num_samples = max(1, len(known) // num_prompts)
    of_prompts = [known[at : at + num_samples] for at in range(0, len(known), num_samples)]
    num_prompt = sum(max(one.num_prompt for one in samples) for samples in of_prompts)
    num_new = sum(len(one.token_ids) for one in known)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
