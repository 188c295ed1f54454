"""The growing text of one sequence, and the stop strings in it.

Tokens are decoded in a short window: a few tokens whose text is known, then the new tokens; the window's text after
the known part is new. The cost of a token therefore does not depend on the length of the output, a word's leading space
is kept, and a character that is split over tokens appears when it is complete (vLLM and SGLang decode with two offsets
in a similar way).

                     _window:  [ known tokens | new tokens ]
    decode(_window):  [ _num_known characters | fresh ... | U+FFFD ... ]
                       already in the text      appended     held back: a character may be incomplete
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol, cast

import regex

from ..errors import LockstepError
from ..grammars.processor_time import thread_time
from ..sampling_params import SamplingParams
from .search_time import SearchTime, SequenceSearchTime
from .stop_prefixes import StopPrefixes

NUM_CONTEXT_TOKENS = 5  # of the prompt, so that the first word keeps its leading space; a few more inside characters
MAX_WINDOW_TOKENS = 16  # a longer window is cut
NUM_BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8; a token has one or more
_MAX_CONTEXT_TOKENS = NUM_CONTEXT_TOKENS + 2 * (NUM_BYTES_OF_A_CHARACTER - 1)
REGEX_WINDOW = 512  # a stop_regex match is found if it starts within this many last characters
HALF = "\ufffd"  # decoders write it for bytes that are no character (yet)


class Tokenizer(Protocol):
    """The interface of a tokenizer. transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], **options: bool) -> str | list[str]: ...


class Backend(Protocol):
    """The interface of a tokenizer of the tokenizers library."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def _plain_backend(tokenizer: object) -> Backend | None:
    """Return the backend of a fast tokenizer of transformers whose `decode` adds nothing to that of its backend, else
    None. The way through transformers takes as long as the decoding itself."""
    fast: Any = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerFast", None)  # not imported for this
    if fast is None or not isinstance(tokenizer, fast):
        return None
    kind: Any = type(tokenizer)
    is_plain = kind.decode is fast.decode and kind._decode is fast._decode and "decode" not in vars(tokenizer)
    return cast(Any, tokenizer).backend_tokenizer if is_plain else None


class StopRegexTimeout(LockstepError):
    """A stop_regex took too long on the text so far. Only its own request ends."""


class Undecodable(ValueError):
    """Tokens that the tokenizer cannot decode. Only their own request ends."""


@dataclass(frozen=True)
class StopMatch:
    """A stop string or pattern that the last token completed."""

    stop: str  # the string or pattern, as given
    num_tokens: int  # tokens kept: up to and with the one that completed the match
    start: int  # first character of the match in the generated text
    end: int  # character after it


class IncrementalDetokenizer:
    """The decoder of one sequence's generated tokens. It also searches for the stop strings.

    The stop that is completed first ends the text (of several that end together, the one that starts first). Only
    generated text is searched, and a stop that is completed before `min_new_tokens` is ordinary text. Patterns (of the
    `regex` module) are searched token by token in the last `REGEX_WINDOW` characters, so a greedy pattern matches the
    text that is there at that time; text before `min_new_tokens` is not searched.

    Without a tokenizer there is no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        search_time: SearchTime | None = None,
    ) -> None:
        """Start with the end of the prompt as context. Raises ValueError if the parameters need a tokenizer.

        search_time: shared with other sequences.
        """
        if tokenizer is None and params.needs_text:
            raise ValueError("stop and stop_regex need a tokenizer, and the engine has none")
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._params = params
        self._has_stops = params.needs_text
        self._patterns = params.stop_patterns
        self._search_time = SequenceSearchTime(search_time or SearchTime())
        self._num_tokens = 0
        self._is_skipped: dict[int, bool] = dict.fromkeys(params.kept_special_tokens, False)  # filled token by token
        self._window, self._num_known = self._context(prompt_ids)
        self._ids = list(self._window)  # the same tokens, and every token after them
        self._num_context = len(self._ids)
        self._prompt_text = self._decode(self._window)
        self._clean = len(self._window)  # tokens of the window up to the last complete character
        self._pieces: list[str] = []  # the settled text
        self._num_chars = 0  # its length
        self._pending = ""  # replacement characters at the end that further tokens may turn into a character
        self._tail = ""  # the end of the settled text, as long as a pattern may reach back
        self._tail_chars = REGEX_WINDOW if self._patterns else 0
        self._stops = StopPrefixes(params.stop)
        self._patterns_from = 0  # first character that patterns may match
        self._match: StopMatch | None = None

    def begin_again(self) -> IncrementalDetokenizer:
        """Return a decoder of the same sequence without its generated tokens."""
        prompt_ids = self._ids[: self._num_context]
        return IncrementalDetokenizer(self._tokenizer, prompt_ids, self._params, self._search_time.shared)

    @property
    def text(self) -> str:
        """All text of the tokens so far, without the stop that ended it unless `no_stop_trim`.

        Changes no visible state; bytes that are no character (yet) appear as U+FFFD.
        """
        settled = self._settled()
        if self._match is None or self._params.no_stop_trim:
            return settled + self._pending
        return settled[: self._match.start]

    @property
    def streamable_text(self) -> str:
        """The part of `text` that no further token changes: without a half character or a beginning of a stop."""
        if self._match is not None:
            return self.text
        settled = self._settled()
        if self._params.no_stop_trim:
            return settled
        return settled[: self._num_chars - self._num_held_back()]

    def append(self, token_ids: SequenceOf[int], num_replaced: int = 0) -> StopMatch | None:
        """Decode further tokens up to the one that completes a stop; returns the match or None.

        After a match no token may follow. With `num_replaced`, the tokens replace the last ones and must begin with
        their text: existing text does not change. Raises StopRegexTimeout if a pattern takes too long on the text.
        """
        assert self._match is None, "a token after the stop"
        num_known = self._go_back(token_ids, num_replaced) if num_replaced else 0
        for token_id in token_ids[num_known:]:
            self._num_tokens += 1
            self._ids.append(token_id)
            if self._tokenizer is None:
                continue
            fresh = self._take(token_id)
            if fresh and self._has_stops:
                self._match = self._find_stop(fresh)
                if self._match is not None:
                    break
        return self._match

    def _go_back(self, token_ids: SequenceOf[int], num_replaced: int) -> int:
        """Replace the last tokens by the first of these, as many as have no text beyond the existing text.

        Returns their number.
        """
        start = len(self._ids) - num_replaced
        assert start >= self._num_context, "more tokens replaced than there are"
        before, _ = self._context(self._ids[max(start - _MAX_CONTEXT_TOKENS, 0) : start])
        num_known_chars = len(self._decode(before + self._ids[start:]).rstrip(HALF))
        num_known = 0
        for num in range(1, len(token_ids) + 1):
            if len(self._decode([*before, *token_ids[:num]]).rstrip(HALF)) > num_known_chars:
                break
            num_known = num
        self._ids[start:] = token_ids[:num_known]
        self._num_tokens += num_known - num_replaced
        self._window = [*before, *token_ids[:num_known]]
        self._num_known = num_known_chars
        self._clean = len(before)
        return num_known

    def _context(self, token_ids: SequenceOf[int]) -> tuple[list[int], int]:
        """Return the last of these tokens, and the number of their characters that no further token changes.

        They begin with a whole character, and so do those that are counted, if there are such places near the end: some
        decoders write `HALF` for all of a row of bytes that begins or ends inside a character.
        """
        for end in range(len(token_ids), max(len(token_ids) - NUM_BYTES_OF_A_CHARACTER, -1), -1):
            for num in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + NUM_BYTES_OF_A_CHARACTER):
                first = max(end - num, 0)
                text = self._decode(list(token_ids[first:end]))
                if not text.startswith(HALF) and not text.endswith(HALF):
                    return list(token_ids[first:]), len(text)
        context = list(token_ids[-NUM_CONTEXT_TOKENS:])
        return context, len(self._decode(context).rstrip(HALF))

    def _settled(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None or not token_ids:
            return ""
        skips = self._params.skip_special_tokens
        if skips and self._params.kept_special_tokens:
            skips = False
            if not (token_ids := [id for id in token_ids if not self._skips(id)]):
                return ""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=skips)
        return self._by_tokenizer(
            token_ids,
            skip_special_tokens=skips,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,  # it would rewrite text that has been streamed
        )

    def _by_tokenizer(self, token_ids: list[int], **settings: bool) -> str:
        assert self._tokenizer is not None
        try:
            text = self._tokenizer.decode(token_ids, **settings)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Undecodable(f"the tokenizer cannot decode the tokens up to {token_ids[-1]}: {why}") from error
        assert isinstance(text, str)
        return text

    def _skips(self, token_id: int) -> bool:
        """Return whether a token is special and not kept."""
        found = self._is_skipped.get(token_id)
        if found is None:
            texts = [self._by_tokenizer([token_id], skip_special_tokens=skips) for skips in (True, False)]
            found = self._is_skipped[token_id] = texts[0] == "" != texts[1]
        return found

    def _take(self, token_id: int) -> str:
        """Move the window over one more token; returns the text that became final with it."""
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = text.rstrip(HALF)
        is_stuck = len(settled) < len(text) and len(self._window) > self._clean + MAX_WINDOW_TOKENS
        if is_stuck:  # so many tokens are no half character: all but the last are invalid for good
            settled = text[:-1]
        if not self._num_chars and len(settled) > self._num_known and text.startswith(self._prompt_text):
            # The prompt ended in invalid bytes, not in half a character that the first token completes.
            self._num_known = max(self._num_known, len(self._prompt_text))
        fresh = settled[self._num_known :]
        self._num_known = max(self._num_known, len(settled))
        pending = text[self._num_known :]
        if not fresh and text and self._is_without_text(token_id, pending):
            self._window.pop()  # it must not displace context, nor part the halves of a character
        self._pending = pending
        if is_stuck:
            self._cut_window(len(self._window) - NUM_BYTES_OF_A_CHARACTER)
        elif not pending:
            if len(self._window) > MAX_WINDOW_TOKENS:
                self._cut_window(self._clean)
            self._clean = len(self._window)
        self._pieces.append(fresh)
        self._num_chars += len(fresh)
        return fresh

    def _is_without_text(self, token_id: int, pending: str) -> bool:
        """Return whether a token behind which the final text is the same has no text, like a skipped special one.

        pending: the text with it that is not final yet. A part of a character may leave that the same too.
        """
        if not pending and not self._pending:
            return True
        return pending == self._pending and self._params.skip_special_tokens and self._skips(token_id)

    def _cut_window(self, num_dropped: int) -> None:
        """Drop the oldest tokens of the window and measure its known part again. Pending text stays."""
        self._window = self._window[num_dropped:]
        self._num_known = max(len(self._decode(self._window)) - len(self._pending), 0)
        self._clean = len(self._window)

    def _find_stop(self, fresh: str) -> StopMatch | None:
        """Return the stop that `fresh`, the newest final text, completes, or None. Moves the tail forward."""
        text = self._tail + fresh
        num_seen, offset = len(self._tail), self._num_chars - len(text)
        self._tail = text[-self._tail_chars :] if self._tail_chars else ""
        completed = self._stops.follow(fresh)
        if self._num_tokens < self._params.min_new_tokens:
            self._patterns_from = self._num_chars
            return None
        found = [(num_seen + num, num_seen + num - len(stop), stop) for num, stop in completed]
        for pattern, matches in self._matches(text, num_seen):
            found += [(end, start, pattern) for start, end in matches[:1]]
        if not found:
            return None
        end, start, stop = min(found)
        return StopMatch(stop, self._num_tokens, offset + start, offset + end)

    def _num_held_back(self) -> int:
        """Return the number of characters at the end of the final text that may begin a stop."""
        num_held = self._stops.num_chars
        for _, begun in self._matches(self._tail, len(self._tail), partial=True):
            num_held = max(num_held, *(len(self._tail) - start for start, _ in begun), 0)
        return num_held

    def _matches(self, text: str, num_seen: int, *, partial: bool = False) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return each pattern with start and end of its matches at the end of the text.

        Matches that reach beyond the first `num_seen` characters or, if `partial`, that further characters may
        complete.
        """
        if not self._patterns:
            return []
        # A start position, not a slice: ^ and \b depend on the text before it.
        position = max(num_seen - REGEX_WINDOW + 1, self._patterns_from - (self._num_chars - len(text)), 0)
        began, allowed = thread_time(), self._search_time.allowance(self._num_tokens)
        try:
            return [
                (pattern.pattern, self._matches_of(pattern, text, num_seen, position, began + allowed, partial))
                for pattern in self._patterns
            ]
        except TimeoutError as error:
            raise StopRegexTimeout(f"stop_regex {error.args[0]!r} ran for more than {allowed:.3g} s") from error
        finally:
            self._search_time.spend(thread_time() - began)

    def _matches_of(
        self, pattern: regex.Pattern[str], text: str, num_seen: int, position: int, deadline: float, partial: bool
    ) -> list[tuple[int, int]]:
        """Return the matches of one pattern. Raises TimeoutError with the pattern where this thread's time, without
        its waits, has reached the deadline."""
        while (left := deadline - thread_time()) > 0:
            try:
                return [
                    match.span()
                    for match in pattern.finditer(text, position, overlapped=True, partial=partial, timeout=left)
                    if (match.partial if partial else match.end() > max(num_seen, match.start()))
                ]
            except TimeoutError:  # `regex` counts the processor time of all threads: what is left of ours decides
                continue
        raise TimeoutError(pattern.pattern)
