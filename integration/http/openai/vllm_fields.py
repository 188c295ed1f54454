"""Fields of OpenAI's two calls that vLLM's clients add: grammars, log-probabilities of the prompt, names of tokens.

Fields that would change the answer and are not supported are refused by name; see `refuse_vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from ....rollout.completion import Completion
from ..edge.errors import BadField

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# Values that change nothing, by field; every other value is refused.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "vllm_xargs": (None, {}),
    "prompt_embeds": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1, 1.0),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "detokenize": (None, True),
    "truncation_side": (None, "left"),
    "include_reasoning": (None, True),
    "watermarking": (None, False),
    "logprob_token_ids": (None, []),
    "return_token_offsets": (None, False),
    "return_prompt_text": (None, False),
    "ec_transfer_params": (None, {}),
    "sampling_logprobs_mode": (None, "selected"),  # SGLang's, as the next
    "task": (None,),
}


def refuse_vllm(values: Mapping[str, object], *, is_chat: bool) -> None:
    """Refuse vLLM's fields that would change the answer. Raises BadField naming the first."""
    refuse_values(values, _DEFAULTS)
    refuse_values(values, {"add_special_tokens": (None, not is_chat)} | ({"echo": (None, False)} if is_chat else {}))


def refuse_values(values: Mapping[str, object], harmless: Mapping[str, tuple[object, ...]], prefix: str = "") -> None:
    """Refuse other values of these fields than those that change nothing. Raises BadField naming the first."""
    for name, allowed in harmless.items():
        if name in values and values[name] not in allowed:
            raise BadField(prefix + name, f"is not supported, but where it is {' or '.join(map(json.dumps, allowed))}")


def structured_settings(given: Mapping[str, object] | None) -> dict[str, object]:
    """Translate structured_outputs to sampling parameters. Raises BadField."""
    name = "structured_outputs"
    fields = {key: value for key, value in (given or {}).items() if value not in (None, False)}
    if options := sorted(set(fields) & set(_OPTIONS)):
        raise BadField(f"{name}.{options[0]}", "is not supported")
    if not fields:
        return {}
    if len(fields) != 1 or not set(fields) <= set(_KINDS):
        raise BadField(name, f"needs one of {', '.join(_KINDS)}, not {', '.join(sorted(map(str, fields)))[:200]}")
    [(kind, value)] = fields.items()
    if kind == "json_object":
        return {"json_schema": {"type": "object", "additionalProperties": True}}
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise BadField(f"{name}.choice", "must be a list of texts")
        return {"ebnf": "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)}
    if not isinstance(value, str) and not (kind in ("json", "structural_tag") and isinstance(value, dict)):
        raise BadField(f"{name}.{kind}", "must be a text" + (", or an object" if kind != "regex" else ""))
    return {{"json": "json_schema", "grammar": "ebnf"}.get(kind, kind): value}


def num_prompt_top(given: int | None, vocab_size: int) -> int | None:
    """Return how many alternatives a prompt's positions have; None: the prompt is not scored. Raises BadField."""
    if given is not None and given < -1:
        raise BadField("prompt_logprobs", f"must be -1 (all tokens) or more, not {given}")
    return vocab_size if given == -1 else given


def shortened(values: dict[str, object], field: str, most: int) -> dict[str, object]:
    """Return the values of a request that truncates its prompts, without token ids before the last that could fit:
    lists may have millions, and are cut before they are walked. most: tokens that fit."""
    given = values.get(field)
    if values.get("truncate_prompt_tokens") is None or not isinstance(given, list) or not given:
        return values
    if isinstance(given[0], list):
        cut: list[object] = [ids[-most:] if isinstance(ids, list) else ids for ids in given]
    else:
        cut = given if isinstance(given[0], str) else given[-most:]
    return {**values, field: cut}


def num_kept(given: int | None, room: int) -> int | None:
    """Return how many last tokens of a prompt are kept; None: all. room: tokens that fit. Raises BadField."""
    if given is None:
        return None
    if given == -1:
        return room
    if given < 1:
        raise BadField("truncate_prompt_tokens", f"must be -1 (as many as fit) or at least 1, not {given}")
    return given


def prompt_logprobs(
    c: Completion, num_top: int, text_of: Callable[[int], str]
) -> list[dict[str, dict[str, object]] | None]:
    """List each position of a prompt: its token and the likeliest ones, by id. The first position has none.

    A token that is not among the likeliest has no rank: it was not counted.
    """
    found: list[dict[str, dict[str, object]] | None] = []
    top = c.prompt_top_logprobs or ()
    for at, (token, logprob) in enumerate(zip(c.prompt_ids, c.prompt_logprobs or (), strict=False)):
        if logprob is None:
            found.append(None)
            continue
        ranked: Sequence[tuple[float, int]] = (top[at] or ())[:num_top] if at < len(top) else ()
        entries: dict[str, dict[str, object]] = {
            str(id): {"logprob": its_own, "rank": rank, "decoded_token": text_of(id)}
            for rank, (its_own, id) in enumerate(ranked, 1)
        }
        own: dict[str, object] = {"logprob": logprob, "rank": None, "decoded_token": text_of(token)}
        found.append({str(token): entries.get(str(token), own)} | entries)
    return found


def token_name(token_id: int) -> str:
    """Return the name that stands for a token's text under return_tokens_as_token_ids."""
    return f"token_id:{token_id}"
