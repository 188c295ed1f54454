"""The places of tokens in a text, counted in characters. A character may take several tokens."""

from __future__ import annotations

from .body import OpenAIRequest

NO_CHARACTER = "\ufffd"  # written by tokenizers for bytes that are no character


class TextOffsets:
    """Count the characters of one sequence's tokens, as its answer's chunks give them."""

    def __init__(self, ask: OpenAIRequest, first: int = 0, echoed: str = "") -> None:
        """Begin before the first token. first: number of characters before it. echoed: text of the prompt, if its
        tokens come first."""
        self._ask, self._num_begun, self._echoed = ask, first, echoed

    def next(self, token_id: int) -> int:
        """Return the offset of the next token: of the character that it begins with, or begins inside."""
        begun, has_begun_inside = self._characters(token_id)
        offset = max(self._num_begun - has_begun_inside, 0)
        self._num_begun += begun
        return offset

    def _characters(self, token_id: int) -> tuple[int, bool]:
        """Return the number of characters that begin in a token, and whether the token begins inside one."""
        ask = self._ask
        text_of = ask.own_text or ask.wanted.text_of
        text = "" if text_of is None else text_of(token_id)
        # A special token that the text leaves out; a prompt that was sent as a text is echoed with those in it.
        if text and not ask.decode([token_id]) and not self._echoed.startswith(text, self._num_begun):
            return 0, False
        found = ask.bytes_of(token_id) if NO_CHARACTER in text else None
        if found is None:
            return len(text), False
        begins = [not 0x80 <= byte < 0xC0 for byte in found]
        return sum(begins), not begins[0]
