"""Grammars: the texts that they allow, errors in them, and the cache that compiles them."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest

from lockstep.rollout.errors import EngineStopped, GrammarsUnavailable, Overloaded
from lockstep.rollout.grammars.cache import MAX_TEXT_BYTES, GrammarCache
from lockstep.rollout.grammars.catalog import Grammars
from lockstep.rollout.grammars.compiler import Constraint, constraint_of
from lockstep.rollout.sampling_params import SamplingParams

EOS = 0
VOCAB = 1024


def allowed_ids(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the ids whose bits are set in a mask."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little", count=vocab_size))


class InProcess:
    """A compiler for a cache: a function that runs in the cache's thread."""

    def __init__(self, compile) -> None:
        self._compile = compile

    def __call__(self, constraint):
        return self._compile(constraint)

    def close(self) -> None:
        pass


def follow(matcher, text, string: str) -> None:
    for id in text.encode(string.encode()):
        assert matcher.accept(id)


def test_a_mask_allows_what_goes_on_and_no_special_token(compiler, text, bpe_tokenizer):
    matcher = compiler.compile(Constraint("json_schema", '{"type": "string"}')).matcher()
    follow(matcher, text, '"a')
    allowed = set(allowed_ids(matcher.mask(), VOCAB).tolist())
    assert allowed and max(allowed) < len(bpe_tokenizer)
    for name in ("<eos>", "<|im_start|>", "<think>"):
        assert bpe_tokenizer.convert_tokens_to_ids(name) not in allowed


def test_only_the_stop_token_follows_a_grammar_that_has_ended(compiler, text):
    matcher = compiler.compile(Constraint("regex", "ab")).matcher()
    follow(matcher, text, "ab")
    assert matcher.is_complete and allowed_ids(matcher.mask(), VOCAB).tolist() == [EOS]
    assert matcher.accept(EOS) and matcher.has_stopped


def test_forced_text_has_whole_characters_and_none_inside_one(compiler, text):
    matcher = compiler.compile(Constraint("ebnf", 'root ::= "日本" ("é" | "è")')).matcher()
    assert matcher.forced() == matcher._forced.find_by_bytes() == "日本".encode()
    first, *others = "日".encode()
    assert matcher.accept(text.pieces.index(bytes([first])))
    assert matcher.forced() == matcher._forced.find_by_bytes() == b""
    assert all(matcher.accept(text.pieces.index(bytes([byte]))) for byte in others)
    assert matcher.forced() == matcher._forced.find_by_bytes() == "本".encode()


def test_no_mask_lets_bytes_be_put_together_that_are_no_character(compiler, text):
    matcher = compiler.compile(Constraint("regex", "[^a]{1,9}")).matcher()
    for lead, wrong, right in ((0xED, 0xA0, 0x80), (0xE0, 0x80, 0xA0), (0xF4, 0x90, 0x80), (0xF0, 0x80, 0x90)):
        assert matcher.accept(text.pieces.index(bytes([lead])))
        allowed = set(allowed_ids(matcher.mask(), VOCAB).tolist())
        assert text.pieces.index(bytes([wrong])) not in allowed and text.pieces.index(bytes([right])) in allowed
        matcher.roll_back(1)
    assert text.pieces.index(b"\xff") not in allowed_ids(matcher.mask(), VOCAB)


def test_rolling_back_restores_the_masks(compiler, text):
    matcher = compiler.compile(Constraint("regex", "[a-c]{1,20}(name|value)")).matcher()
    masks = [matcher.mask()]
    for id in text.encode(b"abcabcacbc"):
        assert matcher.accept(id)
        masks.append(matcher.mask())
    while len(masks) > 1:
        matcher.roll_back(1)
        masks.pop()
        assert np.array_equal(matcher.mask(), masks[-1])


WRONG = [
    ("regex", "a(b", "position 4"),
    ("regex", "[a", "position 3"),
    ("regex", "(?=a)b", "position 3"),
    ("regex", r"\Aab\Z", r"has \\A, which is not supported"),
    ("ebnf", 'root ::= "a" foo', 'line 1, column 14.*"foo"'),
    ("ebnf", 'root = "a"', "root"),
    ("ebnf", 'root ::= "a', "column 12"),
    ("json_schema", '{"type": ', "line 1, column 10"),
    ("json_schema", '{"type": "objekt"}', "objekt"),
    ("json_schema", '{"$ref": "#/x"}', "points nowhere"),
    ("json_schema", '{"type": "string", "pattern": "a("}', "position"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than maximum"),
    ("json_schema", '{"$ref": "#"}', "no text of this vocabulary|Circular"),
    ("json_schema", "false", "cannot accept any value"),
    ("json_schema", '{"items":' * 100 + "{}" + "}" * 100, "nested more than 64"),
    ("json_schema", "[" * 100_000, "nested more than 64"),
    ("structural_tag", '{"type": "x"}', "structural_tag"),
    ("structural_tag", "{", "line 1, column 2"),
    (
        "structural_tag",
        '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "array", "items": {}, '
        '"uniqueItems": true}}}',
        "#/uniqueItems is not supported",
    ),
    (
        "structural_tag",
        r'{"type": "structural_tag", "format": {"type": "regex", "pattern": "\\Aab"}}',
        r"has \\A, which is not supported",
    ),
]


@pytest.mark.parametrize(("kind", "grammar", "why"), WRONG)
def test_what_is_wrong_with_a_grammar_is_quoted_with_its_place(compiler, kind, grammar, why):
    with pytest.raises(ValueError, match=why) as caught:
        compiler.compile(Constraint(kind, grammar))
    assert str(caught.value).startswith(f"{kind}: ") and ".cc:" not in str(caught.value)


def allows_whole(compiler, text, grammar: Constraint, string: str) -> bool:
    matcher = compiler.compile(grammar).matcher()
    return all(matcher.accept(id) for id in text.encode(string.encode())) and matcher.is_complete


@pytest.mark.parametrize(
    ("reference", "defined"),
    [
        ("#/$defs/a~1b", {"a/b": "integer"}),
        ("#/$defs/a~0b", {"a~b": "integer"}),
        ("#/$defs/a~01b", {"a~1b": "integer", "a/b": "string"}),
        ("#/$defs/a%20b", {"a b": "integer", "a%20b": "string"}),
        ("#/$defs/%C3%A4", {"ä": "integer"}),
        ("#/$defs/", {"": "integer", "$defs": "string"}),
        ("#/$defs/a%2525~1", {"a%25/": "integer"}),
        ("#/prefixItems/0", {"unused": "string"}),
    ],
)
def test_references_are_json_pointers_in_schemas_and_in_those_of_tags(compiler, text, reference, defined):
    definitions = {name: {"type": kind} for name, kind in defined.items()}
    schema = {
        "type": "array", "prefixItems": [{"type": "integer"}, {"$ref": reference}], "minItems": 2, "maxItems": 2,
        "$defs": definitions | {"const": {"const": {"$ref": "#/a~1b"}}},
    }  # fmt: skip
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for grammar in (Constraint("json_schema", json.dumps(schema)), Constraint("structural_tag", json.dumps(tag))):
        assert allows_whole(compiler, text, grammar, "[1, 2]")
        assert not allows_whole(compiler, text, grammar, '[1, "a"]')


def test_a_schema_that_names_itself_by_an_escaped_reference_nests(compiler, text):
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/the%20node"}}, "additionalProperties": False}
    grammar = Constraint("json_schema", json.dumps({"$ref": "#/$defs/the%20node", "$defs": {"the node": node}}))
    assert allows_whole(compiler, text, grammar, '{"a": {"a": {}}}')
    assert not allows_whole(compiler, text, grammar, '{"a": {"a": 1}}')


@pytest.mark.parametrize("reference", ["#$defs/a", "#a", "#/$defs/a/", "#/$defs//a", "#/prefixItems/00", "#/$defs/b"])
def test_references_that_name_nothing_are_refused(compiler, reference):
    """The library takes some of them for any value."""
    schema = {"type": "array", "prefixItems": [{}], "items": {"$ref": reference}, "$defs": {"a": {}}}
    with pytest.raises(ValueError, match="points nowhere"):
        compiler.compile(Constraint("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "pattern",
    ["a^b", "a$b", "x*^a", "a(b$)c", "a$\n", "(a|^b)(^c)", "x(a|^b)", "(^a)+", "(a$){2}", "a$(|b)", "a$[b]", "(a$|b)c"],
)
def test_ends_of_the_text_in_the_middle_of_a_pattern_are_refused(compiler, pattern):
    """The library leaves them out, so that other texts match."""
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    schema = {"type": "string", "pattern": pattern}
    for kind, grammar in (
        ("regex", pattern), ("structural_tag", json.dumps(tag)), ("json_schema", json.dumps(schema)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"has \^ or \$ in its middle"):
            compiler.compile(Constraint(kind, grammar))


@pytest.mark.parametrize(
    ("pattern", "string"),
    [
        ("^ab$", "ab"), ("^a|b$", "b"), ("a$|^b", "b"), ("(^a|^b)c", "bc"), ("a(b$|c)", "ac"), ("(^yes$|^no$)", "no"),
        (r"\^\$", "^$"), ("[$^]+", "$^"), ("^(?:a$)?$", "a"), (r"^\u{61}[\]$]$", "a$"), ("a.b", "a\nb"),
    ],
)  # fmt: skip
def test_ends_of_the_text_at_the_ends_of_a_pattern_are_taken(compiler, text, pattern, string):
    assert allows_whole(compiler, text, Constraint("regex", pattern), string)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"[\p{L}]+", r"has \\p in a class, which"), (r"a[^\P{L}]", r"has \\P in a class"),
        (r"[\k<a>]", r"has \\k in a class"), (r"[a\B]", r"has \\B in a class"),
        ("[]a]", r"has \[\],"), (r"x[\1]", r"has \\1 in a class"), (r"[\x{41}]", r"has \\x in a class"),
        (r"[\\\u12]", r"has \\u in a class"), ("[^]a]", r"has \[\^\]"), ("a[^]", r"has \[\^\]"),
        (r"\u{110000}", r"has \\u\{110000\}, which is no character"), (r"[a-\u{00110000}]", r"has \\u\{00110000\}"),
    ],
)  # fmt: skip
def test_classes_that_languages_read_differently_are_refused(compiler, pattern, why):
    """The library takes such an escape for its letter."""
    with pytest.raises(ValueError, match=f"regex: {why}"):
        compiler.compile(Constraint("regex", pattern))
    with pytest.raises(ValueError, match=why):
        compiler.compile(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))


@pytest.mark.parametrize(
    ("pattern", "string"),
    [
        (r"[\d\]\-\[^p{L}]{5}", "]-^pL"), (r"[\x41\u0042\u{43}\cD\t\é]+", "ABC\x04\té"), (r"\[\^]\\p", "[^]\\p"),
        (r"[\\]p[\^]k", "\\p^k"), (r"[^\\\]]k", "ak"), (r"\u{10ffff}", "\U0010ffff"),
    ],
)  # fmt: skip
def test_classes_that_languages_read_alike_are_taken(compiler, text, pattern, string):
    assert allows_whole(compiler, text, Constraint("regex", pattern), string)


@pytest.mark.parametrize("pattern", ["\ud800", r"\ud800", r"[\uD800-\uDFFF]", r"\u{dc00}", r"a\\\ud83d\ude00"])
def test_half_a_character_in_a_pattern_is_refused(compiler, pattern):
    with pytest.raises(ValueError, match=r"regex: has .* half of a surrogate pair"):
        compiler.compile(Constraint("regex", pattern))


@pytest.mark.parametrize(
    ("pattern", "string"),
    [
        ("^[^é]{1,3}$", "aè"), ("^[^“”]+$", "a'é"), ("^[^α-ω]$", "a"), (r"^[^\dé]$", "è"), ("^[^🙂]$", "🙃"),
        ("^é.$", "éa"), (r"^é\D\W\S$", "éa-a"), ("^é[^a]$", "éé"), ("^[ -é]$", "a"), (r"^\é[\è]$", "éè"),
        ("^[^a]]$", "b]"), ("^[^é]]$", "b]"), ("^日本[語国]{2}$", "日本語国"),
    ],
)  # fmt: skip
def test_a_pattern_stays_inside_its_string_whatever_its_characters(compiler, text, pattern, string):
    """The library has two readers of patterns, one of which knows no strings of JSON, and chooses by the pattern."""
    compiled = compiler.compile(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))

    def allows(string: str) -> bool:
        matcher = compiled.matcher()
        return all(matcher.accept(id) for id in text.encode(f'"{string}"'.encode())) and matcher.is_complete

    assert allows(string)
    for place, wrong in itertools.product(range(len(string)), ('"', "\\", "\n", "\x00")):
        assert not allows(string[:place] + wrong + string[place + 1 :])


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^a(\.[0-9]+)?$", ["a", "a.12"], ["a12", "a."]),
        (r"^a(\.[0-9]+)??b$", ["ab", "a.1b"], ["a1b"]),
        ("^(c|c{1,2})$", ["c", "cc"], ["", "ccc", "cccc"]),
        ("^((a{2,}){0,1}){2,}$", ["", "aa", "aaaaa"], ["a"]),
        ("^([ab]|((b|[ab])){1,2})$", ["a", "ba"], ["bab", ""]),
        ("^a$|(^b|^c)d$|", ["", "a", "bd", "cd"], ["ad", "b"]),
        (r"^[\w-]+[\W^][-\S]\s[^-\d]$", ["a-^, x", "-++\u00a0é"], ["a-^,x", "a-^, 5", "a-^, -"]),
        (r"^\w\W\D[\D][!-\]]$", ["a,,,]", "0ééé!"], ["éaaa!", "a,,,^", 'a,,,"', "a,,,\\"]),
    ],
)
def test_a_pattern_of_a_schema_means_what_it_means_elsewhere(compiler, text, pattern, right, wrong):
    """One of the library's two readers takes (xd+)? for (x?d*)?, and c|c{1,2} for c+."""
    compiled = compiler.compile(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    for string in right + wrong:
        matcher = compiled.matcher()
        whole = f'"{string}"'.encode()
        assert (all(map(matcher.accept, text.encode(whole))) and matcher.is_complete) == (string in right), string


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^[^é]$": {"const": 1}}},
        {"type": "object", "propertyNames": {"pattern": "^[^é]$"}},
        {"$ref": "#/a/patternProperties/é", "a": {"patternProperties": {"é": {"patternProperties": {"^[^é]$": {}}}}}},
    ],
    ids=["properties", "names", "reference"],
)
def test_patterns_of_names_stay_inside_their_strings(compiler, text, schema):
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for grammar in (Constraint("json_schema", json.dumps(schema)), Constraint("structural_tag", json.dumps(tag))):
        assert allows_whole(compiler, text, grammar, '{"è": 1}')
        assert not allows_whole(compiler, text, grammar, '{""": 1}')


FORMATS = {  # texts between quotes that follow a format, and others that do not
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2023-02-31", "2023-04-31", "2023-1-1"],
    ),
    "date-time": (
        ["2024-02-29T23:59:60.5+01:00"],
        ["2023-06-31T00:00:00Z", "2023-06-30T24:00:00Z", "2023-06-30T00:00:0012Z"],
    ),
    "email": (["a.b+c@x-y.org", "a@b"], [r"\"\q\"@a", r"\"a\"@b", 'a"@b', "a@", "a@-b", "a..b@c"]),
    "ipv4": (["0.10.255.9", "192.168.1.100"], ["6.091.59.252", "256.1.1.1", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2::7:8", "::ffff:10.0.0.1", "1::2:1.2.3.4", "1:2:3:4:5:6:1.2.3.4"],
        [
            "::ffff:09.1.1.1",
            "1:2:3:4:5:6:7",
            "1::2::3",
            "12345::",
            "1:2:3:4:5:6:7:1.2.3.4",
            ":1",
            "1:2:3:4:5:6::1.2.3.4",
        ],
    ),
    "json-pointer": (["", "/a/~0~1/é", "//0"], ["a", "/~2", '/"', "/\\", r"/\"", "/\n"]),
    "relative-json-pointer": (["0", "12#", "1/a~1b"], ["01", "#", '0/"', "0/\\", "0#/a"]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("in_tag", [False, True])
def test_formats_of_strings_allow_what_they_mean_and_no_broken_json(compiler, text, name, in_tag):
    schema = {"type": "array", "items": {"type": ["string", "null"], "format": name}, "minItems": 1, "maxItems": 1}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    kind, its_text = ("structural_tag", tag) if in_tag else ("json_schema", schema)
    compiled = compiler.compile(Constraint(kind, json.dumps(its_text)))
    right, wrong = FORMATS[name]
    for string in right + wrong:
        matcher = compiled.matcher()
        whole = f'["{string}"]'.encode()
        assert (all(map(matcher.accept, text.encode(whole))) and matcher.is_complete) == (string in right), string


def test_a_structural_tag_leaves_the_rest_free(compiler, text):
    tag = """{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"type": "tag", "begin": "<f=g>", "content": {"type": "json_schema", "json_schema":
            {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}}, "end": "</f>"}]}}"""
    matcher = compiler.compile(Constraint("structural_tag", tag)).matcher()
    follow(matcher, text, "the name ")
    assert EOS in allowed_ids(matcher.mask(), VOCAB)
    follow(matcher, text, "<f=")
    assert matcher.forced().startswith(b"g>")


def test_equal_grammars_are_compiled_once_and_the_longest_unused_goes(compiler):
    asked: list[str] = []

    def compile(constraint):
        asked.append(constraint.text)
        return compiler.compile(constraint)

    cache = GrammarCache(lambda: InProcess(compile), max_grammars=2)
    a, b, c = (Constraint("regex", letter) for letter in "abc")
    first = cache.get_all([a, b, a, None])
    assert first[0] is first[2] and first[3] is None and sorted(asked) == ["a", "b"]
    cache.get_all([a])
    cache.get_all([c])  # b is removed
    assert len(cache) == 2 and cache.get_all([a])[0] is first[0]
    cache.get_all([b])
    assert asked.count("b") == 2 and asked.count("a") == 1
    assert cache.num_compiled == 4 and cache.compile_seconds > 0
    cache.close()


def test_a_compiler_that_cannot_be_made_leaves_nothing_behind(compiler):
    are_files_left = threading.Event()

    def make() -> InProcess:
        if not are_files_left.is_set():
            raise OSError("too many open files")
        return InProcess(compiler.compile)

    cache, wanted = GrammarCache(make), Constraint("regex", "a+")
    for _ in range(2):
        with pytest.raises(GrammarsUnavailable, match="too many open files"):
            cache.ask(wanted)
        assert wanted not in cache
    are_files_left.set()
    assert cache.ask(wanted).result(60) is cache.get_all([wanted])[0]
    cache.close()


def test_where_no_further_compiler_can_be_made_the_first_one_compiles(compiler):
    may_go_on, made = threading.Event(), []

    def compile(constraint):
        assert may_go_on.wait(60)
        return compiler.compile(constraint)

    def make() -> InProcess:
        if made:
            raise OSError("too many open files")
        made.append(InProcess(compile))
        return made[0]

    cache = GrammarCache(make)
    promises = [cache.ask(Constraint("regex", letter)) for letter in "ab"]
    may_go_on.set()
    assert all(promise.result(60) for promise in promises)
    cache.close()


def test_a_thread_that_cannot_start_is_not_counted(compiler, monkeypatch):
    closed = []

    class Closing(InProcess):
        def close(self) -> None:
            closed.append(self)

    class Refused:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    cache, wanted = GrammarCache(lambda: Closing(compiler.compile)), Constraint("regex", "a+")
    monkeypatch.setattr(threading, "Thread", Refused)
    for num in (1, 2, 3):
        with pytest.raises(GrammarsUnavailable, match="can't start new thread"):
            cache.ask(wanted)
        assert len(closed) == num
    monkeypatch.undo()
    assert cache.get_all([wanted])[0] is not None
    cache.close()


def test_a_request_waits_for_its_own_grammar_only(compiler):
    may_go_on = threading.Event()

    def compile(constraint):
        if constraint.text == "slow":
            assert may_go_on.wait(60)
        return compiler.compile(constraint)

    cache = GrammarCache(lambda: InProcess(compile))
    slow = cache.ask(Constraint("regex", "slow"))
    assert cache.get_all([Constraint("regex", "quick")])[0] is not None
    assert not slow.done()
    may_go_on.set()
    assert slow.result(60) is cache.get_all([Constraint("regex", "slow")])[0]
    cache.close()


def test_everything_wrong_is_named_and_compiled_once(compiler):
    asked: list[str] = []

    def compile(constraint):
        asked.append(constraint.text)
        return compiler.compile(constraint)

    cache = GrammarCache(lambda: InProcess(compile))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"regex: .*; ebnf: |ebnf: .*; regex: "):
            cache.get_all([Constraint("regex", "a("), Constraint("ebnf", "root"), Constraint("regex", "b")])
    assert len(cache) == 1 and sorted(asked) == ["a(", "b", "root"]
    with pytest.raises(ValueError, match="bytes of grammar"):
        cache.ask(Constraint("regex", "a" * (MAX_TEXT_BYTES + 1)))
    cache.close()


def test_too_many_waiting_grammars_are_refused_and_those_of_callers_that_left_are_not_compiled():
    may_go_on, asked = threading.Event(), []

    def compile(constraint):
        asked.append(constraint.text)
        assert may_go_on.wait(60)
        raise ValueError("wrong")

    cache = GrammarCache(lambda: InProcess(compile), max_waiting=3)
    running = [cache.ask(Constraint("regex", text)) for text in "ab"]
    while len(asked) < 2:
        threading.Event().wait(0.001)
    first, second, third = (cache.ask(Constraint("regex", text)) for text in "cde")
    with pytest.raises(Overloaded) as caught:
        cache.ask(Constraint("regex", "f"))
    assert caught.value.retry_after_s > 0
    assert cache.ask(Constraint("regex", "d")) is second  # a second caller waits for it
    cache.leave([first, second])
    assert first.cancelled() and not second.done()
    may_go_on.set()
    for promise in (*running, second, third):
        assert isinstance(promise.exception(60), ValueError)
    assert sorted(asked) == ["a", "b", "d", "e"]
    cache.close()


def test_closing_waits_for_no_compilation():
    may_go_on, begun = threading.Event(), threading.Event()

    def compile(constraint):
        begun.set()
        assert may_go_on.wait(60)
        raise ValueError("wrong")

    cache = GrammarCache(lambda: InProcess(compile))
    running = cache.ask(Constraint("regex", "a"))
    assert begun.wait(60)
    cache.close()
    assert not running.done()
    with pytest.raises(EngineStopped):
        cache.ask(Constraint("regex", "b"))
    may_go_on.set()


def test_grammars_in_use_have_a_limit_of_memory(compiler):
    cache = GrammarCache(lambda: InProcess(compiler.compile), max_bytes=1)
    [held] = cache.get_all([Constraint("regex", "a")])
    with pytest.raises(Overloaded, match="grammar_memory_mb"):
        cache.ask(Constraint("regex", "b"))
    del held
    assert cache.get_all([Constraint("regex", "b")])[0] is not None
    cache.close()


def test_an_engine_without_a_tokenizer_refuses_grammars():
    grammars = Grammars(None, VOCAB, [EOS])
    assert grammars.compiled([SamplingParams()]) == [None]
    with pytest.raises(ValueError, match="need a tokenizer"):
        grammars.compiled([SamplingParams(regex="a")])


def test_a_constraint_is_what_the_parameters_say():
    assert constraint_of(SamplingParams()) is None
    assert constraint_of(SamplingParams(regex="a")) == Constraint("regex", "a")
    schema = {"type": "object", "properties": {"ключ": {"type": "null"}}}
    assert "ключ" in constraint_of(SamplingParams(json_schema=schema)).text


def test_a_call_that_waits_may_have_more_grammars_than_wait_for_others():
    def compile(constraint):
        raise ValueError(f"no {constraint.text}")

    cache = GrammarCache(lambda: InProcess(compile), max_waiting=2)
    with pytest.raises(ValueError, match=r"no 0.*no 9"):
        cache.get_all([Constraint("regex", str(number)) for number in range(10)])
    cache.close()
