"""Tests of votes, gathered values and verbs among the ranks of a replica."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lockstep.rollout.errors import DeadlineExceeded, RankFailure
from lockstep.rollout.ranks.follower_channel import FollowerChannel
from lockstep.rollout.ranks.mesh import Mesh
from lockstep.rollout.ranks.opening import open_channel
from lockstep.rollout.ranks.wire import Kind

RunWorld = Callable[..., list[object]]
TIMEOUT_S = 30.0


def test_a_rank_alone_votes_and_answers_by_itself() -> None:
    ranks = open_channel(Mesh.single(), TIMEOUT_S)
    ranks.handlers["double"] = lambda x: 2 * x
    assert ranks.gather_json("no") == ["no"] and ranks.gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert [r.data for r in ranks.run_everywhere("double", {"x": 4})] == [8]
    assert ranks.run_everywhere("triple", {})[0].data == {"skipped": True, "unsupported": True}
    ranks.close()


def _serve(ranks: FollowerChannel) -> None:
    ranks.send(Kind.HERE, 2)
    while (message := ranks.next_message()).kind is Kind.VERB:
        ranks.answer_verb(message)
    assert message.kind is Kind.CLOSE


def test_every_rank_gets_every_answer_and_verbs_run_everywhere(run_world: RunWorld) -> None:
    def rank(rank: int) -> object:
        ranks = open_channel(Mesh.build(2, 2, timeout_s=TIMEOUT_S), TIMEOUT_S)
        seen = [
            ranks.gather_json({"rank": rank, "text": "é" * 3000 * rank}),
            ranks.gather_json(None if rank else "not yet"),
        ]

        def vote(word: str) -> list[object]:  # handlers may communicate with each other
            return ranks.gather_json([word, rank])

        def fail_on(rank_that_fails: int) -> int:
            if rank == rank_that_fails:
                raise KeyError("gone")
            return rank

        ranks.handlers.update(vote=vote, fail_on=fail_on)
        if rank == 0:
            ranks.handlers["mine"] = lambda: "only here"
            for verb, arguments in (("vote", {"word": "x"}), ("fail_on", {"rank_that_fails": 3}), ("mine", {})):
                seen.append([r.as_dict() for r in ranks.run_everywhere(verb, arguments)])
        else:
            with pytest.raises(ValueError, match="call it there"):
                ranks.run_everywhere("vote", {"word": "x"})
            _serve(ranks)
        ranks.close()
        return seen

    first, *others = run_world(4, rank)
    assert all(seen == first[:2] for seen in others)
    assert [len(said["text"]) for said in first[0]] == [0, 3000, 6000, 9000]
    assert first[1] == ["not yet", None, None, None]
    assert [r["data"] for r in first[2]] == [[["x", 0], ["x", 1], ["x", 2], ["x", 3]]] * 4
    assert [(r["rank"], r["pp_rank"], r["tp_rank"]) for r in first[2]] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [(r["success"], r["error"]) for r in first[3]] == [(True, None)] * 3 + [(False, "KeyError")]
    assert [r["data"] for r in first[4]] == ["only here"] + [{"skipped": True, "unsupported": True}] * 3


def test_an_answer_that_is_not_json_fails_its_verb_and_the_followers_go_on(run_world: RunWorld) -> None:
    def rank(rank: int) -> object:
        ranks = open_channel(Mesh.build(2, 1, timeout_s=TIMEOUT_S), TIMEOUT_S)
        ranks.handlers.update(raw=lambda: b"\0", number=lambda: rank)
        if rank:
            _serve(ranks)
            ranks.close()
            return None
        seen = [ranks.run_everywhere(verb, {}) for verb in ("raw", "number")]
        ranks.close()
        return seen

    raw, number = run_world(2, rank)[0]
    assert [(r.rank, r.success, r.error, r.data) for r in raw] == [(n, False, "TypeError", None) for n in range(2)]
    assert all("bytes is not JSON" in r.message for r in raw)
    assert [(r.success, r.data) for r in number] == [(True, 0), (True, 1)]


def test_a_rank_that_does_not_come_to_a_vote_is_named(run_world: RunWorld) -> None:
    def rank(rank: int) -> object:
        ranks = open_channel(Mesh.build(1, 2, timeout_s=TIMEOUT_S), 3.0)
        if rank == 1:  # it runs, but takes no part
            end = time.monotonic() + 60
            while ranks.watch.failure is None and time.monotonic() < end:
                threading.Event().wait(0.05)
            return ranks.watch.failure.ranks, ranks.watch.failure.why
        with pytest.raises(DeadlineExceeded, match=r"rank 1 \(stage 1, tp 0\) did not come to follow"):
            ranks.run_everywhere("anything", {}, timeout_s=0.5)
        with pytest.raises(RankFailure) as caught:
            ranks.gather_json(None)
        with pytest.raises(RankFailure, match="did not come to a vote"):  # from now on
            ranks.send(Kind.CLOSE)
        return caught.value.ranks, str(caught.value)

    controller, follower = run_world(2, rank)
    assert controller == follower and controller[0] == (1,)
    assert "did not come to a vote of the ranks in 3 s" in controller[1]


@pytest.mark.slow
def test_an_idle_replica_takes_next_to_no_time_of_a_processor(run_world: RunWorld) -> None:
    def rank(rank: int) -> float:
        ranks = open_channel(Mesh.build(2, 2, timeout_s=TIMEOUT_S), 10.0)
        ranks.gather_json(None)
        began = time.process_time()
        threading.Event().wait(25)  # longer than the ranks' timeout
        used = time.process_time() - began
        assert ranks.gather_json(None) == [None] * 4
        if rank > 0:
            ranks.await_close()
        ranks.close()
        return used

    assert max(run_world(4, rank)) < 0.02 * 25
