"""The reading of tool calls from the texts that models write between their markers.

A text is a model's, so it may be anything: a reader returns the calls that are whole, and every other part as text, and
takes a time that grows with the length alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .values import decode_at, decoded, dumped, types_of, value_of

_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_MISTRAL, _MISTRAL_ARGS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LLAMA_BEGIN = re.compile(r'\{\s{0,4}"(?:name|type)"\s{0,4}:')
_LLAMA_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>|<\|eom_id\|>)*+")
_MAX_TRIES = 16  # texts that begin like a call and are none, before the rest is text
_JSON_BEGIN = re.compile(r"\{|\[\s{0,32}\{")
_PLAIN_NAME = re.compile(r"[^\s<>\[\]{}\"]{1,256}")
_SPACE = re.compile(r"\s*+")


@dataclass(frozen=True)
class Call:
    """A tool call in an answer."""

    name: str
    arguments: str  # a JSON object
    raw: str  # the text that the model wrote


Item = Call | str  # a call, or text that is none
Schemas = Mapping[str, Mapping[str, Any]]  # the parameters' schema of each tool that the request names


def read_json(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read one call that is a JSON object with a name and arguments. Raises ValueError where it is none."""
    return [_call(decoded(body), raw)]


def read_qwen_xml(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read one call in the form <function=NAME><parameter=KEY>VALUE</parameter></function>. Raises ValueError."""
    text = _Text(body)
    text.skip_space()
    text.skip("<function=")
    name = text.until(">").strip()
    given: dict[str, str] = {}
    text.skip_space()
    while not text.has("</function>"):
        text.skip("<parameter=")
        key = text.until(">").strip()
        value = text.until("</parameter>", may_be_json=may_be_json_of(name, key, schemas))
        given[key] = value.removeprefix("\n").removesuffix("\n")
        text.skip_space()
    text.skip("</function>")
    text.end()
    return [typed(name, given, raw, schemas)]


def read_glm(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read one call in the form NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>. Raises ValueError."""
    if not raw.endswith("</tool_call>"):
        raise ValueError("further arguments may follow")
    text = _Text(body)
    name = (text.until("<arg_key>") if "<arg_key>" in body else text.rest()).strip()
    given: dict[str, str] = {}
    while not text.is_over:
        key = text.until("</arg_key>").strip()
        text.skip_space()
        text.skip("<arg_value>")
        given[key] = text.until("</arg_value>", may_be_json=may_be_json_of(name, key, schemas))
        text.skip_space()
        if not text.is_over:
            text.skip("<arg_key>")
    return [typed(name, given, raw, schemas)]


def read_deepseek(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read the calls of a block of DeepSeek's, in the forms of V3 and R1 (```json) and of V3.1."""
    first, *pieces = _split(body, _DEEPSEEK_BEGIN)
    items: list[Item] = [first]
    for piece in pieces:
        end = piece.find(_DEEPSEEK_END, _end_of_json(piece, 0, before=_DEEPSEEK_END))
        inner = piece if end < 0 else piece[:end]
        closed = piece[len(inner) : len(inner) + len(_DEEPSEEK_END)]
        after = piece[len(inner) + len(closed) :]
        its_raw = _DEEPSEEK_BEGIN + inner + closed
        name, _, arguments = inner.partition(_DEEPSEEK_SEP)
        if name.strip() == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        try:
            items.append(_call({"name": name.strip(), "arguments": decoded(arguments)}, its_raw))
        except ValueError:
            items.append(its_raw)
        items.append(after)
    return items


def read_mistral(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read all calls after [TOOL_CALLS]: a JSON array of them, or NAME[ARGS]{...}, each with a marker of its own."""
    items: list[Item] = []
    for piece in _split(body, _MISTRAL):
        start = len(piece) - len(piece.lstrip())
        if piece.startswith(("[{", "{"), start) or re.match(r"\[\s*\{", piece[start : start + 32]):
            items += _array(piece, start)
            continue
        name, marked, _ = piece.partition(_MISTRAL_ARGS)
        at = len(name) + len(marked) if marked else piece.find("{")
        try:
            if at < 0:
                raise ValueError("no arguments")
            arguments, end = decode_at(piece, at)
            name = piece[:at].removesuffix(_MISTRAL_ARGS).partition(_MISTRAL_ID)[0].strip()
            items.append(_call({"name": name, "arguments": arguments}, _MISTRAL + piece[:end]))
            items.append(piece[end:])
        except ValueError:
            items.append(_MISTRAL + piece)
    return items


def read_llama(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read JSON objects with the name of a known tool and its parameters, which follow one another or stand in text."""
    items: list[Item] = []
    at, num_failed = 0, 0
    while num_failed < _MAX_TRIES and (begin := _LLAMA_BEGIN.search(raw, at)) is not None:
        try:
            value, end = decode_at(raw, begin.start())
            call = _call(value, raw[begin.start() : end])
            if call.name not in schemas or not {"parameters", "arguments"} & set(value):
                raise ValueError("not a call")
        except ValueError:
            num_failed += 1
            items.append(raw[at : begin.end()])
            at = begin.end()
            continue
        between = raw[at : begin.start()]
        match = _LLAMA_BETWEEN.match(between)
        items += [call] if match is not None and match.end() == len(between) else [between, call]
        at = end
    return [*items, raw[at:]]


def read_object(name: str, body: str, raw: str) -> list[Item]:
    """Read one call whose name is known and whose body is its arguments. Raises ValueError."""
    return [_call({"name": name, "arguments": decoded(body)}, raw)]


def call_of(value: object, raw: str, schemas: Schemas) -> Call:
    """Return the call of an object in the shape of OpenAI's API, whose arguments may be texts that have types. Raises
    ValueError."""
    inner = value.get("function") if isinstance(value, dict) else None
    inner = inner if isinstance(inner, dict) else value
    if not isinstance(inner, dict) or not isinstance(name := inner.get("name"), str):
        raise ValueError("a call without a name")
    arguments = inner.get("arguments")
    return typed(name, arguments, raw, schemas) if isinstance(arguments, dict) else _call(inner, raw)


def typed(name: str, given: Mapping[str, Any], raw: str, schemas: Schemas) -> Call:
    """Return the call whose arguments are texts, each of the type that the tool's schema gives it. Raises ValueError.

    Other arguments than texts stay as they are."""
    root, members = schemas.get(name, {}), _members(name, schemas)
    arguments = {
        key: value_of(value, members.get(key), root) if isinstance(value, str) else value
        for key, value in given.items()
    }
    return _call({"name": name, "arguments": arguments}, raw)


def _members(name: str, schemas: Schemas) -> Mapping[str, Any]:
    members = schemas.get(name, {}).get("properties")
    return members if isinstance(members, Mapping) else {}


def may_be_json_of(name: str, key: str, schemas: Schemas) -> bool:
    """Return whether an argument may be written as JSON: a text is written as it is."""
    return types_of(_members(name, schemas).get(key), schemas.get(name, {})) != {"string"}


def _split(body: str, marker: str) -> list[str]:
    """Return the texts between markers, of those that stand in no JSON value: the first value after each is whole."""
    pieces, start, at = [], 0, _end_of_json(body, 0, before=marker)
    while (found := body.find(marker, at)) >= 0:
        pieces.append(body[start:found])
        start = found + len(marker)
        at = _end_of_json(body, start, before=marker)
    return [*pieces, body[start:]]


def _end_of_json(text: str, start: int, *, before: str) -> int:
    """Return the place behind the first object, or array of objects, after `start`; `start` itself where there is none
    that can be read, or the text `before` comes first."""
    limit = text.find(before, start)
    begin = _JSON_BEGIN.search(text, start, len(text) if limit < 0 else limit)
    try:
        return start if begin is None else decode_at(text, begin.start())[1]
    except ValueError:
        return start


def _array(piece: str, start: int) -> list[Item]:
    try:
        value, end = decode_at(piece, start)
        values = value if isinstance(value, list) else [value]
        return [*(_call(one, f"{_MISTRAL}[{json.dumps(one, ensure_ascii=False)}]") for one in values), piece[end:]]
    except ValueError:
        return [_MISTRAL + piece]


def _call(value: object, raw: str) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("no name, or arguments that are no object")
    name.encode()  # UnicodeEncodeError is a ValueError
    return Call(name, dumped(arguments), raw)


class _Text:
    """A text that is read from its beginning to its end. All methods but `has` raise ValueError where it differs."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def is_over(self) -> bool:
        return self._at == len(self._text)

    def has(self, marker: str) -> bool:
        return self._text.startswith(marker, self._at)

    def skip(self, marker: str) -> None:
        if not self.has(marker):
            raise ValueError(f"no {marker} at {self._at}")
        self._at += len(marker)

    def skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None  # it matches the empty text
        self._at = match.end()

    def until(self, marker: str, *, may_be_json: bool = False) -> str:
        """Return the text before a marker, and go on after it. may_be_json: JSON that begins here may hold markers."""
        start = self._at
        if may_be_json:
            self.skip_space()
            with suppress(ValueError):
                _, self._at = decode_at(self._text, self._at)
            start, self._at = self._at, start
        end = self._text.find(marker, start)
        if end < 0:
            raise ValueError(f"no {marker} after {self._at}")
        start, self._at = self._at, end + len(marker)
        return self._text[start:end]

    def rest(self) -> str:
        start, self._at = self._at, len(self._text)
        return self._text[start:]

    def end(self) -> None:
        self.skip_space()
        if not self.is_over:
            raise ValueError(f"text after {self._at}")
