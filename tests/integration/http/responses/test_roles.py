"""Tests of messages of systems and developers, as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integration.http.chat.roles import Roles
from lockstep.tests.integration.http.responses.conftest import Served

NAMES = {"d": "developer", "s": "system", "u": "user", "a": "assistant"}


def fitted(roles: str, *, developer: bool, within: bool, goes_on: bool = False) -> tuple[str, list[str], list[str]]:
    """Return the roles, the texts and the sources of messages whose texts are their numbers."""
    messages = [{"role": NAMES[role], "content": str(number)} for number, role in enumerate(roles)]

    def writes(first, late):
        return (developer or "developer" not in (*first, *late)) and (within or "system" not in (*first[1:], *late))

    found = Roles(writes).fitted(messages, goes_on=goes_on)
    texts = [one["content"].replace("\n\n", "+") for one in found.messages]
    return "".join(one["role"][0] for one in found.messages), texts, list(map(str, found.sources))


@pytest.mark.parametrize(("roles", "developer", "within", "expected", "texts"), [
    ("dduau", True, True, "dduau", "0 1 2 3 4"), ("dduau", True, False, "dduau", "0 1 2 3 4"),
    ("dduau", False, True, "ssuau", "0 1 2 3 4"), ("dduau", False, False, "suau", "0+1 2 3 4"),
    ("sdu", False, False, "su", "0+1 2"), ("su", False, False, "su", "0 1"), ("uu", False, False, "uu", "0 1"),
    ("sudau", False, False, "suau", "0 1+2 3 4"), ("suadu", False, False, "suau", "0 1 2 3+4"),
    ("suuadd", False, False, "suuau", "0 1 2 3 4+5"), ("ud", False, False, "u", "0+1"),
    ("ud", False, True, "us", "0 1"),
])  # fmt: skip
def test_messages_stand_as_the_template_writes_them(roles, developer, within, expected, texts):
    found = fitted(roles, developer=developer, within=within)
    assert found[:2] == (expected, texts.split()) and found[2] == [text.partition("+")[0] for text in texts.split()]


def test_new_messages_of_a_system_are_late():
    assert fitted("du", developer=False, within=False, goes_on=True)[:2] == ("u", ["0+1"])
    assert fitted("du", developer=False, within=True, goes_on=True)[:2] == ("su", ["0", "1"])


WRITES = "{{ m.role }}: {{ m.content }}\n"
ONLY_FIRST = ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
              "{% endif %}{% if m.role != 'developer' %}" + WRITES + "{% endif %}{% endfor %}")  # fmt: skip
LEAVES_OUT = "{% for m in messages %}{% if m.role != 'developer' %}" + WRITES + "{% endif %}{% endfor %}"
REFUSES = ("{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}" + WRITES
           + "{% endfor %}")  # fmt: skip
FIRST_ALONE = (
    "{% if messages[0].role in ('system', 'developer') %}developer: {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + WRITES + "{% endif %}{% endfor %}"
)
ASK: list[Any] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"role": "user", "content": "Hi"},
]


@pytest.mark.parametrize(("template", "expected"), [
    ("{% for m in messages %}" + WRITES + "{% endfor %}", "system: Help.\ndeveloper: Be brief.\nuser: Hi\n"),
    (LEAVES_OUT, "system: Help.\nsystem: Be brief.\nuser: Hi\n"),
    (REFUSES, "system: Help.\nsystem: Be brief.\nuser: Hi\n"),
    (ONLY_FIRST, "system: Help.\n\nBe brief.\nuser: Hi\n"),
])  # fmt: skip
def test_no_text_of_a_developer_is_lost(served: Served, template, expected):
    tokenizer: Any = served.service.engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        chat = {"messages": [{"role": "system", "content": "Help."}, {"role": "developer", "content": "Be brief."},
                             {"role": "user", "content": "Hi"}]}  # fmt: skip
        told = served.http.post("/tokenize", json=chat).raise_for_status().json()["tokens"]
        assert tokenizer.decode(told) == expected
        answer = served.ok(ASK, instructions="Help.", return_token_ids=True)
        assert tokenizer.decode(answer["prompt_token_ids"]) == expected
        params = {"id": served.http.post("/open_session", json={"history": "template"}).json()}
        first = served.ok(ASK, instructions="Help.", session_params=params)
        ask = {"previous_response_id": first["id"], "instructions": "Help.", "session_params": params}
        second = served.ok("More?", return_token_ids=True, **ask)
        assert tokenizer.decode(second["prompt_token_ids"]).startswith(expected)
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("template", [FIRST_ALONE, ONLY_FIRST, LEAVES_OUT])
def test_a_conversation_that_goes_on_begins_as_it_began(served: Served, template):
    tokenizer: Any = served.service.engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        params = {"id": served.http.post("/open_session", json={}).json(), "branch": True}
        first = served.ok(ASK, session_params=params)
        late = {"role": "developer", "content": "Late."}
        second = served.ok([*ASK, *first["output"], late, ASK[1]], session_params=params)
        assert second["session"]["parent_rid"] == first["session"]["rid"]
    finally:
        tokenizer.chat_template = before
