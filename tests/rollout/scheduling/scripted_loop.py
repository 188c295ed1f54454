"""A loop around a scheduler whose forward passes are scripted, for the tests beside this file."""

from __future__ import annotations

from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager

SIZE = 4


class Loop:
    """The engine's loop without a model: the token after n known ones is n."""

    def __init__(
        self,
        num_blocks: int = 4,
        *,
        seqs: int = 8,
        rows: int = 64,
        chunk: int | None = None,
        context: int = 1000,
        prefix_cache: bool = True,
        policy: str = "fcfs",
    ) -> None:
        self.now = 0.0  # a step is a second
        self.ledger = KVLedger(num_blocks, SIZE, prefix_cache)
        self.limits = StepLimits(seqs, rows, chunk or rows, context)
        self.scheduler = Scheduler(self.ledger, self.limits, policy, clock=lambda: self.now)
        self.controller = EngineSequenceManager(frozenset(), context)
        self.worker = WorkerSequenceManager()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(self, id: str, prompt: list[int] | int, new: int = 4, **options: object) -> Request:
        """Add a request. A prompt given as a number is that many tokens that no other prompt has."""
        number = len(self.requests)
        prompt = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_new_tokens=new)
        arrival = self.now + number * 1e-6
        request = Request(Sequence(id, prompt), params, RequestOptions(**options), 0, 0, arrival, number, None)
        self.requests[id] = request
        self.controller.add(request)
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduleOutput:
        self.now += 1.0
        output = self.scheduler.schedule()
        self.check_limits(output)
        self.controller.on_schedule(output)
        self.worker.on_schedule(output)
        results = [self.result(item) for item in output.scheduled]
        ended = [id for id, _ in (*output.ignored, *output.exhausted)]
        ended += self.controller.on_step_completed(results)
        self.worker.on_step_completed(results)
        self.scheduler.on_step_completed(output, {item.id: self.requests[item.id] for item in output.scheduled})
        self.scheduler.on_step_timed(output, 0.1 + 0.1 * output.num_rows)
        self.num_preemptions += len(output.preempted)
        for id in ended:
            self.end(id)
        self.ledger.check()
        assert self.controller.state_hash() == self.worker.state_hash()
        return output

    def end(self, id: str) -> None:
        self.scheduler.remove(self.requests[id])
        self.controller.free(id)
        if id in self.worker:
            self.worker.free(id)

    def result(self, item: ScheduledSequence) -> SequenceResult:
        known = self.worker.sequence(item.id).num_tokens
        assert len(self.worker.block_table(item.id)) * SIZE >= item.start + item.num_tokens
        assert self.worker.block_table(item.id) == self.ledger.block_table(self.requests[item.id])
        assert item.start + item.num_tokens <= known
        is_last = item.start + item.num_tokens == known
        token = (known, -1.0) if is_last else (None, None)
        return SequenceResult(item.id, item.incarnation, item.num_tokens, *token)

    def check_limits(self, output: ScheduleOutput) -> None:
        assert output.num_rows <= self.limits.max_num_batched_tokens
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        ids = [item.id for item in output.scheduled]
        assert len(set(ids)) == len(ids) and not set(ids) & set(output.preempted)
        assert all(0 < item.num_tokens <= self.limits.chunked_prefill_size for item in output.scheduled)

    def drain(self, limit: int = 5000) -> int:
        """Run steps until no request is left."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                self.ledger.check_idle()
                assert len(self.controller) == len(self.worker) == 0
                return steps
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.running()}")


def rows(output: ScheduleOutput) -> list[tuple[str, int, int]]:
    return [(item.id, item.start, item.num_tokens) for item in output.scheduled]
