"""The work of commands between two steps. No step is in flight, and the caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..check.module_check import check_hosted
from ..completion import FinishReason
from ..errors import NotIdle
from ..kv.cache_tree import CacheTree, cache_tree
from ..kv.paths import prefix_of
from ..kv.pins import PinReport
from ..media.images import Images
from ..model.adapters.folder import AdapterFolder, AdapterLayers
from ..replica.controller import ReplicaRunner
from ..sequences.request import Request
from ..sequences.sequence import State
from .code_watch import score_prompts_again, start_epoch
from .commands import (
    AbortReport,
    CommitReport,
    ContinueReport,
    EvictReport,
    FlushReport,
    HoldReport,
    OnCommit,
    PauseMode,
    PauseReport,
)
from .gate import StepGate
from .parts import Parts

SLICE = 256  # requests that are aborted before other threads may use the engine
ABORTED_IN_QUEUE = FinishReason("abort", message="Abort in waiting queue")  # SGLang's message


class BetweenSteps:
    """Carry out the commands of one engine."""

    def __init__(self, parts: Parts, gate: StepGate) -> None:
        self._parts, self._gate, self._loop = parts, gate, gate.loop
        self._scheduler, self._sequences, self._ledger = parts.scheduler, parts.sequences, parts.ledger
        self._model, self._kv_cache, self._runner = parts.model, parts.kv_cache, parts.runner
        self._state_pool = parts.state_pool
        self._metrics = parts.reports.metrics
        self.give_way: Callable[[], None] = lambda: None  # lets other threads use the engine inside a long command

    # -- requests ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> PauseReport:
        """Pause the steps. in_place: sequences keep their KV; retract: they give it back and wait; abort: they end
        with their tokens so far. Any pause may follow any other."""
        num_retracted = num_aborted = 0
        self._gate.pause_mode = mode
        if mode == "retract":
            num_retracted = self.retract_running()
        elif mode == "abort":
            num_aborted = len(self.abort_all(FinishReason("abort", message="aborted by a pause")))
        self._metrics.num_pauses += 1
        if isinstance(self._runner, ReplicaRunner):
            self._runner.check_states()
        return PauseReport(mode, self._scheduler.num_running, self._scheduler.num_waiting, num_retracted, num_aborted)

    def retract_running(self) -> int:
        """Queue every running sequence again, without KV; returns their number."""
        running = self._scheduler.running()
        # The newest first; the queue keeps the order of arrival in any case.
        for request in reversed(running):
            self._loop.retract(request)
        return len(running)

    def resume(self) -> ContinueReport:
        """End the pause."""
        was_paused, self._gate.pause_mode = self._gate.pause_mode is not None, None
        return ContinueReport(was_paused, self._scheduler.num_running, self._scheduler.num_waiting)

    def abort_all(self, reason: FinishReason | None, *, gives_way: bool = True) -> list[str]:
        """Abort every request that is live now; returns their ids. reason: None for SGLang's message by state.

        Of thousands, other threads use the engine between one slice and the next, if it `gives_way`.
        """
        requests, aborted = self._sequences.requests(), []
        for index, request in enumerate(requests):
            if gives_way and index and index % SLICE == 0:
                self.give_way()
            present = self._present(request)
            if present is not None and present.finish_reason is None:  # it may have ended meanwhile
                self._loop.abort(present, reason or _aborted(present))
                aborted.append(request.id)
        return aborted

    def abort(self, rid: str | None, reason: FinishReason | None) -> AbortReport:
        """Abort the request with this id, or all samples with this base id; None: every live request."""
        if rid is None:
            return AbortReport(tuple(self.abort_all(reason)), ())
        found = self._sequences.requests_named(rid)
        for request in found:
            self._loop.abort(request, reason or _aborted(request))
        return AbortReport(tuple(r.id for r in found), () if found else (rid,))

    def abort_listed(self, requests: Iterable[Request], reason: FinishReason) -> None:
        """Abort those of these requests that have not ended. A later request of the same id is another one."""
        for request in requests:
            if (present := self._present(request)) is not None:
                self._loop.abort(present, reason)

    def _present(self, request: Request) -> Request | None:
        """Return what a request is now: another object where a commit has begun it again. None: it is not live."""
        if request.id not in self._sequences:
            return None
        present = self._sequences.request(request.id)
        return present if present.arrival_index == request.arrival_index else None

    # -- the prefix cache -------------------------------------------------------------------------------------------

    def flush(self, retracts: bool = False) -> FlushReport:
        """Empty the prefix cache and reset its counters, unless sequences hold blocks. retracts: they give them back
        first."""
        if retracts:
            self.retract_running()
        if num_running := self._scheduler.num_running:
            why = f"{num_running} running, {self._scheduler.num_waiting} waiting: finish, retract or abort them first"
            return FlushReport(False, 0, why)
        self._runner.num_forwards = 0
        self._scheduler.reset_admission()
        num_blocks, num_unpinned = self._ledger.flush()
        return FlushReport(True, num_blocks, "", num_unpinned)

    def check_weights(self) -> None:
        """Raise MemoryReleased or SamplingRefused where the model must not run with the weights as they are."""
        self._gate.check_weights()

    def pin_prefix(
        self, token_ids: list[int], images: Images | None, extra_key: str, owner: str | None, ttl_s: float | None
    ) -> PinReport:
        """Pin the cached blocks of a prompt; its full blocks that are not cached count as unknown."""
        num_blocks = len(token_ids) // self._ledger.block_size
        prefix = prefix_of(token_ids, images, self._ledger.block_size, extra_key)
        path = self._ledger.paths.of(prefix, num_blocks)
        report = self._ledger.pins.pin([node.hash for node in path], owner, ttl_s)
        return replace(report, num_unknown=num_blocks - len(path))

    def evict_descendants(self, hash: int) -> EvictReport:
        """Free the blocks below a block, except held and pinned ones."""
        node = self._ledger.cache.get(hash)
        if node is None:
            return EvictReport(False, 0, 0, 0)
        self._ledger.pins.expire()
        num_evicted = self._ledger.evict_below(node)
        left = list(self._ledger.cache.below(node))
        num_held = sum(n.num_holders > 0 for n in left)
        return EvictReport(True, num_evicted, num_held, len(left) - num_held)

    def cache_tree(
        self, depth: int | None, under: int | None, prompt: tuple[list[int], Images | None] | None, extra_key: str
    ) -> CacheTree:
        """Return the current prefix cache, for `Engine.cache_tree`. prompt: token ids and their images."""
        size = self._ledger.block_size
        if prompt is None:
            return cache_tree(self._ledger, depth, under)
        prefix = prefix_of(*prompt, size, extra_key)
        return cache_tree(self._ledger, depth, under, prefix, len(prompt[0]) // size)

    # -- weights and KV ---------------------------------------------------------------------------------------------

    def hold(
        self,
        refusal: tuple[str, str] | None,
        before_sampling: Callable[[], None] | None,
        abort_all: bool,
        keep_running: bool,
        in_flight: OnCommit | None = None,
    ) -> HoldReport:
        """Stop the steps as `StepGate.hold` does; first abort all requests if `abort_all`."""
        reason = FinishReason("abort", message="aborted by a weight update")
        num_aborted = 0
        if abort_all:  # first those of now, then those that came in between, however fast others come
            num_aborted = len(self.abort_all(reason)) + len(self.abort_all(reason, gives_way=False))
        return replace(self._gate.hold(refusal, before_sampling, keep_running, in_flight), num_aborted=num_aborted)

    def commit_weights(
        self,
        version: str,
        digest: str | None,
        lift: Iterable[str],
        refuse: Mapping[str, str],
        in_flight: OnCommit | None = None,
        retracts: bool = False,
    ) -> CommitReport:
        """Start a new weight version and a KV epoch; lift refusals by key, and add others.

        in_flight "verify": every sequence that has begun begins again, with its tokens as a draft. retracts: sequences
        give back KV of other weights.
        """
        num_verified = self.verify_begun() if in_flight == "verify" else 0
        if digest is None or digest != self._sequences.weight_digest:
            if retracts:
                self.retract_running()
            self._sequences.keep_kv()
            score_prompts_again(self._parts, self._loop)
        self._sequences.weight_version, self._sequences.weight_digest = version, digest
        lifted = self._gate.lift(lift)
        for key, why in refuse.items():
            self._gate.refuse(key, why)
        self._metrics.num_weight_commits += 1
        self._gate.adapters.committed(digest)
        self._gate.weights.committed()
        report = CommitReport(*start_epoch(self._parts), lifted, num_verified)
        self._scheduler.forget_under_way()
        return report

    def verify_begun(self) -> int:
        """Begin every sequence again that has begun; returns their number.

        A sequence whose tokens its caller cannot take back keeps them, and gives its KV back. One that cannot begin
        again is aborted.
        """
        begun = [request for request in self._sequences.requests() if request.sequence.state is not State.WAITING]
        running, num_verified = set(self._scheduler.running()), 0
        for request in begun:
            if request.options.takes_back:
                num_verified += self._loop.begin_again(request)
            elif request in running:
                self._loop.retract(request)
        return num_verified

    def replace_adapter(self, adapter: AdapterFolder | AdapterLayers) -> AdapterLayers:
        """Put an adapter into the model, or take it out; see `HostedModel.replace_adapter`. Checks it anew."""
        self._runner.release_memory()  # recorded steps call the former layers
        former = self._model.replace_adapter(adapter)
        try:
            check_hosted(self._model)
        except BaseException:
            self._model.replace_adapter(former)
            raise
        return former

    def relabel_weights(self, version: str) -> None:
        """Give the same weights another version; starts no epoch."""
        self._sequences.weight_version = version

    def release_weights(self) -> int:
        """Free the weights' memory; returns its bytes. Raises NotIdle while sequences hold blocks."""
        if num_running := self._scheduler.num_running:
            raise NotIdle(f"cannot release the weights: {num_running} running: finish, retract or abort them first")
        self._runner.release_memory()
        return self._moved(self._model.release_weights())

    def resume_weights(self) -> int:
        """Allocate the released weights, with undefined values; returns the bytes."""
        return self._moved(self._model.resume_weights())

    def _moved(self, num_bytes: int) -> int:
        if num_bytes:  # by the engine itself: no write without a commit
            self._gate.weights.accept()
        return num_bytes

    def release_kv(self) -> int:
        """Free the memory of both pools; returns its bytes. Raises NotIdle while sequences hold blocks."""
        report = self.flush()
        if not report.success:
            raise NotIdle(f"cannot release the KV pool: {report.error_msg}")
        num_bytes = self._kv_cache.num_bytes + self._state_pool.num_bytes
        self._runner.release_memory()
        self._kv_cache.release()
        self._state_pool.release()
        return num_bytes

    def resume_kv(self) -> int:
        """Allocate both pools again, or none; returns their bytes."""
        self._kv_cache.allocate()
        try:
            self._state_pool.allocate()
        except BaseException:
            self._kv_cache.release()  # steps run as soon as it is allocated
            raise
        return self._kv_cache.num_bytes + self._state_pool.num_bytes


def _aborted(request: Request) -> FinishReason:
    """Return the reason of an abort without a message; the texts are SGLang's."""
    has_begun = request.sequence.state is not State.WAITING
    return FinishReason("abort", message="Aborted") if has_begun else ABORTED_IN_QUEUE
