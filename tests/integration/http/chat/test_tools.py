"""Tests of a request's tools, of the choice among them, and of the forms that models have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.integration.http.chat.form import read_form
from lockstep.integration.http.chat.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from lockstep.integration.http.chat.tools import read_tools
from lockstep.integration.http.edge.config import REASONING_PARSERS, TOOL_CALL_PARSERS, HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.generation.limits import RequestLimits
from lockstep.tests.support.chat.answers import TOOLS, parts_of
from lockstep.tests.support.chat.tokenizer import FAMILIES, byte_tokenizer, chat_template


def limits(**settings) -> RequestLimits:
    return RequestLimits(SimpleNamespace(tokenizer=None), HttpConfig(**settings))


def fields(tools=TOOLS, tool_choice=None, parallel_tool_calls=None, **others):
    given = {"separate_reasoning": True, "stream_reasoning": True} | others
    return SimpleNamespace(tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **given)


def a_tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize("bad", [
    5, {}, {"type": "function"}, {"type": "web_search"}, {"type": "function", "function": {}}, a_tool(5), a_tool(""),
    a_tool("a" * 129), a_tool('quo"te'), a_tool("line\n"), a_tool("blank "), a_tool("ünicode"), a_tool("a.b"),
    a_tool(parameters=[]), a_tool(parameters="{}"), a_tool(description=5), a_tool(strict="yes"),
])  # fmt: skip
def test_wrong_tools_are_refused_by_name(bad):
    with pytest.raises(BadField, match="tools"):
        read_tools(fields([bad]), limits())


def test_a_name_may_be_as_long_as_anthropics():
    found = read_tools(fields([a_tool("a" * 128)]), limits())
    assert found is not None and list(found.schemas) == ["a" * 128]


def test_names_that_occur_twice_and_too_many_or_too_long_tools_are_refused_with_the_setting():
    with pytest.raises(BadField, match="'f'"):
        read_tools(fields([a_tool("g"), a_tool(), a_tool()]), limits())
    with pytest.raises(BadField, match=r"10000 tools are more than 512 \(max_tools\)"):
        read_tools(fields([a_tool(f"f{i}") for i in range(10_000)]), limits())
    with pytest.raises(BadField, match=r"262144 bytes \(max_tools_bytes\)"):
        read_tools(fields([a_tool(description="x" * 10_000_000)]), limits())
    with pytest.raises(BadField, match=r"max_tools_bytes"):
        read_tools(fields([a_tool(parameters={"enum": [0] * 100})]), limits(max_tools_bytes=200))
    with pytest.raises(ValueError, match="max_tools must be positive"):
        HttpConfig(max_tools=0)


def test_choices_select_the_tools_that_an_answer_may_or_must_call():
    def read(choice, **others):
        found = read_tools(fields(tool_choice=choice, **others), limits())
        return found and (len(found.shown), [one["name"] for one in found.callable], found.mode, found.is_parallel)

    both = ["weather", "now"]
    assert read(None) == read("auto") == (2, both, "auto", True)
    assert read("none") is None and read(None, tools=None) is None and read("auto", tools=[]) is None
    assert read("required") == (2, both, "required", True)
    assert read("required", parallel_tool_calls=False) == (2, both, "required", False)
    assert read(named("now")) == (2, ["now"], "required", False)
    assert read(allowed("auto", "now")) == (1, ["now"], "auto", True)
    assert read(allowed("required", "now", "weather")) == (2, ["now", "weather"], "required", True)


@pytest.mark.parametrize("choice", [
    "any", 5, [], {}, {"type": "function"}, named("other"), {"type": "function", "function": 5}, {"type": "custom"},
    allowed("auto"), allowed("must", "now"), allowed("auto", "other"), {"type": "allowed_tools", "allowed_tools": 5},
    allowed("auto", *["now"] * 3),
])  # fmt: skip
def test_wrong_choices_are_refused_by_name(choice):
    with pytest.raises(BadField, match="tool_choice"):
        read_tools(fields(tool_choice=choice), limits())


@pytest.mark.parametrize("choice", ["required", named("now"), allowed("required", "now")])
def test_a_demand_without_tools_is_refused(choice):
    for tools in (None, []):
        with pytest.raises(BadField, match="tool_choice"):
            read_tools(fields(tools, choice), limits())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chat_template_shows_the_form_of_calls(family):
    found = tool_format(chat_template(family), None)
    assert found is not None and found.name == family
    harmony = "gpt-oss" if family == "gpt-oss" else None
    for template, expected in (
        (chat_template(family), harmony),
        (chat_template(family, thinks=True), harmony or "qwen3"),
    ):
        reasoning = reasoning_format(template, None)
        assert (reasoning and reasoning.name) == expected


def test_settings_name_the_forms_and_an_unknown_name_is_an_error_that_lists_them():
    tools = {name for one in TOOL_FORMATS for name in (one.name, *one.aliases)}
    reasoning = {name for one in REASONING_FORMATS for name in (one.name, *one.aliases)}
    assert set(TOOL_CALL_PARSERS) == tools | {"none"} and set(REASONING_PARSERS) == reasoning | {"none"}
    for name in TOOL_CALL_PARSERS:
        assert (tool_format(chat_template("hermes"), name) is None) == (name == "none")
    for name in REASONING_PARSERS:
        assert (reasoning_format("", name) is None) == (name == "none")
    with pytest.raises(ValueError, match=r"tool_call_parser must be one of .*hermes.*'hermess'"):
        HttpConfig(tool_call_parser="hermess")
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of .*deepseek_r1.*'r1'"):
        HttpConfig(reasoning_parser="r1")


def test_tools_need_a_form_that_is_known_or_a_setting_that_says_none():
    tokenizer = byte_tokenizer("{{ messages }}")
    with pytest.raises(BadField, match="tool_call_parser"):
        read_form(fields(), tokenizer, limits())
    assert read_form(fields(), tokenizer, limits(tool_call_parser="none")).answers is None
    with pytest.raises(BadField, match="tool_choice"):
        read_form(fields(tool_choice="required"), tokenizer, limits(tool_call_parser="none"))
    assert read_form(fields(None), tokenizer, limits()).answers is None
    chosen = read_form(fields(), tokenizer, limits(tool_call_parser="mistral")).tool_format
    assert chosen is not None and chosen.name == "mistral"


def test_an_answer_has_one_call_where_the_template_could_not_write_two_of_them_in_a_next_turn():
    every = chat_template("llama3_json")
    refuses = "{% if m.tool_calls | length > 1 %}{{ raise_exception('single') }}{% endif %}{{ m.content }}"
    single = every.replace("{{ m.content }}", refuses)
    assert single != every
    for template, most in ((every, None), (single, 1)):
        form = read_form(fields(), byte_tokenizer(template), limits())
        assert form.answers is not None and form.answers.max_calls == most
        assert form.tools is not None and form.tools.is_parallel == (most is None)
        text = read_form(fields(), byte_tokenizer(template), limits(), is_text=True)
        assert text.answers is not None and text.answers.max_calls is None
    assert read_form(fields(None), byte_tokenizer(single), limits()).tools is None


TEMPLATE = {  # in the form of transformers, as a model's folder may ship it
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"<do (?P<name>\w+)>", "close": ["</do>", "<end>"], "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip


def test_a_folder_describes_the_form_of_its_answers_by_itself():
    tokenizer = byte_tokenizer(chat_template("hermes"))
    tokenizer.response_template = TEMPLATE
    form = read_form(fields(), tokenizer, limits())
    text = '<hm>so</hm>I do <do now>{"a": 1}<end><do now>{bad}</do><do now>[1]<end>'
    for pieces in ([text], list(text)):
        expected = ("I do<do now>{bad}</do><do now>[1]<end>", "so", (("now", '{"a": 1}'),))
        assert parts_of(form.answers, pieces)[3:] == expected
    assert form.answers.prefix("<|im_start|>assistant\n<hm>") == "<hm>"
    assert parts_of(read_form(fields(None), tokenizer, limits()).answers, [text]).content == text.partition("</hm>")[2]
    named = read_form(fields(), tokenizer, limits(tool_call_parser="hermes"))
    assert named.tool_format is not None and named.tool_format.name == "hermes", "a setting comes first"
    assert form.markers == ("<hm>", "</hm>", "</do>", "<end>")
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(BadField, match="response_template"):
        read_form(fields(), tokenizer, limits())
    tokenizer.response_template = TEMPLATE
    with pytest.raises(BadField, match="tool_choice"):
        read_form(fields(tool_choice="required"), tokenizer, limits())
    with pytest.raises(BadField, match="strict"):
        read_form(fields([a_tool(strict=True)]), tokenizer, limits())


@pytest.mark.parametrize("end", [{"close": ["<end>", "<stop>"]}, {"close_pattern": r"(?:<end>|<stop>)\s*|$"}])
@pytest.mark.parametrize("text", [
    "a <end> b\n<stop>\n\nc", "<end>a", "a<end><do now>{}</do> b<stop>", "<hm>so</hm><end> a<sto",
    "<end>\n<do now>{}</do>",
])  # fmt: skip
def test_a_marker_that_ends_the_content_of_a_folders_answers_is_content_where_text_has_it(text, end):
    tokenizer = byte_tokenizer(chat_template("hermes"))
    tokenizer.response_template = {**TEMPLATE, "fields": {**TEMPLATE["fields"], "content": end}}
    form = read_form(fields(), tokenizer, limits())
    for one in (form, read_form(fields(None), tokenizer, limits())):
        assert "<end>" in one.markers and "<stop>" not in one.markers, "of a call, and of content alone"
    content = text.replace("<do now>{}</do> ", "").replace("\n<do now>{}</do>", "").removeprefix("<hm>so</hm>")
    content = content.replace("<do now>{}</do>", "")
    for pieces in ([text], list(text), [text[:4], text[4:]]):
        assert parts_of(form.answers, pieces).content == content
