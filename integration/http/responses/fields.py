"""The fields of POST /v1/responses: those that are its own, those that it refuses, and those that a chat has too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, StrictStr

from ..edge.bodies import Body
from ..edge.errors import BadField
from ..openai.vllm_fields import refuse_values

LOGPROBS = "message.output_text.logprobs"
# What else `include` may name. Thoughts come as texts, and the tools that the others are of are refused.
_INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
# Values that change nothing, by field; every other value is refused.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "image": (None, {}),
    "n": (None, 1),
}
# Fields of a chat that have another name here: they would be ignored, and change the answer.
_ELSEWHERE = {
    "messages": "input",
    "input_ids": "input, which has no token ids: /generate and chats take them",
    "prompt_token_ids": "input, which has no token ids: /generate and chats take them",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


class ReasoningFields(Body):
    """Fields of `reasoning`."""

    effort: StrictStr | None = Field(None, description="for the chat template, as a chat's reasoning_effort")


class TextFields(Body):
    """Fields of `text`."""

    format: Any = Field(None, description="text, json_object or json_schema")
    verbosity: Any = None


class ResponsesBody(Body):
    """Fields of POST /v1/responses. A chat's other fields are as in POST /v1/chat/completions."""

    input: StrictStr | list[Any] = Field(description="a text, or items")
    instructions: StrictStr | None = Field(None, description="a system's message before the input")
    model: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[StrictStr] | None = Field(None, description=f"{LOGPROBS}: of the sampled tokens")
    logprobs: bool = Field(False, description="the answer has those of all tokens, as a chat's choice has them")
    top_logprobs: int = Field(0, ge=0)
    tools: list[Any] | None = Field(None, description="of the types function, custom and namespace")
    tool_choice: Any = Field(None, description="none, auto, required, a tool by name, or allowed_tools")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: dict[StrictStr, StrictStr] | None = Field(None, description="the answer repeats it")
    previous_response_id: StrictStr | None = Field(
        None, description="with session_params: the turn to go on from; the input is what is new"
    )
    stream: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the texts of the answer have log-probabilities."""
        return LOGPROBS in (self.include or ())


def refuse_unsupported(values: Mapping[str, object]) -> None:
    """Refuse fields that would change the answer. Raises BadField naming the first."""
    for name, here in _ELSEWHERE.items():
        if values.get(name) is not None:
            raise BadField(name, f"is a chat's field: here it is {here}")
    refuse_values(values, _DEFAULTS)


def refuse_values_of(body: ResponsesBody) -> None:
    """Refuse values of its own fields that would change the answer. Raises BadField."""
    if unknown := sorted(set(body.include or ()) - set(_INCLUDABLE)):
        raise BadField("include", f"{unknown[0][:100]!r} is none of {', '.join(_INCLUDABLE)}")
    if body.top_logprobs and not body.wants_logprobs and not body.logprobs:
        raise BadField("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise BadField("text.verbosity", "is not supported: say so in the instructions")
