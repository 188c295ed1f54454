"""The fields of a request of the Messages API, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import Field, StrictStr

from ....rollout.engine import Engine
from ..chat.template import roles_of
from ..edge.bodies import Body, fields_of
from ..edge.errors import BadField, TooLong
from ..generation.body import refuse_unsupported
from ..generation.limits import RequestLimits
from .conversation import Conversation, is_begun, read_conversation

Values = dict[str, object]

# Of Anthropic's own service: without them the answer would be a different one.
_REFUSED = ("container", "mcp_servers", "fallbacks", "thread", "compaction", "output_format")
# Of the same; they change no answer here.
_IGNORED = (
    "betas", "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id",
    "workspace_id",
)  # fmt: skip
_NAMES = {  # of the chat's fields
    "stop": "stop_sequences", "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort", "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KEEPS_ALL = ("clear_thinking_20251015", "all")  # an edit of the context that leaves it as it is


class MessagesBody(Body):
    """Fields of POST /v1/messages. Others are those of a chat: seed, session_params, return_token_ids and so on."""

    model: str | None = None
    messages: list[Any] = Field(description="user's and assistant's, of texts or content blocks")
    max_tokens: int = Field(ge=1)
    system: StrictStr | list[Any] | None = None
    stop_sequences: list[StrictStr] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Any] | None = Field(None, description="with an input_schema; Anthropic's own tools are refused")
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = Field(
        None, description="its type tells the chat template whether to think; a budget is not enforced"
    )
    output_config: dict[str, Any] | None = Field(None, description="effort, and a format with a JSON schema")
    context_management: dict[str, Any] | None = Field(None, description="edits that keep all thinking; others not")


class CountBody(MessagesBody):
    """Fields of POST /v1/messages/count_tokens."""

    max_tokens: int = Field(1, ge=1)


@dataclass(frozen=True)
class AskedChat:
    """The chat that a request asks for."""

    values: Values
    conversation: Conversation

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors in the chat's fields name those of the request."""
        try:
            yield
        except TooLong as error:  # in the words by which agents know that they have to shorten their history
            why = f"prompt is too long: {error.num_tokens} tokens > {error.room} maximum"
            raise BadField(self.name(str(error.param)), why) from None
        except BadField as error:
            param = str(error.param)
            raise BadField(self.name(param), error.message.removeprefix(f"{param}: ")) from None

    def name(self, param: str) -> str:
        """Return the field of the request that a field of the chat was made of."""
        head, _, rest = param.partition(".")
        if head == "messages":
            return self.conversation.place(param)
        return ".".join(filter(None, (_NAMES.get(head, head), rest)))


def read_chat_of(
    values: Values, engine: Engine, limits: RequestLimits, body_type: type[MessagesBody] = MessagesBody
) -> AskedChat:
    """Translate the fields to those of a chat with the engine's template. Raises BadField."""
    refuse_unsupported(values, _REFUSED)
    _check_lengths(values, limits)
    body = fields_of(body_type, values)
    if values.get("n") not in (None, 1):
        raise BadField("n", "must be 1: a message is one answer")
    _check_context(body.context_management)
    conversation = read_conversation(body.system, body.messages).fitted(roles_of(engine))
    known = {*MessagesBody.model_fields, *_IGNORED} - {"model", "temperature", "top_k", "top_p"}
    chat: Values = {name: value for name, value in values.items() if name not in known}
    chat |= {"messages": conversation.messages, "max_tokens": body.max_tokens, "stream": body.stream}
    if body.stream:
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if is_begun(body.messages):
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools)]
    chat |= _choice(body.tool_choice) | _thinking(body.thinking, values) | _output(body.output_config)
    return AskedChat(chat, conversation)


def _check_lengths(values: Values, limits: RequestLimits) -> None:
    """Refuse lists that are too long to have a use, before they are read."""
    limits.long_lists(values, "input_ids", ("system", "stop_sequences", "tools"))
    messages = values.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            name = f"messages.{index}.content"
            limits.long_lists({name: message.get("content")}, "input_ids", (name,))


def _tool(tool: object, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise BadField(at, "must be an object")
    if (kind := tool.get("type")) not in (None, "custom"):
        raise BadField(at, f"the type {str(kind)[:100]!r} is a tool of Anthropic's own, which is not supported here")
    if not isinstance(tool.get("name"), str):
        raise BadField(f"{at}.name", "must be a text")
    if not isinstance(tool.get("input_schema"), dict):
        raise BadField(f"{at}.input_schema", "must be a JSON schema, an object")
    if tool.get("defer_loading"):
        raise BadField(f"{at}.defer_loading", "is not supported: the model sees all tools from the beginning")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(choice: Mapping[str, Any] | None) -> Values:
    if choice is None:
        return {}
    kind, at_most_one = choice.get("type"), choice.get("disable_parallel_tool_use")
    found: Values = {"parallel_tool_calls": False} if at_most_one else {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        return found | {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise BadField("tool_choice", 'needs the type "auto", "any", "none", or "tool" with a name')
    return found | {"tool_choice": _CHOICES[kind]}


def _thinking(thinking: Mapping[str, Any] | None, values: Values) -> Values:
    """Return what tells a chat template to think or not; the request's own chat_template_kwargs come first."""
    if thinking is None:
        return {}
    kind, given = thinking.get("type"), values.get("chat_template_kwargs")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadField("thinking.type", 'must be "enabled", "adaptive" or "disabled"')
    thinks = kind != "disabled"
    own: Mapping[str, Any] = {"enable_thinking": thinks, "thinking": thinks}  # as Qwen's templates say, and DeepSeek's
    if given is not None and not isinstance(given, dict):
        return {}  # refused as the chat's field
    return {"chat_template_kwargs": {**own, **(given or {})}}


def _output(config: Mapping[str, Any] | None) -> Values:
    if config is None:
        return {}
    found: Values = {}
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str):
            raise BadField("output_config.effort", "must be a text")
        found["reasoning_effort"] = effort
    if (form := config.get("format")) is not None:
        schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
        if not isinstance(schema, dict):
            raise BadField("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "message", "schema": schema}}
    return found


def _check_context(given: Mapping[str, Any] | None) -> None:
    """Refuse edits of the conversation, which this server does not make; one that keeps all thinking is none."""
    edits = (given or {}).get("edits") or []
    if not isinstance(edits, list):
        raise BadField("context_management.edits", "must be a list")
    for index, edit in enumerate(edits):
        if not isinstance(edit, dict) or (edit.get("type"), edit.get("keep")) != _KEEPS_ALL:
            raise BadField(
                f"context_management.edits.{index}", "is not supported: the conversation is read as it is sent"
            )
