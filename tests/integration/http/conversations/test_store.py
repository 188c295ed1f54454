"""Tests of sessions without a server: their turns, limits, ends and errors, with a clock of their own."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from lockstep.integration.http.conversations.history import Template
from lockstep.integration.http.conversations.next_turn import NextTurn
from lockstep.integration.http.conversations.params import read_session_params
from lockstep.integration.http.conversations.session import SESSION_BYTES, SessionOptions
from lockstep.integration.http.conversations.store import Sessions
from lockstep.integration.http.conversations.turns import spans_of, tokens_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField, Draining, HttpError
from lockstep.rollout.completion import Completion, DrawnWith, FinishReason, WeightSpan
from lockstep.rollout.errors import Overloaded
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(HttpConfig(max_sessions=8, session_idle_s=100.0), clock)


def completed(prompt: list[int], output: list[int], version: str = "1") -> Completion:
    spans = (WeightSpan(version, None, 0, len(output)),) if output else ()
    return Completion("id", 0, tuple(prompt), tuple(output), "", (0.0,) * len(output), FinishReason("length"), 0, 0,
                      version, None, spans)  # fmt: skip


def begin(sessions: Sessions, id: str, rid: str, /, **fields: object) -> NextTurn:
    params = read_session_params({"id": id, **fields})
    assert params is not None
    return sessions.begin(params, rid)


def turn(
    sessions: Sessions, id: str, rid: str, new: list[int], output: list[int], /, **fields: object
) -> tuple[list[int], dict]:
    """Run a request of token ids on a session. Returns its prompt, and the `session` of its answer."""
    request = begin(sessions, id, rid, **fields)
    prompt = request.joined(new)
    told = request.keep(completed(prompt, output))
    request.end()
    return prompt, told


def refused(call, *args: object, **fields: object) -> HttpError:
    with pytest.raises(HttpError) as error:
        call(*args, **fields)
    return error.value


# -- turns ----------------------------------------------------------------------------------------------------------


def test_a_prompt_begins_with_the_tokens_of_the_last_turn(sessions):
    id = sessions.open().id
    assert turn(sessions, id, "a", [1, 2], [3])[0] == [1, 2]
    prompt, told = turn(sessions, id, "b", [4], [5, 6])
    assert prompt == [1, 2, 3, 4]
    assert told == {"id": id, "rid": "b", "parent_rid": "a", "num_history_tokens": 3}
    assert turn(sessions, id, "c", [7], [8])[0] == [1, 2, 3, 4, 5, 6, 7]


def test_a_turn_names_the_one_that_it_goes_on_from(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    turn(sessions, id, "b", [3], [4])
    assert turn(sessions, id, "c", [5], [6], rid="a")[0] == [1, 2, 5]
    assert turn(sessions, id, "d", [7], [8], rid="b")[0] == [1, 2, 3, 4, 7]
    assert turn(sessions, id, "e", [9], [], rid="c")[0] == [1, 2, 5, 6, 9]


def test_a_history_is_cut_at_an_offset_and_drops_an_answer(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1, 2], [3, 4])
    for offset, expected in ((1, [1, 9]), (-1, [1, 2, 3, 9]), (4, [1, 2, 3, 4, 9]), (-4, [9]), (0, [1, 2, 3, 4, 9])):
        assert turn(sessions, id, f"at {offset}", [9], [], rid="a", offset=offset)[0] == expected
    prompt, told = turn(sessions, id, "dropped", [9], [8], rid="a", drop_previous_output=True)
    assert prompt == [1, 2, 9] and told["num_history_tokens"] == 2
    assert turn(sessions, id, "on", [7], [], rid="dropped")[0] == [1, 2, 9, 8, 7]
    for offset in (5, -5, 2**30):
        error = refused(begin(sessions, id, f"far {offset}", rid="a", offset=offset).joined, [9])
        assert (error.status, error.param) == (400, "session_params.offset") and "4 tokens" in error.message


def test_replacing_forgets_the_turns_after_one_and_without_one_all(sessions):
    id = sessions.open().id
    for rid, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        turn(sessions, id, rid, [1], [2], rid=parent)
    num_bytes = sessions.report()["num_bytes"]
    turn(sessions, id, "e", [3], [4], rid="a", replace=True)
    session = sessions.find(id, "id")
    assert list(session.turns) == ["a", "e"] and sessions.report()["num_bytes"] < num_bytes
    assert "no turn 'c'" in refused(begin, sessions, id, "f", rid="c").message
    assert turn(sessions, id, "g", [5], [6], replace=True)[0] == [5]
    assert list(session.turns) == ["g"]


def test_a_request_that_fails_replaces_nothing(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    request = begin(sessions, id, "b", replace=True)
    request.joined([3])
    request.end()
    assert turn(sessions, id, "c", [4], [])[0] == [1, 2, 4]


def test_an_answer_that_is_made_after_its_client_left_is_no_turn(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    request = begin(sessions, id, "b", replace=True)
    prompt = request.joined([3])
    request.end()
    told = request.keep(completed(prompt, [4]))
    assert told["rid"] is None and "without its answer" in told["why_not_kept"]
    session = sessions.find(id, "id")
    assert list(session.turns) == ["a"] and session.last.rid == "a" and request.kept is None
    assert sessions.report()["num_bytes"] == session.num_bytes


def test_of_two_requests_at_a_time_each_goes_on_from_its_own_and_the_last_is_the_one_that_ends_last(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    first, second = begin(sessions, id, "b"), begin(sessions, id, "c")
    prompts = first.joined([3]), second.joined([4])
    assert prompts == ([1, 2, 3], [1, 2, 4])
    assert refused(begin, sessions, id, "d", rid="b").message.endswith("the request 'b' has not ended")
    second.keep(completed(prompts[1], [5]))
    first.keep(completed(prompts[0], [6]))
    assert turn(sessions, id, "d", [7], [])[0] == [1, 2, 3, 6, 7]
    assert turn(sessions, id, "e", [7], [], rid="c")[0] == [1, 2, 4, 5, 7]


def test_an_answer_whose_turn_was_replaced_meanwhile_is_none(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    turn(sessions, id, "b", [3], [4])
    slow = begin(sessions, id, "c")
    prompt = slow.joined([5])
    turn(sessions, id, "d", [6], [7], rid="a", replace=True)
    told = slow.keep(completed(prompt, [8]))
    assert told["rid"] is None and "'b' was replaced" in told["why_not_kept"]
    assert list(sessions.find(id, "id").turns) == ["a", "d"]


def test_a_streaming_session_takes_one_request_at_a_time_after_the_last(sessions):
    id = sessions.open(options=SessionOptions(streaming=True)).id
    turn(sessions, id, "a", [1], [2])
    turn(sessions, id, "b", [3], [4])
    request = begin(sessions, id, "c")
    assert refused(begin, sessions, id, "d").status == 409
    request.end()
    for fields in ({"replace": True}, {"offset": 1}, {"drop_previous_output": True}, {"branch": True}, {"rid": "a"}):
        error = refused(begin, sessions, id, "e", **fields)
        assert (error.status, error.param) == (400, f"session_params.{next(iter(fields))}")
    assert turn(sessions, id, "f", [5], [])[0] == [1, 2, 3, 4, 5], "a request that ended without an answer is no turn"


def test_an_id_names_one_turn_of_a_session(sessions):
    id = sessions.open().id
    turn(sessions, id, "a", [1], [2])
    begin(sessions, id, "b")
    for rid in ("a", "b"):
        assert refused(begin, sessions, id, rid).param == "rid"
    other = sessions.open().id
    assert turn(sessions, other, "a", [1], [2])[0] == [1]


def test_versions_are_kept_for_each_run_of_tokens(sessions):
    id = sessions.open().id
    first = begin(sessions, id, "a")
    spans = (WeightSpan("1", "x", 0, 2), WeightSpan("2", None, 2, 3))
    first.keep(replace(completed(first.joined([1, 2]), [3, 4, 5]), weight_versions=spans))
    turn(sessions, id, "b", [6], [7, 8])
    whole = sessions.find(id, "id").last
    assert [(s["rid"], s["start"], s["end"], s["version"], s["digest"]) for s in spans_of(whole)] == [
        ("a", 2, 4, "1", "x"), ("a", 4, 5, "2", None), ("b", 6, 8, "1", None)]  # fmt: skip
    turn(sessions, id, "c", [9], [], rid="a", offset=3)
    cut = sessions.find(id, "id").last
    assert tokens_of(cut) == [1, 2, 3, 9]
    assert [(s["start"], s["end"]) for s in spans_of(cut)] == [(2, 3)], "runs end where the history is cut"


def test_log_probabilities_are_kept_for_each_run_as_float32(sessions):
    id = sessions.open().id
    request = begin(sessions, id, "a")
    told = tuple(torch.tensor([-0.1, -1e-42, float("-inf"), -3.4e38, float("nan")], dtype=torch.float32).tolist())
    spans = (WeightSpan("1", "x", 0, 2), WeightSpan("2", None, 2, 5))
    answer = replace(completed(request.joined([1, 2]), [3, 4, 5, 6, 7]), logprobs=told, weight_versions=spans)
    request.keep(replace(answer, drawn_with=DrawnWith(SamplingParams(temperature=0.5), RequestOptions(), 1)))
    last = sessions.find(id, "id").last
    runs = spans_of(last, has_logprobs=True)
    assert json.loads(json.dumps([run["logprobs"] for run in runs])) == [list(told[:2]), [None, told[3], None]]
    assert {(run["temperature"], run["finish_reason"]) for run in runs} == {(0.5, "length")}
    assert "logprobs" not in spans_of(last)[0]
    turn(sessions, id, "b", [9], [8], rid="a", offset=4)
    runs = spans_of(sessions.find(id, "id").last, has_logprobs=True)
    assert [run["logprobs"] for run in runs] == [list(told[:2]), [0.0]], "only of the tokens that are kept"


def test_leaves_are_the_turns_that_no_other_goes_on_from(sessions):
    id = sessions.open().id
    assert sessions.find(id, "id").leaves == []
    for rid, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "a"), ("e", "d")):
        turn(sessions, id, rid, [1], [2], rid=parent)
    turn(sessions, id, "f", [1], [2], rid="a", drop_previous_output=True)
    assert sessions.find(id, "id").leaves == ["c", "e", "f"]


def test_random_trees_hold_the_tokens_that_a_plain_list_holds(sessions):
    draw, id = random.Random(4), sessions.open().id
    plain: dict[str, list[int]] = {}
    for number in range(300):
        parent = draw.choice(list(plain)) if plain else None
        kept = plain[parent] if parent else []
        offset = draw.randint(-len(kept), len(kept)) if kept else 0
        kept = kept[:offset] if offset else kept
        new, output = ([draw.randrange(9) for _ in range(draw.randrange(4))] for _ in range(2))
        prompt, _ = turn(sessions, id, str(number), new, output, rid=parent, offset=offset)
        assert prompt == kept + new
        plain[str(number)] = kept + new + output
    for rid, one in sessions.find(id, "id").turns.items():
        assert tokens_of(one) == plain[rid]
        assert tokens_of(one, 3) == plain[rid][:3]


# -- ends and limits ------------------------------------------------------------------------------------------------


def test_a_session_that_is_no_more_says_why(sessions, clock):
    closed, old = sessions.open("closed").id, sessions.open("old").id
    sessions.close(closed)
    clock.now += 101.0
    told = {id: refused(begin, sessions, id, "a") for id in ("never", closed, old)}
    assert {error.status for error in told.values()} == {404}
    assert [error.code for error in told.values()] == ["session_unknown", "session_closed", "session_expired"]
    assert {error.param for error in told.values()} == {"session_params.id"}
    assert "session_idle_s" in told[old].message and "100 s" in told[old].message
    assert refused(sessions.close, old).code == "session_expired"
    assert sessions.open(old).id == old, "its id is free again"
    assert begin(sessions, old, "a").joined([1]) == [1]


def test_use_puts_expiry_off_and_an_open_request_prevents_it(sessions, clock):
    id = sessions.open().id
    for number in range(4):
        clock.now += 99.0
        turn(sessions, id, str(number), [1], [2])
    request = begin(sessions, id, "long")
    clock.now += 1000.0
    assert sessions.report()["num_open"] == 1
    request.end()
    clock.now += 99.0
    assert sessions.report()["num_open"] == 1
    clock.now += 2.0
    report = sessions.report()
    assert (report["num_open"], report["num_bytes"], report["num_turns"], report["num_expired"]) == (0, 0, 0, 1)


def test_a_session_may_have_a_shorter_time_and_none_has_a_longer_one(sessions, clock):
    short = sessions.open("short", SessionOptions(timeout_s=10.0))
    long = sessions.open("long", SessionOptions(timeout_s=10_000.0))
    assert (sessions.seconds_left(short), sessions.seconds_left(long)) == (10.0, 100.0)
    clock.now += 11.0
    assert refused(sessions.find, "short", "session_id").code == "session_expired"
    clock.now += 90.0
    assert refused(sessions.find, "long", "session_id").code == "session_expired"


def test_a_session_that_is_closed_under_a_request_takes_no_turn(sessions):
    id = sessions.open().id
    request = begin(sessions, id, "a")
    prompt = request.joined([1])
    sessions.close(id)
    told = request.keep(completed(prompt, [2]))
    request.end()
    assert told["rid"] is None and "has ended" in told["why_not_kept"]
    again = sessions.open(id)
    assert not again.turns and sessions.report()["num_bytes"] == again.num_bytes


def test_there_are_as_many_sessions_as_the_setting_says(sessions, clock):
    ids = [sessions.open().id for _ in range(8)]
    with pytest.raises(Overloaded, match="max_sessions"):
        sessions.open()
    with pytest.raises(Overloaded, match="max_sessions"):
        begin(sessions, "another", "a", open=True)
    sessions.close(ids[0])
    assert begin(sessions, "another", "a", open=True).joined([1]) == [1]
    with pytest.raises(Overloaded):
        sessions.open()
    clock.now += 101.0
    assert sessions.open().id, "the idle ones have made room; the one with an open request has not"
    assert sessions.report()["num_open"] == 2


def test_an_id_that_is_open_cannot_be_opened_again_but_by_a_request(sessions):
    sessions.open("mine")
    assert refused(sessions.open, "mine").param == "session_id"
    turn(sessions, "mine", "a", [1], [2], open=True)
    assert turn(sessions, "mine", "b", [3], [], open=True)[0] == [1, 2, 3]
    assert sessions.report()["num_opened"] == 1


def test_an_id_that_cannot_be_opened_is_named_by_its_field(sessions):
    assert refused(begin, sessions, "a\nb", "a", open=True).param == "session_params.id"
    assert refused(sessions.open, "a\nb").param == "session_id"
    assert sessions.report()["num_opened"] == 0


def test_a_session_that_requests_opened_is_none_where_all_of_them_failed(sessions):
    for number in range(20):
        assert refused(begin, sessions, f"no turn {number}", "a", open=True, rid="b").param == "session_params.rid"
        begin(sessions, f"failed {number}", "a", open=True).end()
    first, second = (begin(sessions, "two", rid, open=True) for rid in "ab")
    first.end()
    assert second.keep(completed(second.joined([1]), [2]))["rid"] == "b"
    second.end()
    begin(sessions, "two", "c").end()
    report = sessions.report()
    assert (report["num_open"], report["num_opened"], report["num_unused"], report["num_closed"]) == (1, 41, 40, 0)
    assert report["num_bytes"] == sessions.find("two", "id").num_bytes
    assert refused(sessions.find, "failed 0", "id").code == "session_unknown"
    assert turn(sessions, "failed 0", "a", [1], [2], open=True)[1]["rid"] == "a", "it lost nothing: a retry opens it"
    sessions.open("empty")
    begin(sessions, "empty", "a", open=True).end()
    assert not sessions.find("empty", "id").turns, "one that was opened by itself stays"


def test_a_session_that_was_closed_under_its_first_request_is_closed(sessions):
    request = begin(sessions, "mine", "a", open=True)
    sessions.close("mine")
    request.end()
    assert refused(sessions.find, "mine", "id").code == "session_closed"
    assert sessions.report()["num_unused"] == 0


def test_sessions_beyond_their_memory_are_refused_until_some_end(clock):
    sessions = Sessions(HttpConfig(max_session_bytes=100_000), clock)
    ids = [sessions.open().id for _ in range(3)]
    turn(sessions, ids[0], "a", [1] * 8000, [2] * 1000)
    turn(sessions, ids[1], "a", [1] * 8000, [2] * 9000)  # an output is kept, also where it is too long
    for call in (lambda: turn(sessions, ids[0], "b", [3], []), lambda: turn(sessions, ids[2], "a", [3], []),
                 sessions.open):  # fmt: skip
        with pytest.raises(Overloaded, match="max_session_bytes"):
            call()
    sessions.close(ids[1])
    assert len(turn(sessions, ids[0], "b", [3], [])[0]) == 9001


def test_what_open_requests_will_add_counts_before_they_are_answered(clock):
    sessions = Sessions(HttpConfig(max_session_bytes=50_000), clock)
    id = sessions.open().id
    first, second, third = (begin(sessions, id, rid) for rid in "abc")
    prompt = first.joined([1] * 8000)
    with pytest.raises(Overloaded, match="max_session_bytes"):
        second.joined([1] * 8000)
    template = Template(lambda messages: "", lambda text: [1], ())
    message = {"role": "user", "content": "hi", "unknown": "x" * 30_000}
    with pytest.raises(Overloaded):
        third.chat_prompt([message], (), lambda turn: template)
    first.end()
    assert len(second.joined([1] * 8000)) == 8000
    second.keep(completed(prompt, [2]))
    for request in (second, third):
        request.end()
    assert sessions.report()["num_bytes"] == sessions.find(id, "id").num_bytes > 32_000
    sessions.close(id)
    sessions.open()
    assert len(begin(sessions, sessions.open("b").id, "d").joined([1] * 9000)) == 9000, "nothing stays reserved"


def test_a_server_that_ends_opens_none(sessions):
    id = sessions.open().id
    sessions.is_draining = True
    with pytest.raises(Draining):
        sessions.open()
    assert turn(sessions, id, "a", [1], [2])[0] == [1], "what is open goes on"


def test_ten_thousand_sessions_are_opened_closed_and_expire_without_a_trace(clock):
    sessions = Sessions(HttpConfig(max_sessions=1000, session_idle_s=100.0), clock)
    for number in range(10_000):
        id = sessions.open().id
        if number % 10:
            sessions.close(id)
        else:
            clock.now += 0.5
    report = sessions.report()
    assert report["num_opened"] == 10_000 == report["num_open"] + report["num_closed"] + report["num_expired"]
    assert report["num_open"] <= 201
    assert len(sessions._deadlines) <= 2 * report["num_open"] + 64, "old deadlines do not pile up"
    assert len(sessions._ended) <= 1000
    clock.now += 101.0
    assert sessions.report()["num_bytes"] == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_new", "num_turns", "size"),
    [(4, 2, 300, 0), (4000, 2, 20, 0), (4, 4000, 20, 0), (1, 0, 300, 3), (1, 2, 300, 3), (0, 2, 99, 5000)],
)
def test_the_memory_that_is_counted_is_the_memory_that_is_taken(clock, num_tokens, num_new, num_turns, size):
    sessions = Sessions(HttpConfig(), clock)
    id = sessions.open().id

    def one_turn(number: int) -> None:
        request = begin(sessions, id, f"request {number:06}")
        prompt = request.joined([5] * num_tokens)
        if size:  # as `chat_prompt`, without a template
            request._messages, request._digest = (), b"d%d" % number
        message = {"role": "assistant", "content": chr(97 + number % 26) * size}
        request.keep(completed(prompt, [7] * num_new), message)
        request.end()

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(num_turns):
            one_turn(number)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sessions.report()["num_bytes"]
    assert 0.95 * taken <= counted <= 2 * taken + 3000, (taken, counted)


def test_requests_of_many_threads_leave_the_counts_right(clock):
    sessions = Sessions(HttpConfig(max_sessions=6, max_session_bytes=60_000), clock)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(300):
            params = read_session_params({"id": str(draw.randrange(8)), "open": True, "replace": draw.random() < 0.1})
            with suppress(HttpError, Overloaded):
                request = sessions.begin(params, f"{seed} {number}")
                try:
                    prompt = request.joined([1] * draw.randrange(50))
                    if draw.random() < 0.9:
                        request.keep(completed(prompt, [2] * draw.randrange(9)))
                finally:
                    request.end()
            if draw.random() < 0.05:
                with suppress(HttpError, Overloaded):
                    sessions.close(id := str(draw.randrange(8)))
                    sessions.open(id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    report, left = sessions.report(), [sessions._sessions[id] for id in list(sessions._sessions)]
    assert report["num_opened"] > 6 and report["num_open_requests"] == 0 == sessions._num_reserved
    for session in left:
        counted = sum(turn.num_bytes for turn in session.turns.values())
        assert session.num_bytes == SESSION_BYTES + len(session.id) + counted
        assert all(turn.parent is None or turn.parent.rid in session.turns for turn in session.turns.values())
    assert report["num_bytes"] == sum(session.num_bytes for session in left)
    for session in left:
        sessions.close(session.id)
    assert sessions.report()["num_bytes"] == 0


# -- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("mine", "session_params"),
        ([{"id": "a"}], "session_params"),
        ({"rid": "a"}, "session_params.id"),
        ({"id": ""}, "session_params.id"),
        ({"id": "x" * 257}, "session_params.id"),
        ({"id": None}, "session_params.id"),
        ({"id": "a", "rid": "x" * 1025}, "session_params.rid"),
        ({"id": "a", "offset": 1.5}, "session_params.offset"),
        ({"id": "a", "offset": True}, "session_params.offset"),
        ({"id": "a", "offset": 2**31}, "session_params.offset"),
        ({"id": "a", "replace": "perhaps"}, "session_params.replace"),
        ({"id": "a", "messages": "some"}, "session_params.messages"),
        ({"id": "a", "ofset": 1}, "session_params"),
    ],
)
def test_wrong_fields_are_named(given, param):
    with pytest.raises(BadField) as error:
        read_session_params(given)
    assert error.value.param == param and error.value.message.startswith(f"{param}: ")


def test_no_fields_are_no_session():
    assert [read_session_params(given) for given in (None, {}, [], "", False)] == [None] * 5


@pytest.mark.parametrize("name", ["max_sessions", "max_session_bytes", "session_idle_s"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=name):
        HttpConfig(**{name: 0})


def test_a_long_line_of_turns_is_read_and_let_go_without_recursion(sessions):
    id = sessions.open().id
    num_turns = 3 * sys.getrecursionlimit()
    for number in range(num_turns):
        request = begin(sessions, id, str(number))
        request._num_history = request.num_tokens_before  # as `joined`, without the work of making each prompt
        base = request._base
        prompt = [1] * (0 if base is None else base.num_tokens)
        request.keep(completed(prompt, [2]))
        request.end()
    assert len(tokens_of(sessions.find(id, "id").last)) == num_turns
    sessions.close(id)
    assert sessions.report()["num_bytes"] == 0
