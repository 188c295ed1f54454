"""Tests of JSON that is parsed and encoded in slices: as `json` does it, while other threads run."""

from __future__ import annotations

import json
import random
import threading
import time
import tracemalloc

import pytest

from lockstep.integration.http.edge import bodies, json_slices, surrogates
from lockstep.integration.http.edge.bodies import parse_object
from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.http.edge.json_slices import TooManyLists, encode_in_slices, parse_in_slices

LONG = 200_000  # characters, more than a slice


def refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def parse(text: str, max_lists: int = 10**9) -> object:
    return parse_in_slices(text, max_lists, parse_constant=refuse)


def value_of(generator: random.Random, depth: int) -> object:
    kind = generator.random()
    if depth == 0 or kind < 0.4:
        return generator.choice([1, -2.5, True, None, "", "a[b", '\\"{', "é\n", 10**20, "x" * generator.randrange(50)])
    if kind < 0.7:
        return [value_of(generator, depth - 1) for _ in range(generator.randrange(6))]
    keys = [generator.choice('ab["\\') * generator.randrange(3) for _ in range(generator.randrange(5))]
    return {key: value_of(generator, depth - 1) for key in keys}


def test_slices_give_what_json_gives_for_right_and_for_broken_texts(monkeypatch):
    monkeypatch.setattr(json_slices, "_WINDOW", 40)
    generator = random.Random(5)
    for _ in range(2000):
        value = value_of(generator, 6)
        text = json.dumps(value, indent=generator.choice([None, 1]), ensure_ascii=generator.random() < 0.5)
        assert parse(text) == json.loads(text)
        at = generator.randrange(len(text) + 1)
        broken = text[:at] + generator.choice(["", ",", "]", "}", '"', "1", " ", "\\"]) + text[at + 1 :]
        found = []
        for read in (json.loads, parse):
            try:
                found.append(read(broken))
            except ValueError:
                found.append(ValueError)
        assert found[0] == found[1], broken


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("[" + "[1]," * 999 + "[1]]", 1001),
        ("[" + "[[],{}]," * 999 + "1]", 2998),
        ("[" + "1," * LONG + "1]", 1),
        ("[" + '"[[[[",' * LONG + "1]", 1),
        ("[" + "[[1],[1]]," * (LONG // 10) + "1]", LONG // 10 * 3 + 1),
    ],
)
def test_lists_and_objects_are_counted_and_brackets_in_texts_are_not(text, num):
    assert parse(text, num) == json.loads(text)
    with pytest.raises(TooManyLists):
        parse(text, num - 1)


def test_encoding_in_slices_is_the_encoding_of_json():
    generator, encode = random.Random(6), json.JSONEncoder(separators=(",", ":")).encode
    for _ in range(300):
        value = [value_of(generator, 5) for _ in range(generator.randrange(40))]
        assert "".join(encode_in_slices(value, encode)) == encode(value)
    assert (
        "".join(encode_in_slices({"b": 1, "a": [{"d": 1, "c": 2}]}, encode, sorts=True))
        == '{"a":[{"c":2,"d":1}],"b":1}'
    )


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ("1e999", "1e999 is larger than any number can be"),
        ("9" * 400 + ".0", "larger than any number"),
        ("-NaN", "not JSON"),
        ("Infinity", "Infinity is no JSON number"),
        ('"\\ud800"', "a: has a lone surrogate"),
        ('"\\udc00"', "a: has a lone surrogate"),
        ('"\\\\ud83d\\ude00"', "a: has a lone surrogate"),  # a backslash, letters, and half a character
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[" * 512 + "]" * 512, "nested too deeply: more than 512"),  # with the body itself one too many
        ("[1, " * 512 + "1" + "]" * 512, "nested too deeply: more than 512"),
        ('{"b": ' * 512 + "1" + "}" * 512, "nested too deeply: more than 512"),
        ("[[], " + "[{}, [" * 256 + "]]" * 256 + "]", "nested too deeply: more than 512"),
        (f'[["{"x" * 9000}", ' * 256 + "1" + "]]" * 256, "nested too deeply: more than 512"),  # longer than slices
    ],
)
@pytest.mark.parametrize("padding", [0, LONG])
def test_long_bodies_are_refused_for_what_short_ones_are(inside, says, padding):
    body = '{{"pad": [{}1], "a": {}}}'.format("1," * padding, inside)
    with pytest.raises(HttpError) as caught:
        parse_object(body.encode())
    assert caught.value.status == 400 and says in caught.value.message


@pytest.mark.parametrize("padding", [0, LONG])
def test_bodies_of_the_deepest_nesting_are_read_and_brackets_of_texts_are_none(padding):
    deepest = "[" * 511 + "]" * 511
    body = '{{"pad": [{}1], "a": {}, "b": "{}"}}'.format("1," * padding, deepest, "[" * 3000)
    value = parse_object(body.encode())
    assert json.dumps(value["a"]) == deepest and value["b"] == "[" * 3000


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": 1, "b": [1, {"c": ["x", ["\ud800"]]}, 2]}, "b"),
        ({"a": [{}] * 5000 + [{"d\udc00": 1}]}, "a"),
        ({"a": {"b": {"c": ["é"] * 9000 + ["\udfff"]}}}, "a"),
        ({"\ud800": 1}, "a key"),
        ({"a": ["\ud83d\ude00"], "b": {"c": [[], {}, ["x"], None, 1.0, True]}}, None),
    ],
)
def test_half_a_character_is_found_anywhere_and_its_field_is_named(value, where):
    body = json.dumps(value).encode()
    if where is None:
        assert parse_object(body) == json.loads(body)
        return
    with pytest.raises(HttpError) as caught:
        parse_object(body)
    assert caught.value.message.startswith(f"{where}: has a lone surrogate")


def test_a_refused_body_of_millions_of_texts_holds_no_other_thread(monkeypatch):
    """Neither its check makes a list of all of them, nor are they let go all at once."""
    slices = []
    monkeypatch.setattr(bodies, "give_way", lambda: slices.append(1))
    body = b'{"a": [' + b",".join([b'"x"'] * 500_000) + b', "\\ud800"]}'
    tracemalloc.start()
    try:
        with pytest.raises(HttpError, match="lone surrogate"):
            parse_object(body)
        values = json.loads(b'{"a": [' + b",".join([b"7000"] * 500_000) + b"]}")
        before, num = tracemalloc.get_traced_memory()[0], len(slices)
        tracemalloc.reset_peak()
        bodies.let_go(values)
        assert values == {"a": []} and len(slices) - num >= 100
        surrogates.refuse_surrogates({"a": ["é"] * 500_000})
        assert tracemalloc.get_traced_memory()[1] - before < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("entry", ['"\\ud83d\\ude00"', '"\\\\ud83d"', '"\\uD83D\\uDE00\\ud83d\\ude00"'])
def test_escapes_that_are_characters_are_read(entry):
    body = '{{"a": [{}]}}'.format(",".join([entry] * 20_000))
    assert parse_object(body.encode()) == json.loads(body)


def test_the_keys_of_a_long_object_are_limited_as_lists_are():
    keys = b",".join(b'"%d": 1' % key for key in range(20_000))
    body = b'{"logit_bias": {' + keys + b"}}"
    assert len(parse_object(body, 20_010)["logit_bias"]) == 20_000
    with pytest.raises(HttpError, match="max_body_lists"):
        parse_object(body, 19_999)


def test_other_threads_run_while_a_long_body_is_parsed():
    gaps, ends = [0.0], threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not ends.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    with pytest.raises(HttpError, match="max_body_lists"):
        parse_object(b'{"input_ids": [' + b"[1]," * (4 << 20) + b"[1]]}", 1 << 18)
    took = time.monotonic() - began
    ends.set()
    watcher.join()
    assert len(gaps) > 10 and max(gaps) < max(1.0, took / 2)
