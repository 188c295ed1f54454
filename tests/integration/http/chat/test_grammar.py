"""Tests of the grammars of demanded calls: any text that they allow has calls that follow the tools' schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace

import jsonschema
import pytest

from lockstep.integration.http.chat.form import Beginning, ChatForm, read_form
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.generation.limits import RequestLimits
from lockstep.rollout.grammars.compiler import GrammarCompiler, constraint_of
from lockstep.rollout.grammars.library import load_library
from lockstep.rollout.grammars.matcher import CompiledGrammar, allows
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.chat.answers import parts_of
from lockstep.tests.support.chat.tokenizer import (
    EOS,
    FAMILIES,
    VOCAB_SIZE,
    byte_tokenizer,
    bytes_as_tokens,
    chat_template,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 6}, "num": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]}, "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["word", "num", "kind"],
    "additionalProperties": False,
}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "second-tool", "parameters": EMPTY}},
]
SCHEMAS = {"first": SCHEMA, "second-tool": EMPTY}
NAMED = {"type": "function", "function": {"name": "first"}}
MOST_TOKENS = 2000
ANEW = Beginning()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (EOS, "<|call|>", "<|return|>")]
    return GrammarCompiler(load_library(), TokenText(tokenizer, VOCAB_SIZE), ends)


def form_of(family: str, choice: object, *, tools=TOOLS, thinks=False, parallel=None) -> ChatForm:
    fields = SimpleNamespace(tools=tools, tool_choice=choice, parallel_tool_calls=parallel, separate_reasoning=True,
                             stream_reasoning=True)  # fmt: skip
    limits = RequestLimits(SimpleNamespace(tokenizer=None), HttpConfig())
    return read_form(fields, byte_tokenizer(chat_template(family, thinks=thinks)), limits)


def grammar_of(compiler: GrammarCompiler, form: ChatForm, beginning: Beginning = ANEW) -> CompiledGrammar:
    constraint = constraint_of(form.params(SamplingParams(), beginning))
    assert constraint is not None
    return compiler.compile(constraint)


def draw(grammar: CompiledGrammar, seed: int, prefer=(), most_tokens=MOST_TOKENS) -> tuple[list[int], bool]:
    """Draw tokens that the grammar allows; return them and whether it ended."""
    matcher = grammar.matcher()
    numbers, ids = random.Random(seed), []
    for _ in range(most_tokens):
        mask = matcher.mask()
        choices = [id for id in range(VOCAB_SIZE) if allows(mask, id)]
        wanted = [id for id in prefer if id in choices]
        ids.append(wanted[0] if wanted and numbers.random() < 0.3 else numbers.choice(choices))
        assert matcher.accept(ids[-1])
        if matcher.has_stopped:
            return ids[:-1], True
    return ids, False


def text_of(form: ChatForm, ids: list[int]) -> str:
    return str(form.tokenizer.decode(ids))


def check_calls(calls: tuple[tuple[str, str], ...]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def cases() -> Iterator[tuple[str, bool, bool]]:
    for family in FAMILIES:
        yield family, False, False
        if family not in ("llama3_json", "mistral"):
            yield family, True, False
        if family not in ("llama3_json", "mistral", "gpt-oss"):
            yield family, True, True


@pytest.mark.parametrize(("family", "thinks", "is_open"), list(cases()))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_every_text_of_a_demanded_call_has_calls_that_follow_their_schemas(compiler, family, thinks, is_open, choice):
    form = form_of(family, choice, thinks=thinks)
    beginning = Beginning("<think>" if is_open else "")
    prefer = [form.tokenizer.convert_tokens_to_ids(token) for token in (EOS, "</think>", "<|call|>")]
    num_calls, has_ended = [], 0
    grammar = grammar_of(compiler, form, beginning)
    for seed in range(8):
        ids, ended = draw(grammar, seed, prefer)
        found = parts_of(form.answers, [text_of(form, ids)], beginning.prefix)
        check_calls(found.calls)
        if ended:
            has_ended += 1
            num_calls.append(len(found.calls))
            assert found.calls and not found.content.strip(), (found, text_of(form, ids))
            assert choice == "required" or [name for name, _ in found.calls] == ["first"]
        for end in range(0, len(ids), 7):  # cut by max_tokens
            check_calls(parts_of(form.answers, [text_of(form, ids[:end])], beginning.prefix).calls)
    assert has_ended >= 4
    if choice == "required" and family != "gpt-oss" and not is_open:
        assert max(num_calls) > 1, "several calls are allowed"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_at_most_where_calls_must_not_be_parallel(compiler, family):
    form = form_of(family, "required", parallel=False)
    grammar = grammar_of(compiler, form)
    for seed in range(6):
        ids, ended = draw(grammar, seed)
        if ended:
            assert len(parts_of(form.answers, [text_of(form, ids)]).calls) == 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt-oss"])
def test_strict_tools_follow_their_schemas_where_the_call_is_left_to_the_model(compiler, family):
    tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    form = form_of(family, "auto", tools=tools)
    ids = form.tokenizer('{"name": "' if family == "llama3_json" else "")["input_ids"]
    markers = ("<tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>")
    prefer = [*ids, *(form.tokenizer.convert_tokens_to_ids(marker) for marker in markers)]
    num_calls = num_free = 0
    grammar = grammar_of(compiler, form)
    for seed in range(12):
        ids, _ = draw(grammar, seed, prefer, 600)
        found = parts_of(form.answers, [text_of(form, ids)])
        check_calls(found.calls)
        num_calls, num_free = num_calls + len(found.calls), num_free + bool(found.content)
    assert num_free, "text without calls is allowed"
    assert num_calls or family == "llama3_json"


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_a_text_parameter_that_is_a_reference_has_the_values_of_its_target(compiler, family):
    schema = {
        "$defs": {"Color": {"$ref": "#/$defs/Named"}, "Named": {"type": "string", "enum": ["red", "green"]}},
        "type": "object", "properties": {"x": {"$ref": "#/$defs/Color"}}, "required": ["x"],
    }  # fmt: skip
    form = form_of(family, "required", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    grammar = grammar_of(compiler, form)
    drawn = set()
    for seed in range(12):
        ids, _ = draw(grammar, seed)
        calls = parts_of(form.answers, [text_of(form, ids)]).calls
        drawn |= {json.loads(arguments)["x"] for _, arguments in calls}
    assert drawn == {"red", "green"}


MARKERS = (
    "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|end|>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "</function>", "</arg_key>", "<parameter=", '{"name": "f"',
)  # fmt: skip
VALUE = '"] }\\"' + "\\".join(MARKERS)
BEGINS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": JSON}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\nTEXT\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": JSON}',
    "mistral": "[TOOL_CALLS]f[ARGS]JSON",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nJSON\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>TEXT</arg_value>\n</tool_call>",
    "gpt-oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>JSON",
}


@pytest.mark.parametrize("options", [None, [VALUE, "b"]], ids=["text", "enum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_whose_value_spells_the_familys_markers_is_read_whole_for_every_cut(compiler, family, options):
    member = {"type": "string"} | ({} if options is None else {"enum": options})
    schema = {"type": "object", "properties": {"x": member}, "required": ["x"]}
    form = form_of(family, "required", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    written = json.dumps({"x": VALUE}, ensure_ascii=False)
    before, after = re.split("JSON|TEXT", BEGINS[family])
    value = written if "JSON" in BEGINS[family] else VALUE
    letters = [form.tokenizer.convert_tokens_to_ids(letter) for letter in bytes_as_tokens(value)]
    matcher = grammar_of(compiler, form).matcher()
    for id in [*form.tokenizer(before)["input_ids"], *letters, *form.tokenizer(after)["input_ids"]]:
        assert matcher.accept(id), form.tokenizer.decode([id])
    text = before + value + after + ("<|call|>" if family == "gpt-oss" else "")
    calls = (("f", written),)
    for at in range(0, len(text), 3):
        found = parts_of(form.answers, [text[:at], text[at:]])
        assert found.calls == calls and not found.content.strip(), (at, found)
    for pieces in (list(text), [text * 2] if family not in ("llama3_json", "gpt-oss") else [text]):
        assert set(parts_of(form.answers, pieces).calls) == set(calls)
    for end in range(len(before), len(text) - len(after) - 1):
        assert not parts_of(form.answers, [text[:end]]).calls, "cut by max_tokens"


@pytest.mark.parametrize(("family", "marker"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
def test_json_between_the_markers_of_a_text_may_spell_them(compiler, family, marker):
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string"}}}, "required": ["x"]}
    form = form_of(family, "required", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    before, after = BEGINS[family].split("TEXT")
    value = json.dumps([f"a{marker}\n<tool_call>", "b"])
    letters = [form.tokenizer.convert_tokens_to_ids(letter) for letter in bytes_as_tokens(value)]
    matcher = grammar_of(compiler, form).matcher()
    for id in [*form.tokenizer(before)["input_ids"], *letters, *form.tokenizer(after)["input_ids"]]:
        assert matcher.accept(id), form.tokenizer.decode([id])
    text = before + value + after
    for pieces in ([text], list(text)):
        assert parts_of(form.answers, pieces).calls == (("f", f'{{"x": {value}}}'),)


@pytest.mark.parametrize(("family", "marker"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
def test_an_option_with_the_marker_that_ends_a_text_is_refused_by_name(family, marker):
    for member in ({"enum": ["a", f"b{marker}c"]}, {"const": marker}):
        schema = {"type": "object", "properties": {"x": member}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        form = form_of(family, "required", tools=tools)
        with pytest.raises(BadField, match=f"f: x: .* holds {marker}"):
            form.params(SamplingParams(), ANEW)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45"])
def test_references_name_parts_of_the_whole_schema_of_the_parameters(compiler, family):
    small = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {
        "type": "object", "properties": {"num": small, "same": {"$ref": "#/properties/num"},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}, "both": {"$ref": "#/$defs/a~1b%20c/anyOf/1"}},
        "required": ["num", "same", "more", "both"], "additionalProperties": False,
        "$defs": {"a/b c": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/properties/same"}}]}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    form = form_of(family, NAMED | {"function": {"name": "f"}}, tools=tools)
    grammar = grammar_of(compiler, form)
    prefer, num_nested = [form.tokenizer.convert_tokens_to_ids(letter) for letter in '"]}'], 0
    for seed in range(20):
        ids, ended = draw(grammar, seed, prefer)
        calls = parts_of(form.answers, [text_of(form, ids)]).calls
        assert calls or not ended
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), schema)
            num_nested += bool(json.loads(arguments).get("more"))
    assert num_nested


def test_markers_are_the_tokens_that_the_model_has_learned(compiler):
    form = form_of("hermes", NAMED, thinks=True)
    ids, _ = draw(grammar_of(compiler, form, Beginning(is_done=True)), 1)
    assert ids[0] == form.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert ids[-1] == form.tokenizer.convert_tokens_to_ids("</tool_call>") or len(ids) == MOST_TOKENS
    kept = form.params(SamplingParams(), Beginning()).kept_special_tokens
    assert set(kept) == {form.tokenizer.convert_tokens_to_ids(marker) for marker in form.markers}


def test_schemas_that_no_grammar_enforces_are_refused_by_name_unless_any_object_will_do():
    faults: tuple[dict[str, object], ...] = ({"type": "array", "uniqueItems": True}, {"type": "any"}, {"enum": []})
    for schema in ({"type": "array"}, *({"type": "object", "properties": {"a": fault}} for fault in faults)):
        tool = {"name": "f", "parameters": schema}
        form = form_of("hermes", "required", tools=[{"type": "function", "function": tool}])
        with pytest.raises(BadField, match=r"tools.*f: "):
            form.params(SamplingParams(), Beginning())
        loose = form_of("hermes", "required", tools=[{"type": "function", "function": {**tool, "strict": False}}])
        assert loose.params(SamplingParams(), Beginning()).structural_tag


def test_a_second_grammar_is_an_error_that_names_both():
    form = form_of("hermes", "required")
    with pytest.raises(BadField, match=r"tool_choice.*response_format"):
        form.params(SamplingParams(json_schema="{}"), Beginning())
    with pytest.raises(BadField, match=r"tool_choice.*regex"):
        form.params(SamplingParams(regex="a"), Beginning())
    assert form_of("hermes", "auto").params(SamplingParams(regex="a"), Beginning()).regex == "a", "auto needs none"


ANSWER = {
    "type": "object", "properties": {"word": {"type": "string", "maxLength": 6}, "kind": {"enum": ["a", "b"]}},
    "required": ["word", "kind"],
}  # fmt: skip
CONSTRAINTS = {
    "json_schema": json.dumps(ANSWER), "regex": "[ab]{3}", "ebnf": 'root ::= "yes" | "no"',
}  # fmt: skip


def follows(kind: str, content: str) -> bool:
    if kind == "json_schema":
        return not list(jsonschema.Draft202012Validator(ANSWER).iter_errors(json.loads(content)))
    return re.fullmatch("[ab]{3}" if kind == "regex" else "yes|no", content) is not None


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize(("family", "prefix"), [("hermes", ""), ("hermes", "<think>"), ("gpt-oss", "")])
def test_an_answer_thinks_first_and_its_content_follows_the_requests_grammar(compiler, family, prefix, kind):
    form = form_of(family, "none", thinks=family != "gpt-oss")
    params = form.params(SamplingParams(**{kind: CONSTRAINTS[kind]}), Beginning(prefix))
    grammar = compiler.compile(constraint_of(params))
    closes = [form.tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</think>", "<|end|>")]
    num_thoughts = num_ended = 0
    for seed in range(8):
        ids, ended = draw(grammar, seed, closes)
        found = parts_of(form.answers, [text_of(form, ids)], prefix)
        num_thoughts += bool(found.thought)
        num_ended += ended
        assert not ended or follows(kind, found.content)
    assert num_ended >= 4 and num_thoughts


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_grammar_holds_from_the_first_token_where_the_answer_does_not_think(kind):
    params = SamplingParams(**{kind: CONSTRAINTS[kind]})
    form = form_of("hermes", "none", thinks=True)
    for beginning, has_begun in ((Beginning(is_done=True), False), (ANEW, True)):
        its = form.params(params, beginning, has_begun=has_begun)
        assert getattr(its, kind) == CONSTRAINTS[kind] and its.structural_tag is None
    begun = form.params(params, Beginning("<think>"), has_begun=True)
    assert begun.structural_tag, "reasoning that has begun goes on"


def test_a_structural_tag_is_of_the_whole_answer_with_its_reasoning():
    form = form_of("hermes", "none", thinks=True)
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a</think>x"}})
    for beginning in (ANEW, Beginning("<think>")):
        assert form.params(SamplingParams(structural_tag=tag), beginning).structural_tag == tag


def test_a_schema_that_no_grammar_enforces_is_refused_by_the_requests_field_behind_reasoning_too():
    form = form_of("hermes", "none", thinks=True)
    with pytest.raises(BadField, match=r"response_format: #/minimum"):
        form.params(SamplingParams(json_schema='{"minimum": 3}'), ANEW, "response_format")
    with pytest.raises(BadField, match=r"json_schema: Expecting value at line 1"):
        form.params(SamplingParams(json_schema='{"a": '), ANEW)
