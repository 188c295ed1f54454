"""The offsets of tokens in a text whose characters take several of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.integration.http.openai.text_offsets import TextOffsets
from lockstep.rollout.grammars.token_text import bytes_of_token

TEXT = "ab漢é😀 x漢漢y😀"


@pytest.fixture
def ask(bpe_tokenizer):
    """Make a request as far as offsets need it."""
    return SimpleNamespace(
        own_text=None,
        wanted=SimpleNamespace(text_of=lambda id: bpe_tokenizer.decode([id])),
        bytes_of=bytes_of_token(bpe_tokenizer),
        decode=bpe_tokenizer.decode,
    )


def test_a_token_is_at_the_character_in_which_it_begins(ask, bpe_tokenizer):
    ids = bpe_tokenizer(TEXT)["input_ids"]
    pieces = list(map(ask.bytes_of, ids))
    assert b"".join(pieces) == TEXT.encode() and len(ids) > len(TEXT)
    place_of = [place for place, character in enumerate(TEXT) for _ in character.encode()]
    starts = [sum(map(len, pieces[:index])) for index in range(len(ids))]
    offsets = TextOffsets(ask, first=7)
    assert [offsets.next(id) for id in ids] == [7 + place_of[start] for start in starts]


def test_names_of_tokens_are_no_text(ask, bpe_tokenizer):
    ids = bpe_tokenizer("ab c")["input_ids"]
    expected = [TextOffsets(ask).next(ids[0]), *map((offsets := TextOffsets(ask)).next, ids)][1:]
    named = SimpleNamespace(
        own_text=ask.wanted.text_of,
        wanted=SimpleNamespace(text_of="token_id:{}".format),
        bytes_of=ask.bytes_of,
        decode=ask.decode,
    )
    again = TextOffsets(named)
    assert [again.next(id) for id in ids] == expected and offsets.next(ids[0]) == 4


def test_bytes_that_are_no_character_are_characters_of_their_own(ask, bpe_tokenizer):
    def token_of(piece: bytes) -> int:
        return next(id for id in range(len(bpe_tokenizer)) if ask.bytes_of(id) == piece)

    a, stray, lead, other = (token_of(piece) for piece in (b"a", b"\xbc", b"\xe6", b"\xf0"))
    for ids, expected in (
        ([a, stray, a, a], [0, 1, 2, 3]),
        ([stray, stray, a], [0, 1, 2]),
        ([lead, a, lead, stray, a], [0, 1, 2, 2, 3]),
        ([lead, other, lead, a], [0, 1, 2, 3]),
    ):
        offsets = TextOffsets(ask, first=5)
        assert [offsets.next(id) - 5 for id in ids] == expected
        text = bpe_tokenizer.decode(ids)
        assert len(text) == expected[-1] + 1, "each place is one of the text"
