"""The calls of a job's rewards and environments: one event loop for all of them."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading

import pytest

from lockstep.integration.grpo.rewards import user_calls
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.rewards.user_calls import CallTimedOut, UserCalls, UserFunction
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.rollout.completion import Completion, FinishReason

PROBLEMS = [Problem(f"p{n}", str(n), f"rows.jsonl:{n + 1}", {"wanted": n}) for n in range(3)]
HERE = __name__


def completion(text: str, index: int = 0) -> Completion:
    stop = FinishReason("stop")
    return Completion(f"id-{index}", index, (1, 2), (3, 4), text, (-0.5, -0.25), stop, 0, 0, "0", None, ())


ANSWERS = [completion(text, index) for index, text in enumerate(("0", "one", "2 "))]


@pytest.fixture
def calls():
    made = UserCalls()
    yield made
    made.close()


class Client:
    """A client of a service, as a user keeps one in a module: it belongs to the loop that it is first used in."""

    def __init__(self):
        self.one_at_a_time, self.loops = asyncio.Semaphore(1), set()

    async def ask(self):
        async with self.one_at_a_time:
            self.loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def client(monkeypatch):
    made = Client()
    monkeypatch.setitem(globals(), "CLIENT", made)
    return made


async def judged(row, completion):
    await CLIENT.ask()  # noqa: F821  # the fixture's
    return 1.0


async def judged_together(rows, completions):
    await asyncio.gather(*(CLIENT.ask() for _ in rows))  # noqa: F821
    return [1.0] * len(rows)


class Told(logging.Handler):
    """Waits for a warning."""

    def __init__(self, least):
        super().__init__(logging.WARNING)
        self.lines, self.came, self._least = [], threading.Event(), least

    def emit(self, record):
        self.lines.append(record.getMessage())
        if len(self.lines) >= self._least:
            self.came.set()


def blocks(row, completion):
    """Block the second of three samples until two warnings have named it."""
    if row["wanted"] == 1:
        assert TOLD.came.wait(60)  # noqa: F821
    return 0.0


async def hangs(row, completion):
    if row["wanted"] == 1:
        await asyncio.Event().wait()
    return 0.0


async def hangs_together(rows, completions):
    await asyncio.Event().wait()


async def has_its_own_limit(row, completion):
    raise TimeoutError("the judge is busy")


async def interrupted(row, completion):
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()


def test_a_client_that_lives_longer_than_a_group_is_met_by_one_loop(calls, client):
    one, other = (Scorer([f"{HERE}:{name}"], calls=calls) for name in ("judged", "judged_together"))
    for scorer in (one, other, one):
        assert [score.total for score in scorer(PROBLEMS, ANSWERS)] == [1.0] * 3
    [loop] = client.loops
    assert not loop.is_closed()
    calls.close()
    assert loop.is_closed(), "it ends with the job"


def test_what_is_over_and_waits_with_a_limit_are_progress(calls, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(user_calls.time, "monotonic", lambda: now[0])
    assert calls.progress == calls.progress == 0
    function = UserFunction("it", "a number", calls)
    for num in (1, 2):
        with function.call(lambda: "this"):
            assert calls.progress == num - 1
        assert calls.progress == num
    with function.waits(50.0), function.waits(5.0):
        seen = [calls.progress]
        for now[0] in (120.0, 149.0, 151.0, 190.0):
            seen.append(calls.progress)
    assert seen == [102, 122, 151, 2, 2], "not beyond its limit"
    assert calls.progress == 2


def test_a_coroutine_with_a_limit_is_progress_while_it_waits():
    calls = UserCalls(timeout_s=1000.0)
    seen = []

    async def waits():
        seen.append(calls.progress)
        return 1.0

    function = UserFunction("it", "a number", calls)
    assert calls.run(function.awaited(waits, lambda: "this")) == 1.0
    assert seen[0] > 0 and calls.progress == 1
    calls.close()


def test_ctrl_c_ends_a_reward_that_waits(calls):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            Scorer([f"{HERE}:interrupted"], calls=calls)(PROBLEMS[:1], ANSWERS[:1])
    finally:
        signal.signal(signal.SIGINT, before)


async def cancelled_inside(row, completion):
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def all_cancelled_inside(rows, completions):
    await cancelled_inside(rows[0], completions[0])


@pytest.mark.parametrize("name", ["cancelled_inside", "all_cancelled_inside"])
def test_a_cancelled_task_inside_a_reward_is_an_error_with_names(calls, name):
    with pytest.raises(ValueError, match=f"reward '{HERE}:{name}' waits for a task that was cancelled") as caught:
        Scorer([f"{HERE}:{name}"], calls=calls)(PROBLEMS[:1], ANSWERS[:1])
    assert "sample 0 of rows.jsonl:1" in "".join(caught.value.__notes__)


def test_tasks_that_a_reward_left_end_with_the_calls(calls):
    ended = []

    async def left():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leave():
        task = asyncio.get_running_loop().create_task(left())
        await asyncio.sleep(0)
        return task

    task = calls.run(leave())
    assert not task.done()
    calls.close()
    assert task.cancelled() and ended
    calls.close()  # again: nothing


def test_a_function_that_takes_long_is_named_with_its_sample_and_again_when_the_time_has_doubled(monkeypatch):
    told = Told(2)
    monkeypatch.setitem(globals(), "TOLD", told)
    log = logging.getLogger("lockstep.integration.grpo.rewards.user_calls")
    log.addHandler(told)
    try:
        Scorer([f"{HERE}:blocks"], calls=UserCalls(patience_s=0.01))(PROBLEMS, ANSWERS)
    finally:
        log.removeHandler(told)
    where = r"1 of 3 calls are over; the oldest of the others, sample 1 of rows.jsonl:2, 'one', for 0 s"
    assert all(re.fullmatch(rf"reward '{HERE}:blocks' has run for 0 s: {where}", line) for line in told.lines[:2])


def test_a_batch_that_takes_as_long_as_the_one_before_is_not_told(caplog):
    function = UserFunction("reward 'slow'", "a number", UserCalls(patience_s=0.0))
    function._longest_s = 3600.0
    with function.batch(1), function.call(lambda: "a sample"):
        pass
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "where"),
    [("hangs", "sample 1 of rows.jsonl:2, 'one'"), ("hangs_together", "3 completions, the first of them sample 0")],
)
def test_a_coroutine_that_takes_longer_than_it_may_is_ended_and_named(name, where):
    calls = UserCalls(0.01)
    with pytest.raises(CallTimedOut, match=rf"^reward '{HERE}:{name}' has returned nothing for 0.01 s.*\nin .*{where}"):
        Scorer([f"{HERE}:{name}"], calls=calls)(PROBLEMS, ANSWERS)
    assert calls.run(num_tasks()) == 1, "nothing goes on in the background"


async def num_tasks():
    return len(asyncio.all_tasks())


def test_a_limit_of_the_rewards_own_is_its_own_error():
    with pytest.raises(TimeoutError, match=r"^the judge is busy\nin reward"):
        Scorer([f"{HERE}:has_its_own_limit"], calls=UserCalls(60.0))(PROBLEMS, ANSWERS)
