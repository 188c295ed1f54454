"""The planner of jumps, on tokens and texts alone."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.grammars.jump import NO_JUMP, Jump
from lockstep.rollout.grammars.jump_forward import cut_jump, plan_stretch, plan_text_jump
from lockstep.rollout.grammars.token_text import TokenText


def bpe(merges: list[str], initial: str = "abcdefghijklmnop:,") -> TokenText:
    """Build a BPE of merges given as "a b"; `initial` is extended by all bytes so that any text can be spelled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() + list(initial))
    vocab = {character: id for id, character in enumerate(dict.fromkeys(alphabet))}
    pairs = [tuple(merge.split()) for merge in merges]
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return TokenText(tokenizer, len(tokenizer))


def ids(text: TokenText, *pieces: str) -> list[int]:
    return [text.pieces.index(piece.encode()) for piece in pieces]


def pieces(text: TokenText, token_ids) -> list[str]:
    return [text.pieces[id].decode() for id in token_ids]


def test_forced_text_that_joins_nothing_rolls_nothing_back():
    text = bpe(["b c"])
    jump = plan_text_jump(ids(text, "a"), b"bcd", text)
    assert jump.num_rolled_back == 0 and pieces(text, jump.token_ids) == ["bc", "d"]
    assert jump.num_gained == 2


def test_a_sampled_token_that_begins_a_longer_one_is_rolled_back():
    text = bpe(["a b"])
    past = ids(text, "c", "a")
    jump = plan_text_jump(past, b"bd", text)
    assert jump.num_rolled_back == 1 and pieces(text, jump.token_ids) == ["ab", "d"]
    assert jump.num_gained == 1


def test_ten_tokens_are_rolled_back_and_no_more():
    letters = "abcdefghijklmnop"
    merges = [f"{letters[: i + 1]} {letters[i + 1]}" for i in range(len(letters) - 1)]  # "a b", "ab c", ...
    text = bpe(merges)
    past = ids(text, *letters[:10])
    jump = plan_text_jump(past, b"k:", text)
    assert jump == Jump(10, tuple(ids(text, letters[:11], ":")))
    # With one token more the window no longer includes the first: the rest is tokenised by itself.
    jump = plan_text_jump(ids(text, ",", *letters[:10]), b"k:", text, max_rollback=10)
    assert jump == Jump(10, tuple(ids(text, letters[:11], ":")))
    longer = plan_text_jump(ids(text, *letters[:11]), b"l:", text, max_rollback=10)
    assert longer.num_rolled_back == 0 and pieces(text, longer.token_ids) == ["l", ":"]


def test_a_past_shorter_than_the_window_is_taken_whole():
    text = bpe(["a b"])
    assert plan_text_jump([], b"ab:", text) == Jump(0, tuple(ids(text, "ab", ":")))
    assert plan_text_jump(ids(text, "a"), b"b:", text) == Jump(1, tuple(ids(text, "ab", ":")))


def test_a_last_token_that_begins_another_is_left_to_the_model():
    text = bpe(["c d"])
    jump = plan_text_jump(ids(text, "a"), b"bc", text)
    assert pieces(text, jump.token_ids) == ["b"]


def test_no_jump_where_the_dropped_token_was_all_there_was():
    text = bpe(["c d"])
    assert plan_text_jump(ids(text, "a"), b"c", text) is NO_JUMP
    # ... also where it reaches back into earlier tokens.
    text = bpe(["b c", "bc d"])
    assert plan_text_jump(ids(text, "a", "b"), b"c", text) is NO_JUMP


def test_nothing_forced_and_canonical_tokens_are_no_jump():
    text = bpe(["a b"])
    assert plan_text_jump(ids(text, "ab", "c"), b"", text) is NO_JUMP
    assert plan_text_jump([], b"", text) is NO_JUMP


def test_retokenisation_joins_what_was_sampled_in_pieces():
    text = bpe(["a b", "ab c"])
    jump = plan_text_jump(ids(text, "d", "ab", "c"), b"", text)
    assert jump == Jump(2, tuple(ids(text, "abc"))) and jump.num_gained == 0


def test_tokens_that_split_a_character_stay_whole():
    text = bpe([])
    head, tail = text.encode("é".encode())
    # The window begins after the half character at its start.
    jump = plan_text_jump([tail, *ids(text, "a")], b"bc", text)
    assert jump == Jump(0, tuple(ids(text, "b", "c")))
    # Forced text that ends inside a character goes up to it.
    assert plan_text_jump(ids(text, "a"), b"b" + "é".encode()[:1], text).token_ids == tuple(ids(text, "b"))
    # One that completes the character of the past does so with its last byte.
    assert plan_text_jump([*ids(text, "a"), head], "é".encode()[1:] + b"b", text).token_ids[0] == tail
    # Without a whole character in the window there is no jump.
    assert plan_text_jump([tail], b"", text) is NO_JUMP


def test_special_tokens_are_never_rolled_back(bpe_tokenizer):
    text = TokenText(bpe_tokenizer, len(bpe_tokenizer))
    past = [*text.encode(b'{"na'), 1, *text.encode(b'{"na')]
    jump = plan_text_jump(past, b'me": ', text)
    assert jump.num_rolled_back <= len(text.encode(b'{"na'))
    kept = past[: len(past) - jump.num_rolled_back]
    assert 1 in kept


def test_a_cut_jump_never_spells_less_than_what_it_replaces():
    text = bpe(["a b"])
    past = ids(text, "a")
    jump = plan_text_jump(past, b"bcde", text)
    assert cut_jump(jump, past, 9, text) is jump
    assert cut_jump(jump, past, 2, text) == Jump(1, jump.token_ids[:2])
    split = Jump(2, tuple(ids(text, "c", "d", "e")))
    assert cut_jump(split, ids(text, "c", "d"), 1, text) is NO_JUMP
    assert cut_jump(jump, past, 0, text) is NO_JUMP


def test_a_stretch_ends_before_a_token_that_text_to_come_may_change():
    text = bpe(["c d", "b c"])
    assert pieces(text, plan_stretch(b"abc", text)) == ["a"]  # "bc", unless a d comes: then b, cd
    assert pieces(text, plan_stretch(b"abce", text)) == ["a", "bc", "e"]
    assert plan_stretch(b"", text) == ()
    assert plan_stretch(b"c", text) == ()


def test_a_change_at_the_end_of_a_stretch_may_reach_further_back():
    # w x y: canonically w, xy. With z: yz joins first, which frees x for wx.
    text = bpe(["i p", "h i", "g h"])
    assert pieces(text, text.encode(b"ghi")) == ["g", "hi"]
    assert pieces(text, text.encode(b"ghip")) == ["gh", "ip"]
    assert pieces(text, plan_stretch(b"aghi", text)) == ["a"]


@pytest.mark.parametrize("seed", range(5))
def test_no_continuation_changes_a_stretch(bpe_tokenizer, seed):
    """Try a thousand texts and random continuations, in the trained vocabulary and in random ones."""
    rng = random.Random(seed)
    trained = TokenText(bpe_tokenizer, len(bpe_tokenizer))
    known = ["a", "b", "c", "d"]
    merges: list[str] = []
    while len(merges) < 12:
        merge = f"{rng.choice(known)} {rng.choice(known)}"
        if merge not in merges:
            merges.append(merge)
            known.append(merge.replace(" ", ""))
    merges = list({merge.replace(" ", ""): merge for merge in merges}.values())
    texts = (trained, bpe(merges))
    words = ['{"', "name", '": "', "città", '", "', "value", '": ', "true", "}]", "ключ", "-1", "0.5", ", "]
    num_tokens = 0
    for _ in range(100):
        for text, parts in zip(texts, (words, "abcd"), strict=True):
            forced = "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))
            stretch = plan_stretch(forced.encode(), text)
            num_tokens += len(stretch)
            for _ in range(10):
                follow = "".join(rng.choice(parts) for _ in range(rng.randint(0, 5)))[rng.randint(0, 2) :]
                whole = text.encode((forced + follow).encode())
                assert whole[: len(stretch)] == stretch, (forced, follow)
    assert num_tokens > 200  # a rule that plans nothing would pass too


def test_a_stretch_of_the_trained_vocabulary_holds_most_of_its_text(bpe_tokenizer):
    text = TokenText(bpe_tokenizer, len(bpe_tokenizer))
    forced = b'{"name": {"value": [{"type": "object", "items": "'
    assert len(text.spell(plan_stretch(forced, text))) >= len(forced) - 4


def test_a_stretch_of_a_long_text_has_the_tokens_of_its_beginning():
    """Each end at which a longer token could begin costs the time of all of the text: here there are 256."""
    runs, text_of_runs = [" "], []
    while len(runs[-1]) < 256:
        text_of_runs.append(f"{'Ġ' * len(runs[-1])} {'Ġ' * len(runs[-1])}")
        runs.append(runs[-1] * 2)
    text = bpe(text_of_runs)
    tokenised: list[int] = []
    encode = text.encode
    text.encode = lambda piece: tokenised.append(len(piece)) or encode(piece)  # type: ignore[method-assign]
    whole = plan_stretch(b" " * 8192, text)
    assert text.spell(whole) == b" " * len(text.spell(whole)) and len(text.spell(whole)) >= 256
    assert sum(tokenised) < 300_000
