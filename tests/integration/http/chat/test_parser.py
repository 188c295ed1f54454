"""Tests of the division of answers into content, reasoning and calls."""

from __future__ import annotations

import json
import time

import pytest

from lockstep.integration.http.chat.parser import AnswerParser
from lockstep.integration.http.chat.values import decode_at, value_of
from lockstep.integration.http.edge.nesting import check_nesting
from lockstep.tests.support.chat.answers import BROKEN, NOW, PARIS, SCHEMA, WHOLE, Case, form_of, parts_of

MARKERS = (
    "<tool_call>", "<tool_ca", "</tool_call>", "<tool_call><function=a><parameter=b>", "<tool_call>f<arg_key>", "<",
    '{"name":', '{"name": "now", "parameters": {}}', "[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]f[ARGS]{",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<|channel|>analysis<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.f", "<think>", "</think>", "<think></think>", "  ", "\n",
)  # fmt: skip
FORMS = tuple({case.tools: case for case in WHOLE}.values())


@pytest.mark.parametrize("case", [*WHOLE, *BROKEN], ids=lambda case: f"{case.tools}: {case.text[:40]!r}")
def test_parts_are_the_same_for_every_cut_of_the_text(case):
    form = form_of(case)
    prefix = form.prefix("")
    expected = (case.content, case.thought, case.calls)
    assert parts_of(form, [case.text], prefix)[3:] == expected
    for at in range(len(case.text) + 1):
        assert parts_of(form, [case.text[:at], case.text[at:]], prefix)[3:] == expected, at
    assert parts_of(form, list(case.text), prefix)[3:] == expected


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: f"{case.tools}: {case.text[:40]!r}")
def test_no_text_of_an_answer_that_is_cut_anywhere_is_lost(case):
    form = form_of(case)
    prefix = form.prefix("")
    for end in range(len(case.text)):
        found = parts_of(form, [case.text[:end]], prefix)
        assert all(call in case.calls for call in found.calls), end
        if case.reasoning is None and not found.calls:
            assert found.content == case.text[:end]
        rest = found.content + found.thought + "".join(name + arguments for name, arguments in found.calls)
        for letter in "Z🏔":
            assert case.text[:end].count(letter) == rest.count(letter), end


@pytest.mark.parametrize("case", [case for case in WHOLE if case.thought or case.content], ids=lambda case: case.tools)
def test_long_parts_in_short_pieces_are_the_same_as_whole_ones(case):
    long = {part: part[:-1] + "x y " * 30_000 + part[-1] for part in (case.thought, case.content) if part}
    text = case.text
    for part, longer in long.items():
        text = text.replace(part, longer, 1)
    form = form_of(case)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    expected = (long.get(case.content, ""), long.get(case.thought, ""), case.calls)
    for cut in ([text], pieces):
        assert parts_of(form, cut, form.prefix(""))[3:] == expected


def test_calls_after_a_broken_one_are_found():
    [case] = [case for case in WHOLE if case.text.startswith("<tool_call>{") and case.tools == "hermes"]
    broken = "<tool_call>{</tool_call>"
    found = parts_of(form_of(case), [f"{broken}{case.text}\n{broken} x {case.text}"])
    assert found.calls == (NOW, NOW) and found.content == f"{broken}{broken} x"


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45"])
def test_a_value_that_is_never_closed_costs_the_calls_behind_it_nothing(tools):
    """A quote too much makes the end marker a part of a text, until the call cannot be read."""
    broken = {
        "hermes": '<tool_call>{"name": "now", "arguments": {}"}</tool_call>',
        "qwen3_coder": "<tool_call><function=now><parameter=a>1</function></tool_call>",
        "glm45": "<tool_call>now<arg_key>a</arg_key><arg_value>1</tool_call>",
    }[tools]
    call = {"hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "glm45": "<tool_call>now</tool_call>"}
    good = call.get(tools, "<tool_call><function=now></function></tool_call>")
    form = form_of(Case(tools, None, ""))
    for text in (f"{broken} a {good} b", f"{broken}{broken} a {good} b", f"{broken} a {good}{broken} b"):
        expected = (text.replace(f" {good}", "").replace(good, "").replace(" a b", " a b"), "", (NOW,))
        found = parts_of(form, [text])[3:]
        assert (found[0].replace(" ", ""), *found[1:]) == (expected[0].replace(" ", ""), *expected[1:])
        for at in range(len(text)):
            assert parts_of(form, [text[:at], text[at:]])[3:] == found
        assert parts_of(form, list(text))[3:] == found


def in_markers(tools: str, name: str, value: str, text: str) -> str:
    """Return a call of `weather` with an argument of this name, and a city."""
    if tools == "glm45":
        given = (f"<arg_key>{a}</arg_key>\n<arg_value>{b}</arg_value>\n" for a, b in ((name, value), ("city", text)))
        return f"<tool_call>weather\n{''.join(given)}</tool_call>"
    given = "".join(f"<parameter={a}>\n{b}\n</parameter>\n" for a, b in ((name, value), ("city", text)))
    return f"<tool_call>\n<function=weather>\n{given}</function>\n</tool_call>"


@pytest.mark.parametrize("tools", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("name", ["where", "unknown"])  # an object by its schema, and of no schema
@pytest.mark.parametrize(
    "value",
    [
        '{"a": "%s"}', r'[{"b\\\"%s": 1}, ["%s"], "\"", -1.5e3, null]', '"%s"',
        "[see it", '{"a": "1"} and it', '"a" "it', "}", "tru",  # texts after all: each ends with the first marker
    ],
)  # fmt: skip
def test_json_without_quotes_around_it_may_spell_all_markers_in_its_texts(tools, name, value):
    spelled = {
        "qwen3_coder": "x </parameter>\n</function>\n</tool_call> <tool_call>\n<function=now>\n<parameter=city>",
        "glm45": "x </arg_value>\n</tool_call> <tool_call>now<arg_key>a</arg_key><arg_value>",
    }[tools]
    form, value = form_of(Case(tools, None, "")), value.replace("%s", spelled)
    text = f"a {in_markers(tools, name, value, 'Z')}{in_markers(tools, 'days', '2', '{')} b"
    given = value_of(value, SCHEMA["properties"].get(name), SCHEMA)
    first = ("weather", json.dumps({name: given, "city": "Z"}, ensure_ascii=False))
    expected = ("ab", "", (first, ("weather", '{"days": 2, "city": "{"}')))  # a city is no JSON by its schema
    for at in range(len(text)):
        assert parts_of(form, [text[:at], text[at:]])[3:] == expected, at
    assert parts_of(form, list(text))[3:] == expected


@pytest.mark.parametrize(
    "begin",
    [
        *("<tool_call><parameter=", '<tool_call>{"', "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        *("<tool_call><function=f><parameter=a>{", "<tool_call>f<arg_key>a</arg_key><arg_value>[["),
        *('<tool_call><function=f><parameter=a>"', "<tool_call><function=f><parameter=a>[x</parameter><parameter="),
    ],
)
@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45"])
def test_many_values_that_are_never_closed_take_a_time_that_grows_with_the_length(tools, begin):
    times = []
    for num in (2_000, 8_000):
        text = f"{begin}</tool_call>" * num
        start = time.process_time()
        assert parts_of(form_of(Case(tools, None, "")), [text]).content == text
        times.append(time.process_time() - start)
    assert times[1] < 10 * times[0], times


def test_blanks_beside_calls_belong_to_neither():
    case = WHOLE[0]
    call = case.text[case.text.index("<tool_call>\n") :].strip()
    assert parts_of(form_of(case), [f"\n \n{call}\n\n"]).content == ""
    assert parts_of(form_of(case), [f" a \n{call}\n\nb\n"]).content == " ab\n"
    assert parts_of(form_of(case), ["\n a \n"]).content == "\n a \n", "nothing else is there: as it was written"


def test_reasoning_that_the_prompt_has_opened_ends_with_its_marker():
    form = form_of(WHOLE[0])
    prefix = form.prefix("<|im_start|>assistant\n<think>\n")
    assert prefix == "<think>"
    assert parts_of(form, ["hm\n</thi", "nk>\n\nYes."], prefix)[3:] == ("Yes.", "hm", ())
    assert parts_of(form, ["hm, no end\n"], prefix)[3:] == ("", "hm, no end", ())
    assert form.prefix("<think>\n\n</think>\n\n") == "", "closed in the prompt"
    assert form.prefix("x", "<think>so") == "<think>" and form.prefix("x", "<think>so</think>a") == ""
    always = form_of(Case(None, "deepseek_r1", ""))
    assert always.prefix("") == "<think>" and always.prefix("<think>\n\n</think>\n\n") == ""
    assert form.prefix("user says <think>, and then the turn ends") == ""


def test_reasoning_that_is_not_separated_stays_in_the_content_as_it_was_written():
    case = WHOLE[0]
    found = parts_of(form_of(case, separates=False), list(case.text))
    assert found.content == case.text[: case.text.index("\n<tool_call>\n{")]
    assert (found.thought, found.calls) == ("", (PARIS, NOW)), "a marker inside the reasoning opens no call"


def test_reasoning_comes_as_one_piece_where_it_is_not_streamed():
    parser = AnswerParser(form_of(WHOLE[0], streams_reasoning=False))
    assert [part for piece in ("<think> a", " b", " c ") for part in parser.feed(piece)] == []
    [part, answer] = parser.feed("</think>d")
    assert (part.kind, part.text, answer.text) == ("reasoning", "a b c", "d")


def test_a_single_call_leaves_the_text_of_further_ones_in_the_content():
    for case in WHOLE:
        if len(case.calls) == 2:
            form = form_of(case, max_calls=1)
            found = parts_of(form, list(case.text), form.prefix(""))
            assert found.calls == case.calls[:1]
            assert case.calls[1][0] in found.content, case.tools


def test_values_without_quotes_have_the_types_of_the_schema():
    case = Case("glm45", None, "")
    properties = {
        "text": {"type": "string"}, "num": {"type": "number"}, "flag": {"type": "boolean"}, "none": {"type": "null"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "list": {"type": "array"},
        "named": {"$ref": "#/$defs/t"}, "one": {"enum": ["1", "2"]}, "loop": {"$ref": "#/properties/loop"}, "any": {},
    }  # fmt: skip
    form = form_of(case)
    form = type(form)(form.template, form.read, {"f": {"properties": properties, "$defs": {"t": {"type": "string"}}}})
    written = {
        "text": ("5", "5"), "num": ("2.50", 2.5), "flag": ("True", True), "none": ("None", None), "either": ("7", 7),
        "list": ('["a"]', ["a"]), "named": ("true", "true"), "one": ("1", "1"), "loop": ("[1]", [1]),
        "any": ("plain words", "plain words"), "other": ('{"a": 1}', {"a": 1}),
    }  # fmt: skip
    text = "".join(f"<arg_key>{key}</arg_key><arg_value>{raw}</arg_value>" for key, (raw, _) in written.items())
    [(_, arguments)] = parts_of(form, [f"<tool_call>f{text}</tool_call>"]).calls
    assert json.loads(arguments) == {key: value for key, (_, value) in written.items()}


def test_arguments_are_strict_json_that_any_client_can_read():
    case = WHOLE[1]
    for bad in ("1e999", "[" * 100_000, "1" * 5000, "-Infinity", "'a'"):
        text = '<tool_call>{"name": "now", "arguments": {"a": ' + bad + "}}</tool_call>"
        assert parts_of(form_of(case), [text])[3:] == (text, "", ()), bad[:20]
    half = '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>'
    [(_, arguments)] = parts_of(form_of(case), [half]).calls
    assert arguments.isascii() and json.loads(arguments) == {"a": "\ud83d"}, "half a character stays an escape"
    raw = '<tool_call>{"name": "now", "arguments": {"a": "one\ntwo\x01"}}</tool_call>'
    [(_, arguments)] = parts_of(form_of(case), [raw]).calls
    assert arguments == '{"a": "one\\ntwo\\u0001"}', "written anew"


def seconds(case: Case, pieces: list[str]) -> float:
    """Return the processor time of an answer in these pieces."""
    form = form_of(case)
    began = time.process_time()
    found = parts_of(form, pieces)
    assert found.content or found.thought or found.calls
    return time.process_time() - began


@pytest.mark.parametrize("case", FORMS, ids=lambda case: f"{case.tools}-{case.reasoning}")
def test_hostile_pieces_take_a_time_that_grows_with_their_number_alone(case):
    for marker in MARKERS:
        short, long = seconds(case, [marker] * 250 + ["x"]), seconds(case, [marker] * 2_000 + ["x"])
        assert long < max(40 * short, 1.0), f"{marker!r}: {short:.2f} s, and {long:.2f} s for eight times as many"
    assert seconds(case, ["".join(marker * 10_000 for marker in MARKERS)]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMS, ids=lambda case: f"{case.tools}-{case.reasoning}")
def test_ten_thousand_hostile_pieces_take_a_few_seconds_at_most(case):
    found = {marker: seconds(case, [marker] * 10_000 + ["x"]) for marker in MARKERS}
    assert max(found.values()) < 5, found


@pytest.mark.parametrize(("tools", "begin", "value", "end"), [
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>{</parameter>", "</function></tool_call>"),
    ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>{</arg_value>", "</tool_call>"),
    ("mistral", "", "[TOOL_CALLS]{x", ""),
])  # fmt: skip
def test_many_values_that_are_no_json_take_a_time_that_grows_with_the_length(tools, begin, value, end):
    case = Case(tools, None, "")
    short, long = (seconds(case, [begin + value * num + end]) for num in (4_000, 32_000))
    assert long < max(20 * short, 0.5), (short, long)


@pytest.mark.parametrize(("tools", "begin", "end"), [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": ', '}"}</tool_call>'),
    ("llama3_json", '{"name": "now", "parameters": {"a": ', "}}"),
    ("gpt-oss", "<|channel|>commentary to=functions.now<|message|>", "<|call|>"),
])  # fmt: skip
def test_a_call_is_nested_no_deeper_than_a_request_may_have_it(tools, begin, end):
    case = Case(tools, None, "")
    for depth in (450, 520, 900):
        text = begin + '{"b":' * depth + "[]" + "}" * depth + end
        text = text.replace('{"b"', '{\\"b\\"') if '"{' in begin else text
        found = parts_of(form_of(case), [text])
        assert len(found.calls) == (depth == 450)
        if found.calls:
            body = {"messages": [{"content": [{"input": json.loads(found.calls[0][1])}]}]}
            check_nesting(body, json.dumps(body))
        else:
            assert found.content == text


def test_json_is_read_to_its_end_wherever_its_text_is_cut():
    inner = {"é\n": ['\\"\ud83d', True, None, -1.5e-30, 12345678901234567890], "a": "x" * 40}
    for length in range(950, 1060):
        value = ["y" * length, inner, 0.25]
        text = json.dumps(value)
        assert decode_at(f"<{text}> {{", 1) == (value, 1 + len(text))
        for bad in (text[:-1], text.replace("true", "trve"), text.replace("-1.5", "-.5")):
            with pytest.raises(ValueError):
                decode_at(f"<{bad}", 1)
    assert decode_at("1" * 3000 + ".5 ", 0)[1] == 3002
