"""The way of an abort to the requests that the engine has not got yet."""

from __future__ import annotations

from starlette.applications import Starlette

from ....rollout.completion import FinishReason


def note_abort(app: Starlette, rid: str | None, reason: FinishReason | None = None) -> None:
    """Note an abort of the request with this id, or of all, for those that a server's engine has not got yet. Call it
    before the engine aborts, see `generation.early_aborts`."""
    if (hub := getattr(app.state, "hub", None)) is not None:
        hub.early_aborts.note(rid, reason)
