"""Answers in OpenAI's format, whole and in chunks, with SGLang's extras."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....rollout.completion import Completion, FinishReason, StreamChunk, TopLogprobs
from ..chat.message import AnswerStream, Fields, message_of
from ..chat.parser import Beginning
from ..generation.meta import Wanted, cached_details, cause, meta_info
from .body import OpenAIRequest
from .text_offsets import NO_CHARACTER, TextOffsets
from .vllm_fields import prompt_logprobs


def answer(
    ask: OpenAIRequest,
    completions: Sequence[Completion],
    received: float,
    echoes: Sequence[str],
    beginnings: Sequence[Beginning] = (),
) -> dict[str, object]:
    """Make the body of an answer that is not streamed. echoes: texts of the prompts; empty if they are not echoed.
    beginnings: those of a chat's answers."""
    last = completions[-1]
    found = weights_of(last)
    if len(completions) > 1:
        del found["weight_versions"]
    if ask.is_chat and ask.return_token_ids:
        found["prompt_token_ids"] = last.prompt_ids
    if ask.return_cached_details:
        found["sglext"] = sglext(completions[0])
    if ask.is_chat and ask.num_prompt_top is not None:
        found["prompt_logprobs"] = prompt_logprobs(last, ask.num_prompt_top, text_of(ask))
    return found | {
        "id": ask.id,
        "object": "chat.completion" if ask.is_chat else "text_completion",
        "created": ask.created,
        "model": ask.model,
        "choices": [
            choice(
                ask,
                completion,
                index,
                received,
                echoes[index // ask.n] if echoes else "",
                beginnings[index // ask.n] if beginnings else Beginning(),
            )
            for index, completion in enumerate(completions)
        ],
        "usage": usage(ask, completions),
    }


def weights_of(completion: Completion) -> dict[str, object]:
    """Make the fields that name the weights of an answer: the newest, and which of them drew which tokens."""
    metadata = {"weight_version": completion.weight_version}  # texts alone, as OpenAI's clients check
    if completion.weight_digest is not None:
        metadata["weight_digest"] = completion.weight_digest
    return {"metadata": metadata, "weight_digest": completion.weight_digest, "weight_versions": spans_of(completion)}


def spans_of(completion: Completion) -> list[dict[str, object]]:
    """List which version of the weights drew which tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_versions]


def choice(
    ask: OpenAIRequest, completion: Completion, index: int, received: float, echoed: str, beginning: Beginning
) -> dict[str, object]:
    """Make one choice of an answer that is not streamed. received: time of the request, by time.monotonic(). echoed:
    the prompt of a completion. beginning: of a chat's answer."""
    c = completion
    found: dict[str, object] = {"index": index}
    has_calls = False
    if ask.is_chat:
        message = _message(ask, c.text, beginning)
        has_calls = "tool_calls" in message
        found["message"] = message
        found["logprobs"] = chat_logprobs(ask, c.token_ids, c.logprobs, c.top_logprobs) if ask.wanted.logprobs else None
    else:
        found["text"] = echoed + c.text
        found["logprobs"] = _completion_logprobs(ask, c, echoed) if ask.wanted.logprobs else None
        if ask.num_prompt_top is not None:
            found["prompt_logprobs"] = prompt_logprobs(c, ask.num_prompt_top, text_of(ask))
    found |= ending(c.finish_reason, has_calls=has_calls)
    return found | extras(ask, c, received)


def _message(ask: OpenAIRequest, text: str, beginning: Beginning) -> dict[str, object]:
    if ask.form is None or ask.form.answers is None:
        return plain_message(text)
    return message_of(ask.form.answers, beginning, text)


def plain_message(text: str) -> dict[str, object]:
    """Make the message of an answer that is content alone."""
    return {"role": "assistant", "content": text}


def ending(reason: FinishReason | None, *, has_calls: bool = False) -> dict[str, object]:
    """Make the fields that say how a choice ended; null while the sequence runs. has_calls: the answer calls tools,
    which is the reason where nothing cut it."""
    kind = None if reason is None else reason.type
    return {
        "finish_reason": "tool_calls" if has_calls and kind == "stop" else kind,
        "matched_stop": None if reason is None else reason.matched,
        **cause(reason),
    }


def extras(ask: OpenAIRequest, completion: Completion, received: float) -> dict[str, object]:
    """Make the fields of SGLang's that the request asks for: token ids and meta_info."""
    found: dict[str, object] = {}
    if ask.return_prompt_token_ids or ask.return_token_ids:
        found["prompt_token_ids"] = completion.prompt_ids
    if ask.return_token_ids:
        found |= token_ids(completion.token_ids)
    if ask.return_meta_info:  # with log-probabilities, also where `logprobs` is not set
        found["meta_info"] = meta_info(completion, Wanted(logprobs=True), received)
    if completion.receipt is not None:
        found["receipt"] = completion.receipt
    if ask.return_weight_versions:
        found["weight_versions"] = spans_of(completion)
    return found


def token_ids(ids: Sequence[int]) -> dict[str, object]:
    """Make the output's token ids under both names that clients read."""
    return {"token_ids": ids, "response_token_ids": ids}


def usage(ask: OpenAIRequest, completions: Sequence[Completion]) -> dict[str, object]:
    """Count the tokens of an answer. A prompt with several samples counts once."""
    first_samples = completions[:: ask.n]
    num_prompt = sum(len(c.prompt_ids) for c in first_samples)
    num_new = sum(len(c.token_ids) for c in completions)
    counted: dict[str, object] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in first_samples)},
    }
    if ask.has_prediction:
        tried = [counts for c in completions for counts in c.drafts if counts.source == "caller"]
        num_accepted = sum(counts.num_accepted_tokens for counts in tried)
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(counts.num_drafted_tokens for counts in tried) - num_accepted,
        }
    return counted


def sglext(completion: Completion) -> dict[str, object]:
    """Make SGLang's extension of an answer: where the cached tokens of its first prompt were."""
    return {"cached_tokens_details": cached_details(completion.num_cached_tokens)}


def prompt_text(ask: OpenAIRequest, number: int, prompt_ids: Sequence[int]) -> str:
    """Return the text of one prompt, as it was sent or decoded."""
    prompt = ask.prompts[number]
    return prompt if isinstance(prompt, str) else ask.decode(prompt_ids)


def text_of(ask: OpenAIRequest) -> Callable[[int], str]:
    """Return a function from a token id to its text, which is empty without a tokenizer."""
    return ask.wanted.text_of or (lambda token_id: "")


# -- chunks ---------------------------------------------------------------------------------------------------------


def chunk_head(ask: OpenAIRequest) -> dict[str, object]:
    """Make the fields that are the same in every chunk of a stream."""
    kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
    return {"id": ask.id, "object": kind, "created": ask.created, "model": ask.model}


def chunk_choices(
    ask: OpenAIRequest, chunk: StreamChunk, index: int, offsets: TextOffsets, stream: AnswerStream | None
) -> list[dict[str, object]]:
    """Make the choices of the events from a step's output: one, or one for each piece of a chat's message; the last
    has everything else. offsets: of the sequence's tokens, for completions. stream: of the message; None: it is content
    alone."""
    last: dict[str, object] = {"index": index}
    deltas: list[Fields] = [{"content": chunk.text}]
    if stream is not None:
        deltas = stream.deltas(chunk.text, is_last=chunk.completion is not None) or [{}]
    if ask.is_chat:
        last["delta"] = deltas.pop()
    else:
        last["text"] = chunk.text
    last["logprobs"] = None
    if ask.wanted.logprobs:
        parts = (chunk.token_ids, chunk.logprobs, chunk.top_logprobs or None)
        last["logprobs"] = chat_logprobs(ask, *parts) if ask.is_chat else token_logprobs(ask, *parts, offsets)
    has_calls = stream is not None and stream.has_calls
    last |= ending(chunk.completion.finish_reason if chunk.completion is not None else None, has_calls=has_calls)
    if ask.return_token_ids:
        last |= token_ids(chunk.token_ids)
    if chunk.completion is not None and chunk.completion.receipt is not None:
        last["receipt"] = chunk.completion.receipt
    if chunk.completion is not None and ask.return_weight_versions:
        last["weight_versions"] = spans_of(chunk.completion)
    return [
        *({"index": index, "delta": delta, "logprobs": None, **ending(None)} for delta in deltas if ask.is_chat),
        last,
    ]


def chunk_usage(ask: OpenAIRequest, num_prompt: int, num_new: int) -> dict[str, object]:
    """Make the usage of a chunk: null, or with continuous_usage_stats the tokens of the chunk's sequence so far."""
    if not ask.include_usage:
        return {}
    if not ask.continuous_usage:
        return {"usage": None}
    return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}}


def chunk_weights(chunk: StreamChunk) -> dict[str, object]:
    """Make the fields that name the weights of a sequence, in its last chunk."""
    return {} if chunk.completion is None else weights_of(chunk.completion)


# -- log-probabilities ----------------------------------------------------------------------------------------------


def chat_logprobs(
    ask: OpenAIRequest, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs] | None
) -> dict[str, object]:
    """Make the `logprobs` object of /v1/chat/completions. top: per token its likeliest alternatives."""
    content = [
        {
            **_token(ask, id, logprob),
            "top_logprobs": [_token(ask, other, its_own) for its_own, other in others[: ask.num_top]],
        }
        for id, logprob, others in zip(ids, logprobs, top or [()] * len(ids), strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(ask: OpenAIRequest, token_id: int, logprob: float) -> dict[str, object]:
    finite_logprob, _, text = ask.wanted.triple(logprob, token_id)
    name = text or ""
    own_text = name if ask.own_text is None else ask.own_text(token_id)
    return {"token": name, "logprob": finite_logprob, "bytes": _token_bytes(ask, token_id, own_text)}


def _token_bytes(ask: OpenAIRequest, token_id: int, text: str) -> list[int] | None:
    """Return the bytes of a token. The text of a part of a character does not tell them; None: nothing tells them."""
    if text and NO_CHARACTER not in text:
        return list(text.encode(errors="replace"))
    found = ask.bytes_of(token_id)
    return None if found is None else list(found)


def token_logprobs(
    ask: OpenAIRequest,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[TopLogprobs | None] | None,
    offsets: TextOffsets,
) -> dict[str, object]:
    """Make the `logprobs` object of /v1/completions. offsets: of the sequence, before the first of these tokens."""
    text = text_of(ask)
    tokens = [text(id) for id in ids]
    own = zip(top or [None] * len(ids), zip(logprobs, ids, strict=False), strict=False)
    ranked = [None if drawn[0] is None else _by_text(ask, at or (), drawn) for at, drawn in own]
    return {
        "tokens": tokens,
        "token_logprobs": [ask.wanted.triple(*pair)[0] for pair in zip(logprobs, ids, strict=False)],
        "top_logprobs": ranked,
        "text_offset": [offsets.next(id) for id in ids],
    }


def _by_text(ask: OpenAIRequest, ranked: TopLogprobs, drawn: tuple[float | None, int]) -> dict[str, float | None]:
    """Return the alternatives' log-probabilities by text, likeliest first, and that of the token itself, which is alone
    where none are asked for. Equal texts keep the likeliest value."""
    found: dict[str, float | None] = {}
    for logprob, token_id in (*ranked[: ask.num_top], drawn):
        found.setdefault(text_of(ask)(token_id), ask.wanted.triple(logprob, token_id)[0])
    return found


def _completion_logprobs(ask: OpenAIRequest, c: Completion, echoed: str) -> dict[str, object]:
    if not ask.echo:
        return token_logprobs(ask, c.token_ids, c.logprobs, c.top_logprobs, TextOffsets(ask))
    # An aborted prompt may not have all of its log-probabilities.
    prompt_logprobs = list(c.prompt_logprobs or ())
    prompt_top = list(c.prompt_top_logprobs or [None] * len(prompt_logprobs))
    ids = [*c.prompt_ids[: len(prompt_logprobs)], *c.token_ids]
    top = [*prompt_top, *(c.top_logprobs or [None] * len(c.token_ids))]
    return token_logprobs(ask, ids, [*prompt_logprobs, *c.logprobs], top, TextOffsets(ask, echoed=echoed))
