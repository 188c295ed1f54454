"""Requests and answers of /generate as verl has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any


def request_body(
    config: Any, context: int, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str
) -> dict[str, Any]:
    """Build the body of /generate from verl's sampling parameters, which have the names of SGLang's or vLLM's.

    context: the longest sequence, in tokens. An answer is as long as asked for, or as the settings of the rollout say,
    and ends where the context does. Raises ValueError for a prompt that fills it.
    """
    given = dict(sampling_params)
    room = context - len(prompt_ids)
    if room < 1:
        raise ValueError(f"request {request_id}: a prompt of {len(prompt_ids)} tokens fills the context of {context}")
    asked = [value for name in ("max_new_tokens", "max_tokens") if (value := given.pop(name, None)) is not None]
    most = asked[0] if asked else config.response_length
    if not asked:  # in conversations, what verl's tensors have room for
        most = min(most, config.prompt_length + config.response_length - len(prompt_ids))
    body: dict[str, Any] = {"rid": request_id, "input_ids": list(prompt_ids), "return_logprob": True}
    given.pop("logprobs", None)
    of_prompt = given.pop("prompt_logprobs", None)
    if of_prompt is not None:
        body |= {"logprob_start_len": 0, "top_logprobs_num": of_prompt}
    if config.full_determinism:  # verl's request ids are the same in each run then
        digest = hashlib.sha256(f"{config.seed} {request_id}".encode()).digest()
        given.setdefault("sampling_seed", int.from_bytes(digest[:4]) >> 1)
    body["sampling_params"] = given | {"max_new_tokens": max(0, min(most, room))}
    return body


def read_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Read an answer of /generate as the fields of verl's TokenOutput."""
    meta = answer["meta_info"]
    further = {"num_cached_tokens": meta["cached_tokens"], **_steps_of(meta)}
    if "input_token_logprobs" in meta:
        further |= _of_prompt(meta)
    return {
        "token_ids": answer["output_ids"],
        "log_probs": [logprob for logprob, *_ in meta["output_token_logprobs"]],
        "stop_reason": meta["finish_reason"]["type"],
        "extra_fields": further,
    }


def _of_prompt(meta: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Return ids and log-probabilities [prompt, ranks] of the tokens after each of the prompt's: its own next one, or
    the likeliest ones where those were asked for. The last row stands for no token and has zeros."""
    ranked = meta.get("input_top_logprobs") or [[triple] for triple in meta["input_token_logprobs"]]
    rows = [row for row in ranked[1:] if row]
    width = len(rows[0]) if rows else 1
    return {
        "prompt_ids": [[token for _, token, *_ in row] for row in rows] + [[0] * width],
        "prompt_logprobs": [[logprob for logprob, *_ in row] for row in rows] + [[0.0] * width],
    }


def _steps_of(meta: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps of verl's trainer whose weights drew the tokens: those of the last one, the first and the
    newest."""
    versions = [span["version"] for span in meta["weight_versions"]] or [meta["weight_version"]]
    steps = [int(version) for version in versions if str(version).isdecimal()]
    if not steps:
        return {}
    return {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}
