"""The verbs of a service that begin, verify and end a session of weight updates."""

from __future__ import annotations

from collections.abc import Mapping

from ...rollout.engine import Engine
from ...rollout.errors import MemoryReleased
from ...rollout.loop.commands import HoldReport, OnCommit, check_in_flight
from ...weight_sync.transaction.transaction import Coverage, Undo
from ..service_config import ServiceConfig
from .all_ranks import Replica, on_all_ranks
from .host import Commit
from .options import DigestTime, UpdateOptions, own_time
from .pauses import Clients, PauseLease
from .sessions import WeightSessions


class SessionVerbs:
    """The methods of a service for sessions of updates; `WeightVerbs` names the common arguments. The subclass sets the
    fields."""

    engine: Engine
    config: ServiceConfig
    sessions: WeightSessions
    pause_lease: PauseLease
    clients: Clients
    replica: Replica

    @on_all_ranks
    def begin_weight_update(
        self,
        *,
        weight_version: str | None = None,
        coverage: Coverage = "full",
        undo: Undo = "tensors",
        digest: DigestTime = "now",
        lease_s: float | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        continue_on_expiry: bool = False,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> HoldReport:
        """Open a session; nothing is sampled until it ends. A session whose client is silent for `lease_s` is rolled
        back, so that a lost client leaves none open; each update and verify starts that time anew. continue_on_expiry:
        the client has paused generation for it, so that is continued then; so is a pause of the same `client`.

        coverage "full": every parameter has to be written before the session can end. undo "none": no old bytes are
        kept, and a failure poisons the weights. digest: compute the model digest at the end, or later by
        `finish_digest`. Raises SessionError where a session is open, NotIdle, naming the remedies, where requests run.
        """
        self._check_resident()
        options = UpdateOptions(
            weight_version,
            self.config.wait_s(timeout_s),
            abort_all_requests=abort_all_requests,
            keep_running=keep_running,
            continue_on_expiry=continue_on_expiry,
            client=client,
        )
        report = self.sessions.begin(coverage, undo, digest, lease_s, options, lambda: self.clients.check(client))
        self.pause_lease.renew()
        return report

    @on_all_ranks
    def verify_weight_update(
        self, digests: Mapping[str, str], *, client: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Compare all tensors that the open session wrote with the sender's tensor roots, hex by name.

        Raises DigestMismatch naming the tensors that differ: they are restored, and sending only them again repairs the
        session, which stays open. Raises ValueError for names that were not written.
        """
        self.sessions.verify(digests, client, own_time(timeout_s, self.config.weight_timeout_s))

    @on_all_ranks
    def end_weight_update(
        self,
        *,
        weight_version: str | None = None,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> Commit:
        """Commit the open session: its version and digest are published and a KV epoch starts.

        Raises SessionError where none is open, ValueError listing the missing tensors of a full session, which stays
        open.
        """
        check_in_flight(in_flight, abort_all=False, keep_running=False)
        commit = self.sessions.end(weight_version, in_flight, client, own_time(timeout_s, self.config.weight_timeout_s))
        self.pause_lease.renew()  # its client may have other engines to end before it continues
        return commit

    @on_all_ranks
    def abort_weight_update(
        self, why: str = "asked for", *, client: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Roll back the open session and restore every byte. Where no old bytes were kept the weights are poisoned.
        A caller without a name gives up anybody's."""
        self.sessions.abort(why, client=client, timeout_s=own_time(timeout_s, self.config.weight_timeout_s))

    @on_all_ranks
    def lose_weight_update(self, why: str, only_expired: bool = False, *, client: str | None = None) -> None:
        """Roll back the open session of a client that is gone, or that made a mistake; its own abort may follow.
        only_expired: raises SessionError where its lease is not over on any rank. client: only that of this client."""
        self.sessions.abort(why, is_lost=True, only_expired=only_expired, client=client)

    @on_all_ranks
    def revert_weight_update(self, *, client: str | None = None, timeout_s: float | None = None) -> str:
        """Take the last commit back while its undo data is kept (until `release_weight_undo` or the next update).
        Returns the version that is current again."""
        return self.sessions.revert(client, own_time(timeout_s, self.config.weight_timeout_s))

    @on_all_ranks
    def release_weight_undo(self) -> None:
        """Free the undo data of the last commit, which then cannot be reverted."""
        self.replica.peers.together("release_weight_undo", self.sessions.release_undo)

    @on_all_ranks
    def commit_implicit_update(self, *, or_roll_back: bool = False, timeout_s: float | None = None) -> None:
        """Commit an implicit session, where one is open. Raises SessionBusy, and commits nothing, where another update
        runs longer than `timeout_s`. or_roll_back: roll it back where it cannot be committed, as for missing bytes."""
        self.sessions.commit_implicit(own_time(timeout_s, self.config.weight_timeout_s), or_roll_back=or_roll_back)

    @on_all_ranks
    def end_implicit_update(self, why: str) -> None:
        """End an implicit session whose client is lost: commit it where it has written all weights, else roll it
        back."""
        self.sessions.end_implicit(why)

    def _check_resident(self) -> None:
        if not self.engine.model.holds_weights:
            raise MemoryReleased('the weights are released: resume_memory_occupation(["weights"]) first')
