"""POST /parse_function_call and /separate_reasoning, with SGLang's fields: the parts of a text that is an answer.

For trainers that generate by token ids and still want the server to read the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictStr

from ..edge.bodies import Body, describe, fields_of, read_as
from ..edge.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from ..generation.sse import dumps
from ..generation.subscriptions import hub_of
from .form import read_form
from .formats import CALL, CONTENT, NONE, REASONING
from .parser import AnswerParser, Part

router = APIRouter(tags=["generation"])


class CallsBody(Body):
    """Fields of POST /parse_function_call."""

    text: StrictStr
    tools: list[Any] = Field(description="functions, as a chat has them")
    tool_call_parser: str | None = Field(None, description="the form of calls; default: the server's")


class ReasoningBody(Body):
    """Fields of POST /separate_reasoning."""

    text: StrictStr
    reasoning_parser: str | None = Field(None, description="the form of reasoning; default: the server's")
    return_blocks: bool = Field(False, description="the pieces too, in their order")


@router.post("/parse_function_call", openapi_extra=describe(CallsBody), response_class=Response)
async def parse_function_call(request: Request) -> Response:
    """Divide a text into its calls of tools and the rest."""
    limits = hub_of(request.app).limits

    def read(values: dict[str, object]) -> dict[str, object]:
        body = fields_of(CallsBody, values)
        if not body.tools:
            raise BadField("tools", "must name the functions that the text may call")
        name = _known(body.tool_call_parser, "tool_call_parser", TOOL_CALL_PARSERS)
        parts = _parts(
            body.text, _Fields(body.tools, False), limits, None if name is None else (name, NONE), "tool_call_parser"
        )
        calls = [part.call for part in parts if part.call is not None]
        return {
            "normal_text": _text(parts, CONTENT),
            "calls": [
                {"tool_index": index, "name": call.name, "parameters": call.arguments}
                for index, call in enumerate(calls)
            ],
        }

    return _answer(await read_as(request, read, is_slow=lambda values: True, ends_with_client=True))


@router.post("/separate_reasoning", openapi_extra=describe(ReasoningBody), response_class=Response)
async def separate_reasoning(request: Request) -> Response:
    """Divide a text into its reasoning and the rest."""
    limits = hub_of(request.app).limits

    def read(values: dict[str, object]) -> dict[str, object]:
        body = fields_of(ReasoningBody, values)
        name = _known(body.reasoning_parser, "reasoning_parser", REASONING_PARSERS)
        parts = _parts(
            body.text, _Fields(None, True), limits, None if name is None else (NONE, name), "reasoning_parser"
        )
        found: dict[str, object] = {"reasoning_text": _text(parts, REASONING), "text": _text(parts, CONTENT)}
        if body.return_blocks:
            blocks = _blocks(parts)
            found["reasoning_blocks"] = [one["text"] for one in blocks if one["type"] == "reasoning"]
            found["text_blocks"] = [one["text"] for one in blocks if one["type"] == "text"]
            found["blocks"] = blocks
        return found

    return _answer(await read_as(request, read, is_slow=lambda values: True, ends_with_client=True))


@dataclass
class _Fields:
    """The fields of a chat that has these tools."""

    tools: list[Any] | None
    separate_reasoning: bool
    stream_reasoning: bool = True
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


def _answer(found: dict[str, object]) -> Response:
    return Response(dumps(found), media_type="application/json")


def _known(name: str | None, field: str, known: Sequence[str]) -> str | None:
    if name is not None and name not in known:
        raise BadField(field, f"must be one of {', '.join(known)}, not {name[:100]!r}")
    return name


def _parts(
    text: str, fields: _Fields, limits: RequestLimits, parsers: tuple[str, str] | None, field: str
) -> list[Part]:
    """Return the parts of an answer. parsers: names of the forms of calls and of reasoning; None: the server's. field:
    that names the one which matters. Slow for long texts. Raises BadField."""
    limits.characters(len(text), "text")
    form = read_form(fields, limits.tokenizer, limits, parsers, is_text=True).answers
    if form is None:
        raise BadField(field, "is needed: neither the chat template nor a setting of the server shows a form")
    opens = form.prefix("") if not text.lstrip().startswith(form.opens or "\0") else ""
    parser = AnswerParser(form, opens)
    return [*parser.feed(text), *parser.finish()]


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _blocks(parts: Sequence[Part]) -> list[dict[str, str]]:
    """Return the pieces of an answer without calls, with those beside each other as one."""
    found: list[dict[str, str]] = []
    for part in parts:
        kind = "reasoning" if part.kind == REASONING else "text"
        if found and found[-1]["type"] == kind:
            found[-1]["text"] += part.text
        elif part.kind != CALL:
            found.append({"type": kind, "text": part.text})
    return found
