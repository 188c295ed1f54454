"""Sessions of clients with their models and samplers, and the order of each model's requests. Used on the event loop.

    Session ── models    id SESSION:train:N    requests in the order of their seq_id, from 1
            └─ samplers  id SESSION:sample:N   requests in any order

A session ends when its client says so, or when its heartbeats stop: its models and samplers go then.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...http.edge.errors import HttpError
from ..training.config import TinkerConfig
from ..training.data import BadInput
from ..training.targets import AdapterSpec
from ..training.trainer import SamplerWeights, Trainer
from .promises import Answer, Promise, Promises, TooMany, as_json
from .sampling import SampleRequest
from .worker import Job, SampleJob, Worker

logger = logging.getLogger(__name__)

Run = Callable[[Trainer], Answer]
Beside = Callable[[Trainer], bool]  # see `Job`


@dataclass
class Model:
    """A model in training, as its session knows it."""

    model_id: str
    spec: AdapterSpec
    is_gone: bool = False  # unloaded, or never made
    next_seq: int = 1  # of the next request that the worker gets
    waiting: dict[int, Job] = field(default_factory=dict)  # by seq_id, for those before them
    waits_since: float = 0.0  # of time.monotonic: when the first of them came, or the next request was last tried
    last_request: float = field(default_factory=time.time)  # seconds since 1970


@dataclass(frozen=True)
class Sampler:
    """A sampler with its weights."""

    sampler_id: str
    weights: SamplerWeights
    saved_by: bytes = b""  # the request that saves the weights for it, if one does


@dataclass
class Session:
    """A client."""

    session_id: str
    display_name: str | None
    user_metadata: Mapping[str, object] | None
    seen_at: float  # of time.monotonic
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    num_clones: dict[str, int] = field(default_factory=dict)  # clients that joined a sampler


class Sessions:
    """All sessions of a server."""

    def __init__(self, config: TinkerConfig, worker: Worker) -> None:
        self._config, self._worker = config, worker
        self.promises = Promises(config.max_open_samples, config.result_s)
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    # -- sessions ---------------------------------------------------------------------------------------------------

    def open(self, display_name: str | None, user_metadata: Mapping[str, object] | None) -> Session:
        """Open a session."""
        session = Session(str(uuid.uuid4()), display_name, user_metadata, time.monotonic())
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return a session, which has given a sign of life. Raises HttpError 410 for one that is not open."""
        session = self._sessions.get(session_id)
        if session is None:
            raise HttpError(410, f"session {session_id[:100]} is not open: it has ended, or never was", code="gone")
        session.seen_at = time.monotonic()
        return session

    def end(self, session_id: str) -> None:
        """End a session. Its requests fail, and its models and the weights of its samplers are dropped."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        prefix = f"{session_id}:"
        for model in session.models.values():
            self._fail_waiting(model, f"the session has ended before {_next(model)} came")
        self._worker.cancel(lambda request_id: request_id.startswith(prefix))
        models, samplers = list(session.models), list(session.samplers)

        def drop(trainer: Trainer) -> Answer:
            for model_id in models:
                trainer.drop(model_id)
            for sampler_id in samplers:
                trainer.drop_snapshot(sampler_id)
            return Answer(b"")

        self._worker.put(Job(drop, Promise("")))
        self.promises.forget(prefix)

    def sweep(self) -> None:
        """End the sessions whose heartbeats have stopped, fail requests that have waited too long for one with a
        smaller seq_id, and forget answers that were fetched."""
        before = time.monotonic() - self._config.session_timeout_s
        for session in [one for one in self if one.seen_at < before]:
            logger.warning(
                "session %s ends: it has sent nothing for %g s; %d models are dropped",
                session.session_id, self._config.session_timeout_s, len(session.models),
            )  # fmt: skip
            self.end(session.session_id)
        for model in [model for one in self for model in one.models.values() if model.waiting]:
            if model.waits_since < time.monotonic() - self._config.gap_s:
                self._pass_over(model)
        self.promises.forget_fetched()

    # -- models -----------------------------------------------------------------------------------------------------

    def create_model(
        self, session: Session, seq: int, digest: bytes, spec: AdapterSpec, run: Run
    ) -> tuple[Model, Promise]:
        """Add a model to a session, and queue the call that makes it. The same request again has the same promise.

        Raises HttpError for another request under that number, and TooMany.
        """
        model_id = f"{session.session_id}:train:{seq}"
        request_id = f"{model_id}:create"
        if (known := self._same(request_id, digest)) is not None:
            return session.models[model_id], known
        if model_id in session.models:
            raise HttpError(400, f"model_seq_id {seq} of session {session.session_id} is taken")
        num = sum(not model.is_gone for one in self for model in one.models.values())
        if num >= self._config.max_models:
            raise TooMany(f"{num} models are loaded (--max-models): unload one, or end its session")
        promise = self.promises.add(request_id, digest)
        model = session.models[model_id] = Model(model_id, spec)

        def make(trainer: Trainer) -> Answer:
            try:
                return run(trainer)
            except BaseException:
                model.is_gone = True
                raise

        self._worker.put(Job(make, promise, lambda trainer: not trainer.makes_layers(spec)))
        return model, promise

    def model(self, model_id: str) -> Model:
        """Return a model. Raises HttpError 404 for one that is not known, 410 for one whose session has ended."""
        session = self.get(model_id.partition(":")[0])
        model = session.models.get(model_id)
        if model is None or model.is_gone:
            raise HttpError(404, f"model {model_id[:200]} is not loaded")
        model.last_request = time.time()
        return model

    def submit(
        self, model: Model, seq_id: int | None, digest: bytes, run: Run, runs_beside: Beside = lambda trainer: True
    ) -> Promise:
        """Queue a call of a model behind those of smaller seq_id. The same request again has the same promise.

        Raises HttpError for a seq_id that another request had, and TooMany.
        """
        seq = max([model.next_seq - 1, *model.waiting]) + 1 if seq_id is None else seq_id
        request_id = f"{model.model_id}:{seq}"
        if (known := self._same(request_id, digest)) is not None:
            return known
        if seq < model.next_seq:
            raise HttpError(
                400, f"seq_id {seq} of {model.model_id} was used, or came too late; the next one is {model.next_seq}"
            )
        if not model.waiting or seq == model.next_seq:
            model.waits_since = time.monotonic()
        if seq >= model.next_seq + self._config.max_requests_ahead:
            raise TooMany(f"seq_id {seq} of {model.model_id} is too far ahead: {model.next_seq} is waited for")
        model.waiting[seq] = Job(run, self.promises.add(request_id, digest), runs_beside)
        promise = model.waiting[seq].promise
        while (job := model.waiting.pop(model.next_seq, None)) is not None:
            self._worker.put(job)
            model.next_seq += 1
        return promise

    def unload(self, model_id: str) -> Promise:
        """Drop a model. Its requests that wait for others fail. The same request again has the same promise.

        Raises HttpError as `model`, and TooMany; the model is as before then.
        """
        session, request_id = self.get(model_id.partition(":")[0]), f"{model_id}:unload"
        if model_id in session.models and (known := self.promises.get(request_id)) is not None:
            return known
        model, promise = self.model(model_id), self.promises.add(request_id, b"")
        model.is_gone = True
        self._fail_waiting(model, f"the model was unloaded before {_next(model)} came")

        def drop(trainer: Trainer) -> Answer:
            trainer.drop(model.model_id)
            return as_json({"model_id": model.model_id, "type": "unload_model"})

        self._worker.put(Job(drop, promise))
        return promise

    def _pass_over(self, model: Model) -> None:
        """Fail the requests of a model that wait, since the next one does not come. Later ones run again."""
        last = max(model.waiting)
        logger.warning("%s: %s did not come; %d later ones fail", model.model_id, _next(model), len(model.waiting))
        self._fail_waiting(model, f"{_next(model)} did not come within {self._config.gap_s:g} s (--limit gap_s=N)")
        model.next_seq = last + 1

    @staticmethod
    def _fail_waiting(model: Model, why: str) -> None:
        for job in model.waiting.values():
            job.promise.fail(BadInput(why))
        model.waiting.clear()

    # -- samplers ---------------------------------------------------------------------------------------------------

    def check_sampler(
        self, session: Session, seq: int, weights: SamplerWeights | None, saved_by: bytes = b""
    ) -> Sampler:
        """Return a sampler that is not added yet; see `add_sampler`."""
        sampler_id = f"{session.session_id}:sample:{seq}"
        sampler = Sampler(sampler_id, weights or SamplerWeights(sampler_id), saved_by)
        if session.samplers.get(sampler_id, sampler) != sampler:
            raise HttpError(400, f"sampling_session_seq_id {seq} of session {session.session_id} is taken")
        return sampler

    def add_sampler(self, session: Session, seq: int, weights: SamplerWeights | None, saved_by: bytes = b"") -> Sampler:
        """Add a sampler; weights: None for those that a model is about to save for it, at the request `saved_by`. The
        same one may be added again. Raises HttpError for a number that another sampler has."""
        sampler = self.check_sampler(session, seq, weights, saved_by)
        return session.samplers.setdefault(sampler.sampler_id, sampler)

    def sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler. Raises HttpError 404 for one that is not known, 410 for one whose session has ended."""
        session = self.get(sampler_id.partition(":")[0])
        if (sampler := session.samplers.get(sampler_id)) is None:
            raise HttpError(404, f"there is no sampling session {sampler_id[:200]}")
        return sampler

    def join(self, sampler: Sampler) -> int:
        """Return a number for a further client of a sampler, from 1."""
        session = self.get(sampler.sampler_id.partition(":")[0])
        number = session.num_clones[sampler.sampler_id] = session.num_clones.get(sampler.sampler_id, 0) + 1
        return number

    def sample(self, sampler: Sampler, seq: int, digest: bytes, request: SampleRequest) -> Promise:
        """Queue samples. The same request again has the same promise. Raises HttpError and TooMany."""
        request_id = f"{sampler.sampler_id}:{seq}"
        if (known := self._same(request_id, digest)) is not None:
            return known
        promise = self.promises.add(request_id, digest, request.params.n)
        self._worker.put(SampleJob(sampler.weights, request, promise))
        return promise

    def cancel(self, request_id: str) -> None:
        """Cancel a request for samples, if it is open."""
        self._worker.cancel(lambda one: one == request_id)

    def _same(self, request_id: str, digest: bytes) -> Promise | None:
        """Return the promise of an earlier request of this id. Raises HttpError where that was another request."""
        known = self.promises.get(request_id)
        if known is not None and known.body_digest != digest:
            raise HttpError(400, f"another request has the id {request_id}: its seq_id was used")
        return known


def _next(model: Model) -> str:
    return f"a request with seq_id {model.next_seq}"
