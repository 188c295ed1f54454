"""openai-agents (0.24) by its Responses model: an agent with a tool, streamed and not, and a format of its answer.

python openai_agents_program.py URL TOKENIZER_FOLDER MODEL_NAME

The server of the arguments is not used: its chat template shows no form of calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import agents
import openai
from pydantic import BaseModel

from lockstep.tests.clients.scripted import MODEL, Scripted, scripted

CITIES = ("Rome", "Oslo")
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
FIRST = "<think>\nI look.\n</think>\n\nLet me see.\n<tool_call>\n" + json.dumps(CALL) + "\n</tool_call>"
LAST = "<think>\nIt rains.\n</think>\n\nRain in Oslo."
asked: list[str] = []


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return f"Rain in {city}."


class Forecast(BaseModel):
    """The format of an answer."""

    city: Literal["Rome", "Oslo"]
    rain: bool


def script(body: dict[str, Any]) -> str:
    """Answer with a call of a tool first, and with a text after its output."""
    return LAST if body["input"][-1].get("type") == "function_call_output" else FIRST


def agent_of(url: str, tool: Callable[..., Any] | None = weather, *, is_strict: bool = True, **settings: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    tools = [] if tool is None else [agents.function_tool(tool, strict_mode=is_strict)]
    return agents.Agent(
        name="Weatherman", instructions="Use the tool.", tools=tools,
        model=agents.OpenAIResponsesModel(MODEL, openai_client=client), output_type=settings.pop("output_type", None),
        model_settings=agents.ModelSettings(**settings),
    )  # fmt: skip


async def in_a_session(server: Scripted, *, is_streamed: bool) -> None:
    """Run the agent in a session by its address, and check what it did and what its session kept."""
    session = server.open_session()
    agent = agent_of(f"{server.proxy_url}/sessions/{session}", is_strict=False)
    asked.clear()
    if is_streamed:
        result: Any = agents.Runner.run_streamed(agent, "Weather?")
        kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert kinds == ["reasoning_item_created", "message_output_created", "tool_called", "tool_output",
                         "reasoning_item_created", "message_output_created"], kinds  # fmt: skip
    else:
        result = await agents.Runner.run(agent, "Weather?")
    assert (result.final_output, asked) == ("Rain in Oslo.", ["Oslo"]), result
    again = await agents.Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Again?"}])
    assert asked == ["Oslo", "Oslo"] and again.final_output == "Rain in Oslo."
    [branch] = server.branches(session)
    ids, decode = branch["token_ids"], server.service.engine.tokenizer.decode
    texts = [decode(ids[run["start"] : run["end"]], skip_special_tokens=True) for run in branch["sampled"]]
    assert texts == [FIRST, LAST] * 2, texts
    assert server.gap(branch) == 0.0


async def by_grammars(server: Scripted) -> None:
    """Demand a call, whose strict schema constrains random weights, and an answer in a format."""
    asked.clear()
    no_thoughts = {"logit_bias": {str(server.service.engine.tokenizer.convert_tokens_to_ids("<think>")): -100}}
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    demanding = agent_of(server.url, **settings, extra_body=no_thoughts)
    demanding.tool_use_behavior = "stop_on_first_tool"
    result = await agents.Runner.run(demanding, "Weather?")
    assert asked and set(asked) <= set(CITIES) and result.final_output == f"Rain in {asked[0]}.", asked
    usage = result.context_wrapper.usage
    assert usage.requests == 1 and usage.output_tokens > 0 and usage.input_tokens > 0
    formatted = agent_of(
        server.url, None, output_type=Forecast, temperature=0.0, max_tokens=200, extra_body=no_thoughts
    )
    result = await agents.Runner.run(formatted, "Weather?")
    assert isinstance(result.final_output, Forecast), result.final_output


async def main() -> None:
    """Run all of it on one server."""
    agents.set_tracing_disabled(True)
    with scripted(script, context=1 << 12) as server:
        await in_a_session(server, is_streamed=False)
        await in_a_session(server, is_streamed=True)
        await by_grammars(server)
        assert all(status == 200 for _, status in server.requests), server.requests
        print(f"openai_agents: done; {len(server.requests)} requests, gap 0.0")


asyncio.run(main())
