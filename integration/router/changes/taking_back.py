"""Updates that some workers take back because others have refused them, or have committed them before."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from ..calls import WorkerCall
from ..fleet.worker import Worker
from .broadcast import Result
from .updates import Updates

_Broadcast = Callable[[Sequence[Worker], WorkerCall, Mapping[str, object]], Awaitable[list[Result]]]


def client_of(values: Mapping[str, object]) -> str | None:
    """Return the name that a call's client has given itself; None: it has none."""
    client = values.get("client")
    return client if isinstance(client, str) and client else None


class TakingBack:
    """Further calls to some of the workers of an update. The caller holds the lock of changes."""

    def __init__(self, updates: Updates, broadcast: _Broadcast) -> None:
        self._updates, self._broadcast = updates, broadcast

    async def give_up_begun(
        self, call: WorkerCall, values: Mapping[str, object], results: Sequence[Result]
    ) -> list[Result]:
        """Abort a session at the workers that have begun it, where others have refused it, as those at which an earlier
        one is still open: it is no session of the fleet. A worker that ends is left out.

        Returns the results, with a refusal like the others' for a worker that has given it up.
        """
        done = [result.worker for result in results if result.success]
        refused = [result for result in results if not result.success and not result.is_ending]
        if not done or not refused or not all(result.did_nothing for result in refused):
            return list(results)
        body = json.dumps({name: values[name] for name in ("timeout_s", "client") if name in values}).encode()
        aborted = await self._broadcast(done, replace(call, path="/lockstep/abort_weight_update", body=body), values)
        told = {"message": "it had begun, and has given the session up, which others refused"}
        told |= {"type": refused[0].kind, "code": refused[0].code}
        given_up = {
            result.worker.id: Result(result.worker, refused[0].status, {"success": False, "error": told})
            for result in aborted
            if result.success
        }
        return [given_up.get(result.worker.id, result) for result in results]

    async def revert_committed(
        self, call: WorkerCall, values: Mapping[str, object], results: Sequence[Result]
    ) -> list[Result]:
        """Revert an update at the workers that have committed it, after an abort that they refused.

        Returns the results, with the result of the revert for such a worker.
        """
        refusing = [result.worker for result in results if result.kind == "SessionError"]
        await self._updates.read_versions(refusing)
        committed = [worker for worker in refusing if self._updates.has_committed(worker)]
        if not committed:
            return list(results)
        path = "/lockstep/revert_weight_update"
        body = json.dumps({name: values[name] for name in ("timeout_s", "client") if name in values}).encode()
        reverted = await self._broadcast(committed, replace(call, path=path, body=body), values)
        by_worker = {result.worker.id: result for result in reverted}
        return [by_worker.get(result.worker.id, result) for result in results]
