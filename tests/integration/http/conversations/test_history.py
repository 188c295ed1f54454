"""Tests of the prompts of chats over sessions, with a template and a tokenizer of one character a token."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from lockstep.integration.http.conversations.history import Template, chat_prompt, check_cut, divide, num_equal
from lockstep.integration.http.conversations.messages import chained, encoded, shape_of
from lockstep.integration.http.conversations.params import SessionParams
from lockstep.integration.http.conversations.session import Session, SessionOptions
from lockstep.integration.http.conversations.turns import Turn
from lockstep.integration.http.edge.errors import BadField

END = ord("]")


def render(messages: list[dict[str, Any]]) -> str:
    """Write [role:content] for each message. Thoughts in parentheses stay in the last answer only."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    texts = []
    for index, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant" and index < last:
            content = content.rpartition(")")[2]
        texts.append(f"[{message['role']}:{content.strip()}]\n")
    return "".join(texts) + "[assistant:"


TEMPLATE = Template(render, lambda text: [ord(one) for one in text], {END, ord("[")})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **others: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def first_turn(messages: list[dict[str, Any]], output: str, matched: int | str | None = None, **told: object) -> Turn:
    prompt = TEMPLATE.tokenise(render(messages))
    said = [*messages, assistant(output.removesuffix("]"), **told)]
    return Turn("a", None, 0, array("i", [*prompt, *map(ord, output)]), len(prompt), matched, (),
                messages=tuple(map(encoded, said)), digest=chained(b"", said)[-1])  # fmt: skip


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def params(**fields: object) -> SessionParams:
    return SessionParams(id="a", **fields)


def find(*turns: Turn):
    session = Session("a", 0, SessionOptions(), 100.0, 0.0)
    for turn in turns:
        session.add(turn, replaces=False)
    return session.with_messages


# -- prompts --------------------------------------------------------------------------------------------------------


def test_a_first_prompt_is_the_templates():
    prompt = chat_prompt(None, [user("hi")], "sampled", TEMPLATE)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:"
    assert (prompt.num_history, prompt.differs_at) == (0, None)


@pytest.mark.parametrize(("output", "matched"), [("yes]", END), ("yes]", None), ("yes", None)])
def test_an_answer_is_closed_once_whether_it_ended_by_itself_or_not(output, matched):
    base = first_turn([user("hi")], output, matched)
    prompt = chat_prompt(base, [user("so")], "sampled", TEMPLATE)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:yes]\n[user:so]\n[assistant:"
    assert prompt.num_history == base.num_tokens and prompt.differs_at is None


def test_an_answer_that_ended_with_a_stop_text_is_not_closed_by_that_text_again():
    base = first_turn([user("hi")], "yes]", "]")
    assert text_of(chat_prompt(base, [user("so")], "sampled", TEMPLATE).token_ids).count("]") == 2 + 1


def test_an_answer_that_ended_with_another_token_keeps_it_and_is_closed():
    base = first_turn([user("hi")], "yes!", ord("!"))
    assert "yes!]\n[user" in text_of(chat_prompt(base, [user("so")], "sampled", TEMPLATE).token_ids)


def test_the_first_token_is_told_at_which_the_template_would_differ():
    base = first_turn([user("hi")], "(hm) yes ]", END)
    prompt = chat_prompt(base, [user("so")], "sampled", TEMPLATE)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:(hm) yes ]\n[user:so]\n[assistant:"
    assert prompt.differs_at == len("[user:hi]\n[assistant:")
    kept = chat_prompt(base, [{"role": "tool", "content": "4"}], "sampled", TEMPLATE)
    assert kept.differs_at == len("[user:hi]\n[assistant:(hm) yes"), "thoughts stay before a tool's answer; blanks go"


def test_an_answer_that_the_template_would_refuse_stands_as_it_was_sampled():
    def picky(messages: list[dict[str, Any]]) -> str:
        if any(message["content"].endswith("!") for message in messages):
            raise BadField("messages", "no shouting")
        return render(messages)

    template = Template(picky, TEMPLATE.tokenise, TEMPLATE.special_ids)
    base = first_turn([user("hi")], "yes!]", END)
    prompt = chat_prompt(base, [user("so")], "sampled", template)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:yes!]\n[user:so]\n[assistant:"
    assert prompt.differs_at == base.num_prompt
    for policy, message in (("template", user("so")), ("sampled", user("so!"))):
        with pytest.raises(BadField, match=r"^messages: no shouting$"):
            chat_prompt(base, [message], policy, template)


def test_the_templates_policy_keeps_the_longest_equal_beginning():
    base = first_turn([user("hi")], "(hm) yes ]", END)
    prompt = chat_prompt(base, [user("so")], "template", TEMPLATE)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:yes]\n[user:so]\n[assistant:"
    assert prompt.num_history == len("[user:hi]\n[assistant:") and prompt.differs_at is None


def test_a_prompt_that_is_longer_than_the_templates_differs_at_its_end():
    assert num_equal([1, 2], [1, 2, 3]) == 2 == num_equal([1, 2, 3], [1, 2])
    short = Template(lambda m: render(m)[: -len("[assistant:")], TEMPLATE.tokenise, ())
    base = first_turn([user("hi")], "yes]", END)
    assert chat_prompt(base, [user("so")], "sampled", short).differs_at is None


@pytest.mark.parametrize("write", [lambda content: "", lambda content: content + content, str.upper])
def test_a_template_that_does_not_show_an_answers_end_is_refused(write):
    def strange(messages: list[dict[str, Any]]) -> str:
        return "".join(write(m["content"]) if m["role"] == "assistant" else m["content"] for m in messages)

    base = first_turn([user("hi")], "yes]", END)
    template = Template(strange, TEMPLATE.tokenise, ())
    with pytest.raises(BadField, match='"template"'):
        chat_prompt(base, [user("so")], "sampled", template)
    assert chat_prompt(base, [user("so")], "template", template).token_ids


def test_a_template_that_wants_calls_of_tools_before_their_answers_is_asked_with_calls():
    def strict(messages: list[dict[str, Any]]) -> str:
        texts = []
        for index, message in enumerate(messages):
            if message["role"] == "tool" and not messages[index - 1].get("tool_calls"):
                raise BadField("messages", "no calls before a tool")
            calls = "".join(f"<{one['function']['arguments']}>" for one in message.get("tool_calls") or [])
            texts.append(f"[{message['role']}:{message['content']}{calls}]\n")
        return "".join(texts) + "[assistant:"

    template = Template(strict, TEMPLATE.tokenise, {END, ord("["), ord(">")})
    tool = {"role": "tool", "content": "4"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    expected = "[user:hi]\n[assistant:yes<{'a': 1}>]\n[tool:4]\n[assistant:"
    for sampled in ("yes<{'a': 1}>]", "yes<{'a': 1}>", "yes<{'a': 1}"):
        base = first_turn([user("hi")], "yes", tool_calls=[call])
        prompt_ids = list(base.added[: base.num_prompt])
        base = replace(base, added=array("i", [*prompt_ids, *map(ord, sampled)]))
        prompt = chat_prompt(base, [tool], "sampled", template)
        assert text_of(prompt.token_ids) == expected and prompt.differs_at is None
    assert text_of(chat_prompt(base, [user("so")], "sampled", template).token_ids).endswith("]\n[user:so]\n[assistant:")
    plain = first_turn([user("hi")], "yes")
    with pytest.raises(BadField, match="no calls before a tool"):
        chat_prompt(plain, [tool], "sampled", template)


def test_marks_and_brackets_in_a_users_text_change_nothing():
    base = first_turn([user("answer]\n[assistant:answer")], "answer]", END)
    prompt = chat_prompt(base, [user("[assistant:x]")], "sampled", TEMPLATE)
    assert text_of(prompt.token_ids) == (
        "[user:answer]\n[assistant:answer]\n[assistant:answer]\n[user:[assistant:x]]\n[assistant:"
    )


# -- messages -------------------------------------------------------------------------------------------------------


def test_messages_of_users_and_tools_are_new_and_lists_with_others_are_the_whole():
    base = first_turn([user("hi")], "yes]")
    assert divide(base, [user("hi")], params(), find()) == (base, [user("hi")])
    assert divide(base, [user("hi"), assistant("yes"), user("so")], params(), find()) == (base, [user("so")])
    given = [{"role": "system", "content": "s"}, user("hi")]
    with pytest.raises(BadField, match=r"messages\.0: differs"):
        divide(base, given, params(), find())
    assert divide(base, given, params(messages="new"), find()) == (base, given)
    assert divide(None, given, params(), find()) == (None, given)
    with pytest.raises(BadField, match="must not be empty"):
        divide(base, [], params(), find())


def test_the_first_message_that_differs_is_named():
    base = first_turn([user("hi")], "yes]")
    for index, given in (
        (0, [user("ho"), assistant("yes"), user("so")]),
        (1, [user("hi"), assistant("no"), user("so")]),
        (1, [user("hi"), user("yes"), assistant("so")]),
    ):
        with pytest.raises(BadField) as error:
            divide(base, given, params(), find())
        assert error.value.param == f"messages.{index}"
    for given in ([user("hi")], [user("hi"), assistant("yes")]):
        with pytest.raises(BadField, match="add none"):
            divide(base, given, params(messages="all"), find())


def test_a_branch_goes_on_from_the_last_turn_that_has_the_messages_before():
    base = first_turn([user("hi")], "yes]")
    more = [user("so"), assistant("well")]
    second = Turn("b", base, base.num_tokens, array("i", [1]), base.num_tokens, None, (),
                  messages=tuple(map(encoded, more)), digest=chained(base.digest, more)[-1])  # fmt: skip
    search = find(base, second)
    before = [user("hi"), assistant("yes")]
    assert divide(second, [*before, user("what")], params(branch=True), search) == (base, [user("what")])
    assert divide(base, [*before, *more, user("ah")], params(branch=True), search) == (second, [user("ah")])
    assert divide(second, [user("ho"), assistant("yes"), user("so")], params(branch=True), search)[0] is None
    again = [user("hi")]
    assert divide(second, again, params(branch=True, messages="all"), search) == (None, again)
    assert divide(second, [*before, more[0]], params(branch=True), search) == (base, [user("so")])


def answered(rid: str, base: Turn | None, new: list[dict[str, Any]], said: dict[str, Any], shape: bytes = b"") -> Turn:
    """Make a turn with these messages and one token."""
    start = shape if base is None else base.digest
    num = 0 if base is None else base.num_tokens
    return Turn(rid, base, num, array("i", [1]), num, None, (), messages=tuple(map(encoded, [*new, said])),
                digest=chained(start, [*new, said])[-1])  # fmt: skip


def test_the_same_request_once_more_goes_on_from_the_same_turn():
    base = answered("a", None, [user("hi")], assistant("yes"))
    again = answered("b", None, [user("hi")], assistant("no"))
    after = answered("c", base, [user("so")], assistant("well"))
    search = find(base, again, after)
    for given, turn, new in (
        ([user("hi")], None, [user("hi")]),
        ([user("hi"), assistant("yes"), user("so")], base, [user("so")]),
        ([user("hi"), assistant("no"), user("so")], again, [user("so")]),
        ([user("hi"), assistant("yes"), user("so"), assistant("well")], after, []),
    ):
        assert divide(after, given, params(branch=True, messages="all"), search) == (turn, new)


def test_a_conversation_that_ends_with_an_answer_goes_on_behind_it():
    base = first_turn([user("hi")], "yes]", END)
    prompt = chat_prompt(base, [], "sampled", TEMPLATE)
    assert text_of(prompt.token_ids) == "[user:hi]\n[assistant:yes]\n[assistant:"
    assert prompt.differs_at is None


def test_an_answer_that_was_cut_goes_on_with_its_own_tokens():
    base, ended = first_turn([user("hi")], "yes"), first_turn([user("hi")], "yes]", END)
    given = [user("hi"), assistant("yes")]
    for fields in ({}, {"branch": True}):
        found = divide(base, given, params(messages="all", **fields), find(base), continues=True)
        assert found == (base, [])
    check_cut(base, [])
    for turn, new, why in ((ended, [], "ended by itself"), (base, [user("so")], "none"), (None, given, "none")):
        with pytest.raises(BadField, match=why) as error:
            check_cut(turn, new)
        assert error.value.param == "continue_final_message"
    cut = replace(TEMPLATE, render=lambda messages: render(messages).removesuffix("]\n[assistant:"))
    prompt = chat_prompt(base, [], "sampled", cut, continues=True)
    assert (text_of(prompt.token_ids), prompt.differs_at) == ("[user:hi]\n[assistant:yes", None)
    assert text_of(chat_prompt(base, [], "template", cut, continues=True).token_ids) == "[user:hi]\n[assistant:yes"

    def refuses(messages: list[dict[str, Any]]) -> str:
        raise BadField("messages", "no")

    prompt = chat_prompt(base, [], "sampled", replace(TEMPLATE, render=refuses), continues=True)
    assert (prompt.num_history, prompt.differs_at) == (len(prompt.token_ids), base.num_prompt)


def test_of_answers_that_are_alike_a_branch_goes_on_from_the_one_that_is_meant():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {**call, "id": "call_2"}
    turns = [
        answered("a", None, [user("hi")], assistant("", reasoning_content="one", tool_calls=[call])),
        answered("b", None, [user("hi")], assistant("", reasoning_content="two", tool_calls=[other])),
        answered("c", None, [user("hi")], assistant(" ", reasoning_content="two", tool_calls=[other])),
    ]
    search, result = find(*turns), {"role": "tool", "content": "3", "tool_call_id": "x"}
    for said, turn in (
        (assistant("", reasoning_content="one", tool_calls=[call]), turns[0]),
        (assistant("", tool_calls=[call]), turns[0]),  # by the id
        (assistant("", reasoning_content="two", tool_calls=[call]), turns[2]),  # by the thoughts
        (assistant("", reasoning_content="two", tool_calls=[other]), turns[1]),
        (assistant(" ", tool_calls=[other]), turns[2]),
        (assistant("", name="planner", tool_calls=[call]), turns[0]),  # by the id, beside another change
        (assistant("", tool_calls=[{**call, "id": "mine"}]), turns[2]),  # nothing tells them apart: the newest
    ):
        given = [user("hi"), said, result]
        assert divide(None, given, params(branch=True), search) == (turn, [result]), said


def test_an_earlier_answer_that_was_changed_does_not_hide_which_later_one_is_meant():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    base = answered("a", None, [user("hi")], assistant("yes\n"))
    one, other = (answered(rid, base, [user("so")], assistant("", tool_calls=[{**call, "id": rid}])) for rid in "bc")
    search = find(base, one, other)
    for turn in (one, other):
        said = assistant("", tool_calls=[{**call, "id": turn.rid}])
        given = [user("hi"), assistant("yes"), user("so"), said, {"role": "tool", "content": "3"}]
        assert divide(None, given, params(branch=True), search) == (turn, given[-1:])


def test_a_branch_goes_on_from_turns_with_the_same_tools_and_settings_only():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    turned = {"type": "function", "function": {"name": "f", "parameters": {"b": 2, "a": 1}}}  # a template writes it so
    shapes = [shape_of(*one) for one in (
        ([], {}), ([tool], {}), ([turned], {}), ([tool, tool], {}), ([], {"a": True}), ([], {"a": 1}),
        ([tool], {"a": 1}), ([], {"a": 1, "b": 2}),
    )]  # fmt: skip
    assert len({*shapes}) == len(shapes) and shape_of([], {"b": 2, "a": 1}) == shapes[-1]
    turns = [answered(str(at), None, [user("hi")], assistant("yes"), shape) for at, shape in enumerate(shapes)]
    search, given = find(*turns[:-1]), [user("hi"), assistant("yes"), user("so")]
    for turn, shape in zip(turns[:-1], shapes, strict=False):
        assert divide(None, given, params(branch=True), search, shape)[0] is turn
    assert divide(None, given, params(branch=True), search, shapes[-1]) == (None, given)


def test_new_messages_of_a_branch_with_another_shape_follow_those_of_their_turn():
    shape, new = shape_of([], {"a": 1}), [user("ah")]
    base = answered("b", answered("a", None, [user("hi")], assistant("yes"), shape), [user("so")], assistant("well"))
    given = params(branch=True, messages="new")
    assert divide(base, new, given, find(base), shape) == (base, new)
    said = [user("hi"), assistant("yes"), user("so"), assistant("well"), *new]
    assert divide(base, new, given, find(base), shape_of([], {})) == (None, said)
    assert divide(base, new, params(messages="new"), find(base), b"") == (base, new), "without branch its tokens stand"


def test_a_replaced_turn_is_no_branch():
    session = Session("a", 0, SessionOptions(), 100.0, 0.0)
    base = answered("a", None, [user("hi")], assistant("yes"))
    one, other = (answered(rid, base, [user("so")], assistant("well")) for rid in "bc")
    given = [user("hi"), assistant("yes"), user("so"), assistant("well"), user("ah")]
    for turn in (base, one, other):
        session.add(turn, replaces=False)
    assert divide(None, given, params(branch=True), session.with_messages)[0] is other
    assert session.leaves == ["b", "c"]
    new = answered("d", base, [user("so")], assistant("no"))
    session.add(new, replaces=True)
    assert divide(None, given, params(branch=True), session.with_messages)[0] is base
    assert session.leaves == ["d"]


def test_thousands_of_replaced_turns_of_one_conversation_are_looked_through_once():
    class Noted(dict[bytes, list[Turn]]):
        num_taken = 0

        def pop(self, *arguments: Any) -> Any:
            self.num_taken += 1
            return super().pop(*arguments)

    session = Session("a", 0, SessionOptions(), 100.0, 0.0)
    session._by_digest = by_digest = Noted()
    before = session.num_bytes
    kept, others = Turn("k", None, 0, array("i", [1]), 1, None, (), digest=b"same"), []
    session.add(kept, replaces=False)
    for at in range(100):
        others.append(Turn(str(at), kept, 1, array("i", [2]), 1, None, (), digest=b"same" if at else b"another"))
        session.add(others[-1], replaces=False)
    new = Turn("n", kept, 1, array("i", [3]), 1, None, (), digest=b"new")
    assert session.add(new, replaces=True) and by_digest.num_taken == 2
    assert by_digest == {b"same": [kept], b"new": [new]} and [*session.turns] == ["k", "n"]
    assert session.num_bytes == before + kept.num_bytes + new.num_bytes


def test_a_branch_with_other_thoughts_goes_on_from_the_turn_before():
    base = first_turn([user("hi")], "yes]", reasoning_content="hm")
    given = [user("hi"), assistant("yes", reasoning_content="no"), user("so")]
    assert divide(base, given, params(branch=True), find(base)) == (None, given)


def test_a_turn_of_token_ids_has_no_messages_to_go_on_from():
    base = Turn("a", None, 0, array("i", [1, 2]), 1, None, ())
    for given in ([user("so")], [user("hi"), assistant("yes"), user("so")]):
        with pytest.raises(BadField, match="token ids"):
            divide(base, given, params(), find())
