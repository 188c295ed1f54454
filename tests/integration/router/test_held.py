"""The parts of the router that need no network: the queue for a worker, the look at bodies, budgets, refusals."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.router.budget import Budget
from lockstep.integration.router.changes.broadcast import Result, common, summarise
from lockstep.integration.router.fleet.balance import num_sequences, prompt_keys
from lockstep.integration.router.fleet.held import HeldRequests
from lockstep.integration.router.fleet.peek import LONG_BYTES, peek
from lockstep.integration.router.fleet.worker import Health, Hold, Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry, why_none
from lockstep.integration.router.relay import Drains, Full, refusal

WAIT_S = 20.0


def soon() -> float:
    return time.monotonic() + WAIT_S


async def turns() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


class Queue:
    """Held requests before one worker, which takes requests while `is_open`."""

    def __init__(self, max_held: int = 100) -> None:
        self.registry = WorkerRegistry()
        self.worker, _ = self.registry.add("http://w:1")
        self.held = HeldRequests(self.registry, max_held)
        self.served: list[int] = []
        self.is_open = False

    def request(self, number: int, deadline: float | None = None) -> asyncio.Task[Worker]:
        def find() -> Worker | None:
            if self.is_open:
                self.served.append(number)
            return self.worker if self.is_open else None

        return asyncio.create_task(self.held.worker(find, soon() if deadline is None else deadline))

    def open(self) -> None:
        self.is_open = True
        self.registry.notify()


# -- the queue -------------------------------------------------------------------------------------------------------


def test_a_request_that_no_worker_can_go_on_with_says_why_when_its_wait_is_over():
    async def run() -> None:
        held = HeldRequests(WorkerRegistry(), 1)
        with pytest.raises(HttpError, match="no worker takes requests: it has other code"):
            await held.its_worker(lambda: None, time.monotonic(), lambda: "it has other code")

    asyncio.run(run())


def test_held_requests_get_their_worker_in_the_order_of_their_arrival():
    async def run() -> None:
        queue = Queue()
        waiting = [queue.request(number) for number in range(50)]
        await turns()
        assert len(queue.held) == 50 and not queue.served
        queue.open()
        late = queue.request(50)  # comes when the worker is there, and after the others
        await asyncio.gather(*waiting, late)
        assert queue.served == list(range(51)) and not len(queue.held)

    asyncio.run(run())


def test_a_request_that_leaves_the_queue_makes_room_and_holds_nobody_up():
    async def run() -> None:
        queue = Queue(max_held=2)
        first, second = queue.request(0), queue.request(1)
        await turns()
        with pytest.raises(HttpError) as refused:
            await queue.request(2)
        assert (refused.value.status, refused.value.code) == (503, "queue_full")
        assert refused.value.headers["Retry-After"] == "1"
        first.cancel()
        await turns()
        assert len(queue.held) == 1
        third = queue.request(3)
        await turns()
        queue.open()
        await asyncio.gather(second, third)
        assert queue.served == [1, 3]

    asyncio.run(run())


def test_ten_thousand_held_requests_are_let_go_at_once():
    async def run() -> None:
        queue = Queue(max_held=10_000)
        waiting = [queue.request(number) for number in range(10_000)]
        await turns()
        queue.open()
        await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
        assert queue.served == list(range(10_000))

    asyncio.run(run())


def test_the_wait_ends_at_its_deadline_or_where_only_an_operator_can_help_or_when_the_router_drains():
    async def run() -> None:
        queue = Queue()
        with pytest.raises(HttpError, match="http://w:1 is unseen") as refused:
            await queue.request(0, deadline=time.monotonic() + 0.01)
        assert (refused.value.status, refused.value.code) == (503, "no_workers")
        waiting = queue.request(1)
        await turns()
        queue.registry.set_disabled(queue.worker, True)
        with pytest.raises(HttpError, match="http://w:1 is"):
            await waiting
        with pytest.raises(HttpError):
            await queue.request(2)
        queue.registry.set_disabled(queue.worker, False)
        waiting = [queue.request(number) for number in (3, 4)]
        await turns()
        queue.held.close()
        for one in waiting:
            with pytest.raises(HttpError, match="router is draining"):
                await one
        assert not queue.served and not len(queue.held)

    asyncio.run(run())


def test_a_journal_or_a_group_needs_an_operator_and_a_version_or_an_update_does_not():
    async def run() -> None:
        for hold, is_hopeless in (
            (Hold.JOURNAL, True),
            (Hold.GROUP, True),
            (Hold.VERSION, False),
            (Hold.BROADCAST, False),
        ):
            queue = Queue()
            queue.registry.hold(queue.worker, hold, "a reason")
            waiting = queue.request(0)
            await turns()
            assert waiting.done() == is_hopeless, hold
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())


def test_a_request_of_some_workers_waits_while_one_of_them_may_return_without_an_operator():
    async def run() -> None:
        registry = WorkerRegistry()
        one, two, other = (registry.add(f"http://w:{port}")[0] for port in (1, 2, 3))
        held = HeldRequests(registry, 100)
        waiting = asyncio.create_task(held.its_worker(lambda: None, soon(), able=lambda: [one, two]))
        await turns()
        registry.hold(one, Hold.JOURNAL, "a reason")
        registry.set_disabled(other, True)
        await turns()
        assert not waiting.done()
        registry.hold(two, Hold.GROUP, "a reason")
        with pytest.raises(HttpError) as refused:
            await waiting
        assert refused.value.code == "no_workers" and not len(held)
        with pytest.raises(HttpError):
            await held.its_worker(lambda: None, soon(), able=lambda: [one])  # at once, too

    asyncio.run(run())


def test_a_request_that_all_workers_refuse_keeps_no_other_one_waiting():
    async def run() -> None:
        queue = Queue(max_held=2)
        await queue.held.pause(time.monotonic(), "full")  # until now
        apart = asyncio.create_task(queue.held.pause(soon(), "full"))
        await turns()
        assert len(queue.held) == 1
        queue.is_open = True
        assert await queue.request(0) is queue.worker
        queue.is_open = False
        waiting = queue.request(1)
        await turns()
        with pytest.raises(HttpError, match="2 requests wait"):
            await queue.held.pause(soon(), "full")
        queue.held.close()
        for one in (apart, waiting):
            with pytest.raises(HttpError, match="router is draining"):
                await one
        assert not len(queue.held)

    asyncio.run(run())


# -- states of a worker ----------------------------------------------------------------------------------------------


def test_unseen_starting_dead_and_draining_are_four_states():
    async def run() -> None:
        registry = WorkerRegistry()
        worker, _ = registry.add("http://w:1")
        registry.mark_gone(worker, "no connection")
        assert worker.health is Health.UNSEEN and worker.num_deaths == 0
        registry.mark_starting(worker)
        assert worker.health is Health.STARTING
        registry.mark_gone(worker, "no connection")
        assert worker.health is Health.UNSEEN
        registry.mark_alive(worker)
        died = worker.died
        registry.mark_draining(worker)
        assert worker.is_alive and not worker.can_take_requests and not died.is_set()
        assert worker.report()["status"] == "draining" and worker.report()["is_healthy"] is False
        registry.mark_gone(worker, "no connection")
        assert worker.health is Health.DEAD and worker.num_deaths == 1 and died.is_set()
        registry.mark_starting(worker)  # another process at the address
        assert worker.health is Health.STARTING
        registry.mark_alive(worker)
        registry.mark_dead(worker, "/health answered 503")  # the same process, which has failed
        registry.mark_starting(worker)
        assert worker.health is Health.DEAD

    asyncio.run(run())


def test_a_worker_that_takes_no_requests_is_explained_by_what_keeps_it():
    registry = WorkerRegistry()
    worker, _ = registry.add("http://w:1")
    assert why_none([worker]) == "http://w:1 is unseen"
    worker.health, worker.paused = Health.ALIVE, True
    assert why_none([worker]) == "http://w:1 is paused"
    worker.suspect("a call failed")
    assert why_none([worker]) == "http://w:1 is being asked whether it is well (a call failed)"
    worker.holds[Hold.VERSION] = "other weights"
    assert why_none([worker]) == "http://w:1 is held: other weights"
    worker.disabled = True
    assert why_none([worker]) == "http://w:1 is disabled"


def test_a_refusal_is_known_by_its_code_in_both_shapes_of_an_error():
    for body in (
        {"error": {"message": "m", "type": "server_error", "code": "draining"}},
        {"success": False, "code": 503, "error": {"message": "m", "type": "draining"}},
        {"status": "draining"},
    ):
        assert isinstance(refusal(json.dumps(body).encode()), Drains)
    for body in (
        b"",
        b"[",
        b'"draining"',
        b"[" * 10_000,
        b'{"error": "draining"}',
        b'{"error": {"code": "overloaded"}}',
    ):
        assert not isinstance(refusal(body), Drains)


def test_a_full_worker_says_when_to_ask_again_within_bounds():
    for said, seconds in (("", 1), ("0", 1), ("7", 7), ("9" * 400, 3600), ("Wed, 21 Oct 2026 07:28:00 GMT", 1)):
        error = refusal(b'{"error": {"code": "overloaded"}}', said)
        assert isinstance(error, Full) and error.retry_after_s == seconds
    for body in (b"", b'{"error": {"code": "EngineStopped"}}'):
        assert not isinstance(refusal(body), Full)


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_short_body_is_looked_at_as_before_and_a_strange_one_harms_nobody():
    body = {"input_ids": [[1, 2], [3, 4]], "sampling_params": {"n": 3}, "model": "m"}
    assert peek(json.dumps(body).encode(), None) == (prompt_keys(body), 6) and num_sequences(body) == 6
    assert peek(json.dumps(body).encode(), "key")[0] == prompt_keys(body, "key")
    for strange in (b"", b"[1]", b"{", b'{"text": "\xff"}', b"[" * 100_000, b'{"n": ' + b"9" * 10_000 + b"}"):
        assert peek(strange, None) == ((), 1)


def test_a_long_body_is_searched_and_not_parsed():
    ids = [list(range(1000, 1000 + 2000)) for _ in range(200)]
    whole = json.dumps({"input_ids": ids, "sampling_params": {"n": 4}}).encode()
    assert len(whole) > LONG_BYTES
    keys, num = peek(whole, None)
    assert num == 800
    ids[-1][0] = 7  # a later part of the prompts
    assert peek(json.dumps({"input_ids": ids, "sampling_params": {"n": 4}}).encode(), None)[0] == keys
    ids[0][0] = 7
    assert peek(json.dumps({"input_ids": ids, "sampling_params": {"n": 4}}).encode(), None)[0][0] != keys[0]
    texts = json.dumps({"text": ["a" * 20_000] * 100}).encode()
    assert peek(texts, None)[1] == 100
    assert peek(b'{"text": "' + b"a" * 2 * LONG_BYTES, "key")[0] == prompt_keys({}, "key")


def test_a_long_conversation_is_one_sequence_and_known_by_its_beginning():
    turns = [{"role": "user", "content": f"{number} " + "a" * 20_000} for number in range(100)]
    for name, other in (("messages", "system"), ("input", "instructions")):
        for body in ({name: turns}, {"tools": turns, name: turns}, {other: "be", "n": 2, name: turns}):
            keys, num = peek(json.dumps(body).encode(), None)
            assert num == body.get("n", 1) and len(keys) > 1
    texts = {"text": ["a" * 20_000, 'say "messages"', 'and "input"'] * 100}
    assert peek(json.dumps(texts).encode(), None)[1] == 300


def test_the_prompts_of_other_apis_are_known_by_their_beginning():
    hello, so = {"role": "user", "content": "hello"}, {"role": "user", "content": "so?"}
    for name, other in (("messages", "system"), ("input", "instructions")):
        short, long = ({other: "be", name: given} for given in ([hello], [hello, so]))
        assert prompt_keys(long)[:2] == prompt_keys(short) and len(prompt_keys(long)) == 3
        assert prompt_keys({other: "see", name: [hello]})[0] != prompt_keys(short)[0]
        assert num_sequences(long) == 1
    assert len(prompt_keys({"input": "hello", "text": {"format": {"type": "text"}}})) == 1


@pytest.mark.parametrize("unit", [b"[1],", b"1.5,", b'"\\ud800",', b'"n":', b"{", b" ", b'"prompt"   '])
def test_the_largest_body_of_any_shape_takes_no_time(unit):
    body = b'{"input_ids": [' + unit * ((32 << 20) // len(unit))
    start = time.process_time()
    peek(body, None)
    assert time.process_time() - start < 1.0  # a parser takes this for a tenth of it


def test_a_budget_is_shared_out_and_given_back():
    budget = Budget(10)
    with budget.share() as one, budget.share() as two:
        assert one.resize(6) and two.resize(4) and not two.resize(5) and budget.num_taken == 10
        assert one.resize(1) and two.resize(9)
        budget.limit = 3
        assert two.resize(8) and not two.resize(9)
    assert budget.num_taken == 0


# -- answers ---------------------------------------------------------------------------------------------------------


def test_answers_that_are_nested_deeply_are_compared_and_summarised():
    deep: object = 1
    for _ in range(700):
        deep = {"a": deep}
    assert common([deep, deep]) is not None
    results = [Result(Worker("http://a:1", "a"), 200, {"x": deep}), Result(Worker("http://b:1", "b"), 200, {"x": deep})]
    assert summarise(results)[0] == 200
