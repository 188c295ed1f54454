"""The bytes that the tokens of a vocabulary spell, and the canonical tokens of a text, for grammars.

A token may hold part of a character, so all text here is bytes. Tokens that represent no text (special ones, and
control words such as `<think>` that a tokenizer has besides its vocabulary) spell nothing: a grammar never sees their
names as text. `bytes_of_token` returns those names too, for answers that list tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from tokenizers import AddedToken, Tokenizer

_SPACE = "\u2581"  # SentencePiece's character for a space
_SENTINEL = "\n"  # precedes a text so that a tokenizer does not treat it as the beginning


class FastTokenizer(Protocol):
    """The attributes of a tokenizer that are used here; the fast ones of transformers fit."""

    backend_tokenizer: Tokenizer
    all_special_ids: list[int]


class TokenText:
    """Convert tokens to bytes, and text to tokens.

    It holds its own copy of the tokenizer, so that any one thread may use it while others tokenise prompts; nothing
    changes after construction. Raises ValueError for a tokenizer whose tokens are not pieces of text one after another.
    """

    def __init__(self, tokenizer: FastTokenizer, vocab_size: int) -> None:
        """Copy the tokenizer and spell its tokens.

        vocab_size: of the model; ids that the tokenizer does not know spell nothing.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("grammars need a fast tokenizer (one with a backend of the tokenizers library)")
        self._backend = Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        spell, kinds = _speller(self._backend), _decoders(self._backend)
        if spell is None:
            raise ValueError(
                f"grammars need a tokenizer whose tokens are pieces of text; this one decodes by {', '.join(kinds)}"
            )
        silent = _silent_ids(self._backend) | set(tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        self.pieces: list[bytes] = [b""] * vocab_size
        for token, id in self._backend.get_vocab(with_added_tokens=True).items():
            if id < vocab_size and id not in silent:
                self.pieces[id] = token.encode() if id in added else spell(token)
        self._sorted = sorted(set(self.pieces) - {b""})
        self.max_piece_bytes = max(map(len, self._sorted), default=0)
        self._sentinel_ids = self._ids(_SENTINEL)

    def spell(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of these tokens."""
        return b"".join([self.pieces[id] for id in token_ids])

    def encode(self, text: bytes) -> tuple[int, ...] | None:
        """Return the canonical tokens of a text in the middle of other text.

        Returns None if it is not UTF-8, or if the tokenizer would not reproduce its bytes.
        """
        try:
            string = text.decode()
        except UnicodeDecodeError:
            return None
        ids = self._ids(string)
        if self._spells(ids, text):
            return ids
        # SentencePiece puts a space before a text that it treats as a beginning.
        ids, num_sentinel = self._ids(_SENTINEL + string), len(self._sentinel_ids)
        if ids[:num_sentinel] == self._sentinel_ids and self._spells(ids[num_sentinel:], text):
            return ids[num_sentinel:]
        return None

    def begins_a_token(self, text: bytes) -> bool:
        """Return whether a longer token begins with this text."""
        index = bisect_right(self._sorted, text)
        return index < len(self._sorted) and self._sorted[index].startswith(text)

    def open_ends(self, text: bytes) -> list[int]:
        """Return the positions in this text where a token could begin that extends beyond its end.

        Each is the length of the text before that token; they rise, and the last is the whole length.
        """
        first = max(len(text) - self.max_piece_bytes + 1, 0)
        return [start for start in range(first, len(text)) if self.begins_a_token(text[start:])] + [len(text)]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _spells(self, ids: Sequence[int], text: bytes) -> bool:
        return all(id < len(self.pieces) and self.pieces[id] for id in ids) and self.spell(ids) == text


def bytes_of_token(tokenizer: object) -> Callable[[int], bytes | None]:
    """Return a function from a token id to the token's bytes, which may be a part of a character.

    It returns None for ids that the tokenizer does not know, and for every id where the tokenizer does not tell bytes.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda token_id: None

    @cache
    def spelling() -> tuple[Callable[[str], bytes] | None, dict[int, AddedToken]]:
        """Read the tokenizer at the first token that needs it: most requests have none, and it takes half a ms."""
        return _speller(backend), backend.get_added_tokens_decoder()

    def bytes_of(token_id: int) -> bytes | None:
        spell, added = spelling()
        if spell is None:
            return None
        if token_id in added:
            return added[token_id].content.encode()
        token = backend.id_to_token(token_id)
        return None if token is None else spell(token)

    return bytes_of


# Lead bytes after which not every continuation byte makes a character, and the first bytes that must not follow.
WRONG_SECOND_BYTES = {
    0xE0: range(0x80, 0xA0),  # shorter forms of earlier characters
    0xED: range(0xA0, 0xC0),  # surrogates
    0xF0: range(0x80, 0x90),  # shorter forms
    0xF4: range(0x90, 0xC0),  # beyond the last character
}


def can_be_text(piece: bytes) -> bool:
    """Return whether these bytes can be part of UTF-8 text; they may begin and end inside a character."""
    start = 0
    while start < min(3, len(piece)) and 0x80 <= piece[start] < 0xC0:
        start += 1
    try:
        piece[start:].decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def whole_characters(text: bytes) -> bytes:
    """Return the text without an incomplete character at its end."""
    for num_cut in range(min(4, len(text) + 1)):
        kept = text[: len(text) - num_cut]
        try:
            kept.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return text
            continue
        return kept
    return text


def _silent_ids(backend: Tokenizer) -> set[int]:
    """Return the added tokens that are no text. Some vocabularies add runs of spaces, which are text."""
    added = backend.get_added_tokens_decoder()
    return {id for id, token in added.items() if token.special or token.content.strip()}


def _decoders(backend: Tokenizer) -> list[str]:
    """Return the kinds of the tokenizer's decoders, in their order; ["none"] for a tokenizer without one."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    return [part["type"] for part in decoder.get("decoders", [decoder])]


def _speller(backend: Tokenizer) -> Callable[[str], bytes] | None:
    """Return the function that spells a token of the vocabulary; None where a token's bytes depend on others."""
    kinds = _decoders(backend)
    if "ByteLevel" in kinds:
        byte_of = _byte_level_alphabet()
        return lambda token: bytes(byte_of[c] for c in token if c in byte_of)
    if kinds == ["none"] or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    return lambda token: _spell_fallback(token, "ByteFallback" in kinds)


def _byte_level_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte. Source: GPT-2's bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _spell_fallback(token: str, has_bytes: bool) -> bytes:
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()
