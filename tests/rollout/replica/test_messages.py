"""Tests of the controller's messages: a follower that reads a trace of events has an equal manager, in few words."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

from lockstep.rollout.completion import (
    Completion,
    DraftCounts,
    DrawnWith,
    FinishReason,
    KeptIds,
    NextToken,
    WeightSpan,
)
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.grammars.jump import Jump
from lockstep.rollout.kept_kv import KeptKV, KVStart
from lockstep.rollout.ranks.remote_errors import error_bytes, error_from, is_of_a_group
from lockstep.rollout.replica.calls import completions_bytes, completions_from
from lockstep.rollout.replica.event_stream import EventReader, EventWriter, Op
from lockstep.rollout.replica.request_json import request_json, request_of
from lockstep.rollout.replica.result_bytes import results_bytes
from lockstep.rollout.replica.result_bytes import results_from as results_of_bytes
from lockstep.rollout.request_options import Begun, RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.event_log import fresh_copy
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.sequences.step import (
    Draft,
    NewToken,
    ScheduledSequence,
    ScheduleOutput,
    SequenceResult,
    StateSlots,
)
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager


def make_request(id: str, prompt: list[int], params: SamplingParams | None = None, **options: object) -> Request:
    return Request(Sequence(id, prompt), params or SamplingParams(), RequestOptions(**options), 1, -7, 0.0, 0, None)


class Pair:
    """A controller's manager with its writer, and a follower's manager with its reader."""

    def __init__(self) -> None:
        self.writer, self.reader = EventWriter(), EventReader()
        self.controller, self.follower = WorkerSequenceManager(1), WorkerSequenceManager(1)
        self.requests: dict[str, Request] = {}
        self.ran: list[int] = []
        self.scheduled: list[ScheduledSequence] = []  # all shares that the follower has read

    def schedule(self, output: ScheduleOutput, **new: Request) -> None:
        self.writer.schedule(output, self.controller, new)
        self.controller.on_schedule(output)

    def results(self, results: list[SequenceResult]) -> None:
        self.writer.results(results)
        self.controller.on_step_completed(results)

    def preempt(self, id: str) -> None:
        self.writer.preempt(id)
        self.controller.preempt(id)

    def free(self, id: str) -> None:
        self.writer.free(id)
        self.controller.free(id)

    def send(self) -> int:
        """Send all events to the follower; returns the number of bytes."""
        self.writer.check(self.controller.state_hash())
        message = self.writer.take()
        follower = self.follower
        for event in self.reader.read(message, follower):
            value = event.value
            if event.op is Op.SCHEDULE:
                follower.on_schedule(value[0])
                self.scheduled += value[0].scheduled
                self.requests.update({request.id: request for request in value[1]})
            elif event.op is Op.RESULTS:
                follower.on_step_completed(value)
            elif event.op is Op.CANCELLED:
                follower.on_step_cancelled(value)
            elif event.op is Op.PREEMPT:
                follower.preempt(value)
            elif event.op is Op.FREE:
                follower.free(value)
            elif event.op is Op.CHECK:
                assert follower.state_hash() == value
            else:
                self.ran.append(value)
        return len(message)


def item(id: str, start: int, rows: int, *blocks: int, tokens: list[int] | None = None, life: int = 0):
    return ScheduledSequence(id, life, start, rows, blocks, None if tokens is None else tuple(tokens))


def test_a_follower_reads_what_happened_to_its_sequences() -> None:
    pair = Pair()
    a, b = make_request("a", [1, 2, 3, 4]), make_request("b", [5, 6])
    first = (item("a", 0, 4, 10, tokens=[1, 2, 3, 4]), item("b", 1, 1, 11, tokens=[5, 6]))
    pair.schedule(ScheduleOutput(1, first), a=a, b=b)
    pair.writer.run(1)
    pair.results([SequenceResult("a", 0, 4, 9, -0.5), SequenceResult("b", 0, 1, 8, -0.5)])
    pair.send()
    assert pair.ran == [1] and set(pair.requests) == {"a", "b"}
    assert pair.follower.sequence("a").token_ids == [1, 2, 3, 4, 9] and pair.follower.block_table("b") == [11]
    pair.preempt("b")
    pair.schedule(ScheduleOutput(2, (item("a", 4, 1),)))
    pair.writer.cancelled([item("a", 4, 1)])
    pair.controller.on_step_cancelled([item("a", 4, 1)])
    pair.schedule(ScheduleOutput(3, (item("a", 4, 1), item("b", 0, 3, 12, tokens=[5, 6, 8], life=1))))
    pair.send()
    assert pair.follower.incarnation("b") == 1 and pair.follower.block_table("b") == [12]
    pair.free("a")
    pair.schedule(ScheduleOutput(4, (), ("b",)))
    pair.send()
    assert "a" not in pair.follower and pair.follower.block_table("b") == []


def test_one_that_is_preempted_and_comes_back_in_one_schedule_is_in_its_next_life() -> None:
    pair = Pair()
    pair.schedule(ScheduleOutput(1, (item("a", 0, 2, 10, tokens=[1, 2]),)), a=make_request("a", [1, 2]))
    pair.results([SequenceResult("a", 0, 2, 9, -0.5)])
    pair.schedule(ScheduleOutput(2, (item("a", 0, 3, 11, tokens=[1, 2, 9], life=1),), ("a",)))
    pair.results([SequenceResult("a", 1, 3, 4, -0.5)])
    pair.send()
    assert pair.follower.sequence("a").token_ids == [1, 2, 9, 4]


def test_masks_and_jumps_cross_with_their_step_and_are_undone_by_a_preemption() -> None:
    pair = Pair()
    request = make_request("a", [1, 2, 3], SamplingParams(regex="x+", jump_forward="exact"))
    first = item("a", 0, 3, 4, tokens=[1, 2, 3])._replace(allowed=bytes(range(8)))
    pair.schedule(ScheduleOutput(1, (first,)), a=request)
    pair.results([SequenceResult("a", 0, 3, 9, -0.5)])
    jumping = item("a", 2, 4, 7, 8)._replace(jump=Jump(1, (5, 6, 7)), num_blocks_kept=0, allowed=b"\xff" * 8)
    pair.schedule(ScheduleOutput(2, (jumping,)))
    pair.send()
    assert not pair.requests["a"].params.is_constrained  # followers need the masks only
    follower = pair.follower
    assert follower.sequence("a").token_ids == [1, 2, 3, 5, 6, 7] and follower.block_table("a") == [7, 8]
    pair.preempt("a")
    pair.send()
    assert follower.sequence("a").token_ids == [1, 2, 3, 9] == pair.controller.sequence("a").token_ids
    again = item("a", 0, 6, 3, life=1)._replace(jump=Jump(1, (5, 6, 7)), allowed=b"\1" * 8)
    pair.schedule(ScheduleOutput(3, (again,)))
    scores = {"jump_logprobs": (-1.0, -2.0, -3.0), "masked_prob": 0.25}
    [result] = results_of_bytes(results_bytes([SequenceResult("a", 1, 6, 8, -0.25, **scores)]), [again])
    assert result.jump_logprobs == (-1.0, -2.0, -3.0) and result.masked_prob == 0.25
    pair.results([result])
    pair.send()
    assert follower.sequence("a").token_ids == [1, 2, 3, 5, 6, 7, 8]
    assert [(t.token_id, t.is_forced, t.masked_prob) for t in (*result.jumped((5, 6, 7)), result.sampled())] == [
        (5, True, 1.0), (6, True, 1.0), (7, True, 1.0), (8, False, 0.25)
    ]  # fmt: skip


def test_a_jump_crosses_with_its_first_rows_and_is_settled_by_the_token_after_its_last() -> None:
    pair = Pair()
    request = make_request("a", [1, 2, 3], SamplingParams(regex="x+", jump_forward="text"))
    pair.schedule(ScheduleOutput(1, (item("a", 0, 3, 4, tokens=[1, 2, 3]),)), a=request)
    pair.results([SequenceResult("a", 0, 3, 9, -0.5)])
    pair.schedule(ScheduleOutput(2, (item("a", 2, 1)._replace(jump=Jump(1, (5, 6, 7)), num_blocks_kept=1),)))
    pair.results([SequenceResult("a", 0, 1, jump_logprobs=(-1.0,))])
    pair.schedule(ScheduleOutput(3, (item("a", 3, 1),)))
    pair.results([SequenceResult("a", 0, 1, jump_logprobs=(-2.0,))])
    pair.send()
    for manager in (pair.follower, pair.controller):
        assert manager.sequence("a").token_ids == [1, 2, 3, 5, 6, 7] and manager.sequence("a").jump_start == 3
        assert manager.next_row("a") == 4
    pair.schedule(ScheduleOutput(4, (item("a", 4, 2)._replace(allowed=b"\1" * 8),)))
    pair.results([SequenceResult("a", 0, 2, 8, -0.25, jump_logprobs=(-3.0,))])
    pair.send()
    for manager in (pair.follower, pair.controller):
        assert manager.sequence("a").token_ids == [1, 2, 3, 5, 6, 7, 8] and manager.sequence("a").jump_start is None


def new_token(token_id: int, masked_prob: float | None = None) -> NewToken:
    return NewToken(token_id, -0.5, ((-0.5, token_id),), ((-1.5, 3),), False, False, masked_prob)


def test_a_draft_crosses_with_its_masks_and_its_accepted_tokens_come_before_the_sampled_one() -> None:
    pair = Pair()
    pair.schedule(ScheduleOutput(1, (item("a", 0, 3, 4, tokens=[1, 2, 3]),)), a=make_request("a", [1, 2, 3]))
    pair.results([SequenceResult("a", 0, 3, 9, -0.5)])
    drafts = [
        Draft((5, 6, 7), source="past", confidence=3),
        Draft((5, 6), (b"\1" * 8, b"\2" * 8)),
        Draft((5, 6), (None, b"\2" * 8)),
        Draft((8,)),
    ]
    start = 3
    for number, (draft, num_accepted) in enumerate(zip(drafts, (2, 0, 2, 1), strict=True), 2):
        share = item("a", start, 1, *([7] if number == 2 else []))._replace(
            draft=draft, allowed=b"\1" * 8 if draft.allowed else None
        )
        if number == 3:
            share = share._replace(num_blocks_kept=1)
        pair.schedule(ScheduleOutput(number, (share,)))
        accepted = tuple(new_token(id) for id in draft.token_ids[:num_accepted])
        [result] = results_of_bytes(
            results_bytes([SequenceResult("a", 0, 1, 20 + number, -0.25, accepted=accepted)]), [share]
        )
        assert result.accepted == accepted
        pair.results([result])
        pair.send()
        there = pair.scheduled[-1]
        rows = 1 + len(draft.token_ids)
        assert (there.draft.token_ids, there.num_tokens, there.num_rows) == (draft.token_ids, 1, rows)
        assert there.draft.allowed == draft.allowed and (there.draft.source, there.draft.confidence) == ("", 0)
        start += 1 + num_accepted
        for manager in (pair.follower, pair.controller):
            assert manager.sequence("a").token_ids[-1 - num_accepted :] == [
                *draft.token_ids[:num_accepted],
                20 + number,
            ]
            assert manager.next_row("a") == start == manager.sequence("a").num_tokens - 1
        assert pair.follower.block_table("a") == pair.controller.block_table("a") == ([4, 7] if number == 2 else [4])


def test_slots_of_a_drafts_states_cross_and_the_next_decode_is_short_again() -> None:
    writer, reader = EventWriter(has_states=True), EventReader(has_states=True)
    controller, follower = WorkerSequenceManager(1), WorkerSequenceManager(1)
    shares = [
        item("a", 0, 2, 4, tokens=[1, 2])._replace(states=StateSlots(0, 3)),
        item("a", 2, 1)._replace(states=StateSlots(3, 5), draft=Draft((6, 7), states=(8, 9))),
        item("a", 5, 1)._replace(states=StateSlots(9, 1)),
    ]
    results = [
        SequenceResult("a", 0, 2, 5, -0.5),
        SequenceResult("a", 0, 1, 8, -0.5, accepted=(new_token(6), new_token(7))),
        SequenceResult("a", 0, 1, 4, -0.5),
    ]
    seen, sizes = [], []
    for number, (share, result) in enumerate(zip(shares, results, strict=True), 1):
        writer.schedule(ScheduleOutput(number, (share,)), controller, {"a": make_request("a", [1, 2])})
        controller.on_schedule(ScheduleOutput(number, (share,)))
        writer.results([result])
        controller.on_step_completed([result])
        message = writer.take()
        sizes.append(len(message))
        for event in reader.read(message, follower):
            if event.op is Op.SCHEDULE:
                seen += event.value[0].scheduled
                follower.on_schedule(event.value[0])
            else:
                follower.on_step_completed(event.value)
    assert [(share.states, share.draft.token_ids, share.draft.states) for share in seen] == [
        (share.states, share.draft.token_ids, share.draft.states) for share in shares
    ]
    assert follower.sequence("a").token_ids == [1, 2, 5, 6, 7, 8, 4] and sizes[2] < sizes[1]
    assert follower.state_hash() == controller.state_hash()


def test_a_decode_step_takes_three_words_a_sequence_and_its_result_included() -> None:
    pair, ids = Pair(), [f"request-{i}" for i in range(64)]
    new = {id: make_request(id, [1, 2]) for id in ids}
    pair.schedule(ScheduleOutput(1, tuple(item(id, 0, 2, i, tokens=[1, 2]) for i, id in enumerate(ids))), **new)
    pair.results([SequenceResult(id, 0, 2, 7, -0.5) for id in ids])
    pair.send()
    pair.schedule(ScheduleOutput(2, tuple(item(id, 2, 1) for id in ids)))
    pair.results([SequenceResult(id, 0, 1, 7, -0.5) for id in ids])
    pair.writer.run(2)
    assert pair.send() <= 64 * 12 + 100


def test_random_traces_leave_equal_managers() -> None:
    for seed in range(30):
        rng, pair, live, made = random.Random(seed), Pair(), [], 0
        for step in range(1, 61):
            if rng.random() < 0.3 or not live:
                made += 1
                prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
                live.append(make_request(f"r{made}", prompt, SamplingParams(temperature=rng.random())))
            entries = []
            for request in live:
                known = request.id in pair.controller
                sequence = pair.controller.sequence(request.id) if known else request.sequence
                start = sequence.num_tokens_stage_processed
                rows = rng.randrange(1, sequence.num_tokens - start + 1)
                blocks = tuple(rng.randrange(99) for _ in range(rng.randrange(3)))
                tokens = tuple(sequence.token_ids) if start == 0 else None
                life = pair.controller.incarnation(request.id) if known else 0
                is_last = start + rows == sequence.num_tokens
                drafted = tuple(rng.randrange(500) for _ in range(rng.randrange(4) if is_last else 0))
                entries.append(ScheduledSequence(request.id, life, start, rows, blocks, tokens, draft=Draft(drafted)))
            pair.schedule(ScheduleOutput(step, tuple(entries)), **{r.id: r for r in live})
            ends = {e.id: e.start + e.num_tokens == pair.controller.sequence(e.id).num_tokens for e in entries}
            pair.results([
                SequenceResult(e.id, e.incarnation, e.num_tokens, rng.randrange(500) if ends[e.id] else None,
                               accepted=tuple(map(new_token, e.draft.token_ids[: rng.randrange(4)])))
                for e in entries
            ])  # fmt: skip
            for request in list(live):
                if rng.random() < 0.15:
                    pair.preempt(request.id)
                elif rng.random() < 0.1:
                    pair.free(request.id)
                    live.remove(request)
            if rng.random() < 0.7:
                pair.send()
        pair.send()
        for request in live:
            assert pair.follower.block_table(request.id) == pair.controller.block_table(request.id)


def test_a_request_crosses_with_all_that_a_sampler_reads() -> None:
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={3: float("-inf"), 9: 1.5}, stop_token_ids=[4, 5],
                            stop=["x"], custom_params={"a": object()}, min_new_tokens=2)  # fmt: skip
    request = make_request("né", [1, 2, 3], params, logprob_start_len=0, token_ids_logprob=(7, 8), top_logprobs_num=1)
    there = request_of(request_json(fresh_copy(request)), [1, 2, 3])
    assert (there.id, there.seed, there.index, there.options) == ("né", -7, 1, request.options)
    assert (there.params.logit_bias, there.params.stop_token_ids) == (params.logit_bias, (4, 5))
    assert (there.params.temperature, there.params.top_k, there.params.min_new_tokens) == (0.3, 5, 2)
    assert there.record.prompt_logprobs == [None] and there.params.stop == ()


def test_the_drafts_of_a_request_stay_with_the_controller() -> None:
    request = make_request("a", [1, 2], SamplingParams(), draft_token_ids=(7,) * 1000, speculation=False)
    assert len(request_json(request)) < 100


def test_results_come_back_bit_for_bit() -> None:
    results = [
        SequenceResult("a", 0, 5, prompt_logprobs=(-0.1, -1e-300), prompt_top_logprobs=(((-0.1, 3), (-2.0, 4)), ())),
        SequenceResult("b", 2, 1, 0, -0.12345678901234567, ((-0.1, 1),), listed_logprobs=((float("-inf"), 9),)),
        SequenceResult("c", 0, 1, 7, -3.0),
        SequenceResult("d", 0, 1, 9, -700.0, masked_prob=0.0),  # too small for a number
    ]
    items = [ScheduledSequence(r.id, r.incarnation, 0, r.num_tokens, (), None) for r in results]
    assert results_of_bytes(results_bytes(results), items) == results
    assert len(results_bytes(results[2:3])) == 8 + 12


def test_completions_come_back_as_they_were() -> None:
    given = Completion(
        "a", 0, (1, 2), (3,), "né", (-0.1,), FinishReason("stop", matched="\n"), 0, 1, "v", None,
        (WeightSpan("v", None, 0, 1),), top_logprobs=(((-0.1, 3), (-2.0, 4)),), prompt_logprobs=(None, -1.0),
        prompt_top_logprobs=(None, ()), next_token=NextToken(4, -0.25, ((-0.25, 4),)),
        drafts=(DraftCounts("past", 1, 4, 2), DraftCounts("caller", 3, 9, 9)),
        kept_ids=KeptIds(array("i", [3, 9, 2]), array("i", [3])),
        kv_starts=(KVStart(0, (KeptKV("u", None, 2),)), KVStart(1, ())),
    )  # fmt: skip
    begun = Begun.of(replace(given, drawn_with=DrawnWith(SamplingParams(), RequestOptions(), 5)))
    given = replace(given, drawn_with=DrawnWith(SamplingParams(), RequestOptions(begun=begun), 5))
    assert completions_from(completions_bytes([given, given])) == [given, given]


def test_parameters_of_the_callers_own_need_be_no_json() -> None:
    params = SamplingParams(custom_params={"tags": {"x"}, ("a", 1): object()})
    given = Completion(
        "a", 0, (1,), (2,), "", (-0.1,), FinishReason("length", length=1), 0, 0, "v", None,
        (WeightSpan("v", None, 0, 1),), drawn_with=DrawnWith(params, RequestOptions(), 5),
    )  # fmt: skip
    [found] = completions_from(completions_bytes([given]))
    assert found.drawn_with == DrawnWith(SamplingParams(), RequestOptions(), 5)


def test_errors_come_back_as_their_kind_with_their_place() -> None:
    for error in (BrokenLogits("NaN"), MemoryError("full"), ValueError("bad")):
        there = error_from(error_bytes(error), "rank 3")
        assert type(there) is type(error) and str(there) == f"rank 3: {error}"

    class Unknown(Exception):
        pass

    assert str(error_from(error_bytes(Unknown("x")), "rank 3")) == "rank 3: x (Unknown)"
    several = error_from(error_bytes(ExceptionGroup("several", [ValueError("a")])), "rank 3")
    assert str(several) == "rank 3: several (1 sub-exception) (ExceptionGroup)"
    assert is_of_a_group(RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_of_a_group(RuntimeError("shape mismatch")) and not is_of_a_group(ValueError("gloo"))
