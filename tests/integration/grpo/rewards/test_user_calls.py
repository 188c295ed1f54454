"""The calls of a job's rewards and environments: one event loop for all of them."""

from __future__ import annotations

import asyncio
import signal

import pytest

from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.rewards.user_calls import UserCalls
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


def test_ctrl_c_ends_a_reward_that_waits(calls):
    with pytest.raises(KeyboardInterrupt):
        Scorer([f"{HERE}:interrupted"], calls=calls)(PROBLEMS[:1], ANSWERS[:1])


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
