"""What can be asked of an engine besides completions: control commands, pins, the state of cache and weights.

Every verb may be called from any thread; it runs between two steps, with nothing in flight, and what it says holds when
it returns. `op_id` names a command so that a repeated one runs once (OpIdTaken where the name is another one's);
`timeout_s` is how long it may wait to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ..completion import FinishReason
from ..kv.cache_tree import CacheTree
from ..kv.events import KVEventLog
from ..kv.pins import PinReport, UnpinReport
from ..kv.tensors import KVPlan
from ..loop.commands import (
    AbortReport,
    CommitReport,
    ContinueReport,
    EvictReport,
    FlushReport,
    HoldReport,
    PauseMode,
    PauseReport,
    check_pause_mode,
)
from ..loop.core import EngineCore
from ..model.hosted_model import HostedModel
from ..ranks.channel import RankChannel
from ..reports.latencies import Latencies
from ..reports.metrics import Metrics
from ..reports.sequence_view import SequenceView, view
from ..sequences.event_log import Event
from .driver import Driver
from .intake import Prompt, prompt_ids
from .once_per_id import OncePerId

T = TypeVar("T")


class EngineVerbs:
    """The commands of an engine and the reports about it. Its heir sets `_core`, `_driver` and `ranks`."""

    _core: EngineCore
    _driver: Driver
    model: HostedModel
    ranks: RankChannel

    # -- control ----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._core.pause_mode is not None

    @property
    def pause_mode(self) -> PauseMode | None:
        """The mode of the pause that holds now; None: not paused."""
        return self._core.pause_mode

    def pause_generation(
        self, mode: PauseMode = "retract", *, op_id: str | None = None, timeout_s: float | None = None
    ) -> PauseReport:
        """Run no more steps until `continue_generation`; it holds when the call returns.

        in_place: sequences keep their KV; retract: they give it back, keep tokens and log-probabilities and are
        computed again; abort: all are answered with what they have. Requests that come while paused wait. Raises
        ValueError for another mode, DeadlineExceeded when `timeout_s` passed before it began.
        """
        check_pause_mode(mode)
        return self._command("pause_generation", lambda: self._core.pause(mode), op_id, timeout_s, mode=mode)

    def continue_generation(self, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End a pause; says so if there was none."""
        return self._command("continue_generation", self._core.resume, op_id, timeout_s)

    def abort_request(
        self,
        rid: str | None = None,
        *,
        abort_all: bool = False,
        message: str | None = None,
        finished_reason: FinishReason | None = None,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AbortReport:
        """End a live request, or all, with what they have so far; `rid` is exact, or the base of n samples.

        An id that is not live is reported, not an error. Raises ValueError when neither is named.
        """
        if rid is None and not abort_all:
            raise ValueError("abort_request needs a rid, or abort_all")
        reason = finished_reason or (FinishReason("abort", message=message) if message else None)

        def abort() -> AbortReport:
            if abort_all:
                return AbortReport(tuple(self._core.abort_all(reason)), ())
            return self._core.abort(rid, reason)

        return self._command(
            "abort_request", abort, op_id, timeout_s, rid=rid, abort_all=abort_all, message=message,
            finished_reason=finished_reason,
        )  # fmt: skip

    def flush_cache(self, *, op_id: str | None = None, timeout_s: float | None = None) -> FlushReport:
        """Empty the prefix cache, and drop every pin, unless sequences hold blocks; however many wait."""
        return self._command("flush_cache", self._core.flush, op_id, timeout_s)

    # -- the prefix cache -------------------------------------------------------------------------------------------

    def pin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        ttl: float | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Keep cached blocks, and those before them, from eviction until they are unpinned as often as pinned.

        ttl: seconds after which these pins lift themselves. Pins end with a flush or a weight commit, or where a
        request could not run for them; never with a request. Hashes that no cached block has count 0; blocks over the
        budget (`EngineConfig.pin_budget`) are refused and counted. Raises ValueError for what is no 64-bit hash, or a
        bad ttl.
        """
        hashes = tuple(hashes)
        return self._command(
            "pin_blocks", lambda: self._core.ledger.pins.pin(hashes, owner, ttl), op_id, timeout_s,
            hashes=hashes, owner=owner, ttl=ttl,
        )  # fmt: skip

    def unpin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> UnpinReport:
        """Lift one pin of this owner on each block; those it has none on count 0."""
        hashes = tuple(hashes)
        return self._command(
            "unpin_blocks", lambda: self._core.ledger.pins.unpin(hashes, owner), op_id, timeout_s,
            hashes=hashes, owner=owner,
        )  # fmt: skip

    def pin_prefix(
        self,
        prompt: Prompt,
        owner: str | None = None,
        ttl: float | None = None,
        *,
        extra_key: str = "",
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Pin the cached blocks of a prompt, text or token ids, from its start as far as they are there.

        The report has their hashes, for `unpin_blocks`; full blocks of the prompt that are not cached are its unknowns.
        """
        ids = prompt_ids(prompt, self._core.tokenizer, self.model.vocab_size)
        return self._command(
            "pin_prefix", lambda: self._core.pin_prefix(ids, extra_key, owner, ttl), op_id, timeout_s,
            token_ids=ids, owner=owner, ttl=ttl, extra_key=extra_key,
        )  # fmt: skip

    def evict_descendants(self, hash: int, *, op_id: str | None = None, timeout_s: float | None = None) -> EvictReport:
        """Free every cached block below this one that no sequence holds and no pin protects."""
        return self._command(
            "evict_descendants", lambda: self._core.evict_descendants(hash), op_id, timeout_s, hash=hash
        )

    def cache_tree(
        self,
        depth: int | None = None,
        under: int | None = None,
        *,
        prompt: Prompt | None = None,
        extra_key: str = "",
        timeout_s: float | None = None,
    ) -> CacheTree:
        """The prefix cache as it is between two steps: all of it, or what is below a block, `depth` levels at most.

        With a prompt, text or token ids, it also says which of its blocks is the first that is not cached. Raises
        ValueError for an unknown block or a depth below 1.
        """
        ids = None if prompt is None else prompt_ids(prompt, self._core.tokenizer, self.model.vocab_size)
        return self._command("cache_tree", lambda: self._core.cache_tree(depth, under, ids, extra_key), None, timeout_s)

    @property
    def kv_events(self) -> KVEventLog:
        """What happens in the prefix cache; attach a sink to hear it. Off until one is."""
        return self._core.ledger.events

    # -- weights and KV ---------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        return self._core.sequences.weight_version

    @property
    def weight_digest(self) -> str | None:
        return self._core.sequences.weight_digest

    @property
    def epoch(self) -> int:
        """How many times weights were committed; KV of an earlier epoch never matches a prefix again."""
        return self._core.ledger.epoch

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once."""
        return self.model.resident_tensors()

    def commit_weights(
        self,
        version: str,
        digest: str | None,
        *,
        lift: Iterable[str] = ("torn",),
        refuse: Mapping[str, str] | None = None,
    ) -> CommitReport:
        """From here on tokens are sampled from weights of this version; starts a KV epoch.

        version and digest are opaque here. Cached blocks and pins are dropped; refusals under the keys of `lift` end,
        and those of `refuse` (why by key) begin. Running sequences go on, on their KV.
        """
        keys, added = tuple(lift), dict(refuse or {})
        return self._driver.command("commit_weights", lambda: self._core.commit_weights(version, digest, keys, added))

    def hold_for_update(
        self,
        *,
        refusal: tuple[str, str] | None = None,
        before_sampling: Callable[[], None] | None = None,
        abort_all: bool = False,
        keep_running: bool = False,
        timeout_s: float | None = None,
    ) -> HoldReport:
        """Run no step while weights are written: with a `refusal` (key, why) until a commit lifts it or
        `allow_sampling` does, else until `before_sampling` was called, by whoever wants the next step.

        Raises NotIdle, naming the remedies, while requests are running or queued, unless they are aborted, or paused
        by retract, or paused in_place with `keep_running`: then they go on with the new weights.
        """
        return self._driver.command(
            "hold_for_update",
            lambda: self._core.hold(refusal, before_sampling, abort_all, keep_running),
            None,
            timeout_s,
        )

    def refuse_sampling(self, why: str, key: str = "torn") -> None:
        """Run no step until a weight commit lifts `key`, or `allow_sampling` does. `why` is what a step raises."""
        self._driver.command("refuse_sampling", lambda: self._core.refusals.update({key: why}))

    def allow_sampling(self, key: str) -> None:
        """Lift the refusal under that key, if there is one."""
        self._driver.command("allow_sampling", lambda: self._core.refusals.pop(key, None))

    @property
    def before_sampling(self) -> Callable[[], None] | None:
        """What has to be called before the next step, by whoever wants it, without the engine's lock; no step runs
        before this is None again. Where it raises SamplingRefused requests wait."""
        return self._core.before_sampling

    @before_sampling.setter
    def before_sampling(self, call: Callable[[], None] | None) -> None:
        self._core.before_sampling = call
        self._driver.kick()

    def start_trace(self, path: str | Path) -> bool:
        """Write what happens to a file, as Chrome-trace events; False where a trace is being written already."""
        trace = self._core.trace

        def start() -> bool:
            if not trace.is_on:
                trace.open(path)
                return True
            return False

        return self._driver.command("start_trace", start)

    def stop_trace(self) -> None:
        """End the trace; its file is whole then."""
        self._driver.command("stop_trace", lambda: None)  # whose span is the last
        self._core.trace.close()

    def at_step(self, num_steps: int | None, call: Callable[[], None] = lambda: None) -> None:
        """Have `call` made between two steps, by whoever runs them, as soon as so many have run since the engine was
        made (`metrics.num_steps`). Only the last one that was asked for is; None: none. It must not raise."""

        def set_alarm() -> None:
            self._driver.alarm.set(num_steps, call)
            self._driver.alarm.ring(self._core.metrics.num_steps)

        self._driver.command("at_step", set_alarm)

    def between_steps(self, name: str, run: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run something in this thread between two steps, with nothing in flight; returns what it returns."""
        return self._driver.command(name, run, None, timeout_s)

    @property
    def refusal(self) -> str | None:
        """Why no step may run though generation is not paused; None: it may."""
        return self._core.refusal

    def release_weights(self) -> int:
        """Give the weights' memory back where the engine owns it; returns the bytes. Raises NotIdle while sequences
        hold blocks."""
        return self._driver.command("release_weights", self._core.release_weights)

    def resume_weights(self) -> int:
        """Allocate the weights again, with undefined values; returns the bytes. Does nothing when they are there."""
        return self._driver.command("resume_weights", self.model.resume_weights)

    def relabel_weights(self, version: str) -> None:
        """Tokens from here on bear this version; the weights, and their KV, are the same."""
        self._driver.command("relabel_weights", lambda: self._core.relabel_weights(version))

    def set_weight_digest(self, digest: str) -> None:
        """The digest of the version that is committed, computed later. Starts no epoch."""
        with self._driver.lock:
            self._core.sequences.weight_digest = digest

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        return self._driver.command("release_kv", self._core.release_kv)

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes. Does nothing when it is there."""
        return self._driver.command("resume_kv", self._core.resume_kv)

    def _command(
        self,
        name: str,
        run: Callable[[], T],
        op_id: str | None = None,
        timeout_s: float | None = None,
        **arguments: object,
    ) -> T:
        """A command that is the controller's to give. Raises ValueError, naming it, at a rank that follows."""
        self.ranks.check_controller(name)
        return self._driver.command(name, run, op_id, timeout_s, **arguments)

    @property
    def once_per_id(self) -> OncePerId:
        """The answers of commands that had an op_id; whoever offers this engine's commands another way uses it too."""
        return self._driver.once_per_id

    # -- reports ----------------------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether a thread of the engine's own drives the loop."""
        return self._driver.is_started

    @property
    def heartbeat(self) -> float:
        """When the loop was last seen to live, by time.monotonic(); now, where nothing runs. Waits for nobody."""
        return self._driver.heartbeat

    @property
    def failure(self) -> Exception | None:
        """What ended the loop that `start` had begun; None: nothing did."""
        return self._driver.failure

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._core.eos_token_ids

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def kv_plan(self) -> KVPlan:
        return self._core.kv_plan

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool now; 0 while it is released."""
        return self._core.kv_bytes

    @property
    def metrics(self) -> Metrics:
        return self._core.metrics

    @property
    def latencies(self) -> Latencies:
        return self._core.latencies

    @property
    def log_events(self) -> list[Event] | None:
        """Where the managers' events are recorded, for `event_log.replay`; None: nowhere."""
        return self._core.managers.log

    @log_events.setter
    def log_events(self, log: list[Event] | None) -> None:
        self._core.managers.log = log

    def state(self) -> dict[str, object]:
        """What is where, as plain values. Changes nothing."""
        with self._driver.lock:
            self._driver.take_inbox()
            return self._core.state()

    def live_sequences(self, num_newest: int = 16, limit: int | None = None) -> list[SequenceView]:
        """Who runs, then who waits, each in order, `limit` of each at most. Changes nothing.

        num_newest: how many tokens of its end each shows. Raises ValueError for a negative number.
        """
        if num_newest < 0 or (limit is not None and limit < 0):
            raise ValueError(f"num_newest and limit must not be negative, not {num_newest} and {limit}")
        with self._driver.lock:
            self._driver.take_inbox()
            scheduler = self._core.scheduler
            requests = [*scheduler.running()[:limit], *scheduler.waiting()[:limit]]
            return [view(request, num_newest) for request in requests]

    def check_integrity(self) -> None:
        """Sum up the block ledger block by block. Raises LedgerError naming what is wrong."""
        with self._driver.lock:
            self._core.ledger.check()
