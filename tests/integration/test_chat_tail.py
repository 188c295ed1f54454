"""Tests of the tokens that a template writes behind an answer, with templates of one character a token.

A token in angle brackets is one character here: U is the beginning of a user's message, M of the model's, E the end of
a turn, R the end of the last one, C the end of a call, T the beginning of a tool's result.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integration.chat_tail import Messages, Template, UnclearEnd, added_tokens

SPECIAL = "UMERCTQ"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}
ASK, RESULT, MORE = (
    {"role": "user", "content": "ask"}, {"role": "tool", "content": "sunny"}, {"role": "user", "content": "more"},
)  # fmt: skip


def answer(content: str = "", *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def tokens(text: str) -> list[int]:
    return list(map(ord, text))


def behind(render, history: str, known: Messages, new: Messages, *, matched: bool = True, close=None) -> str:
    template = Template(render, tokens, set(map(ord, SPECIAL)), close=close)
    stop = ord(history[-1]) if matched else None
    return "".join(map(chr, added_tokens(tokens(history), stop, known, new, template, refused=ValueError)))


def written(calls: list[dict[str, Any]]) -> str:
    return "".join(f"call {one['function']['name']}{one['function']['arguments']}C" for one in calls)


def within_turns(messages: Messages) -> str:
    """Write results of tools in the turn of the model that has the calls, and nowhere else, as Gemma 4's template."""
    found = ""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            found += f"U{message['content']}E\n"
        elif message["role"] == "assistant":
            found += "M"
            if calls := message.get("tool_calls"):
                results = [one["content"] for one in messages[index + 1 :] if one["role"] == "tool"]
                found += written(calls) + "".join(f"T{one}Q" for one in results)
            found += message["content"] + ("E\n" if not calls else "")
    return found + ("" if messages[-1]["role"] == "tool" else "M")


@pytest.mark.parametrize(("sampled", "matched"), [("C", True), ("CT", True), ("CE", True), ("C", False)])
def test_the_result_of_a_tool_is_behind_its_call_where_the_template_writes_it_there_alone(sampled, matched):
    history = "UaskE\nMcall f{'a': 'x'}" + sampled
    found = behind(within_turns, history, [ASK, answer("", CALL)], [RESULT], matched=matched)
    assert found == "TsunnyQ".removeprefix("T" if sampled == "CT" else "")


def test_the_content_of_an_answer_with_a_call_is_not_written_once_more_behind_the_result():
    assert (
        behind(within_turns, "UaskE\nMI look.call f{'a': 'x'}C", [ASK, answer("I look.", CALL)], [RESULT]) == "TsunnyQ"
    )


def test_a_new_message_that_the_template_would_lose_is_refused():
    with pytest.raises(UnclearEnd):
        behind(within_turns, "UaskE\nMhm E", [ASK, answer("hm")], [RESULT])


def test_a_new_message_that_the_template_moves_before_the_answer_is_refused():
    def hoists(messages: Messages) -> str:
        first = sorted(messages, key=lambda one: one["role"] != "system")
        return "".join(f"U{one['role']}:{one['content']}E\n" for one in first) + "M"

    late = {"role": "system", "content": "be brief"}
    with pytest.raises(UnclearEnd):
        behind(hoists, "Uuser:askE\nMhmE", [ASK, answer("hm")], [late, MORE])
    assert behind(hoists, "Uuser:askE\nUassistant:hmE", [ASK, answer("hm")], [MORE]) == "\nUuser:moreE\nM"


def two_ends(messages: Messages) -> str:
    """Write two tokens behind each answer, as Cohere's templates."""
    return "".join(f"M{one['content']}QE" if one["role"] == "assistant" else f"U{one['content']}E"
                   for one in messages) + "M"  # fmt: skip


@pytest.mark.parametrize("sampled", ["hmQE", "hmQ", "hm"])
def test_the_tokens_that_end_a_turn_stand_once_however_many_there_are(sampled):
    found = behind(two_ends, "UaskEM" + sampled, [ASK, answer("hm")], [MORE], matched=sampled != "hm")
    assert "UaskEM" + sampled + found == "UaskEMhmQEUmoreEM"


def test_blanks_before_the_token_that_ends_a_turn_are_not_written_behind_it():
    def spaced(messages: Messages) -> str:
        return "".join(f"U{one['content']} E" for one in messages) + "M"

    assert behind(spaced, "Uask EMhmE", [ASK, answer("hm")], [MORE]) == "Umore EM"
    assert behind(spaced, "Uask EMhm", [ASK, answer("hm")], [MORE], matched=False) == " EUmore EM"


def rewritten(messages: Messages, *, is_closed: bool = False) -> str:
    """Write R behind the last answer of a closed conversation, and E behind all others, as gpt-oss's template."""
    ends = ["E"] * (len(messages) - 1) + ["R" if is_closed else "E"]
    found = "".join(f"U{one['role']}:{one['content']}{end}" for one, end in zip(messages, ends, strict=True))
    return found if is_closed else found + "M"


def test_a_token_that_ends_the_last_answer_alone_stands_for_the_one_that_ends_others():
    def close(told: Messages) -> str:
        return rewritten(told, is_closed=True)

    known = [ASK, answer("hm")]
    assert behind(rewritten, "Uuser:askEMhmR", known, [MORE], close=close) == "Uuser:moreEM"
    assert behind(rewritten, "Uuser:askEMhmQ", known, [MORE], close=close) == "EUuser:moreEM", "it closes no turn"
    assert behind(rewritten, "Uuser:askEMhmR", known, [MORE]) == "EUuser:moreEM", "a template that cannot be asked"


def test_a_call_whose_end_no_special_token_shows_is_followed_by_its_result():
    def plain(messages: Messages) -> str:
        return within_turns(messages).translate(str.maketrans("CTQ", "ctq"))

    history = "UaskE\nMcall f{'a': 'x'}c"
    assert behind(plain, history, [ASK, answer("", CALL)], [RESULT], matched=False) == "tsunnyq"
    assert behind(plain, history + "E", [ASK, answer("", CALL)], [RESULT]) == "tsunnyq"
    with pytest.raises(UnclearEnd):
        behind(plain, "UaskE\nMcall f and more?", [ASK, answer("", CALL)], [RESULT], matched=False)
