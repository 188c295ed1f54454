"""The one thread that trains and samples: it takes jobs in their order, and runs the steps of the engine.

Samples of one set of weights run together: while they do, further ones of the same weights join them, and training jobs
that exchange no layers run between their steps. A job that cannot, samples of other weights for instance, waits for the
samples under way, and what came after it waits for it. So every job's turn comes, and the order of jobs is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ....rollout.completion import Completion
from ..training.data import BadInput
from ..training.trainer import SamplerWeights, Trainer
from ..wire.json_forms import sample_values
from .promises import PROTO, Answer, Promise
from .sampling import SampleRequest

logger = logging.getLogger(__name__)

_MOST_STEPS = 8  # decode steps after which arriving samples join those that run
_DIGEST_HEADER = "X-Lockstep-Weight-Digest"


@dataclass(frozen=True)
class Job:
    """A call that trains, saves or loads, whose result is the answer to a promise."""

    run: Callable[[Trainer], Answer]
    promise: Promise
    # Whether it can run between the steps of samples, whose layers it leaves in the module.
    runs_beside: Callable[[Trainer], bool] = lambda trainer: True


@dataclass(frozen=True)
class SampleJob:
    """Samples of one prompt."""

    weights: SamplerWeights
    request: SampleRequest
    promise: Promise


@dataclass
class _Open:
    """A request for samples that the engine has."""

    job: SampleJob
    num_open: int
    completions: dict[int, Completion] = field(default_factory=dict)  # by number of the sample


class Worker:
    """The thread and its queue. `put`, `cancel` and `close` may be called from any thread."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._engine = trainer, trainer.engine
        self._changed = threading.Condition()
        self._jobs: deque[Job | SampleJob] = deque()
        self._cancelled: set[str] = set()  # request ids
        self._is_closed = False
        self._taken: str | None = None  # the request for samples that has left the queue and is not open yet
        self._open: dict[str, _Open] = {}  # by request id
        self._owners: dict[str, str] = {}  # request id by the engine's sequence id
        self._thread = threading.Thread(target=self._run, name="lockstep-tinker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, job: Job | SampleJob) -> None:
        """Queue a job. One that comes after `close` fails."""
        with self._changed:
            if not self._is_closed:
                self._jobs.append(job)
                self._changed.notify()
                return
        job.promise.fail(_ending())

    def cancel(self, is_its: Callable[[str], bool]) -> None:
        """Fail the requests whose ids are meant: those that wait, and samples that run, as soon as their step ends. A
        training job that runs goes on to its end."""
        with self._changed:
            waiting = [job for job in self._jobs if is_its(job.promise.request_id)]
            self._jobs = deque(job for job in self._jobs if not is_its(job.promise.request_id))
            begun = [*self._open, *([] if self._taken is None else [self._taken])]
            self._cancelled |= {request_id for request_id in begun if is_its(request_id)}
        for job in waiting:
            job.promise.fail(_cancelled())

    def close(self, timeout_s: float) -> None:
        """Fail what waits, abort the samples that run, and end the thread after its job."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self.cancel(lambda request_id: True)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, Job):
                self._run_job(job)
            else:
                self._run_samples(job)

    def _next(self) -> Job | SampleJob | None:
        with self._changed:
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            return self._pop() if self._jobs else None

    def _pop(self) -> Job | SampleJob:
        """Take the first job, under the lock. Samples may be cancelled from then on as those that run."""
        job = self._jobs.popleft()
        if isinstance(job, SampleJob):
            self._taken = job.promise.request_id
        return job

    def _run_job(self, job: Job) -> None:
        try:
            job.promise.set(job.run(self._trainer))
        except Exception as error:  # noqa: BLE001 - a thread boundary: the client gets the error
            job.promise.fail(error)

    def _run_samples(self, first: SampleJob) -> None:
        """Run samples of one set of weights until none is left."""
        try:
            digest = self._trainer.publish(first.weights)
            self._submit(first)
            while self._open:
                self._abort_cancelled()
                for completion in self._engine.step(_MOST_STEPS):
                    self._take(completion, digest)
                self._let_in(first.weights)
        except Exception as error:  # noqa: BLE001 - a thread boundary: the clients get the error
            for request_id in list(self._open):
                self._end(request_id).job.promise.fail(error)
            self._owners.clear()
            self._fail_taken(first, error)
            with self._changed:
                self._cancelled.clear()
            self._engine.abort_request(abort_all=True, message="a step of samples failed")

    def _let_in(self, weights: SamplerWeights) -> None:
        """Take samples of the same weights from the front of the queue, up to a training job, and run that one."""
        while (job := self._next_beside(weights)) is not None:
            if isinstance(job, SampleJob):
                self._submit(job)
                continue
            self._engine.between_steps("tinker", partial(self._run_job, job))
            return

    def _next_beside(self, weights: SamplerWeights) -> Job | SampleJob | None:
        """Take the first job of the queue, if it can run beside samples of these weights."""
        with self._changed:
            if not self._jobs:
                return None
            job = self._jobs[0]
            is_beside = job.weights == weights if isinstance(job, SampleJob) else job.runs_beside(self._trainer)
            return self._pop() if is_beside else None

    def _submit(self, job: SampleJob) -> None:
        request_id = job.promise.request_id
        try:
            ids = self._engine.add(job.request.prompt_ids, job.request.params, options=job.request.options)
        except ValueError as error:
            self._fail_taken(job, error)
            return
        except BaseException as error:  # those that run fail, too
            self._fail_taken(job, error)
            raise
        with self._changed:
            self._open[request_id], self._taken = _Open(job, len(ids)), None
        self._owners |= dict.fromkeys(ids, request_id)

    def _fail_taken(self, job: SampleJob, error: BaseException) -> None:
        """Fail a job that did not come to run."""
        with self._changed:
            self._taken = None
            self._cancelled.discard(job.promise.request_id)
        job.promise.fail(error)

    def _take(self, completion: Completion, digest: str) -> None:
        """Take an answer of the engine, and answer its request with the last one."""
        request_id = self._owners.pop(completion.id, None)
        if request_id is None or request_id not in self._open:
            return
        found = self._open[request_id]
        found.completions[completion.index] = completion
        found.num_open -= 1
        if found.num_open:
            return
        job = self._end(request_id).job
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            job.promise.fail(_cancelled())
            return
        try:
            answer = job.request.answer([found.completions[index] for index in sorted(found.completions)])
        except ValueError as error:
            job.promise.fail(error)
            return
        job.promise.set(Answer(answer.encoded(), PROTO, {_DIGEST_HEADER: digest}, partial(sample_values, answer)))

    def _end(self, request_id: str) -> _Open:
        with self._changed:
            return self._open.pop(request_id)

    def _abort_cancelled(self) -> None:
        with self._changed:
            cancelled = self._cancelled & self._open.keys()
        for sequence_id, request_id in list(self._owners.items()):
            if request_id in cancelled:
                self._engine.abort_request(sequence_id, message="cancelled by its client")


def _cancelled() -> BadInput:
    return BadInput("the request was cancelled, or its session has ended")


def _ending() -> BadInput:
    return BadInput("the server is ending")
