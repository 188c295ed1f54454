"""Facts about an answer (meta_info), with SGLang's keys."""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....rollout.completion import Completion, FinishReason, KeptIds, StreamChunk

Triple = tuple[float | None, int, str | None]  # log-probability, token id, its text if it was asked for
Ranked = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Wanted:
    """The log-probabilities that were asked for with one prompt."""

    logprobs: bool = False
    logprob_start_len: int = -1
    top: bool = False
    listed: bool = False
    text_of: Callable[[int], str] | None = None  # returns a token's text; None: triples have no text

    def triple(self, logprob: float | None, token_id: int) -> Triple:
        if logprob is not None and not math.isfinite(logprob):
            logprob = None  # JSON has no infinity
        return (logprob, token_id, self.text_of(token_id) if self.text_of else None)

    def triples(self, logprobs: Iterable[float | None], token_ids: Iterable[int]) -> list[Triple]:
        """Make triples, as many as there are log-probabilities: an aborted prompt may not have all of them."""
        return [self.triple(*pair) for pair in zip(logprobs, token_ids, strict=False)]

    def ranked(self, positions: Iterable[Ranked | None]) -> list[list[Triple] | None]:
        """Make per position the triples of several tokens."""
        return [None if at is None else [self.triple(*pair) for pair in at] for at in positions]


def finish_reason(reason: FinishReason | None) -> dict[str, object] | None:
    """Make SGLang's form of a finish reason; null while the sequence runs."""
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        why = {"message": reason.message} if reason.message else {}
        return {"type": "length", "length": reason.length, **why}
    return {"type": "abort", "message": reason.message, "status_code": None, "err_type": None}


def cause(reason: FinishReason | None) -> dict[str, object]:
    """Make the fields of an answer of OpenAI's or vLLM's that was aborted, or cut by the KV pool: why, and whether the
    engine aborted it by itself. Other answers have none of them."""
    if reason is None or reason.message is None:
        return {}
    found: dict[str, object] = {"finish_message": reason.message}
    return found | {"aborted_by": "engine"} if reason.by_engine else found


def meta_info(completion: Completion, wanted: Wanted, received: float) -> dict[str, object]:
    """Make the meta_info of a final answer. received: time of the request, by time.monotonic()."""
    c = completion
    info: dict[str, object] = {
        **_head(c.id, len(c.prompt_ids), len(c.token_ids), c.num_cached_tokens, c.num_retractions, received),
        "finish_reason": finish_reason(c.finish_reason),
        "weight_version": c.weight_version,
        "weight_digest": c.weight_digest,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end, "digest": span.digest}
            for span in c.weight_versions
        ],
        "response_sent_to_client_ts": time.time(),
    }
    if c.drawn_with is not None:  # for /renew
        info |= {"seed": c.drawn_with.seed, "sample_index": c.index}
    if c.num_kept_tokens:
        info["num_kept_tokens"] = c.num_kept_tokens
    if c.forced is not None:
        info["num_jump_forward_tokens"] = c.num_jump_forward_tokens
    if c.drafts:
        info |= _drafts(c)
    if c.kept_ids is not None:
        info |= _kept(c.kept_ids)
    if c.receipt is not None:
        info["receipt"] = c.receipt
    if wanted.logprobs:
        info |= _output_logprobs(c, wanted) | _input_logprobs(c, wanted)
        if c.forced is not None:
            info |= {"output_token_forced": c.forced, "output_token_masked_probs": c.masked_probs}
    return info


def _kept(kept: KeptIds) -> dict[str, object]:
    """List the tokens that top_p and the other filters kept, as slime reads them: ids of all positions one after
    another, and where each position's begin, with the end of the last; int32, little-endian, in base64."""
    offsets = array("i", [0]) + kept.ends
    return {"top_p_token_ids": _base64_int32(kept.ids), "top_p_token_offsets": _base64_int32(offsets)}


def _base64_int32(values: array[int]) -> str:
    return base64.b64encode(np.asarray(values, "<i4").tobytes()).decode()


def _drafts(c: Completion) -> dict[str, object]:
    """Count the drafts under SGLang's names, the present and the earlier ones. SGLang drafts in every step; here steps
    without a draft count in none of them."""
    num_steps, num_drafted, num_accepted = c.num_draft_steps, c.num_drafted_tokens, c.num_accepted_tokens
    return {
        "spec_verify_ct": num_steps,
        "spec_accept_rate": num_accepted / num_drafted,
        "spec_accept_length": 1 + num_accepted / num_steps,  # tokens of such a step
        **dict.fromkeys(("spec_num_proposed_drafts", "spec_draft_token_num"), num_drafted),
        **dict.fromkeys(("spec_num_correct_drafts", "spec_accept_token_num"), num_accepted),
        "draft_sources": {
            d.source: {"drafted_tokens": d.num_drafted_tokens, "accepted_tokens": d.num_accepted_tokens}
            for d in c.drafts
        },
    }  # fmt: skip


def stream_meta(chunk: StreamChunk, num_tokens: int, received: float) -> dict[str, object]:
    """Make the meta_info of an incomplete answer, without its growing lists. num_tokens: generated so far."""
    return {
        **_head(
            chunk.id, chunk.num_prompt_tokens, num_tokens, chunk.num_cached_tokens, chunk.num_retractions, received
        ),
        "finish_reason": None,
        "weight_version": chunk.weight_version,
    }


def _head(
    id: str, num_prompt: int, num_new: int, num_cached: int, num_retractions: int, received: float
) -> dict[str, object]:
    return {
        "id": id,
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "reasoning_tokens": 0,
        "cached_tokens": num_cached,
        "cached_tokens_details": cached_details(num_cached),
        "num_retractions": num_retractions,
        "dp_rank": 0,
        "e2e_latency": time.monotonic() - received,
    }


def cached_details(num_cached: int) -> dict[str, int]:
    """Make SGLang's count of cached tokens by the place where their KV was."""
    return {"device": num_cached, "host": 0}


def _output_logprobs(c: Completion, wanted: Wanted) -> dict[str, object]:
    """List the output's log-probabilities. With max_new_tokens=0 there is one entry: that of the next token."""
    token_ids, logprobs, top, listed = c.token_ids, c.logprobs, c.top_logprobs, c.listed_logprobs
    if (ahead := c.next_token) is not None:
        token_ids, logprobs = (ahead.token_id,), (ahead.logprob,)
        top, listed = (ahead.top_logprobs,), (ahead.listed_logprobs,)
    info: dict[str, object] = {
        "output_token_logprobs": wanted.triples(logprobs, token_ids),
        "output_token_logprobs_length": len(logprobs),
    }
    if wanted.top:
        info["output_top_logprobs"] = wanted.ranked(top or ())
    if wanted.listed:
        info["output_token_ids_logprobs"] = wanted.ranked(listed or ())
    return info


def _input_logprobs(c: Completion, wanted: Wanted) -> dict[str, object]:
    """List the log-probabilities of prompt[logprob_start_len:]. As in SGLang, the first entry's is always null."""
    start = wanted.logprob_start_len
    token_ids = c.prompt_ids[start:] if start >= 0 else ()
    info: dict[str, object] = {"input_token_logprobs": wanted.triples(_without_first(c.prompt_logprobs), token_ids)}
    if wanted.top:
        info["input_top_logprobs"] = wanted.ranked(_without_first(c.prompt_top_logprobs))
    if wanted.listed:
        info["input_token_ids_logprobs"] = wanted.ranked(_without_first(c.prompt_listed_logprobs))
    return info


def _without_first(values: Sequence[Any] | None) -> list[Any]:
    return [None, *values[1:]] if values else []
