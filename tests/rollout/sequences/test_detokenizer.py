"""Tests of text that grows token by token: complete characters, leading spaces, and the places of stops."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.detokenizer import REGEX_WINDOW, IncrementalDetokenizer, StopRegexTimeout
from lockstep.rollout.sequences.search_time import MAX_S, SearchTime
from lockstep.rollout.sequences.stop_prefixes import StopPrefixes

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46",
    "naïve café, Straße; 中文字符 日本語 한국어 🙂🙃 👩‍👩‍👧 family",
    "Answer: 46<END> and then\n\nmore text, more words",
] * 3
SPECIAL = ["<|end|>", "<|user|>"]
TEXTS = st.text(alphabet=st.sampled_from("abcdefo  .,:46\n<END>é中文🙂👩\u200d\u0301"), max_size=60)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL)


def metaspace() -> PreTrainedTokenizerFast:
    """Make a tokenizer with leading spaces as U+2581 and unknown characters as byte tokens, like sentencepiece."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:1] * 3, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL]))
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{i:02X}>": len(model["vocab"]) + i for i in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, unk_token="[UNK]")


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "wordpiece": wordpiece()}
BYTES = TOKENIZERS["byte_level"]


def encode(text: str, tokenizer: PreTrainedTokenizerFast = BYTES) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def token_of_each_byte(text: str, tokenizer: PreTrainedTokenizerFast = BYTES) -> list[int]:
    vocab = tokenizer.get_vocab()
    if "<0x00>" in vocab:
        return [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [vocab[char] for piece, _ in pieces for char in piece]


def stream(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    """Append token by token until a stop; returns the pieces that a streaming client gets."""
    pieces, num_sent = [], 0
    for token_id in token_ids:
        match = detokenizer.append([token_id])
        text = detokenizer.streamable_text
        assert detokenizer.text.startswith(text)
        pieces.append(text[num_sent:])
        num_sent = len(text)
        if match is not None:
            break
    return [*pieces, detokenizer.text[num_sent:]]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), skip=st.booleans())
def test_streamed_pieces_are_the_decoded_text(data, name, skip):
    tokenizer = TOKENIZERS[name]
    ids = encode(data.draw(TEXTS), tokenizer)
    # A special token that is shown inside a character breaks it, and with byte tokens the whole row of them.
    if skip or name != "metaspace":
        for special in data.draw(st.lists(st.sampled_from(tokenizer.all_special_ids), max_size=30)):
            ids.insert(data.draw(st.integers(0, len(ids))), special)
    params = SamplingParams(skip_special_tokens=skip)
    pieces = stream(IncrementalDetokenizer(tokenizer, [], params), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)))
def test_special_tokens_that_are_kept_stand_in_the_text_and_others_do_not(data, name):
    tokenizer = TOKENIZERS[name]
    ids, special = encode(data.draw(TEXTS), tokenizer), sorted(tokenizer.all_special_ids)
    kept = data.draw(st.lists(st.sampled_from(special), min_size=1, unique=True))
    # As above: a special token that is shown inside a character breaks it, and with byte tokens the whole row of them.
    for token in data.draw(st.lists(st.sampled_from(special), max_size=30)) if name != "metaspace" else special:
        ids.insert(data.draw(st.integers(0, len(ids))) if name != "metaspace" else len(ids), token)
    pieces = stream(IncrementalDetokenizer(tokenizer, [], SamplingParams(kept_special_tokens=kept)), ids)
    shown = [id for id in ids if id in kept or id not in special]
    assert "".join(pieces) == tokenizer.decode(shown, skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTES) - 1), max_size=80))
def test_random_tokens_with_broken_characters_give_the_decoded_text(ids):
    pieces = stream(IncrementalDetokenizer(BYTES, [], SamplingParams(skip_special_tokens=False)), ids)
    assert "".join(pieces) == BYTES.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_a_character_over_several_tokens_appears_when_it_is_whole(text):
    pieces = stream(IncrementalDetokenizer(BYTES, [], SamplingParams()), token_of_each_byte(text))
    ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
    assert {i: piece for i, piece in enumerate(pieces) if piece} == dict(zip(ends, text, strict=True))


@pytest.mark.parametrize("num_between", [1, 40])
@pytest.mark.parametrize("num_halves", [1, 2, 3])
def test_skipped_tokens_between_the_parts_of_a_character_do_not_part_them(num_between, num_halves):
    first, special = token_of_each_byte("🙂"), BYTES.convert_tokens_to_ids(SPECIAL[0])
    ids = [*encode("fox "), *first[:num_halves], *[special] * num_between, *first[num_halves:], *encode(" jumps")]
    pieces = stream(IncrementalDetokenizer(BYTES, [], SamplingParams()), ids)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=True) == "fox 🙂 jumps"


def test_byte_fallback_characters_in_a_row_are_whole():
    tokenizer = TOKENIZERS["metaspace"]
    text = "fox 中文🙂字符日本語한국어 jumps"
    ids = encode(text, tokenizer)
    assert len(ids) > 30  # byte tokens
    pieces = stream(IncrementalDetokenizer(tokenizer, [], SamplingParams()), ids)
    assert "".join(pieces) == text
    assert sum(bool(piece) for piece in pieces) > 10  # it does not wait for the end of the row


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@pytest.mark.parametrize("num_halves", [1, 2, 3])
@pytest.mark.parametrize("before", ["字", "🙂"])
def test_a_prompt_may_end_inside_a_character_whatever_character_is_before_it(name, num_halves, before):
    tokenizer = TOKENIZERS[name]
    ids = token_of_each_byte(f"A{before}🙂B", tokenizer)
    num_prompt = len(ids) - 5 + num_halves
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:num_prompt], SamplingParams())
    assert "".join(stream(detokenizer, ids[num_prompt:])) == "🙂B"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_prompt_gives_the_first_word_its_leading_space(name):
    tokenizer = TOKENIZERS[name]
    prompt, whole = encode("The quick brown", tokenizer), encode("The quick brown fox jumps", tokenizer)
    assert whole[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams())
    assert "".join(stream(detokenizer, whole[len(prompt) :])) == " fox jumps"


def test_the_prompt_is_never_part_of_the_text_or_of_a_stop():
    detokenizer = IncrementalDetokenizer(BYTES, encode("is it EN"), SamplingParams(stop=["END"]))
    assert detokenizer.text == ""
    assert detokenizer.append(encode("D and EN")) is None
    assert detokenizer.text == "D and EN"
    smile = token_of_each_byte("🙂")
    detokenizer = IncrementalDetokenizer(BYTES, smile[:2], SamplingParams())
    detokenizer.append(smile[2:] + encode("!"))
    assert detokenizer.text == "🙂!"  # a character the prompt began belongs to the text
    detokenizer = IncrementalDetokenizer(BYTES, smile[:2], SamplingParams())
    detokenizer.append(encode("!"))
    assert detokenizer.text == "!"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abE中🙂 ", max_size=40),
    stops=st.lists(st.text(alphabet="abE中🙂 ", min_size=1, max_size=4), min_size=1, max_size=4),
    bytewise=st.booleans(),
    no_stop_trim=st.booleans(),
    min_new_tokens=st.integers(0, 10),
)
def test_stops_are_found_where_a_search_of_the_whole_text_finds_them(
    text, stops, bytewise, no_stop_trim, min_new_tokens
):
    ids = token_of_each_byte(text) if bytewise else encode(text)
    lengths = [len(BYTES.decode(ids[: k + 1]).rstrip("\ufffd")) for k in range(len(ids))]  # after each token
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
        and next(k for k, n in enumerate(lengths) if n >= start + len(stop)) + 1 >= min_new_tokens
    ]
    params = SamplingParams(stop=stops, no_stop_trim=no_stop_trim, min_new_tokens=min_new_tokens)
    detokenizer = IncrementalDetokenizer(BYTES, [], params)
    streamed = "".join(stream(detokenizer, ids))
    match = IncrementalDetokenizer(BYTES, [], params).append(ids)  # all at once is the same
    if not ends:
        assert match is None
        assert streamed == text
        return
    end, start, stop = min(ends)
    assert match is not None
    num_tokens = next(k for k, n in enumerate(lengths) if n >= end) + 1
    assert (match.end, match.start, match.stop, match.num_tokens) == (end, start, stop, num_tokens)
    assert streamed == detokenizer.text == (BYTES.decode(ids[:num_tokens]) if no_stop_trim else text[:start])


def test_text_that_may_begin_a_stop_is_held_back_until_it_does_not():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=["<END>", "!!"]))
    pieces = stream(detokenizer, token_of_each_byte("a<E<EN!?<END> b"))
    assert [piece for piece in pieces if piece] == ["a", "<E", "<EN", "!?"]
    assert detokenizer.text == "a<E<EN!?"


def test_a_pattern_stops_at_its_first_match_and_is_held_back_while_under_way():
    params = SamplingParams(stop_regex=[r"\n\n[A-Z]", r"^x"])
    detokenizer = IncrementalDetokenizer(BYTES, [], params)
    pieces = stream(detokenizer, token_of_each_byte("a\nx\n\nb\n\nC rest"))
    assert [piece for piece in pieces if piece] == ["a", "\nx", "\n\nb"]
    match = IncrementalDetokenizer(BYTES, [], params).append(token_of_each_byte("a\n\nC rest"))
    assert match is not None
    assert (match.stop, match.num_tokens, match.start, match.end) == (r"\n\n[A-Z]", 4, 1, 4)


def test_a_pattern_sees_a_bounded_end_of_the_text_and_no_false_start():
    params = SamplingParams(stop_regex=[r"a.*z", r"^b"])
    for gap, found in ((REGEX_WINDOW - 2, True), (REGEX_WINDOW - 1, False)):
        ids = token_of_each_byte("ca" + "b" * gap + "z")
        assert (IncrementalDetokenizer(BYTES, [], params).append(ids) is not None) == found


def test_a_pattern_does_not_search_text_before_the_minimum():
    params = SamplingParams(stop_regex=["ab+"], min_new_tokens=3)
    match = IncrementalDetokenizer(BYTES, [], params).append(token_of_each_byte("abbbab"))
    assert match is not None
    assert (match.start, match.num_tokens) == (4, 6)


def test_a_runaway_pattern_ends_in_an_error_that_names_it():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop_regex=[r"(?:(?:a|ab|b)+)+[0-9]"]))
    with pytest.raises(StopRegexTimeout, match="stop_regex"):
        detokenizer.append(token_of_each_byte("ab" * 200))


class WaitingTime(SearchTime):
    """Search time that is asked for only while another thread holds the processor, and remembers what was spent."""

    spent = 0.0

    def allowance(self) -> float:
        threading.Event().wait(1.5 * MAX_S)  # a data loader that keeps the interpreter's lock
        return super().allowance()

    def spend(self, seconds: float) -> None:
        self.spent += seconds
        super().spend(seconds)


def test_a_wait_for_the_processor_is_no_search_for_a_pattern():
    shared = WaitingTime()
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop_regex=["QQ."]), shared)
    assert detokenizer.append(token_of_each_byte("QQ!")) is not None
    assert shared.spent < 0.5 * MAX_S


def test_the_processor_time_of_other_threads_is_no_search_for_a_pattern():
    pattern, calls = regex.compile("QQ."), list[float]()

    class Busy(SamplingParams):
        """Parameters whose pattern is cut short while this thread has hardly run, as `regex` does where others run."""

        @property
        def stop_patterns(self) -> Any:
            return (SimpleNamespace(pattern="QQ.", finditer=find),)

    def find(*args: Any, timeout: float, **options: Any) -> Any:
        calls.append(timeout)
        if len(calls) == 1:
            raise TimeoutError
        return pattern.finditer(*args, timeout=timeout, **options)

    match = IncrementalDetokenizer(BYTES, [], Busy(stop_regex=["QQ."])).append(token_of_each_byte("QQ!"))
    assert match is not None and match.stop == "QQ." and 0 < calls[1] < calls[0]


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string():
    detokenizer = IncrementalDetokenizer(None, [1, 2], SamplingParams(stop_token_ids=[4]))
    assert detokenizer.append([3, 4]) is None
    assert detokenizer.text == detokenizer.streamable_text == ""
    for params in (SamplingParams(stop="x"), SamplingParams(stop_regex="x")):
        with pytest.raises(ValueError, match="tokenizer"):
            IncrementalDetokenizer(None, [], params)


@pytest.mark.parametrize("ids", [encode("the lazy dog"), [BYTES.all_special_ids[0]], token_of_each_byte("🙂")[2:3]])
def test_a_token_costs_the_same_however_long_the_text_is(ids):
    detokenizer = IncrementalDetokenizer(BYTES, encode("The"), SamplingParams(stop=["never"]))

    def seconds(num_tokens: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            detokenizer.append((ids * num_tokens)[:num_tokens])
            best = min(best, time.process_time() - start)
        return best

    first = seconds(300)
    detokenizer.append((ids * 6000)[:6000])
    assert seconds(300) < 4 * first


def test_a_token_costs_the_same_however_long_the_stops_are():
    def seconds(num_chars: int) -> float:
        stops = [f"{index:02}" + "q" * (num_chars - 2) for index in range(32)]
        detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=stops))
        detokenizer.append(encode("q") * 2048)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            for token_id in encode("q") * 100:
                assert detokenizer.append([token_id]) is None and detokenizer.streamable_text
            best = min(best, time.process_time() - start)
        return best

    assert seconds(2048) < 4 * seconds(16)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
)
def test_stops_and_their_beginnings_are_those_of_a_search(pieces, stops):
    prefixes, text = StopPrefixes(stops), ""
    for piece in pieces:
        before, text = text, text + piece
        expected = [
            (num, stop) for stop in stops
            if (num := next((n for n in range(1, len(piece) + 1) if (before + piece[:n]).endswith(stop)), 0))
        ]  # fmt: skip
        assert prefixes.follow(piece) == expected
        held = [k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert prefixes.num_chars == max(held, default=0)


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("skips", [True, False])
def test_the_short_way_to_the_backend_gives_the_text_of_transformers(make, skips):
    class Wrapped(PreTrainedTokenizerFast):
        """A tokenizer with a decode of its own, which must be asked."""

        num_asked = 0

        def decode(self, *args: object, **options: object) -> str:
            Wrapped.num_asked += 1
            return super().decode(*args, **options)

    plain = make()
    other = Wrapped(tokenizer_object=plain.backend_tokenizer, additional_special_tokens=SPECIAL)
    params = SamplingParams(skip_special_tokens=skips)
    ids = [*range(len(plain)), len(plain) + 7, 0, 1]
    texts = []
    for tokenizer in (plain, other):
        detokenizer = IncrementalDetokenizer(tokenizer, [5, 6, 7], params)
        detokenizer.append(ids)
        texts.append(detokenizer.text)
    assert texts[0] == texts[1] and len(texts[0]) > 100 and ("<|end|>" in texts[0]) != skips
    assert Wrapped.num_asked >= len(ids)
