"""Aborts of requests that the engine has not got yet: their prompts are tokenised, their images wait for the model, or
their grammars are compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....rollout.completion import FinishReason
from ....rollout.grammars.cache import Promise
from ....rollout.sampling_params import GRAMMARS
from .asked import Asked


@dataclass(eq=False)
class Preparing:
    """A request that is being prepared."""

    asked: Asked | None = None  # once its prompts are tokenised, which gives it its ids
    aborts: list[tuple[str | None, FinishReason | None]] = field(default_factory=list)  # that came meanwhile
    was_noted: asyncio.Event = field(default_factory=asyncio.Event)  # one of them

    def aborted(self) -> dict[str, FinishReason | None]:
        """Return the ids of the request that were aborted, with the reasons. An abort may name the request that one of
        them is a sample of."""
        if self.asked is None:
            return {}
        options = zip(self.asked.rids, self.asked.options, strict=True)
        names = {own: (None, own, option.base_id or own) for own, option in options}
        return {own: reason for rid, reason in reversed(self.aborts) for own in names if rid in names[own]}

    @property
    def is_aborted(self) -> bool:
        """Whether every id of the request was aborted."""
        return self.asked is not None and len(self.aborted()) == len(set(self.asked.rids))

    async def unless_aborted(self, done: asyncio.Future[Any]) -> bool:
        """Wait for a future, and return whether it is done: a request that is aborted waits no more."""
        aborted = asyncio.ensure_future(self._until_aborted())
        try:
            await asyncio.wait((done, aborted), return_when=asyncio.FIRST_COMPLETED)
            return done.done()
        finally:
            aborted.cancel()

    async def _until_aborted(self) -> None:
        while not self.is_aborted:
            self.was_noted.clear()
            await self.was_noted.wait()


class EarlyAborts:
    """The requests of one event loop that are being prepared, and the aborts that came meanwhile."""

    def __init__(self) -> None:
        self._preparing: set[Preparing] = set()

    def begin(self) -> Preparing:
        """Begin to prepare a request, until `end`."""
        preparing = Preparing()
        self._preparing.add(preparing)
        return preparing

    def end(self, preparing: Preparing) -> None:
        """Forget a request: the engine has it, or it failed."""
        self._preparing.discard(preparing)

    def note(self, rid: str | None, reason: FinishReason | None) -> None:
        """Note an abort of the request with this id, or of all. Call it before the engine aborts: a request is aborted
        there if it is queued before, and by this note if it is queued after."""
        for preparing in self._preparing:
            preparing.aborts.append((rid, reason))
            preparing.was_noted.set()


async def are_compiled(missing: Sequence[Promise], preparing: Preparing) -> bool:
    """Wait for the grammars of a request, and return whether all are ready: one that is aborted waits no more. Raises
    the first error that is not one in a grammar; those `submit` raises, all together."""
    waiting = [asyncio.shield(asyncio.wrap_future(grammar)) for grammar in missing]
    compiled = asyncio.gather(*waiting, return_exceptions=True)
    if not await preparing.unless_aborted(compiled):
        return False
    for outcome in compiled.result():
        if isinstance(outcome, BaseException) and not isinstance(outcome, ValueError):
            raise outcome
    return True


def without_grammars(asked: Asked) -> Asked:
    """Return a request without its grammars: it is aborted, and ends before it runs."""
    nothing: dict[str, None] = dict.fromkeys(GRAMMARS)
    return replace(asked, params=[replace(params, **nothing) for params in asked.params])  # type: ignore[arg-type]
