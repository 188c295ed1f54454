"""An engine with its weights: the interface for HTTP, the command line, the job and the trainer adapters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..rollout.completion import Completion
from ..rollout.engine import Engine
from ..rollout.errors import DeadlineExceeded, LockstepError, MemoryReleased
from ..rollout.loop.commands import OnCommit, check_in_flight
from ..rollout.model.adapters.layers import bare_names
from ..rollout.one_process import OfOneProcess
from ..weight_sync.errors import DigestMismatch, Poisoned, SessionError
from ..weight_sync.group.registry import GroupRegistry
from ..weight_sync.manifest import NamedTensors
from ..weight_sync.same_host.shared_memory import TensorReceiver
from ..weight_sync.transaction.call_lock import CallLock
from ..weight_sync.transaction.in_place import checked_pairs, sync_in_place
from ..weight_sync.transaction.peers import PeerFailed
from ..weight_sync.transaction.shard_sync import ShardSync, plan_shard_sync
from .replay.present import PresentWeights
from .replay.proof import OnProgress, WeightSource, replay
from .replay.report import ReplayReport
from .service_config import ServiceConfig
from .weights.all_ranks import Replica, on_all_ranks, serve_verbs
from .weights.checks import WeightChecks
from .weights.host import Commit
from .weights.lora import LoraVerbs
from .weights.memory import MemoryVerbs
from .weights.options import DigestTime, check_required_version
from .weights.pauses import Clients, PauseLease, PauseVerbs
from .weights.sessions import WeightSessions
from .weights.sources import SharedMemory

logger = logging.getLogger(__name__)

_AGREE = "give every rank the same weights, and commit"
_MEND = "complete one, or restore a checkpoint (weights_restored), and commit"


class RolloutService(MemoryVerbs, LoraVerbs, PauseVerbs, OfOneProcess):
    """Connect an engine and the weight verbs. Methods with an HTTP verb have its name.

    Example, in a training rank whose `model` the engine was made from:

        service = RolloutService(Engine(model))
        with service.rollout():
            completions = service.engine.generate(prompts, params)
        with service.optimizer_step():
            optimizer.step()
        service.commit_in_place("1", source=model.named_parameters())
    """

    def __init__(self, engine: Engine, config: ServiceConfig | None = None) -> None:
        self.engine = engine
        self.config = config or ServiceConfig()
        self.groups = GroupRegistry()
        self.replica = Replica(engine, self.config.weight_timeout_s)
        self.sessions = WeightSessions(
            engine,
            self.config.weight_timeout_s,
            self.replica,
            commit_before_sampling=self.commit_implicit_update,
            on_lease_over=self._give_up_session,
            end_pause=self.end_pause_of,
        )
        self.pause_lease = PauseLease(self)
        self.clients = Clients(self)
        self._receiver = TensorReceiver(self.config.shared_memory_folder)
        self._shared_memory = SharedMemory(self._receiver)
        self.sessions.when_rolled_back(self._shared_memory.forget)
        self._checks = WeightChecks(engine, self.sessions, self.replica)
        self._adapter_lock = CallLock(self.config.weight_timeout_s)
        self._torn: str | None = None  # why the weights that the trainer writes must not be published
        self.replica.how_it_stands = self._how_it_stands
        serve_verbs(self)
        self.replica.stands()

    # -- phases -----------------------------------------------------------------------------------------------------

    @contextmanager
    def rollout(self, *, release_kv: bool = False) -> Iterator[None]:
        """Run the rollout phase, in which the module generates. KV memory released before is resumed.

        With `release_kv` the pool is released at the end, for the trainer to use its memory, after an exception too,
        but where several ranks hold it. Sequences that still run, of other callers, are retracted: they go on with
        their tokens in the next rollout phase.
        """
        if self.replica.is_alone or self.engine.kv_bytes:
            self.engine.weights.resume_kv()
        else:
            self.resume_memory_occupation(["kv_cache"])
        try:
            with self.engine.model.rollout_phase():
                self.engine.wake()
                yield
        except BaseException as error:
            if release_kv and self.replica.is_alone:
                try:
                    self._release_kv()
                except LockstepError as failure:  # the engine has stopped, for instance
                    error.add_note(f"the KV pool was not released: {failure}")
            raise
        if release_kv:
            self._release_kv()

    def _release_kv(self) -> None:
        self.engine.weights.retract_running()
        if self.replica.is_alone:
            self.engine.weights.release_kv()
        else:  # on all ranks or none: only the controller knows the running sequences
            self.release_memory_occupation(["kv_cache"])

    @contextmanager
    def weights_turn(self, what: str, timeout_s: float | None = None) -> Iterator[float]:
        """Wait for a turn to write weights outside of the trainer, and yield the seconds left. Re-entrant.

        Where the module is a trainer's it waits for a rollout phase, and that phase ends after the block. Raises
        DeadlineExceeded, naming `what` and what it waited for, where no phase comes in `timeout_s` (None: the service's
        `weight_timeout_s`). The trainer itself, which knows its phases, calls the verbs without it.
        """
        with self.engine.model.borrowed(what, timeout_s or self.config.weight_timeout_s) as seconds_left:
            yield seconds_left

    @contextmanager
    def turn_to_commit(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Wait as `weights_turn` for a call that commits an implicit session, where one is open; else do not wait."""
        if self.sessions.state()["state"] != "open" or self.sessions.is_open:
            yield
        else:
            with self.weights_turn(what, timeout_s):
                yield

    @contextmanager
    def training_numerics(self) -> Iterator[None]:
        """Run the trainer's forward and backward in the block, so that its log-probabilities are the engine's, bit for
        bit."""
        with self.engine.model.training_numerics():
            yield

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Announce that the trainer writes the shared weights in the block. From here to the next commit the engine
        refuses to sample.

        After an exception in the block the weights may be partly written; only a step that completes, or
        `weights_restored`, allows a commit again. Raises SessionError, and runs nothing, while a weight-update session
        is open.
        """
        self.finish_digest()
        self.sessions.let_write("optimizer_step")
        self.engine.weights.refuse_sampling("the trainer is writing the weights: commit them first")
        self._torn = "an optimizer step has not completed"
        try:
            yield
        except BaseException as error:
            self._torn = f"an optimizer step failed ({type(error).__name__}: {error})"
            self.engine.weights.refuse_sampling(f"the weights may be partly written: {self._torn}: {_MEND}")
            raise
        self._torn = None

    def weights_restored(self) -> None:
        """Note that the trainer has loaded a checkpoint into the shared weights, or written frozen ones through
        `.data`. They may be committed, also after a failed step, and each digest is computed anew."""
        self._torn = None
        self.sessions.forget_frozen()

    # -- answers ----------------------------------------------------------------------------------------------------

    def renew(self, completions: Completion | Sequence[Completion]) -> list[Completion]:
        """Return the answers that the present weights give to the same requests, see `WaitingCalls.renew`."""
        return self.engine.renew(completions)

    def replay(
        self,
        receipts: Sequence[Mapping[str, Any]],
        *,
        weights: WeightSource | None = None,
        prompts: Iterable[Mapping[str, Any]] = (),
        anyway: bool = False,
        on_progress: OnProgress = lambda num: None,
    ) -> ReplayReport:
        """Prove samples by their receipts: every token is drawn again in prefills, and compared bit by bit.

        weights: where to find weights by digest; None: only the present ones are at hand, whose digest is computed
        anew. The engine keeps those that were proven with last. prompts: those that have images, as a processor gives
        them: a receipt has the SHA-256 of its images alone. anyway: also where this machine's guarantee is another
        one than the receipts'. on_progress: called with numbers of samples that are done. The report has a verdict on
        each receipt, in their order.
        """
        return replay(
            self.engine, receipts, weights or PresentWeights(self), prompts=prompts, anyway=anyway,
            on_progress=on_progress,
        )  # fmt: skip

    # -- weights in place -------------------------------------------------------------------------------------------

    def commit_in_place(
        self,
        version: str,
        *,
        source: NamedTensors,
        digest: DigestTime = "now",
        in_flight: OnCommit | None = None,
        keep_running: bool = False,
    ) -> Commit:
        """Publish the weights that the trainer wrote into the shared storage as `version`. Starts a KV epoch.

        source: the trainer's parameters by Hugging Face name, checked to be the engine's own memory; buffers of
        checkpoints come with the module. With `digest="later"` the digest is None until `finish_digest`, which
        `optimizer_step` calls before the next write.
        Requests that run keep their tokens, and their KV is computed anew. keep_running: it stays as it is, of the old
        weights. in_flight "verify": they are drawn again under the new weights, see `WeightVerbs`.
        Raises ValueError naming a version that is none, or tensors that are not shared, Poisoned after a step that
        failed, SessionError while a weight-update session is open; then nothing is committed. Raises DigestMismatch
        where ranks do not agree about their bytes: nothing is sampled then before a commit or update that is whole.

        Ranks that share the model call this together. Where a rank's source is sharded as its engine is, the engine
        uses that storage; where it is whole, as it is for data-parallel trainers, each rank copies its part.
        """
        if digest not in ("now", "later"):
            raise ValueError(f'digest must be "now" or "later", not {digest!r}')
        check_in_flight(in_flight, abort_all=False, keep_running=keep_running)
        if self.replica.asks_followers:
            raise ValueError("the other ranks follow this one: call commit_in_place on all of them")

        def plan() -> ShardSync | None:
            check_required_version(version)
            if self._torn is not None:
                raise Poisoned(f"{self._torn}: {_MEND}")
            self.sessions.let_write("commit_in_place")
            model = self.engine.model
            if self.replica.is_alone:
                return None
            resident = [*model.resident_tensors(), *model.buffers(stored=True)]
            return plan_shard_sync(resident, model.shards, [*model.buffers(stored=True, of_trained=True), *source])

        source = bare_names(checked_pairs(source))
        planned = self.replica.peers.together("commit_in_place", plan)
        if planned is None:
            record = sync_in_place(self.engine.weights.resident_tensors(), source)
        else:
            record = self.engine.between_steps("commit_in_place", planned.run)
        try:
            return self.sessions.commit_in_place(
                version, digest, record.bytes_copied, in_flight, retracts=not keep_running
            )
        except DigestMismatch as error:  # the bytes are there already, on every rank its own
            self.engine.weights.set_weight_digest(None)
            self.engine.weights.refuse_sampling(f"version {version!r} was written and not committed: {error}: {_AGREE}")
            raise
        finally:
            self.replica.stands()

    @on_all_ranks
    def finish_digest(self) -> str | None:
        """Compute the digest that a commit left for later, if one is owed. Returns the digest of the present
        weights."""
        return self.sessions.finish_digest()

    @on_all_ranks
    def weights_checker(
        self, action: str = "checksum", *, skip_tensor_list: Sequence[str] = (), seed: int | None = None
    ) -> dict[str, object]:
        """Check the weights between two steps: checksum, snapshot, compare, reset_tensors; see `WeightChecks`."""
        return self._checks.run(action, skip_tensor_list, seed)

    def name_weights(self) -> str | None:
        """Return the digest of the present weights, which is computed where none was: receipts need one. None where the
        weights are released or undefined, or an update or a trainer writes them."""
        if self.engine.weight_digest is not None:
            return self.engine.weight_digest
        if self.sessions.state()["state"] == "open":  # requests do not wait here for an update under way
            return None
        if self.finish_digest() is None:
            try:
                self.present_digest(anew=False)
            except (MemoryReleased, SessionError, PeerFailed):
                return None
        return self.engine.weight_digest

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Return the engine's state and the weights'. Changes nothing.

        `ranks`: the state of each rank of the replica, as that rank reported it; a block of the pool has its share of
        memory on each of them.
        """
        state = self.engine.state()
        used = 1 - state["num_free_blocks"] / state["num_blocks"]  # type: ignore[operator]
        ranks = self.replica.states()
        return {
            **state,
            "lora_adapters": self.loaded_adapters,
            "owes_digest": self.sessions.owes_digest,
            "weight_update": self.sessions.state(),
            "weight_groups": self.groups.state(),
            "num_ranks": self.replica.peers.num_ranks,
            "ranks": [rank | {"kv_used_bytes": round(used * rank.get("kv_bytes", 0))} for rank in ranks],
        }

    def _how_it_stands(self) -> dict[str, object]:
        engine, model, update = self.engine, self.engine.model, self.sessions.state()
        return {
            # Only values that verbs change, not for example the time left: the controller receives changes after a
            # verb.
            "weight_update": {key: update[key] for key in ("state", "version", "why", "num_undefined")},
            "weight_version": engine.weight_version,
            "weight_digest": engine.weight_digest,
            "epoch": engine.epoch,
            "refusal": engine.refusal,
            "holds_weights": model.holds_weights,
            "weight_bytes": model.weight_bytes,
            "kv_bytes": engine.kv_bytes,
        }

    def close(self) -> None:
        """Leave every group, roll back an open session, and close the engine. Does nothing in a forked child.

        Raises SessionBusy where an update runs too long; the engine is closed all the same. A second call, after the
        update, rolls it back.
        """
        if self.engine.driver.process.is_forked:
            return
        self.pause_lease.cancel()
        self.groups.close()
        self._receiver.close()
        try:
            self.sessions.close()
        finally:
            self.engine.close()

    def _give_up_session(self) -> None:
        """Roll back an explicit session whose lease has expired, after a running update, which renews it. In a job
        whose ranks run the same program the next verb does this."""
        self.replica.note_outside_call()  # followers that wait in a vote of that update follow all the same
        try:
            if self.replica.asks_followers:
                self.lose_weight_update("it expired", only_expired=True)
                self.sessions.on_expired()
        except (SessionError, PeerFailed, DeadlineExceeded) as ended:  # another call was faster, or no rank follows
            logger.info("the expired weight-update session: %s", ended)
