"""The slots of the state pool and their users: running sequences, and snapshots in the prefix cache. Numbers only.

A slot holds the states of all recurrent layers after some token of one sequence. A step reads one slot of a sequence
and writes another, which has no other user. So a step may run twice or in vain, and a snapshot is no copy: it is a
further user of the slot that a step has written. Each row of a draft writes a slot of its own; the one after the last
accepted token is kept.

    the sequence's steps      read 0, write 7     read 7, write 3     read 3, write 7 again

Slot 0 holds zeros, the states before the first token, and is never written. A slot without users is free at once: every
rank runs the steps in the order of their plans, so an earlier step has read it before a later one writes to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from ..sequences.request import Request
from ..sequences.step import StateSlots


class Place(Protocol):
    """The place of a snapshot: a node of the prefix cache, which ends where the state stands."""

    num_guards: int  # positive while pins protect it


@dataclass(eq=False)
class _Account:
    """The slots of one running request: before the rows of its newest step, and after them."""

    read: int
    start: int  # tokens before the newest step
    write: int | None = None  # None: no step is planned yet
    end: int = 0  # tokens after it
    drafted: tuple[int, ...] = ()  # slots that get the states after each token of its draft
    rolling: Place | None = None  # the newest snapshot in its output, which the next one replaces


class SlotLedger:
    """Hand out slots to running sequences and keep snapshots, the least recently used of which makes room."""

    def __init__(self, num_sequences: int, num_snapshots: int) -> None:
        """Create a ledger whose slots are all free. They suffice for so many running sequences and snapshots."""
        self.num_slots = 1 + 2 * num_sequences + num_snapshots
        self.max_snapshots = num_snapshots
        self._free = list(range(self.num_slots - 1, 0, -1))
        self._num_users = Counter[int]()
        self._accounts: dict[Request, _Account] = {}
        self._snapshots: dict[Place, int] = {}  # least recently used first
        self.num_evicted = 0  # snapshots that made room for another

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def has_snapshot(self, place: Place) -> bool:
        return place in self._snapshots

    # -- running sequences ----------------------------------------------------------------------------------------

    def open(self, request: Request, place: Place | None, num_tokens: int) -> None:
        """Admit a request whose first `num_tokens` tokens, up to `place`, are cached; None and 0 where none are."""
        assert request not in self._accounts
        self._accounts[request] = _Account(self._use(place), num_tokens)

    def plan(self, request: Request, start: int, end: int) -> StateSlots:
        """Return the slots for a step with the request's rows `start` to `end` - 1.

        A step that was planned before and begins at the same row will not run, and gives its slots to this one.
        """
        account = self._accounts[request]
        assert not account.drafted, f"{request.id} has a draft that is not settled"
        if account.write is not None and start == account.end:
            self._release(account.read)
            account.read, account.start, account.write = account.write, account.end, None
        assert start == account.start, f"{request.id} has states at {account.start} and {account.end}, not at {start}"
        if account.write is None:
            account.write = self._free.pop()
            self._num_users[account.write] = 1
        account.end = end
        return StateSlots(account.read, account.write)

    def plan_draft(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Return slots for the states after each token of a draft, in the step that was planned last.

        They are taken from the free ones until `settle_draft`. There must be enough.
        """
        account = self._accounts[request]
        assert account.write is not None and not account.drafted
        account.drafted = tuple(self._free.pop() for _ in range(num_tokens))
        self._num_users.update(account.drafted)
        return account.drafted

    def settle_draft(self, request: Request, num_accepted: int) -> None:
        """Make the states after the last accepted token those of the request, and release the others. The step is
        committed, and its snapshots are kept already."""
        account = self._accounts[request]
        assert account.write is not None
        written, account.drafted = (account.write, *account.drafted), ()
        for slot in written[:num_accepted] + written[num_accepted + 1 :]:
            self._release(slot)
        account.write = written[num_accepted]
        account.end += num_accepted

    def stands_at(self, request: Request, num_tokens: int) -> bool:
        """Return whether the request's next step could begin after its first `num_tokens` tokens."""
        return num_tokens == self._accounts[request].start

    def rewind(self, request: Request, place: Place | None, num_tokens: int) -> None:
        """Return a request to the snapshot at `place`, after `num_tokens` tokens; None and 0 for its first token."""
        read = self._use(place)
        self.close(request)
        self._accounts[request] = _Account(read, num_tokens)

    def close(self, request: Request) -> None:
        """Release the request's slots."""
        account = self._accounts.pop(request)
        self._release(account.read)
        for slot in (account.write, *account.drafted):
            if slot is not None:
                self._release(slot)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def keep(self, request: Request, place: Place, num_tokens: int, *, is_rolling: bool) -> None:
        """Keep the request's states after `num_tokens` tokens as the snapshot at `place`, if a slot holds them.

        The step that wrote them must be committed. is_rolling: the request's next rolling snapshot replaces this one.
        Does nothing where pins protect all snapshots.
        """
        account = self._accounts[request]
        slots = {account.end: account.write, account.start: account.read}
        slots |= {account.end + number: slot for number, slot in enumerate(account.drafted, 1)}
        slot = slots.get(num_tokens)
        if slot is None or place in self._snapshots or not self.max_snapshots:
            return
        if is_rolling:
            if (last := account.rolling) is not None and last in self._snapshots and not last.num_guards:
                self.drop(last)
            account.rolling = place
        if len(self._snapshots) == self.max_snapshots:
            oldest = next((at for at in self._snapshots if not at.num_guards), None)
            if oldest is None:
                return
            self.drop(oldest)
            self.num_evicted += 1
        self._snapshots[place] = slot
        self._num_users[slot] += 1

    def drop(self, place: Place) -> None:
        """Drop the snapshot at `place`, if there is one. Sequences that read its slot keep it."""
        if (slot := self._snapshots.pop(place, None)) is not None:
            self._release(slot)

    def _use(self, place: Place | None) -> int:
        """Return the slot of a snapshot with one more user, as the most recently used; slot 0 for None."""
        if place is None:
            return 0
        self._snapshots[place] = slot = self._snapshots.pop(place)
        self._num_users[slot] += 1
        return slot

    def _release(self, slot: int) -> None:
        if slot == 0:
            return
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            del self._num_users[slot]
            self._free.append(slot)

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_idle(self) -> list[str]:
        """Return what is wrong with the sum of the slots while no request is admitted; empty if nothing is. Cheap."""
        num_used = self.num_slots - 1 - self.num_free
        if self._accounts or num_used == self.num_snapshots:
            return []
        return [f"{num_used} state slots are used, but there are {self.num_snapshots} snapshots"]

    def check(self) -> list[str]:
        """Return a description of each inconsistency; empty when there is none. Changes nothing."""
        users = Counter(self._snapshots.values())
        for account in self._accounts.values():
            users.update(slot for slot in (account.read, account.write, *account.drafted) if slot)
        wrong = []
        if users != self._num_users:
            wrong.append(f"state slots have the users {dict(users)}, counted are {dict(self._num_users)}")
        if sorted([*self._free, *users]) != list(range(1, self.num_slots)):
            wrong.append(f"state slots: {sorted(self._free)} free and {sorted(users)} used are not the pool")
        if self.num_snapshots > self.max_snapshots:
            wrong.append(f"{self.num_snapshots} snapshots of at most {self.max_snapshots}")
        return wrong
