"""The clients of sessions: a call of one client reaches no session of another one.

A client may give its calls a name of its own, one for each update. Then its calls reach only the session that it has
begun, and others' updates do not get into it. Calls without a name share the sessions that were begun without one.
"""

from __future__ import annotations

from collections import OrderedDict

from ..errors import SessionError
from .records import WeightSession

NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
_MOST_ENDED = 64  # clients whose ended sessions are remembered


class Owners:
    """The ends of named clients' sessions, and the checks of names."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, str] = OrderedDict()  # how the last session of a client ended

    def was_rolled_back(self, session: WeightSession, why: str) -> None:
        """Remember how a session ended that its client has not ended."""
        if session.client is not None:
            self._ended[session.client] = f"the weight-update session was rolled back ({why}); begin another one"
            self._ended.move_to_end(session.client)
            while len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)

    def has_begun(self, client: str | None) -> None:
        """Forget how the last session of a client ended: it has begun another one."""
        if client is not None:
            self._ended.pop(client, None)

    def has_ended(self, client: str | None) -> bool:
        """Return whether a session of this client was rolled back."""
        return client is not None and client in self._ended

    def check(self, session: WeightSession | None, client: str | None) -> None:
        """Raise SessionError naming both where a call of `client` does not belong to the open session, and where a
        named client has none. A call without a name belongs to no named one's session."""
        if session is None:
            if client is not None:
                raise SessionError(self._ended.get(client, f"{client} has no weight-update session here: begin one"))
        elif session.client != client:
            mine = self._ended.get(client, "") if client is not None else ""
            whose = "of a client without a name" if session.client is None else f"of {session.client}"
            raise SessionError(f"the open weight-update session is that {whose}{f': {mine}' if mine else ''}")

    def why_not_to_abort(self, session: WeightSession, client: str | None) -> SessionError | None:
        """Return why a call does not roll this session back; None: it does. Anybody without a name may do so, as an
        operator."""
        if client is None:
            return None
        try:
            self.check(session, client)
        except SessionError as error:
            return error
        return None

    def check_revert(self, session: WeightSession, client: str | None) -> None:
        """Raise SessionError where a named client would take another one's commit back."""
        if client is not None and session.client != client:
            raise SessionError(f"the last commit is not that of {client}: it stays")
