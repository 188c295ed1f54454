"""Scheduler time per step, by policy and by number of waiting requests. No model runs: sampled tokens are made up.

--batch sequences decode. In every step one of them ends and one waiting request is admitted, whose whole prompt runs
in that step; a new request takes its place in the queue, so that every step has the same work. Prompts have different
lengths and share no prefix. Time counts inside the scheduler and the block ledger only: the decision, the completion of
the step, the request that leaves and the new one. ms_per_step is the median over the steps of all repeats, which
take turns; growth is the time with the longest queue divided by that with the shortest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from ...rollout.kv.ledger import KVLedger
from ...rollout.request_options import RequestOptions
from ...rollout.sampling_params import SamplingParams
from ...rollout.scheduling.policies import POLICIES
from ...rollout.scheduling.scheduler import Scheduler, StepLimits
from ...rollout.sequences.engine_manager import EngineSequenceManager
from ...rollout.sequences.request import Request
from ...rollout.sequences.sequence import Sequence
from ...rollout.sequences.step import ScheduleOutput, SequenceResult
from ...rollout.sequences.worker_manager import WorkerSequenceManager
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive

_BLOCK_SIZE = 16
_PROMPT_TOKENS = tuple(range(32, 513, 32))
_FILLER = [1] * max(_PROMPT_TOKENS)
_MAX_MODEL_LEN = 4096
_STEP_SECONDS, _ROW_SECONDS = 0.001, 0.001  # assumed times of the model: prompts get deadlines of many lengths
_MIN_DEADLINE_S = 0.05
_CLOCK_STEP = 1e-5  # so slow that no deadline passes: after one, lrs would have less work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES), default=list(POLICIES))
    parser.add_argument(
        "--waiting", nargs="+", type=positive, default=[10, 100, 1000, 10000], help="requests that wait"
    )
    parser.add_argument("--batch", type=positive, default=64, help="sequences that decode")
    parser.add_argument("--steps", type=positive, default=200, help="measured steps of a repeat")
    parser.add_argument("--repeats", type=positive, default=3)
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    budget = Budget(options.max_seconds)
    cases = list(itertools.product(options.policies, sorted(set(options.waiting))))
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for repeat in budget.rounds(options.repeats):
        for policy, num_waiting in cases:
            load = SteadyLoad(policy, options.batch, num_waiting)
            steps = [load.step() for _ in range(options.steps)]
            seconds[policy, num_waiting] += steps
            median_ms = statistics.median(steps) * 1e3
            say(f"repeat {repeat + 1}/{options.repeats} {policy}, {num_waiting} waiting: {median_ms:.3f} ms")
    ms: dict[str, dict[int, float]] = {policy: {} for policy in options.policies}
    for (policy, num_waiting), times in seconds.items():
        ms[policy][num_waiting] = round(statistics.median(times) * 1e3, 4)
    return {
        "batch": options.batch,
        "steps": options.steps,
        "repeats": len(seconds[cases[0]]) // options.steps,
        "ms_per_step": ms,
        "growth": {policy: round(times[max(times)] / times[min(times)], 2) for policy, times in ms.items()},
    }


class SteadyLoad:
    """A scheduler under a steady load: `batch` sequences decode, `num_waiting` wait, one ends in each step."""

    def __init__(self, policy: str, batch: int, num_waiting: int) -> None:
        self._batch = batch
        self._now = 0.0
        self._num_requests = 0
        blocks_each = -(-(max(_PROMPT_TOKENS) + batch) // _BLOCK_SIZE)
        self._ledger = KVLedger(2 * batch * blocks_each, _BLOCK_SIZE, prefix_cache=True)
        limits = StepLimits(batch, batch + max(_PROMPT_TOKENS), max(_PROMPT_TOKENS), _MAX_MODEL_LEN)
        self.scheduler = Scheduler(
            self._ledger, limits, policy, min_deadline_s=_MIN_DEADLINE_S, clock=lambda: self._now
        )
        self._controller = EngineSequenceManager(frozenset(), _MAX_MODEL_LEN)
        self._worker = WorkerSequenceManager()
        for _ in range(batch):  # one is added in each step, so later one ends in each step
            self._queue(self._request())
            self.step()
        while self.scheduler.num_waiting < num_waiting:
            self._queue(self._request())

    def step(self) -> float:
        """Run one step, and add a request for the one that ended; returns the seconds spent in the scheduler."""
        self._now += _CLOCK_STEP
        scheduler, started = self.scheduler, time.perf_counter()
        output = scheduler.schedule()
        seconds = time.perf_counter() - started
        requests = {item.id: self._controller.request(item.id) for item in output.scheduled}
        ended = self._run(output)
        arriving = [self._request() for _ in ended]
        started = time.perf_counter()
        scheduler.on_step_completed(output, requests)
        scheduler.on_step_timed(output, _STEP_SECONDS + _ROW_SECONDS * output.num_rows)
        for id in ended:
            scheduler.remove(requests[id])
        seconds += time.perf_counter() - started
        for id in ended:
            self._controller.free(id)
            self._worker.free(id)
        return seconds + sum(self._queue(request) for request in arriving)

    def _run(self, output: ScheduleOutput) -> list[str]:
        """Do the part of the model and the managers; returns the ids that ended."""
        results = []
        for manager in (self._controller, self._worker):
            manager.on_schedule(output)
        for item in output.scheduled:
            is_last = item.start + item.num_tokens == self._worker.sequence(item.id).num_tokens
            token = (0, 0.0) if is_last else (None, None)
            results.append(SequenceResult(item.id, item.incarnation, item.num_tokens, *token))
        ended = self._controller.on_step_completed(results)
        self._worker.on_step_completed(results)
        return ended

    def _request(self) -> Request:
        number = self._num_requests = self._num_requests + 1
        prompt = [number, *_FILLER[1 : _PROMPT_TOKENS[number % len(_PROMPT_TOKENS)]]]
        params = SamplingParams(max_new_tokens=self._batch)
        sequence = Sequence(f"r{number}", prompt)
        return Request(sequence, params, RequestOptions(), 0, 0, self._now, number, None)

    def _queue(self, request: Request) -> float:
        self._controller.add(request)
        started = time.perf_counter()
        self.scheduler.add(request)
        return time.perf_counter() - started
