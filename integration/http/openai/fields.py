"""The fields of OpenAI's two calls, with the extras of SGLang's and vLLM's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, StrictInt, StrictStr

from ....rollout.sampling_params import SamplingParams
from ..edge.bodies import Body, ReceiptKind
from ..edge.errors import BadField
from ..generation.going_on import MovingBody

NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}  # of sampling parameters that have others here


def named_params(make: Callable[[], SamplingParams]) -> SamplingParams:
    """Return the sampling parameters that `make` makes. Raises BadField with the names of these fields."""
    try:
        return make()
    except ValueError as error:
        message = str(error).removeprefix("sampling parameters: ")
        for name, ours in (*NAMES.items(), ("max_tokens", "max_new_tokens")):
            message = message.replace(ours, name)
        name, _, why = message.partition(" ")
        raise BadField(name.rstrip(":"), why) from None


class StreamOptions(Body):
    """Settings of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: counts so far in every chunk

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk has the counts so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


class CommonBody(MovingBody):
    """Fields of both calls. Names are OpenAI's; the names from top_k on are SGLang's."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: StrictStr | list[StrictStr] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[StrictInt] | None = None
    stop_regex: StrictStr | list[StrictStr] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    custom_params: dict[str, Any] | None = None
    response_format: Any = None
    regex: str | None = None
    ebnf: str | None = None
    jump_forward: str | None = None
    rid: str | None = None
    request_id: str | None = Field(None, max_length=256, description="vLLM's: rid, after cmpl- or chatcmpl-")
    extra_key: str | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = Field(None, description="vLLM's form of a grammar")
    prompt_logprobs: int | None = Field(None, description="alternatives at each token of the prompt; -1: all")
    truncate_prompt_tokens: int | None = Field(None, description="keep this many last tokens; -1: as many as fit")
    return_tokens_as_token_ids: bool = Field(False, description="log-probabilities name tokens as token_id:ID")
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    return_token_ids: bool = False
    return_weight_versions: bool = Field(False, description="each choice says which version drew which of its tokens")
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_cached_tokens_details: bool = Field(False, description="sglext: where cached tokens of the prompt were")
    draft_token_ids: list[Any] | None = Field(None, description="see POST /generate")
    speculation: bool = True
    session_params: Any = Field(None, description="the session, and the turn of it, that the conversation goes on from")
    return_receipt: ReceiptKind | None = Field(None, description="each choice has a receipt; see POST /generate")
    stream_when_final: bool = Field(
        False, description="nothing is streamed before the answer's end, so that a weight commit may draw it again"
    )


class CompletionBody(CommonBody):
    """Fields of POST /v1/completions."""

    prompt: StrictStr | list[Any] = Field(description="a text, texts, token ids, or lists of token ids")
    logprobs: int | None = Field(None, ge=0, description="alternatives at each token")
    echo: bool = False
    best_of: int | None = None


class ChatBody(CommonBody):
    """Fields of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    input_ids: list[StrictInt] | None = Field(None, description="instead of messages and the chat template")
    prompt_token_ids: list[StrictInt] | None = Field(None, description="another name of input_ids")
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    tools: list[Any] | None = Field(None, description="functions that the answer may call")
    tool_choice: Any = Field(None, description="none, auto, required, a function by name, or allowed_tools")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    separate_reasoning: bool = Field(True, description="false: reasoning stays in the content, with its markers")
    stream_reasoning: bool = Field(True, description="false: streamed reasoning comes as one piece")
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = Field(
        None, description="for the chat template; none: it does not think, unless chat_template_kwargs say so"
    )
    reasoning: Any = Field(None, description="SGLang's: effort is reasoning_effort, enabled whether it thinks")
    thinking: Any = Field(None, description="SGLang's: true, false or a type, whether it thinks")
    prediction: dict[str, Any] | None = Field(
        None, description="an answer that may come again: draft_token_ids, as text"
    )
