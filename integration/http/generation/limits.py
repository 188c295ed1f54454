"""Limits of generation requests: counts are checked before contents are walked, texts before they are tokenised."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

from ....rollout.engine import Engine
from ....rollout.errors import Overloaded
from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import SamplingParams
from ..edge.config import HttpConfig
from ..edge.errors import BadField, TooLong
from ..images.intake import ImageIntake
from .tokenising import Tokenising

_NAMES = ("rid", "extra_key", "cache_salt", "model")
_MAX_NAME = 1024  # characters of each of these; every sequence, chunk or block has a copy
_STREAM_SHARE = 8  # of the limit of entries, a stream that repeats its earlier output has this part
_KEPT_IDS = 32  # token ids that filters kept that count as one entry
_PLAIN_POSITIONS = 8  # output positions without alternatives, a number each, that count as one entry
# Values in one prompt's sampling parameters; their longest text, a grammar, may have as many bytes.
_MAX_ENTRIES = 1 << 18
_MAX_DEPTH = 500  # of values that answers repeat; twice as many could be parsed, but not encoded everywhere
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # in ASCII, so that a text is as long as its bytes, or longer


class RequestLimits:
    """Check the parts of requests against the server's settings. Every method raises BadField that names the setting
    and its value."""

    def __init__(self, engine: Engine, config: HttpConfig) -> None:
        self._engine, self._config = engine, config
        self.tokenising = Tokenising(engine, config.max_tokenising_chars)
        self.images = ImageIntake(engine, config)

    @cached_property
    def max_chars(self) -> int | None:
        """The number of characters of the longest text that can fit into the context; None without a tokenizer."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return None
        return self._engine.max_model_len * max(map(len, tokenizer.get_vocab()), default=1)

    def lists(self, values: Mapping[str, object], names: Iterable[str]) -> None:
        """Check the lengths of lists that may have an entry for each prompt, and those of names."""
        for name in names:
            value = values.get(name)
            if isinstance(value, list) and len(value) > self._config.max_prompts:
                self.prompts(len(value), name)
        for name in _NAMES:
            value = values.get(name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and len(text) > _MAX_NAME:
                    raise BadField(name, f"has {len(text)} characters, more than {_MAX_NAME}")

    def long_lists(self, values: Mapping[str, object], prompt: str, others: Iterable[str] = ()) -> None:
        """Check the lengths of a field of prompts, of lists of token ids in others, and of a conversation. To walk
        millions of entries, which no context has room for, would hold all threads."""
        room, most = self._engine.max_model_len, self._config.max_prompts
        given = values.get(prompt)
        if isinstance(given, list) and len(given) > max(most, room):
            if given and isinstance(given[0], list | str):
                self.prompts(len(given), prompt)
            self.lengths([given], prompt)
        self.lengths((entry for entry in given if isinstance(entry, list)) if isinstance(given, list) else (), prompt)
        for name in ("messages", *others):
            value, limit = values.get(name), max(most, room, self._config.max_listed_logprobs)
            if isinstance(value, list) and len(value) > limit:
                raise BadField(name, f"{len(value)} entries are more than the {limit} that can have a use")

    def prompts(self, num_prompts: int, field: str) -> None:
        """Check the number of prompts."""
        if num_prompts > (limit := self._config.max_prompts):
            raise BadField(field, f"{num_prompts} entries are more than the {limit} prompts of a request (max_prompts)")

    def sequences(self, num_sequences: int) -> None:
        """Check the number of prompts times samples."""
        if num_sequences > (limit := self._config.max_sequences):
            raise BadField(
                "n", f"{num_sequences} sequences are more than the {limit} that one request may have (max_sequences)"
            )

    def given_params(self, given: Mapping[str, object], field: str | None = None) -> None:
        """Check the sizes of sampling parameters as they came. field: the field that holds them; None: they are fields
        themselves."""
        bias, stop = given.get("logit_bias"), given.get("stop")
        limit = min(self._config.max_logit_bias, self._engine.model.vocab_size)
        if isinstance(bias, Mapping) and len(bias) > limit:
            message = f"logit_bias has {len(bias)} entries, more than {limit} (max_logit_bias, or the vocabulary)"
            raise BadField(field or "logit_bias", message)
        texts = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        num_bytes = sum(len(text) for text in texts if isinstance(text, str))
        if num_bytes > (limit := self._config.max_stop_bytes):
            raise BadField(field or "stop", f"stop has {num_bytes} bytes, more than {limit} (max_stop_bytes)")
        ids = given.get("stop_token_ids")
        self._stop_token_ids(ids if isinstance(ids, list) else [], field or "stop_token_ids")
        for name, value in given.items():
            if isinstance(value, list | dict) and _has_more_than(_MAX_ENTRIES, value):
                raise BadField(field or name, f"{name[:100]} has more than {_MAX_ENTRIES} values")

    def _stop_token_ids(self, ids: Sequence[object], field: str) -> None:
        if len(ids) > (limit := self._config.max_stop_token_ids):
            raise BadField(field, f"stop_token_ids has {len(ids)} entries, more than {limit} (max_stop_token_ids)")
        self._in_vocabulary(ids, field, "stop_token_ids names")

    def _in_vocabulary(self, ids: Sequence[object], field: str, names: str = "names") -> None:
        size = self._engine.model.vocab_size
        if far := [id for id in ids if isinstance(id, int) and id >= size]:
            raise BadField(field, f"{names} {far[:5]}, but the vocabulary ends at {size - 1}")

    def lengths(self, prompts: Iterable[str | Sequence[int]], field: str) -> None:
        """Check that prompts may fit into the context: token ids by their number, texts by their characters."""
        room, context = self._engine.max_prompt_len, self._engine.max_model_len
        for prompt in prompts:
            if isinstance(prompt, str):
                self.characters(len(prompt), field)
            elif len(prompt) > room:
                # A token that is generated needs room too. Whether one is asked for is read later, see `Tokenising`.
                most = f"{room - 1} tokens; {room} where none are generated"
                if room < context:
                    most = f"{room} tokens, as the KV pool has room for no more"
                why = f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({most})"
                raise TooLong(field, str(len(prompt)), room, room, why=why)

    def characters(self, num_chars: int, field: str) -> None:
        """Check that a text of this length may fit into the context."""
        if self.max_chars is not None and num_chars > self.max_chars:
            room = self._engine.max_model_len
            why = (
                f"Input length ({num_chars} characters) exceeds the maximum allowed length "
                f"({self.max_chars} characters are as many as {room} of the longest tokens have)"
            )
            raise TooLong(field, f"more than {room}", room, room, why=why)

    def top(self, num_top: int, field: str) -> None:
        """Check the number of likeliest tokens at each position."""
        if num_top > (limit := self._config.max_top_logprobs):
            raise BadField(field, f"{num_top} are more than {limit} (max_top_logprobs)")

    def listed(self, token_ids: Sequence[object], field: str) -> None:
        """Check the number of named tokens at each position, and that the vocabulary has them."""
        if len(token_ids) > (limit := self._config.max_listed_logprobs):
            raise BadField(field, f"{len(token_ids)} tokens are more than {limit} (max_listed_logprobs)")
        self._in_vocabulary(token_ids, field)

    def draft(self, token_ids: Sequence[object], field: str) -> None:
        """Check the number of tokens of an output that may come again: no output is longer than the context."""
        if len(token_ids) > (room := self._engine.max_model_len):
            raise BadField(field, f"{len(token_ids)} tokens are more than the context has, which is {room}")

    def max_kept_ids(self, params: SamplingParams) -> int:
        """Return how many tokens that its filters keep an answer may report; 0: it was not asked for any. Raises
        BadField."""
        wants = (params.custom_params or {}).get("return_top_p_token_ids", False)
        if not isinstance(wants, bool):
            raise BadField("custom_params", f"return_top_p_token_ids must be true or false, not {str(wants)[:100]!r}")
        return self._config.max_kept_token_ids if wants else 0

    def tools(self, tools: Sequence[object], field: str) -> None:
        """Check the number of a request's tools, and the bytes of their JSON."""
        if len(tools) > (limit := self._config.max_tools):
            raise BadField(field, f"{len(tools)} tools are more than {limit} (max_tools)")
        num_bytes, limit = 0, self._config.max_tools_bytes
        for tool in tools:
            num_bytes += _num_bytes(tool, field)
            if num_bytes > limit:
                raise BadField(field, f"their JSON has more than {limit} bytes (max_tools_bytes)")

    def repeated(self, value: object, field: str) -> None:
        """Check the bytes and the depth of tools, of a choice among them, or of a format, which the answer repeats."""
        limit, num_bytes = max(self._config.max_tools_bytes, self._config.max_grammar_bytes), 0
        for part in value if isinstance(value, list) else [value]:
            num_bytes += _num_bytes(part, field)
            if num_bytes > limit:
                raise BadField(field, f"its JSON has more than {limit} bytes (max_tools_bytes, max_grammar_bytes)")
        if _is_deeper_than(_MAX_DEPTH, value):
            raise BadField(field, f"is nested too deeply: more than {_MAX_DEPTH} lists and objects within one another")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the engine; None: it has none."""
        return self._engine.tokenizer

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """The settings tool_call_parser and reasoning_parser."""
        return self._config.tool_call_parser, self._config.reasoning_parser

    def entries(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
        field: str,
        *,
        repeats: bool = False,
        has_logprobs: Iterable[bool] = (),
    ) -> None:
        """Check the number of log-probabilities, of all sequences together. repeats: the answer is a stream whose every
        event repeats the earlier output. has_logprobs: per prompt, whether the answer has those of the output where no
        alternatives are asked for."""
        total = self._num_entries(prompts, params, options, has_logprobs)
        limit = self._config.max_logprob_entries // (_STREAM_SHARE if repeats else 1)
        if total > limit:
            what = f"stream, 1/{_STREAM_SHARE} of those of a request" if repeats else "request"
            raise BadField(
                field, f"{total} log-probabilities are more than the {limit} of a {what} "
                "(max_logprob_entries): ask for fewer alternatives, tokens or samples, or start later"
            )  # fmt: skip

    def num_open_entries(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
    ) -> int:
        """Count the log-probabilities that a request adds to the open ones. Those of output tokens alone do not count:
        every sequence has them, asked for or not, and each takes a step."""
        num_kept = sum(one.max_kept_ids // _KEPT_IDS * its.n for its, one in zip(params, options, strict=True))
        return self._num_entries(prompts, params, options, ()) + num_kept

    def _num_entries(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
        has_logprobs: Iterable[bool],
    ) -> int:
        total = 0
        for ids, its_params, its_options, has in zip_longest(prompts, params, options, has_logprobs):
            num, start = (
                its_options.top_logprobs_num + len(its_options.token_ids_logprob),
                its_options.logprob_start_len,
            )
            num_scored = max(len(ids) - start, 0) if start >= 0 else 0
            num_new = max(min(its_params.max_new_tokens, self._engine.max_model_len - len(ids)), 0)
            if num:
                num_each: float = max(num_scored + num_new, 1) * (1 + num)
            else:
                num_each = num_scored + num_new / _PLAIN_POSITIONS * bool(has)
            total += math.ceil(num_each * its_params.n)
        return total


class OpenEntries:
    """The log-probabilities of all open requests, counted until their answers are sent. Safe to use from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._held: dict[object, int] = {}  # by request
        self.num = 0

    def take(self, request: object, num: int) -> None:
        """Count a request's. Raises Overloaded beyond the limit; a request alone is always let in."""
        with self._lock:
            if num and self.num and self.num + num > self._limit:
                raise Overloaded(
                    f"the open requests have {self.num} log-probabilities, and {num} more would be over the limit of "
                    f"{self._limit} (max_open_logprob_entries)"
                )
            if num:
                self._held[request] = num
                self.num += num

    def release(self, request: object) -> None:
        """Count a request's no longer. Does nothing where they are not counted."""
        with self._lock:
            self.num -= self._held.pop(request, 0)


def _num_bytes(value: object, field: str) -> int:
    """Return the length of a value's JSON. Raises BadField."""
    try:
        return len(_ENCODER.encode(value))
    except RecursionError:
        raise BadField(field, "is nested too deeply") from None


def _is_deeper_than(limit: int, value: object) -> bool:
    """Return whether a value has more lists and objects within one another than this."""
    level = [value]
    for _ in range(limit + 1):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        if not inner:
            return False
        level = list(chain.from_iterable(inner))
    return True


def _has_more_than(limit: int, value: object) -> bool:
    """Return whether a value has more parts than this, without looking at many more."""
    todo, num = [value], 0
    while todo:
        entry = todo.pop()
        parts = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        num += len(parts)
        if num > limit:
            return True
        todo += [part for part in parts if isinstance(part, dict | list)]
    return False
