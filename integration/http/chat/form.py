"""The form of a chat's answers, as the model, the server's settings and the request ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField, load_response_template

from ....rollout.grammars.compiler import constraint_of
from ....rollout.sampling_params import GRAMMARS, SamplingParams
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from .calls import Item, Schemas, call_of
from .formats import CALL, REASONING, Read, ReasoningFormat, ToolFormat, as_texts, reasoning_format, template_of
from .formats import tool_format as format_of_tools
from .grammar import answer_grammar, tools_grammar
from .parser import AnswerForm, Beginning
from .past_calls import writes_one_call_alone
from .rendering import chat_template_text
from .tools import ToolFields, Tools, read_tools

_ROLES = {"tool_calls": CALL, "thinking": REASONING, "reasoning_content": REASONING}  # in templates of folders
_FIELDS = {"json_schema": "response_format", "structural_tag": "response_format"}
_TAIL_TOKENS = 16  # of a prompt, in which a marker that opens reasoning stands


class FormFields(ToolFields, Protocol):
    """The fields of a request that choose the form of its answers."""

    separate_reasoning: bool
    stream_reasoning: bool


@dataclass(frozen=True)
class ChatForm:
    """The form of one request's answers."""

    tools: Tools | None
    answers: AnswerForm | None  # None: an answer is content alone
    tool_format: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: Any
    markers: tuple[str, ...] = ()  # texts that may be special tokens

    def beginning(self, prompt_ids: Sequence[int], begun: str | None, num_begun: int = 0) -> Beginning:
        """Return how an answer after this prompt begins. begun: the text of the answer that the prompt has already.
        num_begun: last tokens of the prompt that are those of the answer, as they were sampled."""
        if self.answers is None:
            return Beginning()
        if num_begun:
            start, own = list(prompt_ids[:-num_begun]), list(prompt_ids[-num_begun:])
            found = replace(self.beginning(start, None), begun=str(self.tokenizer.decode(own)))
            has_ended = not found.is_open(self.answers) and self.answers.closes in (found.begun or " ")
            return replace(found, is_done=found.is_done or (bool(self.answers.closes) and has_ended))
        if not self.answers.opens:
            return Beginning()
        tail = str(self.tokenizer.decode(list(prompt_ids[-_TAIL_TOKENS:])))
        is_done = tail.rstrip().endswith(self.answers.closes)
        return Beginning(self.answers.prefix(tail, begun), is_done)

    @property
    def has_grammar(self) -> bool:
        """Whether the tools of the request constrain its answers."""
        return self.tools is not None and self.tools.is_constrained and self.tool_format is not None

    def params(
        self, params: SamplingParams, beginning: Beginning, field: str | None = None, *, has_begun: bool = False
    ) -> SamplingParams:
        """Return the parameters with the tokens that must stay in the text, and the grammar of calls that the request
        demands, or its own grammar behind the reasoning. field: that its own is made of. has_begun: the prompt has the
        beginning of the answer. Raises BadField."""
        if self.answers is None:
            return params
        ids = {marker: id for marker in self.markers if (id := token_of(self.tokenizer, marker)) is not None}
        params = replace(params, kept_special_tokens=tuple(ids.values()))
        if self.tools is None or not self.tools.is_constrained or self.tool_format is None:
            return self._behind_reasoning(params, beginning, ids, field, has_begun=has_begun)
        if twice := [name for name in GRAMMARS if getattr(params, name) is not None]:
            field = "tool_choice" if self.tools.mode == "required" else "tools"
            raise BadField(
                field, f"and {_FIELDS.get(twice[0], twice[0])}: only one grammar can constrain an output, and calls "
                "that are demanded or strict need one"
            )  # fmt: skip
        is_open, is_done = beginning.is_open(self.answers), beginning.is_done
        grammar = tools_grammar(
            self.tool_format.name, self.reasoning, self.tools, ids, is_open=is_open, is_done=is_done
        )
        return replace(params, structural_tag=grammar)

    def _behind_reasoning(
        self, params: SamplingParams, beginning: Beginning, ids: Mapping[str, int], field: str | None, *,
        has_begun: bool,
    ) -> SamplingParams:  # fmt: skip
        """Return the parameters with the request's own grammar where it holds: behind the reasoning, if the answer has
        some. A structural tag is of the whole answer, with the markers of its reasoning. Raises BadField."""
        constraint, reasoning = constraint_of(params), self.reasoning
        assert self.answers is not None
        is_open = beginning.is_open(self.answers)
        if constraint is None or constraint.kind == "structural_tag" or reasoning is None:
            return params
        if beginning.is_done or (has_begun and not is_open):
            return params
        try:
            grammar = answer_grammar(constraint, reasoning, ids, is_open=is_open)
        except ValueError as error:
            raise BadField(field or constraint.kind, str(error).removeprefix(f"{constraint.kind}: ")) from None
        return replace(params, json_schema=None, regex=None, ebnf=None, structural_tag=grammar)


def read_form(
    fields: FormFields, tokenizer: Any, limits: RequestLimits, parsers: tuple[str, str] | None = None,
    *, is_text: bool = False,
) -> ChatForm:  # fmt: skip
    """Read the tools of a request and find the form of its answers, of one call at most where the chat template could
    not write more in a next turn. parsers: names of the forms of calls and of reasoning; None: the server's settings.
    is_text: an answer is a text that is read, and has as many calls as it has. Raises BadField."""
    tools = read_tools(fields, limits)
    named_tools, named_reasoning = parsers or limits.parsers
    template = chat_template_text(tokenizer)
    if tools is not None and tools.is_parallel and not is_text and writes_one_call_alone(tokenizer, template):
        tools = replace(tools, is_parallel=False)
    given = getattr(tokenizer, "response_template", None)
    if given is not None and named_tools is None and named_reasoning is None:
        _refuse_demands(tools)
        return _form_of(given, tools, fields, tokenizer)
    reasoning = reasoning_format(template, named_reasoning)
    form = format_of_tools(template, named_tools) if tools is not None else None
    if form is None:
        if tools is not None and named_tools is None:
            raise BadField(
                "tools", "the chat template shows no known form of tool calls: name one by the server's setting "
                "tool_call_parser; none leaves calls in the content"
            )  # fmt: skip
        _refuse_demands(tools)
        if reasoning is None:
            return ChatForm(tools, None, None, None, tokenizer)
    answers = AnswerForm(
        template_of(form and form.name, reasoning and reasoning.name),
        None if form is None else form.read,
        {} if tools is None else tools.schemas,
        None if tools is None or tools.is_parallel else 1,
        fields.separate_reasoning,
        fields.stream_reasoning,
        24 if form is None else form.num_id_chars,
        *(("", "") if reasoning is None else (reasoning.opens, reasoning.closes)),
        reasoning is not None and reasoning.begins_inside,
        values=None if form is None else form.values,
    )
    markers = tuple(marker for one in (form, reasoning) if one is not None for marker in one.markers)
    return ChatForm(tools, answers, form, reasoning, tokenizer, markers)


def _refuse_demands(tools: Tools | None) -> None:
    """Refuse demands on calls whose form is not known. Raises BadField."""
    if tools is not None and tools.is_constrained:
        field, demand = ("tool_choice", "demands a call") if tools.mode == "required" else ("tools", "strict")
        raise BadField(field, f"{demand}: that needs a form of tool calls that the server's tool_call_parser names")


def names_of_forms(
    tokenizer: Any, named_tools: str | None, named_reasoning: str | None
) -> tuple[str | None, str | None]:
    """Return the names of the forms of calls and of reasoning that a server's answers have; None: none. The forms that
    a folder describes are called response_template."""
    if named_tools is None and named_reasoning is None and getattr(tokenizer, "response_template", None) is not None:
        return "response_template", "response_template"
    template = chat_template_text(tokenizer)
    form, reasoning = format_of_tools(template, named_tools), reasoning_format(template, named_reasoning)
    return form.name if form is not None else None, reasoning.name if reasoning is not None else None


def token_of(tokenizer: Any, text: str) -> int | None:
    """Return the id of the token that is this text as a whole; None: there is none."""
    id = tokenizer.convert_tokens_to_ids(text)
    return None if id is None or id == tokenizer.unk_token_id else int(id)


def _form_of(given: Any, tools: Tools | None, fields: FormFields, tokenizer: Any) -> ChatForm:
    """Return the form that a folder's own response_template describes. Raises BadField where that is wrong."""
    try:
        template = load_response_template(given)
    except ValueError as error:
        raise BadField("messages", f"the tokenizer's response_template is wrong: {error}") from None
    roles = {_ROLES.get(name, name): name for name in template.fields}
    plain = as_texts(template)
    if tools is None and CALL in roles:
        del plain.fields[roles[CALL]]
    opens, closes = "", ""
    if REASONING in roles:
        reasoning = template.fields[roles[REASONING]]
        if reasoning.open_literals and reasoning.close_literals:
            opens, closes = reasoning.open_literals[0], reasoning.close_literals[0]
    answers = AnswerForm(
        plain, _reader(template.fields[roles[CALL]]) if CALL in roles else None, {} if tools is None else tools.schemas,
        None if tools is None or tools.is_parallel else 1, fields.separate_reasoning, fields.stream_reasoning,
        opens=opens, closes=closes, roles=_ROLES, can_restart=False,
    )  # fmt: skip
    marked = {**template.fields, **plain.fields}.values()  # those of calls also where the answer has none
    literals = [(one.open_literals or []) + (one.close_literals or []) for one in marked]
    own = ReasoningFormat("response_template", (), {}, (opens, closes), opens, closes) if opens else None
    return ChatForm(tools, answers, None, own, tokenizer, tuple(chain.from_iterable(literals)))


def _reader(call: ResponseTemplateField) -> Read:
    """Return the reading of calls that a folder's template describes."""

    def read(body: str, raw: str, schemas: Schemas) -> list[Item]:
        match = call.open_re.match(raw)
        try:
            value = process_field(body, call, {k: v for k, v in match.groupdict().items() if v is not None})
        except (KeyError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return [call_of(one, raw, schemas) for one in (value if isinstance(value, list) else [value])]

    return read
