"""The engine's loop: schedule, run, commit, deliver. It runs on one thread at a time, which holds the engine's lock.

With overlap the model runs on its own thread. While it runs step n, this thread schedules step n + 1, and turns the
tokens of step n - 1 into text and delivers them:

    model thread   | forward n                      |                      | forward n+1
    this thread    | deliver n-1, schedule n+1, wait | commit n, launch n+1 | deliver n, schedule n+2, ...

Between the two forwards only the facts are settled that step n + 1 needs of step n: the tokens, and the sequences that
ended by token or length. A stop string is found at delivery, when its sequence may be in one more step; the result of
that step is dropped.

With several stages as many steps are in flight, of different sequences or of successive chunks of one prompt:

    first stage    | n         | n+1           | n+2           | n+3
    last stage     |           | n             | n+1           | n+2
    this thread    | launch n  | launch n+1    | commit n, launch n+2          | commit n+1, launch n+3

Steps are committed in the order of their launches, and every stage runs them in that order. So blocks may change their
owner while steps are in flight: a preempted sequence may still be in one of them, which reads and writes its old blocks
on every stage before a later step writes there. The results of its old incarnation are dropped; none was published.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from ..completion import FinishReason
from ..running.runner import StepHandle
from ..scheduling.multi_step import MultiStep
from ..sequences.request import Request
from ..sequences.sequence import HOLDS_BLOCKS
from ..sequences.step import ScheduleOutput, SequenceResult
from .answers import Answers, Interrupts
from .draft_steps import DraftSteps
from .failed_steps import FailedSteps
from .grammar_steps import GrammarSteps
from .parts import Parts
from .receipts import Receipts


@dataclass(eq=False)
class Flight:
    """A step from its launch to its delivery."""

    output: ScheduleOutput
    requests: dict[str, Request]  # the requests of the step, by id
    handle: StepHandle
    started: float  # of time.perf_counter()
    num_steps: int = 1  # decode steps that have run, one after another; known after the commit
    results: list[SequenceResult] = field(default_factory=list)  # after the commit: the committed results
    num_delivered: int = 0  # of the results


class Loop:
    """Move requests from the queue to their answers."""

    def __init__(self, parts: Parts, answers: Answers, interrupts: Interrupts) -> None:
        """Connect the parts. Raises ValueError if overlap is configured and there are several stages."""
        overlap, num_stages = parts.overlap, parts.runner.num_stages
        if overlap and num_stages > 1:
            raise ValueError(
                f"overlap plans the next step while the only stage runs, and there are {num_stages}, which have "
                "several steps at a time: leave it off"
            )
        self._scheduler, self._managers, self._ledger = parts.scheduler, parts.managers, parts.ledger
        self._runner, self._reports = parts.runner, parts.reports
        self._metrics, self._latencies = self._reports.metrics, self._reports.latencies
        self._trace = self._reports.trace
        self._grammars = GrammarSteps(parts)
        self._drafts = DraftSteps(parts, self._grammars)
        self._receipts = Receipts(parts)
        self._answers, self._interrupts = answers, interrupts
        self._multi_step = MultiStep(parts.ledger, parts.limits, parts.managers.engine, answers.wants_tokens)
        self._runner.goes_on = lambda num_steps: not interrupts.is_awaited(self._metrics.num_steps + num_steps)
        self._overlap = overlap  # plan ahead while the only stage runs
        self._flights: deque[Flight] = deque()  # launched steps, in the order of their launches
        self._committed: Flight | None = None  # the step that is committed and not delivered
        self.failed_steps = FailedSteps(parts, self.abort, answers.on_broken)
        self._last_commit = 0.0  # of time.perf_counter()
        self._newest_step: tuple[list[SequenceResult], float] = [], 1.0  # its results and seconds

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._flights) or self._committed is not None

    @property
    def last_throughput(self) -> float:
        """Tokens per second of the newest step; 0 before the first one."""
        results, seconds = self._newest_step
        return sum((result.token_id is not None) + len(result.accepted) for result in results) / seconds

    def queue(self, request: Request) -> None:
        """Queue a request. Its id must not be live."""
        self._managers.add(request)
        self._scheduler.add(request)
        self._drafts.on_queued(request)
        self._reports.on_queued(request)

    def step(self, most: int = 1) -> None:
        """Launch as many steps as there are stages, if requests can run, and finish the oldest. most: of one schedule.

        Raises the error of a failed step. The launched steps are dropped then, and their sequences wait again. Where
        memory ran out nothing is raised: later steps are smaller.
        """
        try:
            if self._overlap:
                self._step_ahead()
            else:
                self._deliver()  # what an error has left of the step before
                while len(self._flights) < self._runner.num_stages and self._launch(self._schedule(), most):
                    pass
                self._commit()
                self._deliver()
        except (RuntimeError, MemoryError) as error:
            self.failed_steps.go_on_after(error)
        if not self.has_work:
            self._ledger.check_idle()

    def _step_ahead(self) -> None:
        """Finish the running step and launch the next one, which is planned while it runs.

        A step with drafts is finished first: what follows it is known with its tokens.
        """
        if self._flights and self._flights[-1].output.has_drafts:
            self._deliver()
            self._commit()
        if not self._flights:
            self._deliver()
            self._launch(self._schedule())
        if not self._flights or self._flights[-1].output.has_drafts:
            return
        self._deliver()  # before the schedule, which then knows the ended sequences
        ahead = self._schedule()
        if not self._is_interrupted and not self._drafts.may_draft:
            try:
                self._runner.anticipate(ahead, self._managers.engine.requests_of(ahead.scheduled))
            except BaseException as error:
                self._start_over_after(ahead, error)
                raise
        self._commit()
        if ahead.exhausted:
            self._deliver()  # they end with the token of this step
        wanted = self._still_wanted(ahead)
        if self._is_interrupted:
            self._cancel(wanted)  # a waiting command would have to wait for this step too
            self._runner.settle()
        elif not self._launch(wanted):
            self._runner.settle()

    def drain(self) -> None:
        """Finish all launched steps and deliver their output. Nothing is in flight afterwards."""
        try:
            self._deliver()
            while self._flights:
                self._commit()
                self._deliver()
        except (RuntimeError, MemoryError) as error:
            self.failed_steps.go_on_after(error, in_step=False)

    def retract(self, request: Request) -> None:
        """Free a running request's blocks and queue it again. No step may be in flight."""
        self._managers.preempt(request.id)
        self._scheduler.retract(request)
        self._reports.on_retraction(request.id)

    def begin_again(self, request: Request) -> bool:
        """Queue a live request as it came, with its tokens so far as a draft. No step may be in flight.

        Returns False where that cannot be done: the request is aborted, and its message says why.
        """
        try:
            again = request.begin_again()  # before anything of it is freed
        except ValueError as error:
            self.abort(request, FinishReason("abort", message=str(error), by_engine=True))
            return False
        self._drafts.on_end(request)
        self._scheduler.remove(request)
        self._runner.forget(request)
        self._answers.keep_id(request.id)  # another request of this id would be in the way
        try:
            self._managers.free(request.id)
            self._managers.add(again)
        finally:
            self._answers.free_id(request.id)
        self._scheduler.add(again)
        self._drafts.on_queued(again)
        self._reports.on_retraction(request.id)
        return True

    def abort(self, request: Request, reason: FinishReason) -> None:
        """End a live request with its tokens so far; one that has ended is answered. It may be in no step in flight."""
        if request.finish_reason is None:
            self._managers.finish(request.id, reason)
        self._answer(request)

    # -- one step, phase by phase -------------------------------------------------------------------------------

    def _schedule(self) -> ScheduleOutput:
        scheduler = self._scheduler
        try:
            if not self._trace.is_on:
                return scheduler.schedule()
            with self._trace.span("schedule", running=scheduler.num_running, waiting=scheduler.num_waiting):
                return scheduler.schedule()
        except BaseException:  # the tables have blocks of a schedule that no one will have
            self._start_over()
            raise

    def _launch(self, output: ScheduleOutput, most: int = 1) -> bool:
        """Send the schedule to the managers and launch the step; returns False if it is empty. most: as of `step`."""
        try:
            output = self._drafts.prepare(self._grammars.prepare(output))
            most = min(most, self._drafts.num_without)
            if most > 1 and self._runner.runs_several(len(output.scheduled)) and self._runner.goes_on(1):
                output = self._multi_step.plan(output, most, may_evict=not self._scheduler.num_waiting)
        except BaseException as error:
            self._start_over_after(output, error)
            raise
        self._decide(output)
        if not output.scheduled:
            return False
        requests = self._managers.engine.requests_of(output.scheduled)
        try:
            for item, request in zip(output.scheduled, requests.values(), strict=True):
                adds_token = item.start + item.num_tokens == len(request.sequence.token_ids)
                request.in_flight.launched(item.num_tokens, adds_token)
                if request.first_step_time is None:
                    self._latencies.on_launch(request)
            started = time.perf_counter()
            flight = Flight(output, requests, self._runner.launch(output, requests), started)
            self._flights.append(flight)
            if self._runner.num_stages > 1:
                self._leave_first_stage(flight)
        except BaseException as error:
            self._start_over_after(output, error)
            raise
        return True

    def _leave_first_stage(self, flight: Flight) -> None:
        """Wait until the step has left the first stage. Prompts may then go on with their next chunk."""
        flight.handle.wait_first_stage()
        self._managers.on_stage_completed(flight.output.scheduled)
        for item in flight.output.scheduled:
            request = flight.requests[item.id]
            if item.incarnation == request.num_retractions:
                request.in_flight.left_first_stage(item.num_tokens)

    def _decide(self, output: ScheduleOutput) -> None:
        """Send the schedule to the managers, and answer the requests that will not run."""
        self._managers.on_schedule(output)
        for id in output.preempted:
            self._reports.on_retraction(id)
        for id, _ in (*output.ignored, *output.exhausted):
            self._answer(self._managers.engine.request(id))

    def _cancel(self, output: ScheduleOutput) -> None:
        """Cancel a scheduled step before launch. Its sequences keep their KV blocks."""
        self._decide(output)
        self._managers.on_step_cancelled(output.scheduled)

    def _commit(self) -> None:
        """Wait for the oldest launched step and commit it: tokens, states, KV, and ends by token or length."""
        if not self._flights:
            return
        flight = self._flights[0]
        try:
            results = flight.handle.results()
        except BaseException as error:
            self._start_over_after(flight.output, error)
            raise
        self._flights.popleft()
        for item in flight.output.scheduled:
            request = flight.requests[item.id]
            if item.incarnation == request.num_retractions:
                request.in_flight.committed()
        if flight.output.num_steps > 1:
            flight.num_steps = 1 + len(results[0].accepted)
        with self._trace.span("commit", step=flight.output.step):
            takes = self._managers.engine.takes
            flight.results = [r for r in results if takes(r, flight.requests[r.id])]
            self._managers.on_step_completed(flight.results)
            accepted: dict[str, int] = {}
            if flight.output.has_drafts or flight.num_steps > 1:
                accepted = {result.id: len(result.accepted) for result in flight.results if result.accepted}
            self._scheduler.on_step_completed(flight.output, flight.requests, accepted, flight.num_steps)
            self._drafts.end(flight.output, flight.results)
            self._grammars.end(flight.results)
        self._committed = flight
        if len(flight.results) < len(results):
            for result in results:  # the sampler kept state of sequences that ended during the step
                if result.id not in self._managers.engine:
                    self._runner.forget(flight.requests[result.id])
        self._measure(flight)

    def _deliver(self) -> None:
        """Deliver the text, the chunks and the answers of the step that was committed last."""
        flight = self._committed
        if flight is None:
            return
        with self._trace.span("deliver", step=flight.output.step):
            now = time.monotonic()
            while flight.num_delivered < len(flight.results):
                result = flight.results[flight.num_delivered]
                flight.num_delivered += 1  # an error at one result leaves the others for the next call
                request = flight.requests[result.id]
                has_token = result.token_id is not None and request.params.max_new_tokens > 0
                if has_token:
                    record, num_before = request.record, request.record.num_delivered
                    self._managers.deliver(request)
                    num_tokens = max(len(record.logprobs) - num_before, 1)  # a jump may replace as many
                    self._latencies.on_tokens(request, now, num_tokens)
                if request.finish_reason is not None:
                    self._answer(request)
                elif has_token:
                    self._answers.on_token(request)
        self._committed = None

    def _answer(self, request: Request) -> None:
        """Answer an ended request, once, and free its blocks and state."""
        engine = self._managers.engine
        completion = request.completion(engine.weight_version, engine.weight_digest)
        self._answers.keep_id(request.id)  # a later request of this id would be given this answer
        try:
            # Freed before the receipt is made, which may fail: an ended sequence may not stay.
            self._drafts.on_end(request)
            self._scheduler.remove(request)
            self._runner.forget(request)
            self._managers.free(request.id)
            completion = self._receipts.with_receipt(request, completion)
            request.finish_reason = completion.finish_reason
            self._reports.on_answer(request)
            self._answers.on_answer(request, completion)
        finally:
            self._answers.free_id(request.id)

    @property
    def _is_interrupted(self) -> bool:
        """Whether a command or an alarm has to run before the next step."""
        return self._interrupts.is_interrupted(self._metrics.num_steps)

    def _still_wanted(self, ahead: ScheduleOutput) -> ScheduleOutput:
        """Return a schedule that was made ahead without the sequences that have ended since."""
        engine = self._managers.engine

        def lives(id: str) -> bool:
            return id in engine and engine.request(id).finish_reason is None

        return replace(
            ahead,
            scheduled=tuple(item for item in ahead.scheduled if lives(item.id)),
            preempted=tuple(id for id in ahead.preempted if lives(id)),
            exhausted=tuple(pair for pair in ahead.exhausted if lives(pair[0])),
        )

    def _start_over_after(self, output: ScheduleOutput, error: BaseException) -> None:
        """Drop all launched and planned steps after an error or interrupt, so that no sequence stays partly in one.

        Sequences that hold blocks, or were planned ahead, wait again as after a preemption. output: the step that
        failed. Called where it did, and not by a context manager: each step would enter three.
        """
        self.failed_steps.on_failure(output, error)
        self._start_over()

    def _start_over(self) -> None:
        if self._overlap:
            self._runner.settle()
        self._deliver()
        while self._flights:
            self._flights.popleft().handle.abandon()
        self._grammars.forget_time()
        for request in self._managers.engine.requests():
            request.in_flight.forget()
            if request.finish_reason is not None:  # its delivery has failed
                self._answer(request)
                continue
            if request.sequence.state in HOLDS_BLOCKS:
                self._managers.preempt(request.id)
                self._reports.on_retraction(request.id)
            self._scheduler.requeue(request)

    def _measure(self, flight: Flight) -> None:
        now = time.perf_counter()
        # With several steps in flight only the time that this one added counts: the stages' times overlap.
        seconds = now - max(flight.started, self._last_commit)
        self._last_commit = now
        self._metrics.num_steps += (num_steps := flight.num_steps)
        self._metrics.num_rows += flight.output.num_rows * num_steps
        self._metrics.num_sequence_forwards += len(flight.output.scheduled) * num_steps
        self._metrics.step_seconds += seconds
        self._scheduler.on_step_timed(flight.output, seconds / num_steps)
        self._drafts.on_step_timed(flight.output, seconds / num_steps, num_steps)
        self._newest_step = flight.results, seconds
        if self._trace.is_on:
            usage = self._ledger.usage
            self._trace.counter("blocks", free=usage.num_free, cached=usage.num_cached, held=usage.num_held)
