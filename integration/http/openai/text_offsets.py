"""The places of tokens in a text, counted in characters. A character may take several tokens."""

from __future__ import annotations

import codecs

from .body import OpenAIRequest

NO_CHARACTER = "\ufffd"  # written by tokenizers for bytes that are no character
_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Count the characters of one sequence's tokens, as its answer's chunks give them."""

    def __init__(self, ask: OpenAIRequest, first: int = 0, echoed: str = "") -> None:
        """Begin before the first token. first: number of characters before it. echoed: text of the prompt, if its
        tokens come first."""
        self._ask, self._num_whole, self._echoed = ask, first, echoed
        self._decoder = _UTF8("replace")  # of the bytes so far, as tokenizers decode them

    def next(self, token_id: int) -> int:
        """Return the offset of the next token: of the character that it begins with, or begins inside."""
        found = self._bytes(token_id)
        had_begun = self._has_begun
        if not found:
            return self._num_whole + had_begun
        first = self._decoder.decode(found[:1])
        # Where a character had begun, this byte goes on with it, or ends it; every other one leaves it a U+FFFD.
        goes_on = not first or (len(first) == 1 and not self._has_begun)
        offset = self._num_whole + (had_begun and not goes_on)
        self._num_whole += len(first) + len(self._decoder.decode(found[1:]))
        return offset

    @property
    def _has_begun(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for a special token that the text leaves out."""
        ask = self._ask
        text_of = ask.own_text or ask.wanted.text_of
        text = "" if text_of is None else text_of(token_id)
        # A prompt that was sent as a text is echoed with special tokens in it.
        if text and not ask.decode([token_id]) and not self._echoed.startswith(text, self._num_whole):
            return b""
        found = ask.bytes_of(token_id) if NO_CHARACTER in text else None
        return text.encode(errors="replace") if found is None else found
