"""Text of one sequence while it grows, and the stop strings in it.

Tokens are decoded in a short window: a few tokens whose text is known, then the new ones; what the window's
text has beyond the known part is new. So a token costs the same however long the output is, a word's leading
space survives, and a character that is split over tokens appears when it is whole (vLLM and SGLang decode
with two offsets in this spirit).

                     _window:  [ known tokens | new tokens ]
    decode(_window):  [ _num_known characters | fresh ... | U+FFFD ... ]
                       already in the text      goes there   kept back: a character may be half there
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import regex

from ..errors import LockstepError
from ..sampling_params import SamplingParams

NUM_CONTEXT_TOKENS = 5  # of the prompt, so that the first word keeps its leading space
MAX_WINDOW_TOKENS = 16  # beyond it the window moves on
NUM_BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8; a token has one or more
REGEX_WINDOW = 512  # a stop_regex match is found where it starts within this many last characters
REGEX_TIMEOUT_S = 0.1
HALF = "\ufffd"  # what decoders write for bytes that are no character (yet)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit."""

    def decode(self, token_ids: list[int], **options: bool) -> str | list[str]: ...


class StopRegexTimeout(LockstepError):
    """A stop_regex ran away on the text so far; only its own request is concerned."""


@dataclass(frozen=True)
class StopMatch:
    """A stop string or pattern that the last token completed."""

    stop: str  # the string or pattern, as given
    num_tokens: int  # tokens kept: up to and with the one that completed the match
    start: int  # first character of the match in the generated text
    end: int  # character after it


class IncrementalDetokenizer:
    """Decodes the generated tokens of one sequence as they come and watches for its stop strings.

    The stop that is completed first ends the text (of those that end together, the one that starts first); it
    is looked for in generated text only, and where it is completed before `min_new_tokens` it is ordinary
    text. Patterns (of the `regex` module) are searched token by token in the last `REGEX_WINDOW` characters,
    so a greedy one takes what stands there at that time; the text before `min_new_tokens` is not searched.

    Without a tokenizer there is no text; ValueError where the parameters need one.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: SequenceOf[int], params: SamplingParams) -> None:
        if tokenizer is None and params.needs_text:
            raise ValueError("stop and stop_regex need a tokenizer, and the engine has none")
        self._tokenizer = tokenizer
        self._params = params
        self._patterns = tuple(regex.compile(pattern) for pattern in params.stop_regex)
        self._num_tokens = 0
        self._window: list[int] = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._ids = list(self._window)  # the same, and every token since
        self._num_context = len(self._ids)
        self._prompt_text = self._decode(self._window)
        self._num_known = len(self._prompt_text.rstrip(HALF))
        self._clean = len(self._window)  # tokens of the window up to its last end of a character
        self._pieces: list[str] = []  # the settled text
        self._num_chars = 0  # its length
        self._pending = ""  # replacement characters at the end that further tokens may turn into a character
        self._tail = ""  # the end of the settled text, as long as a match may reach back
        self._tail_chars = max((len(stop) - 1 for stop in params.stop), default=0)
        if self._patterns:
            self._tail_chars = max(self._tail_chars, REGEX_WINDOW)
        self._patterns_from = 0  # first character that patterns may match
        self._match: StopMatch | None = None

    @property
    def text(self) -> str:
        """All text of the tokens so far, without the stop that ended it unless `no_stop_trim`. Changes
        nothing that a reader can see; bytes that are no character (yet) stand as U+FFFD."""
        settled = self._settled()
        if self._match is None or self._params.no_stop_trim:
            return settled + self._pending
        return settled[: self._match.start]

    @property
    def streamable_text(self) -> str:
        """The part of `text` that no further token changes: no half character and no beginning of a stop."""
        if self._match is not None:
            return self.text
        settled = self._settled()
        if self._params.no_stop_trim:
            return settled
        return settled[: self._num_chars - self._num_held_back()]

    def append(self, token_ids: SequenceOf[int], num_replaced: int = 0) -> StopMatch | None:
        """Take further tokens up to the one that completes a stop; that match, or None. Nothing may follow a
        match. They come in the place of the last `num_replaced`, which they spell first: what is text stays.

        Raises StopRegexTimeout when a pattern runs away on the text.
        """
        assert self._match is None, "a token after the stop"
        num_known = self._go_back(token_ids, num_replaced) if num_replaced else 0
        for token_id in token_ids[num_known:]:
            self._num_tokens += 1
            self._ids.append(token_id)
            if self._tokenizer is None:
                continue
            fresh = self._take(token_id)
            if fresh:
                self._match = self._find_stop(fresh)
                if self._match is not None:
                    break
        return self._match

    def _go_back(self, token_ids: SequenceOf[int], num_replaced: int) -> int:
        """Put the first of these tokens in the place of the last ones, as many as spell no more than is text already;
        returns how many."""
        start = len(self._ids) - num_replaced
        assert start >= self._num_context, "more tokens replaced than there are"
        before = self._ids[max(start - NUM_CONTEXT_TOKENS, 0) : start]
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

    def _settled(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None or not token_ids:
            return ""
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,  # it would rewrite text that has been streamed
        )
        assert isinstance(text, str)
        return text

    def _take(self, token_id: int) -> str:
        """Move the window over one more token; the text that settled with it."""
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = text.rstrip(HALF)
        is_stuck = len(settled) < len(text) and len(self._window) > self._clean + MAX_WINDOW_TOKENS
        if is_stuck:  # so many tokens are no half character: all but the last are broken for good
            settled = text[:-1]
        if not self._num_chars and len(settled) > self._num_known and text.startswith(self._prompt_text):
            # What the prompt ended in was broken, not half a character that the first token completes.
            self._num_known = max(self._num_known, len(self._prompt_text))
        fresh = settled[self._num_known :]
        self._num_known = max(self._num_known, len(settled))
        pending = text[self._num_known :]
        if not fresh and not pending and not self._pending and text:
            self._window.pop()  # a token without text, like a skipped special one, must not drive context out
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

    def _cut_window(self, num_dropped: int) -> None:
        """Forget the oldest tokens of the window; its known part is measured anew, pending stays."""
        self._window = self._window[num_dropped:]
        self._num_known = len(self._decode(self._window)) - len(self._pending)
        self._clean = len(self._window)

    def _find_stop(self, fresh: str) -> StopMatch | None:
        """The stop that `fresh`, the newest settled text, completes. Moves the tail on."""
        if not self._params.needs_text:
            return None
        text = self._tail + fresh
        num_seen, offset = len(self._tail), self._num_chars - len(text)
        self._tail = text[-self._tail_chars :] if self._tail_chars else ""
        if self._num_tokens < self._params.min_new_tokens:
            self._patterns_from = self._num_chars
            return None
        found = []
        for stop in self._params.stop:
            start = text.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        for pattern in self._patterns:
            found += [(end, start, pattern.pattern) for start, end in self._matches(pattern, text, num_seen)[:1]]
        if not found:
            return None
        end, start, stop = min(found)
        return StopMatch(stop, self._num_tokens, offset + start, offset + end)

    def _num_held_back(self) -> int:
        """Characters at the end of the settled text that may turn out to begin a stop."""
        num_held = 0
        for stop in self._params.stop:
            lengths = range(min(len(stop) - 1, len(self._tail)), num_held, -1)
            num_held = next((k for k in lengths if self._tail.endswith(stop[:k])), num_held)
        for pattern in self._patterns:
            begun = self._matches(pattern, self._tail, len(self._tail), partial=True)
            num_held = max(num_held, *(len(self._tail) - start for start, _ in begun), 0)
        return num_held

    def _matches(
        self, pattern: regex.Pattern[str], text: str, num_seen: int, *, partial: bool = False
    ) -> list[tuple[int, int]]:
        """Start and end of the pattern's matches at the end of the text: those that reach beyond the first
        `num_seen` characters or, when `partial`, those that further characters may complete."""
        # A start position, not a slice: ^ and \b must see that text comes before.
        position = max(num_seen - REGEX_WINDOW + 1, self._patterns_from - (self._num_chars - len(text)), 0)
        try:
            return [
                match.span()
                for match in pattern.finditer(text, position, overlapped=True, partial=partial, timeout=REGEX_TIMEOUT_S)
                if (match.partial if partial else match.end() > max(num_seen, match.start()))
            ]
        except TimeoutError as error:
            raise StopRegexTimeout(f"stop_regex {pattern.pattern!r} ran for more than {REGEX_TIMEOUT_S} s") from error
