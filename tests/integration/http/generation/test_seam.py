"""The seam of a stream that goes on at another server: what the client has, and what is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.http.generation.going_on import BegunBody, Moving
from lockstep.integration.http.generation.seam import Seam
from lockstep.rollout.completion import Completion, FinishReason, StreamChunk


def seam_of(token_ids: list[int], num_chars: int, doubts: list[str] | None = None) -> Seam:
    """Return the seam of one sequence of which a client has these tokens; a token has its id as log-probability."""
    one = {"token_ids": token_ids, "logprobs": [float(id) for id in token_ids], "num_chars": num_chars}
    begun = BegunBody.model_validate({"sequences": [one], "weight_digest": "d", "guarantee": {}, "head": {}})
    return Seam(Moving(begun=begun, names=["a"], doubts=doubts or []), None)


def chunk(token_ids: list[int], text: str, num_taken_back: int = 0) -> StreamChunk:
    logprobs = tuple(float(id) for id in token_ids)
    return StreamChunk("b", 0, tuple(token_ids), logprobs, text, num_taken_back=num_taken_back)


@pytest.fixture
def make_end() -> Callable[[StreamChunk], StreamChunk]:
    """Return a function that gives a chunk the end of its answer."""
    completion = Completion("b", 0, (1,), (1, 7, 8, 9), "abcd", (1.0, 7.0, 8.0, 9.0), FinishReason("length"), 0, 0,
                            "1", "d", ())  # fmt: skip
    return lambda last: replace(last, completion=completion)


def test_a_step_is_divided_where_the_client_has_the_first_of_its_tokens():
    seam = seam_of([1, 2], 2)
    assert seam.parts(0, [chunk([1], "a")])[1] == []
    [known], [fresh] = seam.parts(0, [chunk([2, 3], "bc")])
    assert (known.token_ids, known.text, fresh.token_ids, fresh.text) == ((2,), "b", (3,), "c")
    assert seam.parts(0, [chunk([4], "d", 1)])[1][0].num_taken_back == 1


def test_a_step_that_replaces_tokens_which_the_client_has_is_new_as_a_whole():
    seam = seam_of([1, 2, 3], 3)
    assert seam.parts(0, [chunk([1, 2], "ab"), chunk([3], "c")])[1] == []
    known, [fresh] = seam.parts(0, [chunk([4, 5], "de", num_taken_back=1)])
    assert known == [] and (fresh.token_ids, fresh.text, fresh.num_taken_back) == ((4, 5), "de", 1)


def test_a_replaced_token_among_those_that_the_client_has_comes_again_with_them():
    seam = seam_of([1, 4, 5], 5, ["a jump may replace it"])
    assert seam.parts(0, [chunk([1, 2], "ab"), chunk([4], "cd", num_taken_back=1)])[1] == []
    [known], [fresh] = seam.parts(0, [chunk([5, 6], "ef")])
    assert (known.token_ids, fresh.token_ids, fresh.text) == ((5,), (6,), "f")


def test_an_abort_before_all_has_come_again_is_called_by_its_name(make_end):
    ended = make_end(chunk([1], "a"))
    assert ended.completion is not None
    reason = FinishReason("abort", message="enough")
    aborted = replace(ended.completion, token_ids=(1,), logprobs=(1.0,), finish_reason=reason)
    for read in (
        lambda seam: seam.parts(0, [replace(ended, completion=aborted)]),
        lambda seam: seam.completion(0, aborted),
    ):
        with pytest.raises(HttpError, match="was aborted: enough") as raised:
            read(seam_of([1, 2], 2))
        assert (raised.value.status, raised.value.code) == (409, "aborted")


def test_another_token_is_named_at_once_where_none_replaces_it():
    with pytest.raises(HttpError, match="at output token 1 token 2 was claimed, and 7 is drawn") as raised:
        seam_of([1, 2], 2).parts(0, [chunk([1, 7], "ab")])
    assert raised.value.status == 409


def test_another_token_that_no_step_replaces_is_named_at_the_end_with_the_doubt(make_end):
    seam = seam_of([1, 2], 2, ["a jump may replace it"])
    assert seam.parts(0, [chunk([1, 7], "ab"), chunk([8], "c")])[1] == []
    with pytest.raises(HttpError, match=r"token 2 was claimed, and 7 is drawn \(a jump may replace it\)"):
        seam.parts(0, [make_end(chunk([9], "d"))])
