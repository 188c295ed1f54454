"""The fields that a router writes into a request, and the tokens of a stream that it reads from the comments in it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass

import pytest

from lockstep.integration.http.edge.errors import SERVER_ENDED
from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.moving.fields import seeded, with_fields
from lockstep.integration.router.moving.progress import Progress, StreamCut, end_of_events
from lockstep.integration.router.wire import WorkerFailed
from lockstep.rollout.giving_way import giving_way

BITS = {"invariant": True, "isa": "avx512"}


@dataclass
class Host:
    weight_digest: str | None = "d1"
    guarantee: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self.guarantee = BITS if self.guarantee is None else self.guarantee


def event(data: object, *notes: object) -> bytes:
    comments = "".join(f": progress {json.dumps(note)}\n" for note in notes)
    return f"{comments}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def head(num: int = 1) -> dict[str, object]:
    return {"head": {"rids": ["a"]}, "guarantee": BITS, "num_sequences": num}


def note(ids: list[int], **more: object) -> dict[str, object]:
    return {"index": 0, "ids": ids, "logprobs": [-0.5] * len(ids), "chars": len(ids), **more}


FIRST = note([1, 2, 3], digest="d1", version="1", cached=2)


def read(progress: Progress, *events: bytes) -> bytes:
    passed = b""
    for one, notes in progress.read(b"".join(events)):
        passed += one
        progress.add(notes)
    return passed


def begun(progress: Progress) -> dict:
    found = progress.begun_at(Host())
    return found["sequences"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', {"seed": 7, "a": 1}),
        (b' \n{ "seed": 3 }', {"seed": 3}),  # the client's own stays
        (b"{}", {"seed": 7}),
        (b"{ }", {"seed": 7}),
    ],
)
def test_fields_stand_before_the_clients_own(body, expected):
    assert json.loads(with_fields(body, {"seed": 7})) == expected


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b"\xff", b" "])
def test_a_body_that_is_no_object_stays_as_it_is(body):
    assert with_fields(body, {"seed": 7}) == body


@pytest.mark.parametrize(("before", "after"), [(b"{", b"}"), (b"", b'{"a":1}'), (b"{", b'"a":1}')])
def test_space_in_a_body_costs_no_time_of_the_other_requests(before, after):
    body = before + b" " * (32 << 20) + after
    start = time.process_time()
    longer = with_fields(body, {"seed": 7})
    assert time.process_time() - start < 1.0  # one byte after the other it takes ten seconds
    assert json.loads(longer) == {"seed": 7, **json.loads(body)}


def test_long_fields_are_written_in_slices_between_which_others_go_on():
    progress, num_waits = Progress("proven"), 0
    read(progress, event("a", head(), {**FIRST, "ids": list(range(200_000)), "logprobs": [-0.25] * 200_000}))

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1

    fields = {"begun": progress.begun_at(Host())}
    with giving_way(wait, threading.Lock()):
        body = with_fields(b'{"a":1}', fields)
    assert num_waits > 5
    assert json.loads(body) == {**json.loads(json.dumps(fields)), "a": 1}


def test_only_calls_that_complete_prompts_get_a_seed_and_each_another_one():
    calls = [seeded(WorkerCall("POST", "/generate", "", (), b"{}"), wants_progress=False) for _ in range(9)]
    assert len({json.loads(call.body)["default_seed"] for call in calls}) == 9
    for method, path in (("GET", "/generate"), ("POST", "/tokenize"), ("POST", "/renew")):
        call = WorkerCall(method, path, "", (), b"{}")
        assert seeded(call, wants_progress=True) is call


def test_comments_are_read_and_not_passed_on():
    progress = Progress("proven")
    assert progress.why_lost is not None
    assert read(progress, event("1", head(), FIRST), event("2", note([4], ended=True))) == b"data: 1\n\ndata: 2\n\n"
    assert progress.why_lost is None and progress.num_tokens == 4 and not progress.is_done
    assert begun(progress) == {
        "token_ids": [1, 2, 3, 4], "logprobs": [-0.5] * 4, "num_chars": 4, "cached_tokens": 2, "has_ended": True,
        "spans": [("1", "d1", 0)],
    }  # fmt: skip
    read(progress, event("[DONE]"))
    assert progress.is_done


def test_an_event_counts_only_when_it_is_passed_on():
    progress = Progress("proven")
    events = progress.read(event("1", head(), FIRST) + event("2", note([4])))
    _, notes = next(events)
    progress.add(notes)
    next(events)
    assert begun(progress)["token_ids"] == [1, 2, 3]


def test_tokens_that_are_taken_back_take_their_weights_along():
    progress = Progress("trusted")
    read(progress, event("1", head(), FIRST), event("2", note([4, 5], digest="d2", version="2", cached=2)))
    assert begun(progress)["spans"] == [("1", "d1", 0), ("2", "d2", 3)]
    read(progress, event("3", note([6], taken_back=3, chars_taken_back=3, digest="d1", version="1", cached=2)))
    assert begun(progress) | {"logprobs": []} == {
        "token_ids": [1, 2, 6], "logprobs": [], "num_chars": 3, "cached_tokens": 2, "has_ended": False,
        "spans": [("1", "d1", 0)],
    }  # fmt: skip


@pytest.mark.parametrize("num", [3, 2])
def test_tokens_that_newer_weights_draw_again_from_any_token_have_one_span_for_each_weights(num):
    progress = Progress("proven")
    newer = {"digest": "d2", "version": "2", "cached": 2}
    read(progress, event("1", head(), FIRST), event("2", note([4], taken_back=num, chars_taken_back=num, **newer)))
    old = [("1", "d1", 0)][: 3 - num]
    assert begun(progress)["spans"] == [*old, ("2", "d2", 3 - num)]
    read(progress, event("3", note([5], taken_back=1)))  # a worker names its weights only when they change
    assert begun(progress)["spans"] == [*old, ("2", "d2", 3 - num)]


def test_tokens_that_are_taken_back_and_not_drawn_again_yet_leave_spans_below_their_number():
    progress = Progress("proven")
    read(progress, event("1", head(), FIRST), event("2", note([4], digest="d2", version="2", cached=2)))
    read(progress, event("3", note([], taken_back=1)))
    assert begun(progress)["spans"] == [("1", "d1", 0)]
    read(progress, event("4", note([5])))
    assert begun(progress)["spans"] == [("1", "d1", 0), ("2", "d2", 3)]


@pytest.mark.parametrize(
    "last",
    [
        event("3", note([4], ended=SERVER_ENDED)),  # the end of a drain, and no abort by a client
        event({"error": {"message": "the loop ended", "code": 503, "type": "server_error"}}),
        event({"error": {"message": "the loop ended", "code": None, "type": "server_error"}}),  # OpenAI's shape
    ],
)
def test_a_worker_that_ends_a_stream_before_its_end_is_left(last):
    progress = Progress("proven")
    with pytest.raises(StreamCut):
        read(progress, event("1", head(), FIRST), last)
    assert begun(progress)["token_ids"] == [1, 2, 3] and not begun(progress)["has_ended"]


@pytest.mark.parametrize(
    "last",
    [
        event("3", note([4], ended="Aborted")),
        event({"error": {"message": "not proven", "code": 409, "type": "invalid_request_error"}}),
        event({"error": "odd"}),
    ],
)
def test_an_abort_and_an_error_of_the_request_are_the_clients(last):
    progress = Progress("proven")
    assert read(progress, event("1", head(), FIRST), last).count(b"data: ") == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"index": 9}, {"index": -1}, {"index": 0, "ids": "x"}, {"index": 0, "digest": 1}, {"head": 1}, note([2**70]),
        note([4], digest={}, version="1", cached=0), head(10**12), head(5000), head(0),
        {"head": [["rids", 1]], "guarantee": BITS, "num_sequences": 1},
    ],
)  # fmt: skip
def test_notes_that_cannot_be_understood_lose_the_stream_and_not_the_events(odd):
    progress = Progress("proven")
    assert read(progress, event("1", head(), FIRST), event("2", odd), event("3")) == event("1") + event("2") + event(
        "3"
    )
    assert progress.why_lost == "the notes of its worker cannot be understood"


@pytest.mark.parametrize("odd", [b"{", b"[1]", b"[" * 200_000, b"9" * 5000])
def test_a_comment_that_is_no_note_is_the_workers_failure(odd):
    with pytest.raises(WorkerFailed, match="no note"):
        read(Progress("proven"), b": progress " + odd + b"\ndata: 1\n\n")


def test_an_error_that_is_nested_too_deeply_is_passed_on():
    deep = b'data: {"error": ' + b"[" * 200_000 + b"\n\n"
    assert read(Progress("proven"), deep) == deep


def test_events_whose_lines_end_with_crlf_are_read_and_stay_as_they_are():
    events = [event("1", head(), FIRST), event("2", note([4], ended=True)), event("[DONE]")]
    progress = Progress("proven")
    passed = read(progress, *(one.replace(b"\n", b"\r\n") for one in events))
    assert passed == b"data: 1\r\n\r\ndata: 2\r\n\r\ndata: [DONE]\r\n\r\n"
    assert begun(progress)["token_ids"] == [1, 2, 3, 4] and progress.is_done


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"data: 1\n\nda", 9),
        (b"data: 1\r\n\r\nda", 11),
        (b"a\n\nb\r\n\r\n", 8),
        (b"a\r\n\r\nb\n\nc", 8),
        (b"a\r\n\r", 0),
    ],
)
def test_the_end_of_the_last_whole_event_is_found_with_both_ends_of_lines(data, end):
    assert end_of_events(data) == end


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (Host(), None),
        (Host("d2"), "the digest d2"),
        (Host(None), "the digest None"),
        (Host(guarantee={**BITS, "isa": "avx2"}), "its isa is avx2, and was avx512"),
        (Host(guarantee={}), "its invariant is None"),
    ],
)
def test_a_worker_that_would_draw_other_bits_cannot_go_on(host, why):
    progress = Progress("proven")
    read(progress, event("1", head()))
    assert progress.why_not(host) is None, "no token is drawn yet"
    read(progress, event("2", FIRST))
    found = progress.why_not(host)
    assert found is None if why is None else found is not None and why in found


# -- groups of events -----------------------------------------------------------------------------------------------


def named(kind: str, *notes: object) -> bytes:
    return event({"type": kind}, *notes).replace(b"data:", f"event: {kind}\ndata:".encode())


def test_events_of_one_output_count_together():
    groups = [
        named("message_start", head(), {"index": 0}),
        named("block", FIRST, {"events": 2}) + named("delta"),
        named("delta", note([4])),
        named("block_stop", note([5]), {"index": 0}, {"events": 3}) + named("block") + named("delta"),
        named("message_delta", {"usage": True}, {"events": 2}) + named("message_stop"),
    ]
    whole, progress = b"".join(groups), Progress("proven")
    ends = [sum(map(len, groups[:num])) for num in range(len(groups) + 1)]
    for at in range(1, len(whole) + 1):
        events = whole[: end_of_events(whole[:at])]
        expected = max(end for end in ends if end <= len(events))
        assert progress.end_of_groups(events) == expected
    assert progress.end_of_groups(groups[0] + named("ping")) == len(groups[0] + named("ping"))
    for group in groups:
        assert not progress.is_done
        assert b"progress" not in read(progress, group)
    assert progress.is_done and progress.has_usage and progress.why_lost is None
    assert begun(progress)["token_ids"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["api_error", "overloaded_error"])
def test_an_error_of_a_worker_in_anthropics_shape_cuts_the_stream(kind):
    progress = Progress("proven")
    read(progress, event(1, head(), FIRST))
    value = {"type": "error", "error": {"type": kind, "message": "the engine has stopped", "code": None}}
    line = f"event: error\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
    assert progress.concerns(line)
    with pytest.raises(StreamCut, match="the engine has stopped"):
        list(progress.read(line))
    value["error"]["type"] = "invalid_request_error"  # type: ignore[index]
    own = f"event: error\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
    assert [passed for passed, _ in progress.read(own)] == [own], "the request's own fault is passed on"


@pytest.mark.parametrize(("status", "is_cut"), [(503, True), (500, True), (409, False), (None, False)])
def test_an_error_of_a_worker_in_a_response_cuts_the_stream(status, is_cut):
    progress = Progress("proven")
    read(progress, event(1, head(), FIRST))
    value = {"type": "error", "code": "engine_stopped", "message": "it has stopped", "param": None, "status": status}
    events = b"".join(
        f"event: {one['type']}\ndata: {json.dumps(one, separators=(',', ':'))}\n\n".encode()
        for one in (value, {"type": "response.failed", "response": {}})
    )
    if is_cut:
        with pytest.raises(StreamCut, match="it has stopped"):
            list(progress.read(events))
    else:
        assert b"".join(passed for passed, _ in progress.read(events)) == events


@pytest.mark.parametrize("line", ["[1]", '{"error":5}', '{"error":{"code":1}}', '{"type":"error"}', "{"])
def test_an_event_that_is_hardly_an_error_is_passed_on(line):
    own = f"data: {line}\n\n".encode()
    assert [passed for passed, _ in Progress("proven").read(own)] == [own]
