"""Tests of tools and reasoning by the openai package over a real socket. Grammars force answers and their markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest
import torch

from lockstep.integration.cli.serve import run
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.answers import BROKEN, SCHEMA, TOOLS, WHOLE, Case
from lockstep.tests.support.chat.serving import byte_engine, forced, serving
from lockstep.tests.support.chat.tokenizer import FAMILIES, chat_template

PATIENCE = 60.0
CONTEXT = 2048
ASK = [{"role": "user", "content": "Weather?"}]
STRICT = {**SCHEMA, "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
          "additionalProperties": False}  # fmt: skip
DEMANDED = [
    {"type": "function", "function": {"name": "weather", "parameters": STRICT}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    with byte_engine(CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def serve(engine: Engine) -> Iterator[Callable[..., openai.OpenAI]]:
    """Yield a function that returns a client of a server whose settings name the forms."""
    clients = []

    def client_of(template: str, **settings) -> openai.OpenAI:
        url = server_of(template, **settings)
        clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE))
        return clients[-1]

    with serving(engine) as server_of:
        yield client_of
        for client in clients:
            client.close()


def settings_of(case: Case) -> dict[str, str]:
    return {"tool_call_parser": case.tools or "none", "reasoning_parser": case.reasoning or "none"}


def a_chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(**{"model": "small", "messages": ASK, "seed": 3, "max_tokens": 1000} | fields)


def calls_of(message) -> tuple[tuple[str, str], ...]:
    return tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())


@pytest.mark.parametrize("case", [*WHOLE, *BROKEN[::3]], ids=lambda case: f"{case.tools}: {case.text[:30]!r}")
def test_streamed_and_whole_answers_have_the_same_parts(serve, case):
    client = serve(chat_template("hermes"), **settings_of(case))
    fields = {"tools": TOOLS, "response_format": forced(case.text)}
    [whole] = a_chat(client, **fields).choices
    assert (whole.message.content or "", calls_of(whole.message)) == (case.content, case.calls)
    assert (whole.message.content is None) == (not case.content)
    assert getattr(whole.message, "reasoning_content", "") == case.thought
    assert whole.finish_reason == ("tool_calls" if case.calls else "stop")
    body = {"response_format": fields["response_format"]}
    with client.chat.completions.stream(
        model="small", messages=ASK, max_tokens=1000, seed=3, tools=TOOLS, extra_body=body
    ) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices
    assert (streamed.message.content, calls_of(streamed.message)) == (whole.message.content, case.calls)
    assert streamed.finish_reason == whole.finish_reason
    assert sum(event.type == "tool_calls.function.arguments.done" for event in events) == len(case.calls)
    chunks = [event.chunk for event in events if event.type == "chunk"]
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", "") or "" for chunk in chunks if chunk.choices]
    assert "".join(thoughts) == case.thought
    ids = [call.id for call in whole.message.tool_calls or ()]
    assert len({*ids}) == len(ids) and all(
        len(id) == 9 and id.isalnum() if case.tools == "mistral" else id.startswith("call_") for id in ids
    )


def test_a_streamed_call_comes_with_its_name_first_and_its_arguments_after(serve):
    case = WHOLE[0]
    client = serve(chat_template("hermes"), **settings_of(case))
    stream = a_chat(client, tools=TOOLS, stream=True, response_format=forced(case.text), logprobs=True)
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    found = [call for choice in choices for call in choice.delta.tool_calls or ()]
    first, *rest = [call for call in found if call.index == 0]
    assert first.id and first.type == "function" and first.function.name == "weather" and not first.function.arguments
    assert all(call.id is None and call.function.name is None for call in rest)
    assert "".join(call.function.arguments for call in rest) == case.calls[0][1]
    assert choices[0].delta.role == "assistant" and choices[0].delta.content is None
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    num_tokens = sum(len(choice.logprobs.content) for choice in choices if choice.logprobs)
    [whole] = a_chat(client, tools=TOOLS, response_format=forced(case.text), logprobs=True).choices
    assert num_tokens == len(whole.logprobs.content), "each token has its log-probability once, held back or not"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_demanded_calls_are_made_and_follow_their_schemas(serve, family, choice):
    client = serve(chat_template(family, thinks=family in ("hermes", "glm45")))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in DEMANDED}
    fields = {"tools": DEMANDED, "tool_choice": choice, "parallel_tool_calls": False}
    answer = a_chat(client, n=4, max_tokens=300, temperature=1, **fields)
    num_ended = 0
    for one in answer.choices:
        for name, arguments in calls_of(one.message):
            jsonschema.validate(json.loads(arguments), schemas[name])
            assert choice == "required" or name == "weather"
        if one.finish_reason != "length":
            num_ended += 1
            assert one.finish_reason == "tool_calls" and one.message.tool_calls and one.message.content is None
    assert num_ended, "a single call ends soon"


def test_an_answer_cut_in_a_call_keeps_its_text_and_says_length(serve):
    case = WHOLE[1]
    client = serve(chat_template("hermes"), **settings_of(case))
    for stream in (False, True):
        fields = {"tools": TOOLS, "response_format": forced(case.text), "max_tokens": 20, "stream": stream}
        if stream:
            chunks = [chunk.choices[0] for chunk in a_chat(client, **fields) if chunk.choices]
            content, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
        else:
            [whole] = a_chat(client, **fields).choices
            content, reason = whole.message.content, whole.finish_reason
            assert not whole.message.tool_calls
        assert case.text.startswith(content) and content.startswith("<tool_call>{") and reason == "length"


def test_special_tokens_stay_out_of_content_and_stop_strings_are_found(serve, engine):
    client = serve(chat_template("gpt-oss"))
    text = "<|channel|>final<|message|>Hi <|im_start|>there<tool_call>.<|end|>"
    [plain] = a_chat(client, response_format=forced(text)).choices
    assert plain.message.content == "Hi there<tool_call>."
    [stopped] = a_chat(client, response_format=forced(text), stop="there").choices
    assert (stopped.message.content, stopped.matched_stop) == ("Hi ", "there")
    [ids] = a_chat(client, response_format=forced(text), extra_body={"return_token_ids": True}).choices
    assert engine.tokenizer.decode(ids.token_ids[:-1]) == text, "all tokens are reported"


def test_tools_and_reasoning_that_are_not_asked_for_change_nothing(serve):
    case = WHOLE[0]
    client = serve(chat_template("hermes", thinks=True))
    template_thinks = case.text.partition("</think>\n\n")[2]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = a_chat(client, response_format=forced(case.text), **fields).choices
        assert choice.message.content == template_thinks and choice.message.reasoning_content == case.thought
        assert not choice.message.tool_calls and choice.finish_reason == "stop"
    fields = {"separate_reasoning": False}
    [choice] = a_chat(client, response_format=forced(case.text), extra_body=fields).choices
    assert choice.message.content == case.text and "reasoning_content" not in (choice.message.model_extra or {})


def test_a_template_that_opens_the_reasoning_begins_the_answer_inside_it(serve):
    client = serve(chat_template("hermes", opens=True))
    text = "So.\n</think>\n\nYes."
    for fields in ({}, {"extra_body": {"stream_reasoning": False}}):
        [choice] = a_chat(client, response_format=forced(text), **fields).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("So.", "Yes.")
        chunks = [c.choices[0].delta for c in a_chat(client, response_format=forced(text), stream=True, **fields)]
        thoughts = [t for delta in chunks if (t := getattr(delta, "reasoning_content", None))]
        assert "".join(thoughts) == "So." and "".join(delta.content or "" for delta in chunks) == "Yes."
        assert len(thoughts) == 1 or not fields


QWEN = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}"


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}], ids=str)
def test_no_effort_of_reasoning_reaches_the_template_as_no_thinking(serve, engine, fields):
    url = str(serve(QWEN).base_url).rstrip("/")
    asked = {"messages": ASK, "max_tokens": 1, "return_token_ids": True, **fields}
    ids = httpx.post(f"{url}/chat/completions", json=asked).raise_for_status().json()["prompt_token_ids"]
    assert engine.tokenizer.decode(ids) == "Weather?|False|False|none"
    counted = httpx.post(f"{url.removesuffix('/v1')}/tokenize", json={"messages": ASK, **fields}).json()["tokens"]
    assert counted == ids
    answer = httpx.post(f"{url}/responses", json={"input": "Weather?", "reasoning": {"effort": "none"},
                                                  "max_output_tokens": 1, "return_token_ids": True})  # fmt: skip
    assert answer.raise_for_status().json()["prompt_token_ids"] == ids


SMALL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SMALL_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL, "strict": True}}


@pytest.mark.parametrize("settings", [{}, {"reasoning_parser": "deepseek_r1"}], ids=["opened", "begins inside"])
def test_the_content_of_an_answer_that_thinks_follows_its_format(serve, engine, settings):
    client = serve(chat_template("hermes", opens=not settings, thinks=True), **settings)
    closes = str(engine.tokenizer.convert_tokens_to_ids("</think>"))
    fields = {"response_format": SMALL_FORMAT, "logit_bias": {closes: 5.0}, "max_tokens": 2000, "seed": 4}
    [choice] = a_chat(client, **fields).choices
    assert choice.message.reasoning_content and json.loads(choice.message.content)["a"] in (1, 2)
    chunks = [c.choices[0].delta for c in a_chat(client, stream=True, **fields)]
    assert "".join(delta.content or "" for delta in chunks) == choice.message.content
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
    assert "".join(thoughts) == choice.message.reasoning_content


def prompt_of(url: str, **fields) -> str:
    """Return the text of a conversation, as the model reads it."""
    found = httpx.post(f"{url}/tokenize", json={"messages": ASK, **fields}, timeout=PATIENCE).raise_for_status().json()
    return httpx.post(f"{url}/detokenize", json={"tokens": found["tokens"]}).raise_for_status().json()["prompt"]


def test_templates_get_tools_and_the_calls_and_results_of_the_history(serve):
    history = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning_content": "Hm",
         "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"é": [1]}'}}]},
        {"role": "tool", "tool_call_id": "a", "name": "now", "content": [{"type": "text", "text": "12:00"}]},
    ]  # fmt: skip
    for family in ("hermes", "deepseek_v3"):  # one expects objects as arguments, the other texts
        url = str(serve(chat_template(family)).base_url).removesuffix("/v1/")
        text = prompt_of(url, messages=history, tools=TOOLS)
        assert text.startswith("tools: [") and '"weather"' in text
        assert '[CALL]now {"é": [1]}' in text.encode().decode("unicode_escape", "ignore") or "[CALL]now {" in text
        assert "<|im_start|>assistant\n(Hm)[CALL]" in text and "<|im_start|>tool\n12:00" in text
        assert "tools: " not in prompt_of(url, tools=TOOLS, tool_choice="none")
    template = "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    url = str(serve(template).base_url).removesuffix("/v1/")
    assert prompt_of(url, messages=history) == "Weather?(Hm)12:00", "a template may have another name of reasoning"


def test_model_info_names_the_forms_in_force(serve):
    for family, settings, expected in (
        ("hermes", {}, ("hermes", None)),
        ("gpt-oss", {}, ("gpt-oss", "gpt-oss")),
        ("hermes", {"tool_call_parser": "mistral", "reasoning_parser": "deepseek-r1"}, ("mistral", "deepseek_r1")),
        ("hermes", {"tool_call_parser": "none", "reasoning_parser": "none"}, (None, None)),
    ):
        url = str(serve(chat_template(family), **settings).base_url).removesuffix("/v1/")
        found = httpx.get(f"{url}/model_info").raise_for_status().json()
        assert (found["tool_call_parser"], found["reasoning_parser"]) == expected


def test_the_command_takes_the_names_of_forms_and_lists_them_for_an_unknown_one(tmp_path):
    with pytest.raises(ValueError, match=r"http: tool_call_parser must be one of none, hermes, .*, not 'x'"):
        run(["--model", str(tmp_path), "--tool-call-parser", "x"])
    with pytest.raises(ValueError, match=r"http: reasoning_parser must be one of none, qwen3, .*, not 'y'"):
        run(["--model", str(tmp_path), "--reasoning-parser", "y"])


@pytest.mark.parametrize(("fields", "word"), [
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, "max_tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 10_000_000}}]}, "max_tools_bytes"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": TOOLS}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}]}, "messages"),
])  # fmt: skip
def test_wrong_and_hostile_fields_are_refused_by_name(serve, fields, word):
    client = serve(chat_template("hermes"))
    with pytest.raises(openai.BadRequestError, match=word):
        a_chat(client, max_tokens=4, extra_body=fields)


def test_schemas_that_explode_are_refused_and_the_server_goes_on(serve):
    client = serve(chat_template("hermes"))
    deep: dict[str, object] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"type": "object", "properties": {"a": {"enum": [str(i) for i in range(20_000)]}}, "required": ["a"]}
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(" * 500}}}
    for schema, limit in ((deep, "nested"), (wide, "max_grammar_alternatives"), (pattern, "max_grammar_nesting")):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"input_ids": [1, 2], "tools": tools, "tool_choice": "required", "max_tokens": 4}
        answer = httpx.post(f"{client.base_url}chat/completions", json=body, timeout=PATIENCE)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith("tools: ") and limit in message
    assert a_chat(client, max_tokens=2).choices


def test_many_streams_at_a_time_do_not_mix(serve):
    client = serve(chat_template("hermes"), tool_call_parser="hermes", reasoning_parser="qwen3")
    cases = [case for case in WHOLE if case.tools == "hermes"] * 4

    def read(case: Case):
        fields = {"tools": TOOLS, "extra_body": {"response_format": forced(case.text)}}
        with client.chat.completions.stream(model="small", messages=ASK, max_tokens=1000, **fields) as stream:
            return calls_of(stream.get_final_completion().choices[0].message)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, cases)) == [case.calls for case in cases]
