"""The bytes of tokens, and the canonical tokens of a text in the middle of others."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.grammars.token_text import TokenText, bytes_of_token, can_be_text, whole_characters


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Build a BPE with byte fallback that puts a space before a text, as Llama 2's."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for token in ("\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", '"'):
        vocab[token] = len(vocab)
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_byte_level_tokens_spell_their_bytes_and_texts_come_back(text, bpe_tokenizer):
    for sample in ('{"name": "città", "ключ": [1, 2]}', "  two  spaces\n", "日本語 €", ""):
        ids = text.encode(sample.encode())
        assert ids is not None and text.spell(ids) == sample.encode()
        assert list(ids) == bpe_tokenizer.encode(sample, add_special_tokens=False)


def test_tokens_that_split_a_character_spell_parts_of_it(text):
    ids = text.encode("日".encode())
    assert len(ids) > 1 and all(len(text.pieces[id]) < 3 for id in ids)
    assert text.spell(ids) == "日".encode()


def test_single_tokens_tell_their_bytes_and_special_ones_their_names(text, bpe_tokenizer):
    bytes_of = bytes_of_token(bpe_tokenizer)
    names = {0: b"<eos>", 1: b"<|im_start|>", bpe_tokenizer.convert_tokens_to_ids("<think>"): b"<think>"}
    expected = [names.get(id, piece) for id, piece in enumerate(text.pieces[: len(bpe_tokenizer)])]
    assert [bytes_of(id) for id in range(len(bpe_tokenizer))] == expected
    assert bytes_of(len(bpe_tokenizer)) is None


def test_tokens_of_the_byte_fallback_tell_their_byte():
    tokenizer = sentencepiece_like()
    bytes_of = bytes_of_token(tokenizer)
    assert bytes_of(tokenizer.convert_tokens_to_ids("<0xE2>")) == b"\xe2"
    assert bytes_of(tokenizer.convert_tokens_to_ids("\u2581ab")) == b" ab"


def test_tokenizers_whose_tokens_are_no_pieces_of_text_tell_no_bytes():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert bytes_of_token(PreTrainedTokenizerFast(tokenizer_object=backend))(1) is None
    assert bytes_of_token(None)(1) is None


def test_special_tokens_and_control_words_spell_nothing(text, bpe_tokenizer):
    for name in ("<eos>", "<|im_start|>", "<think>"):
        assert text.pieces[bpe_tokenizer.convert_tokens_to_ids(name)] == b""
        assert text.encode(f"a{name}b".encode()) is None  # the tokenizer would read it as the special token


def test_ids_beyond_the_tokenizer_spell_nothing(text, bpe_tokenizer):
    assert len(text.pieces) == 1024 and not any(text.pieces[len(bpe_tokenizer) :])


def test_bytes_that_are_no_text_have_no_canonical_tokens(text):
    assert text.encode(b"a\xff") is None
    assert text.encode("é".encode()[:1]) is None


def test_added_runs_of_spaces_are_text():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["a b"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    backend.add_tokens(["    "])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = TokenText(tokenizer, len(tokenizer))
    assert text.spell(text.encode(b"a    b")) == b"a    b"
    assert text.pieces[tokenizer.convert_tokens_to_ids("    ")] == b"    "


def test_a_tokenizer_that_begins_with_a_space_continues_without_one():
    tokenizer = sentencepiece_like()
    text = TokenText(tokenizer, len(tokenizer))
    for sample in ("ab", " ab", "cab", "é", '"a"'):
        ids = text.encode(sample.encode())
        assert ids is not None and text.spell(ids) == sample.encode(), sample
    assert tokenizer.convert_ids_to_tokens(list(text.encode(b" ab"))) == ["\u2581ab"]


def test_a_tokenizer_whose_tokens_are_no_pieces_of_text_is_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="pieces of text; this one decodes by WordPiece"):
        TokenText(PreTrainedTokenizerFast(tokenizer_object=backend), 3)


def test_open_ends_are_where_a_longer_token_could_begin(text):
    for sample in (b'{"name": "', b', "value', b"]}"):
        ends = text.open_ends(sample)
        assert ends[-1] == len(sample)
        for start in range(len(sample)):
            longer = [p for p in text.pieces if len(p) > len(sample) - start and p.startswith(sample[start:])]
            assert (start in ends) == bool(longer), (sample, start)


def test_begins_a_token_is_about_longer_tokens_only(text):
    longest = max(text.pieces, key=len)
    assert text.begins_a_token(longest[:-1]) and not text.begins_a_token(longest)


@pytest.mark.parametrize(
    ("piece", "can"),
    [(b"", True), (b"abc", True), ("é".encode()[1:], True), ("日".encode()[:2], True), (b"\x80\x80\x80a", True),
     (b"\xc0", False), (b"\xff", False), (b"\xed\xa0", False), (b"a\xe0\x80", False), (b"\xf4\x90", False),
     (b"\xe6a", False), (b"\xed", True)],
)  # fmt: skip
def test_pieces_that_no_text_holds_are_known(piece, can):
    assert can_be_text(piece) == can


@pytest.mark.parametrize(("given", "kept"), [("aé", 3), ("a", 1), ("", 0), ("日", 3)])
def test_half_characters_at_the_end_are_cut(given, kept):
    assert whole_characters(given.encode()) == given.encode()[:kept]
    if kept > 1:
        assert whole_characters(given.encode()[:-1]) == given[:-1].encode()
