"""Tests of Anthropic's Messages API by the anthropic package over a real socket. Grammars force answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator

import anthropic
import httpx
import pytest
import torch

from lockstep.integration.http.chat.roles import Roles
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.answers import BROKEN, TOOLS, WHOLE, Case
from lockstep.tests.support.chat.serving import MODEL, Serve, byte_engine, forced, serving
from lockstep.tests.support.chat.tokenizer import byte_tokenizer, chat_template

PATIENCE = 60.0
ASK = [{"role": "user", "content": "Weather?"}]
OWN_TOOLS = [
    {"name": its["name"], "input_schema": its["parameters"]}
    | ({"description": its["description"]} if "description" in its else {})
    for its in (tool["function"] for tool in TOOLS)
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    with byte_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server_of(engine: Engine) -> Iterator[Serve]:
    with serving(engine) as serve:
        yield serve


@pytest.fixture(scope="module")
def serve(server_of: Serve) -> Iterator[Callable[..., anthropic.Anthropic]]:
    """Yield a function that returns a client of a server whose settings name the forms."""
    clients = []

    def client_of(template: str, **settings) -> anthropic.Anthropic:
        url = server_of(template, **settings)
        clients.append(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE))
        return clients[-1]

    yield client_of
    for client in clients:
        client.close()


def forms_of(case: Case) -> dict[str, str]:
    return {"tool_call_parser": case.tools or "none", "reasoning_parser": case.reasoning or "none"}


def a_message(client: anthropic.Anthropic, text: str | None = None, **fields):
    """Ask for a message. text: what the answer is forced to be."""
    body = {"seed": 3, **fields.pop("extra_body", {})} | ({} if text is None else {"response_format": forced(text)})
    return client.messages.create(**{"model": MODEL, "messages": ASK, "max_tokens": 1000, "extra_body": body} | fields)


def parts_of(message) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return the content, the thoughts and the calls of a message."""
    texts = "".join(block.text for block in message.content if block.type == "text")
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    calls = [block for block in message.content if block.type == "tool_use"]
    return texts, thoughts, tuple((call.name, json.dumps(call.input, ensure_ascii=False)) for call in calls)


def known(message) -> dict:
    """Return a message without what differs from one request to the next."""
    found = message.model_dump(exclude={"id", "usage", "_request_id"})
    for block in found["content"]:
        block.pop("id", None)
    return found


def error_of(answer: httpx.Response) -> dict:
    found = answer.json()
    assert found["type"] == "error" and {"type", "message"} <= set(found["error"])
    return found["error"]


@pytest.mark.parametrize("case", [*WHOLE, *BROKEN[::3]], ids=lambda case: f"{case.tools}: {case.text[:30]!r}")
def test_streamed_and_whole_messages_have_the_same_blocks(serve, case):
    client = serve(chat_template("hermes"), **forms_of(case))
    whole = a_message(client, case.text, tools=OWN_TOOLS)
    calls = tuple((name, json.dumps(json.loads(given), ensure_ascii=False)) for name, given in case.calls)
    assert parts_of(whole) == (case.content, case.thought, calls)
    assert whole.stop_reason == ("tool_use" if case.calls else "end_turn") and whole.stop_sequence is None
    body = {"response_format": forced(case.text), "seed": 3}
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=1000, tools=OWN_TOOLS, extra_body=body) as stream:
        streamed = stream.get_final_message()
    mine, theirs = known(streamed), known(whole)
    shared = set(mine) & set(theirs)
    assert {name: mine[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"content", "stop_reason", "stop_sequence", "model", "role", "type"} <= shared
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len({*ids}) == len(ids) and all(ids) and whole.id.startswith("msg_")


def test_a_message_is_the_answer_of_the_same_chat_bit_for_bit(serve):
    client = serve(chat_template("hermes"))
    url = str(client.base_url).rstrip("/")
    fields = {"seed": 11, "logprobs": True, "return_token_ids": True, "temperature": 1.0, "top_p": 0.9, "top_k": 50}
    ask = {"model": MODEL, "max_tokens": 24, "stop_sequences": ["~~"], "system": [{"type": "text", "text": "Be"},
           {"type": "text", "text": "brief."}], "messages": ASK, **fields}  # fmt: skip
    same = {"model": MODEL, "max_tokens": 24, "stop": ["~~"], **fields,
            "messages": [{"role": "system", "content": "Be\nbrief."}, *ASK]}  # fmt: skip
    message = httpx.post(f"{url}/v1/messages", json=ask, timeout=PATIENCE).raise_for_status().json()
    chat = httpx.post(f"{url}/v1/chat/completions", json=same, timeout=PATIENCE).raise_for_status().json()
    choice = chat["choices"][0]
    assert message["token_ids"] == choice["token_ids"] and len(message["token_ids"]) > 4
    assert message["logprobs"] == choice["logprobs"] and message["prompt_token_ids"] == chat["prompt_token_ids"]
    assert "".join(block["text"] for block in message["content"]) == choice["message"]["content"]
    assert message["metadata"] == chat["metadata"] and message["weight_versions"] == chat["weight_versions"]
    counted = chat["usage"]
    assert message["usage"]["output_tokens"] == counted["completion_tokens"]
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == counted["prompt_tokens"]
    with httpx.stream("POST", f"{url}/v1/messages", json={**ask, "stream": True}, timeout=PATIENCE) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    [last] = [event for event in lines if event["type"] == "message_delta"]
    assert {name: last[name] for name in ("token_ids", "logprobs", "metadata", "weight_versions")} == {
        name: message[name] for name in ("token_ids", "logprobs", "metadata", "weight_versions")
    }
    assert last["delta"] == {name: message[name] for name in ("stop_reason", "stop_sequence")}


def test_the_events_of_a_stream_come_in_anthropics_order(serve):
    case = WHOLE[0]
    client = serve(chat_template("hermes"), **forms_of(case))
    events = list(a_message(client, case.text, tools=OWN_TOOLS, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens > 0 and events[0].message.content == []
    open_index, seen = None, []
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_index is None and event.index == len(seen)
            open_index = event.index
            seen.append(event.content_block.type)
        elif event.type == "content_block_delta":
            assert event.index == open_index
        else:
            assert event.type == "content_block_stop" and event.index == open_index
            open_index = None
    assert seen == ["thinking", "text", "tool_use", "tool_use"] and open_index is None
    assert [e.delta.type for e in events if e.type == "content_block_delta"].count("signature_delta") == 1


def test_an_async_client_streams_too(serve):
    client = serve(chat_template("hermes"))

    async def read() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="none", max_retries=0) as own,
            own.messages.stream(
                model=MODEL, messages=ASK, max_tokens=100, extra_body={"response_format": forced("Good day.")}
            ) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(read()) == "Good day."


@pytest.mark.parametrize(("text", "fields", "ends"), [
    ("one two three", {"stop_sequences": ["two", "four"]}, ("one ", "stop_sequence", "two")),
    ("one two three", {"max_tokens": 5}, ("one t", "max_tokens", None)),
    ("one", {}, ("one", "end_turn", None)),
])  # fmt: skip
def test_an_answer_says_how_it_ended(serve, text, fields, ends):
    client = serve(chat_template("hermes"))
    whole = a_message(client, text, **fields)
    assert (parts_of(whole)[0], whole.stop_reason, whole.stop_sequence) == ends
    [last] = [event for event in a_message(client, text, stream=True, **fields) if event.type == "message_delta"]
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ends[1:]


def test_an_answer_that_fills_the_context_says_so(serve):
    client = serve(chat_template("hermes"))
    long = [{"role": "user", "content": "x" * 2000}]
    found = a_message(client, "y" * 100, messages=long, max_tokens=500)
    assert found.stop_reason == "model_context_window_exceeded" and found.usage.output_tokens < 100


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for(serve):
    client = serve(chat_template("hermes"))
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages: prompt is too long: \d+ tokens > 2047 maximum"):
        a_message(client, messages=long, max_tokens=4)
    long[0]["content"] = "x" * 1_000_000  # which is not tokenised
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: more than 2048 tokens > 2048 maximum"):
        a_message(client, messages=long, max_tokens=4)


def prompt_text(client: anthropic.Anthropic, engine: Engine, **fields) -> str:
    """Return the prompt of a request, as the model reads it."""
    message = a_message(client, max_tokens=1, extra_body={"return_token_ids": True}, **fields)
    return engine.tokenizer.decode(message.prompt_token_ids)


def test_blocks_become_the_messages_of_a_chat(serve, engine):
    client = serve(chat_template("hermes"))
    history = [
        {"role": "user", "content": [{"type": "text", "text": "What", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "time?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "text", "text": "I look"},
            {"type": "text", "text": " it up."}, {"type": "tool_use", "id": "a", "name": "now", "input": {}},
            {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "é"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "12:00"},
            {"type": "tool_result", "tool_use_id": "b", "is_error": True,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}]},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    text = prompt_text(client, engine, messages=history, tools=OWN_TOOLS, system="Be brief.")
    shown, _, rest = text.partition("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert shown.startswith("tools: ") and '"weather"' in shown
    assert rest == (
        "<|im_start|>user\nWhat\ntime?<|im_end|>\n"
        "<|im_start|>assistant\n(Hm)I look it up.[CALL]now {}[CALL]weather {\"city\": \"é\"}<|im_end|>\n"
        "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>tool\nno\ncity<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip


def test_a_late_message_of_the_system_stays_in_its_place_also_where_the_template_refuses_it(serve, engine):
    system = {"role": "system", "content": "Be brief."}
    late = [*ASK, system, {"role": "assistant", "content": "Sun."}, system, {"role": "user", "content": "And now?"}]
    plain = chat_template("hermes")
    assert "<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>" in prompt_text(serve(plain), engine, messages=late)
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}"
        "{% endif %}{% endfor %}" + plain
    )
    text = prompt_text(serve(strict), engine, messages=late, system="First.")
    assert text == (
        "<|im_start|>system\nFirst.<|im_end|>\n<|im_start|>user\nWeather?\n\nBe brief.<|im_end|>\n"
        "<|im_start|>assistant\nSun.<|im_end|>\n<|im_start|>user\nBe brief.\n\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_answer_that_is_begun_goes_on(serve, engine):
    client = serve(chat_template("hermes"))
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    assert prompt_text(client, engine, messages=begun).endswith("<|im_start|>assistant\nIt is")


def test_thinking_and_effort_reach_the_template(serve, engine):
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    client = serve(template)
    for thinking, seen in (({"type": "enabled", "budget_tokens": 1024}, "True True "),
                           ({"type": "disabled"}, "False False "), (None, " ")):  # fmt: skip
        fields = {} if thinking is None else {"thinking": thinking}
        assert prompt_text(client, engine, **fields).rstrip() == seen.rstrip()
    assert prompt_text(client, engine, output_config={"effort": "low"}) == "True True low"
    given = prompt_text(client, engine, output_config={"effort": "low"}, thinking={"type": "disabled"})
    assert given == "False False low"


def test_a_choice_of_tools_and_a_schema_of_the_answer_are_followed(serve):
    client = serve(chat_template("hermes"))
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
        found = a_message(client, tools=OWN_TOOLS[1:], tool_choice=choice, max_tokens=300)
        assert parts_of(found) == ("", "", (("now", "{}"),)) and found.stop_reason == "tool_use"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(parts_of(a_message(client, output_config=config))[0]) in ({"a": 1}, {"a": 2})


def test_tokens_of_a_prompt_are_counted_before_it_is_sent(serve):
    client = serve(chat_template("hermes"))
    fields = {"messages": ASK, "system": "Be brief.", "tools": OWN_TOOLS}
    counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
    usage = a_message(client, max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    long = [{"role": "user", "content": "x" * 5000}]
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 5000, "beyond the context too"


def test_a_turn_of_a_session_is_recognised_when_an_agent_sends_it_back(serve):
    case = WHOLE[0]
    client = serve(chat_template("hermes"), **forms_of(case))
    url = str(client.base_url).rstrip("/")
    session = httpx.post(f"{url}/open_session", json={}).raise_for_status().json()
    body = {"session_params": {"id": session}, "return_token_ids": True}
    first = a_message(client, case.text, tools=OWN_TOOLS, extra_body=body)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
               for block in first.content if block.type == "tool_use"]  # fmt: skip
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    body["session_params"]["messages"] = "all"
    second = a_message(client, "Done.", tools=OWN_TOOLS, messages=history, extra_body=body)
    tokens = [*first.prompt_token_ids, *first.token_ids]
    assert second.prompt_token_ids[: len(tokens)] == tokens
    assert second.session["parent_rid"] == first.session["rid"]
    assert second.session["num_history_tokens"] == len(tokens)
    events = list(a_message(client, "More.", tools=OWN_TOOLS, stream=True, extra_body=body,
                            messages=[*history, {"role": "assistant", "content": second.content}, *ASK]))  # fmt: skip
    assert events[-2].session["parent_rid"] == second.session["rid"]


def go_on(client, session: str, text: str, cut: int, **fields) -> tuple[object, object]:
    """Ask on a session for an answer that is cut after some tokens, and for the rest. text: the whole answer."""
    tokenizer = byte_tokenizer()
    head = tokenizer.decode(tokenizer(text)["input_ids"][:cut])
    body = {"session_params": {"id": session, "messages": "all"}}
    first = a_message(client, head + "~", max_tokens=cut, extra_body=body, **fields)
    assert first.stop_reason == "max_tokens"
    history = [*ASK, {"role": "assistant", "content": first.content}]
    return first, a_message(client, text.removeprefix(head), messages=history, extra_body=body, **fields)


@pytest.mark.parametrize("family", ["hermes", "opens", "deepseek-r1"])
@pytest.mark.parametrize("cut", [12, 45])
def test_an_answer_that_was_cut_goes_on_in_its_state(serve, family, cut):
    """In its thoughts, or behind them."""
    opens = family == "opens"
    text = "<think>I think so, on and on.</think>Yes, it is so, and more."
    if opens or family == "deepseek-r1":
        text = text.removeprefix("<think>")
    settings = {"reasoning_parser": family} if family == "deepseek-r1" else {}
    client = serve(chat_template("hermes", thinks=family == "hermes", opens=opens), **settings)
    url = str(client.base_url).rstrip("/")
    first, second = go_on(client, httpx.post(f"{url}/open_session", json={}).json(), text, cut)
    parts = [parts_of(one) for one in (first, second)]
    whole = [thoughts + content for content, thoughts, _ in parts]
    assert "".join(thoughts for _, thoughts, _ in parts) == "I think so, on and on.", parts
    assert "".join(content for content, _, _ in parts) == "Yes, it is so, and more.", (parts, whole)


def test_a_call_that_was_cut_is_called_when_it_goes_on(serve):
    client = serve(chat_template("hermes"))
    url = str(client.base_url).rstrip("/")
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    session = httpx.post(f"{url}/open_session", json={}).json()
    _, second = go_on(client, session, text, 14, tools=OWN_TOOLS)
    assert parts_of(second) == ("", "", (("now", "{}"),)) and second.stop_reason == "tool_use"


def test_half_of_a_surrogate_pair_in_a_call_can_be_sent_back(serve):
    client = serve(chat_template("hermes"))
    url = str(client.base_url).rstrip("/")
    text = '<tool_call>\n{"name": "now", "arguments": {"x": "a\\ud83d b"}}\n</tool_call>'
    session = httpx.post(f"{url}/open_session", json={}).json()
    body = {"session_params": {"id": session, "messages": "all"}}
    with client.messages.stream(
        model=MODEL, messages=ASK, max_tokens=200, tools=OWN_TOOLS,
        extra_body={"response_format": forced(text), **body},
    ) as stream:  # fmt: skip
        first = stream.get_final_message()
    assert first.content[0].input == {"x": "a\ufffd b"}
    assert a_message(client, text, tools=OWN_TOOLS).content[0].input == {"x": "a\ufffd b"}
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "ok"}
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = a_message(client, "Done.", tools=OWN_TOOLS, messages=history, extra_body=body)
    assert second.session["parent_rid"] == first.id


def test_lists_that_no_context_has_room_for_and_deep_nesting_are_refused_at_once(serve):
    url = str(serve(chat_template("hermes")).base_url).rstrip("/")
    call = {"type": "tool_use", "id": "a", "name": "now", "input": "DEEP"}
    many = [{"type": "text", "text": "x"}] * 20_000
    for messages, field in (
        ([{"role": "user", "content": "x"}] * 20_000, "messages"),
        ([{"role": "user", "content": many}], "messages.0.content"),
        ([*ASK, {"role": "assistant", "content": [call]}, *ASK], "messages.1"),
    ):
        for path, depth in itertools.product(("/v1/messages", "/v1/messages/count_tokens"), range(900, 1000, 4)):
            if field != "messages.1" and depth > 900:
                continue
            text = json.dumps({"model": MODEL, "max_tokens": 4, "messages": messages})
            text = text.replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth)
            answer = httpx.post(f"{url}{path}", content=text, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text[:300]
            assert field == "messages.1" or error_of(answer)["param"] == field
    late = [{"role": "user", "content": "x"}, *[{"role": "system", "content": "y"}] * 8000]
    fitted = Roles(lambda first, late: "system" not in late).fitted(late)
    assert [len(message["content"]) for message in fitted.messages] == [1 + 3 * 8000]


BAD = (
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    (
        {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, *ASK]},
        "messages.1.content.0.input",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "x"}}]}]},
        "messages.0.content.0.source",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}},
                    ],
                }
            ]
        },
        "messages.0.content.1.source",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *ASK]},
        "messages.0.content.0",
    ),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"system": 5}, "system"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""] * 9}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": 'a"b', "input_schema": {}}]}, "tools"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0"),
    ({"context_management": {"edits": 5}}, "context_management.edits"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"thread": {"type": "continue", "previous_message_id": "x"}}, "thread"),
    ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
    ({"compaction": {"type": "enabled"}}, "compaction"),
    ({"n": 2}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": "x"}, "top_k"),
    ({"seed": "x"}, "seed"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
)


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named_as_the_client_sent_it(serve, fields, param):
    url = str(serve(chat_template("hermes")).base_url).rstrip("/")
    body = {"model": MODEL, "max_tokens": 4, "messages": ASK} | fields
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=PATIENCE)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith((f"{param}: ", "json_schema: "))


def test_what_changes_nothing_is_ignored(serve):
    client = serve(chat_template("hermes"))
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    body = {"context_management": edits, "betas": ["x"], "cache_control": {"type": "ephemeral"}, "seed": 3}
    assert known(a_message(client, "Yes.", extra_body=body, **fields)) == known(a_message(client, "Yes."))


def test_errors_have_anthropics_shape_and_the_client_its_classes(serve, server_of):
    client = serve(chat_template("hermes"))
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        a_message(client, "x", model="other")
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0"):
        a_message(client, "x", tools=[{"type": "bash_20250124", "name": "bash"}])
    url = server_of(chat_template("hermes"), api_key="right")
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as wrong:
        with pytest.raises(anthropic.PermissionDeniedError):
            a_message(wrong, "x")
        right = wrong.with_options(api_key="right")
        assert parts_of(a_message(right, "Yes."))[0] == "Yes."
    answer = httpx.post(f"{url}/v1/messages", json={})
    assert (answer.status_code, error_of(answer)["type"]) == (401, "authentication_error")
    assert httpx.get(f"{url}/v1/messages", headers={"x-api-key": "right"}).status_code == 405
