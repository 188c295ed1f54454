"""The weight verbs of a service, under the names of their HTTP verbs. All are thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ...rollout.engine import Engine
from ...rollout.loop.commands import OnCommit
from ...weight_sync.delta.apply import Check
from ...weight_sync.delta.pull import PullRecord, pull_weights
from ...weight_sync.group.joining import check_places
from ...weight_sync.group.registry import GroupRegistry
from ...weight_sync.group.rendezvous import Rendezvous
from ...weight_sync.manifest import NamedTensors, specs_from_lists
from ...weight_sync.transaction.receiving import Receive
from ...weight_sync.transaction.records import UpdateRecord
from ..service_config import ServiceConfig
from .all_ranks import Replica, on_all_ranks
from .options import UpdateOptions, check_required_version, own_time
from .session_verbs import SessionVerbs
from .sessions import WeightSessions
from .sources import OWN_FORMATS, FolderSource, SharedMemory, from_group, from_ipc, from_named_tensors, from_payload
from .vllm_group import VllmGroupVerbs

GROUP_NAME = "weight_update_group"
T = TypeVar("T")


class WeightVerbs(SessionVerbs, VllmGroupVerbs):
    """The methods of a service that update its weights. The subclass sets the fields.

    Tensors have the names of the module's parameters, or those in which such models are published, each a piece of one:
    each expert's matrices by themselves, for instance. Deltas have no such pieces.

    Common arguments: weight_version, the label of the weights, published when they are committed; verify, the sender's
    tensor roots (`model_digest.tensor_root`, hex) by name, None for those of its manifest, if it has one;
    abort_all_requests, abort running requests first; keep_running, let requests that are paused in_place continue with
    the new weights; in_flight="verify", draw the tokens of requests that have begun again under the new weights, so
    that their answers are those that these would have given from the start (inside a session `begin_weight_update` has
    the first two, `end_weight_update` the third); delta_check, how closely a delta checks the bytes that it changes
    (`delta.apply.Check`); timeout_s, the deadline of every wait; client, a name of the caller's own, one for each
    update: its calls then reach only the session that it has begun, and others' updates do not get into that.
    """

    engine: Engine
    config: ServiceConfig
    sessions: WeightSessions
    groups: GroupRegistry
    replica: Replica
    _shared_memory: SharedMemory

    # -- over a process group ---------------------------------------------------------------------------------------

    @on_all_ranks
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP_NAME,
        backend: str = "nccl",
        *,
        group_secret: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Join a group as rank `rank_offset`; rank 0 is the sender. Blocks until all have joined, while the engine
        keeps running. group_secret: known to all ranks (`Rendezvous`); None where the sender has none, as other
        frameworks' do. Raises ValueError for a group that exists, TransferFailed when not all ranks came in time.

        Where several ranks hold the model each joins, as `rank_offset` plus its local rank, and the engine runs no step
        meanwhile.
        """
        check_places(rank_offset, self.replica.peers.num_ranks, world_size)

        def join() -> None:
            device = self.engine.model.device if backend == "nccl" else None
            # Other frameworks send the port also as text.
            rendezvous = Rendezvous(
                master_address, int(master_port), rank_offset + self.replica.local_rank, world_size, group_name,
                backend, self.config.wait_s(timeout_s), device, secret=group_secret,  # type: ignore[arg-type]
            )  # fmt: skip
            self.groups.init(rendezvous)

        leave = partial(self.groups.destroy, group_name)
        self.replica.peers.together("init_weights_update_group", join, leave)

    @on_all_ranks
    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> None:
        """Leave a group, or end a rendezvous that still waits. Raises ValueError for an unknown one."""
        self.replica.peers.together("destroy_weights_update_group", lambda: self.groups.destroy(group_name))

    @on_all_ranks
    def update_weights_from_distributed(
        self,
        names: Sequence[str] | None = None,
        dtypes: Sequence[str] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        group_name: str = GROUP_NAME,
        *,
        load_format: str | None = None,
        manifest: str | None = None,
        delta_check: Check = "pre",
        weight_version: str | None = None,
        verify: Mapping[str, str] | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> UpdateRecord:
        """Receive tensors from rank 0 of a group.

        load_format None: one broadcast per tensor, in the order of the lists; "flattened_bucket": one of all their
        bytes; "lockstep": our own sender's protocol (`group.protocol.send_update`), and with `manifest` (JSON) its
        plan; "delta": the same with changes against the present weights. An update in one of the first two formats
        that fails before its broadcasts were received, for whichever reason, breaks the group (`in_step`): destroy it
        and join a new one.
        """
        group, specs = self.groups.get(group_name), (names or (), dtypes or (), shapes or ())
        with nullcontext() if load_format in OWN_FORMATS else self.groups.in_step(group_name) as have_arrived:
            timeout_s = self.config.wait_s(timeout_s)
            digests: dict[str, str] = {}  # filled while receiving; compared after the tensors have arrived
            receive = from_group(group, load_format, specs, manifest, delta_check, timeout_s, have_arrived, digests)
            given = digests if verify is None else verify
            options = UpdateOptions(
                weight_version, timeout_s, given, abort_all_requests, keep_running, in_flight, client=client
            )
            return self._update(f"group {group_name}", receive, options)

    # -- by shared memory or CUDA IPC -------------------------------------------------------------------------------

    @on_all_ranks
    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str] | None = None,
        *,
        descriptions: Sequence[Mapping[str, object]] | None = None,
        load_format: str | None = None,
        delta_check: Check = "pre",
        weight_version: str | None = None,
        verify: Mapping[str, str] | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> UpdateRecord:
        """Read tensors from memory of this host. Returns when the copy is complete and nothing refers to them any more.

        descriptions: yielded by our own sender (`SharedMemorySender`), one entry for each rank of this engine, or one
        that all of them read. serialized_named_tensors: the frameworks' pickled payload likewise, with load_format
        None, "direct" or "flattened_bucket"; refused where the service's `allow_pickle` is off.
        """
        if (serialized_named_tensors is None) == (descriptions is None):
            raise ValueError("pass either serialized_named_tensors or descriptions")
        timeout_s, digests = self.config.wait_s(timeout_s), dict[str, str]()
        if descriptions is not None:
            description = self._own(descriptions, "descriptions")
            receive = self._shared_memory.source(description, load_format, delta_check, timeout_s, digests)
        else:
            payload = self._own(serialized_named_tensors or (), "serialized_named_tensors")
            receive = from_payload(payload, load_format, self.config)
        given = digests if verify is None else verify
        options = UpdateOptions(
            weight_version, timeout_s, given, abort_all_requests, keep_running, in_flight, client=client
        )
        return self._update("tensor", receive, options)

    @on_all_ranks
    def update_weights_from_ipc(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        serialized_handles: str,
        *,
        tensor_sizes: Sequence[int] | None = None,
        weight_version: str | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> UpdateRecord:
        """Copy tensors from memory of this host that vLLM's IPC handles name; see `ipc_handles.read_ipc_handles`.
        Returns when the copy is complete and nothing refers to them any more. Refused where the service's
        `allow_pickle` is off."""
        timeout_s = self.config.wait_s(timeout_s)
        specs = specs_from_lists(names, dtypes, shapes)
        receive = from_ipc(specs, serialized_handles, tensor_sizes, self.engine.model.device, self.config)
        return self._update("tensor", receive, UpdateOptions(weight_version, timeout_s, client=client))

    def update_weights_from_named_tensors(
        self,
        named_tensors: NamedTensors,
        *,
        weight_version: str | None = None,
        verify: Mapping[str, str] | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> UpdateRecord:
        """Copy tensors of this process, one at a time as the iterator yields them. Raises ValueError for one that lies
        in memory of other weights of the engine, unless they come as a list, of which such tensors are copied first.

        Ranks that share the model call this together, each with the same whole tensors, of which it keeps its part. An
        iterator is read to its end, also after a failure, since gathering may be a collective. Raises ValueError where
        the other ranks follow this one: they have no such tensors.
        """
        if self.replica.asks_followers:
            raise ValueError("the other ranks follow this one: call update_weights_from_named_tensors on all of them")
        alone, others = self.replica.is_alone, self.sessions.weights.memory_of_others
        receive = from_named_tensors(named_tensors, to_the_end=not alone, memory_of_others=others)
        options = UpdateOptions(
            weight_version,
            self.config.wait_s(timeout_s),
            verify,
            abort_all_requests,
            keep_running,
            in_flight,
            client=client,
        )
        try:
            with self.replica.waiting(timeout_s):
                return self._update("this process", receive, options)
        finally:
            self.replica.stands()

    # -- from disk --------------------------------------------------------------------------------------------------

    @on_all_ranks
    def update_weights_from_disk(
        self,
        model_path: str | Path,
        *,
        weight_version: str | None = None,
        verify: Mapping[str, str] | bool = True,
        delta_check: Check = "pre",
        keep_pause: bool = False,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> UpdateRecord:
        """Read a folder of safetensors in Hugging Face layout, or a delta folder against the present weights.

        Everything is checked before anything is written. Outside of a session the folder must hold every parameter of
        the model, adapters' aside: raises ValueError naming those that are missing. Where a delta has the digest of its
        base (`base_model_digest`), raises DigestMismatch if the weights are neither that nor its result. verify True:
        compare with the folder's own digests, if it has any. keep_pause: generation stays paused afterwards, also if it
        was not paused before.
        """
        path, timeout_s = Path(model_path), self.config.wait_s(timeout_s)
        digests: dict[str, str] = {}  # filled while reading; compared after the tensors have arrived
        source = FolderSource(
            path, digests if verify is True else None, delta_check, timeout_s,
            lambda specs: None if self.sessions.is_open else self.sessions.weights.require_all(specs, f"folder {path}"),
            self.sessions.weights.skeleton_for, self.sessions.require_base,
        )  # fmt: skip
        given = digests if isinstance(verify, bool) else verify
        options = UpdateOptions(
            weight_version, timeout_s, given, abort_all_requests, keep_running, in_flight, client=client, is_whole=True
        )
        record = self._update(f"folder {path}", source.receive, options, str(path), source.look)
        if keep_pause and self.engine.is_controller and not self.engine.is_paused:
            self.engine.pause_generation("in_place")
        return record

    def pull_weights(
        self,
        local_checkpoint_dir: str | Path,
        source_dir: str | Path,
        target_version: int,
        *,
        timeout_s: float | None = None,
    ) -> PullRecord:
        """Assemble the full checkpoint of a version in a local folder from versioned folders, deltas among them."""
        return pull_weights(
            Path(local_checkpoint_dir), Path(source_dir), target_version, timeout_s=self.config.wait_s(timeout_s)
        )

    # -- versions and values ----------------------------------------------------------------------------------------

    def get_weight_version(self) -> str:
        """Return the version that was committed last."""
        return self.engine.weight_version

    @on_all_ranks
    def update_weight_version(
        self,
        new_version: str,
        abort_all_requests: bool = True,
        *,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Set the version of the open session's weights, or else of the current weights. Aborts all requests unless
        told not to. Raises ValueError for a version that is none, SessionError where another client's session is open
        or a call of it runs too long; then no request was aborted."""
        check_required_version(new_version)
        timeout_s = own_time(timeout_s, self.config.weight_timeout_s)

        def abort_all() -> None:
            if abort_all_requests and self.engine.is_controller:
                self.engine.abort_request(abort_all=True, message="the weight version changed")

        self.replica.peers.together(
            "update_weight_version", lambda: self.sessions.name_version(new_version, client, abort_all, timeout_s)
        )

    @on_all_ranks
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[object]:
        """Return values of a parameter, or of a published piece of one, as nested lists, each dimension cut to
        `truncate_size`. Raises ValueError for an unknown name."""
        self._check_resident()
        if truncate_size < 1:
            raise ValueError(f"truncate_size must be at least 1, not {truncate_size}")
        return self.sessions.weights.first_entries(name, truncate_size).to(torch.float32).tolist()

    @on_all_ranks
    def model_digest(self) -> str:
        """Compute the SHA-256 tree over the resident tensors as they are now (docs/architecture.md), in hex, over all
        ranks. Changes nothing. Raises MemoryReleased where there are none."""
        return self.sessions.model_digest()

    @on_all_ranks
    def present_digest(self, anew: bool = True) -> str:
        """Compute the digest of the present weights as `model_digest` does, and set it where they had none. anew: also
        where they have one already.

        Raises SessionError, and sets nothing, where the bytes are not those of the version that was committed last: a
        session is open, a trainer writes them, or their values are undefined. Raises MemoryReleased where there are
        none.
        """
        return self.sessions.present_digest(anew=anew)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _update(
        self,
        source: str,
        receive: Receive,
        options: UpdateOptions,
        folder: str | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> UpdateRecord:
        self._check_resident()
        return self.sessions.update(source, receive, options, folder, look)

    def _own(self, items: Sequence[T], what: str) -> T:
        """Return this rank's entry, or the one entry that is for all ranks."""
        num_ranks = self.replica.peers.num_ranks
        if len(items) not in (1, num_ranks):
            raise ValueError(f"{what} has {len(items)} entries, one for each rank: this engine has {num_ranks}")
        return items[self.replica.local_rank if len(items) == num_ranks else 0]
