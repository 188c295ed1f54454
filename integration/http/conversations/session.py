"""One session: a tree of turns, the last of them, and the requests that are open on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....rollout.completion import Completion
from ..edge.errors import BadField, HttpError
from ..edge.session_paths import FIELD
from .params import History, SessionParams
from .sampling import Numbers, SessionSampling
from .turns import Turn

SESSION_BYTES = 2000  # of memory, about, of a session without turns


@dataclass(frozen=True)
class SessionOptions:
    """The options that a session was opened with."""

    streaming: bool = False  # SGLang's word: one request at a time, each after the last
    timeout_s: float | None = None  # None, or longer than `session_idle_s`: that setting
    history: History = "sampled"  # of a chat: which tokens win where the template has others
    pin: bool = False  # keep the KV of the last turn in the cache
    sampling: SessionSampling = field(default_factory=SessionSampling)  # of all turns
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of chats whose requests do not set them
    on_answer: Callable[[str, Completion], None] | None = None  # called with the rid and the answer of each turn
    may_forget: bool = True  # whether requests may `replace` turns

    @property
    def num_bytes(self) -> int:
        """The memory that they take, in bytes, about."""
        given = [dict(self.sampling.values), dict(self.chat_template_kwargs)]
        return len(json.dumps(given)) if any(given) else 0


class Session:
    """One session. Not safe by itself: `Sessions` calls it under its lock."""

    def __init__(self, id: str, number: int, options: SessionOptions, timeout_s: float, now: float) -> None:
        """Open it, without a turn. number: differs from that of every other session, also of an equal id."""
        self.id, self.number, self.options, self.timeout_s = id, number, options, timeout_s
        self.used_at = now
        self.turns: dict[str, Turn] = {}  # by rid, in the order in which they ended: each after its parent
        self.last: Turn | None = None  # the turn that ended last
        self.open_rids: set[str] = set()  # of requests that have not ended
        self.has_ended = False
        self.needs_turn = False  # it ends with its last open request, if it has no turn by then
        self.num_bytes = SESSION_BYTES + len(id) + options.num_bytes
        self.pinned: tuple[int, ...] = ()  # hashes of blocks that were pinned, see `pins`
        self.pin_owner = ""  # whose pins they are
        self.numbers = Numbers()  # of requests with equal prompts
        self._by_digest: dict[bytes, list[Turn]] = {}  # each the oldest first

    @property
    def deadline(self) -> float:
        """The time at which it expires if nothing uses it until then."""
        return self.used_at + self.timeout_s

    def settled(self, params: SessionParams, *, may_branch: bool) -> SessionParams:
        """Return the fields of a request with `branch`. may_branch: it branches where it does not say otherwise and the
        session is not a streaming one, which has no branches."""
        if params.branch is not None:
            return params
        return params.model_copy(update={"branch": may_branch and not self.options.streaming})

    def base_of(self, params: SessionParams, rid: str) -> Turn | None:
        """Return the turn that a request goes on from; None: it begins a conversation. rid: of the request itself.
        Raises BadField, HttpError 409."""
        if rid in self.turns or rid in self.open_rids:
            raise BadField("rid", f"{rid!r} names another turn of the session {self.id!r}")
        if self.options.streaming:
            if self.open_rids:
                raise HttpError(409, f"the streaming session {self.id!r} has a request that has not ended",
                                param=f"{FIELD}.id", code="session_busy")  # fmt: skip
            wrong = [name for name in ("replace", "drop_previous_output", "offset", "branch") if getattr(params, name)]
            if wrong:
                raise BadField(f"{FIELD}.{wrong[0]}", "a streaming session only goes on from its last turn")
        if params.replace and not self.options.may_forget:
            raise BadField(f"{FIELD}.replace", "is not for the requests of this session, which keeps all turns")
        if params.rid is None:
            return None if params.replace else self.last
        if params.rid in self.open_rids:
            raise BadField(f"{FIELD}.rid", f"the request {params.rid!r} has not ended")
        if params.rid not in self.turns:
            raise BadField(f"{FIELD}.rid", f"the session {self.id!r} has no turn {params.rid!r}")
        base = self.turns[params.rid]
        if self.options.streaming and base is not self.last:
            raise BadField(f"{FIELD}.rid", "a streaming session only goes on from its last turn")
        return base

    def with_messages(self, digests: tuple[bytes, ...]) -> Iterator[Sequence[Turn]]:
        """Yield the turns whose conversations may be the first of these messages, see `chained`: those with the most
        together, the newest first, then those with fewer."""
        for digest in reversed(digests):
            if turns := self._by_digest.get(digest):
                yield turns[::-1]

    @property
    def leaves(self) -> list[str]:
        """The rids of the turns from which no other turn goes on, in the order in which they ended."""
        parents = {turn.parent.rid for turn in self.turns.values() if turn.parent is not None}
        return [rid for rid in self.turns if rid not in parents]

    def begin(self, rid: str, now: float) -> None:
        """Count a request as open."""
        self.open_rids.add(rid)
        self.used_at = now

    def finish(self, rid: str, now: float) -> None:
        """Count a request no longer."""
        self.open_rids.discard(rid)
        self.used_at = now

    def add(self, turn: Turn, *, replaces: bool) -> bool:
        """Add a turn, which is the last now. replaces: forget the turns after its parent first; without a parent, all.
        Returns False, and changes nothing, where its parent is gone."""
        parent = turn.parent
        if parent is not None and self.turns.get(parent.rid) is not parent:
            return False
        if replaces:
            self._forget_after(parent)
        self.turns[turn.rid] = turn
        if turn.digest:
            self._by_digest.setdefault(turn.digest, []).append(turn)
        self.num_bytes += turn.num_bytes
        self.last = turn
        return True

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self._by_digest.clear()
        self.last = None

    def _forget_after(self, parent: Turn | None) -> None:
        gone: set[str] = set()
        for rid, turn in self.turns.items():
            if turn.parent is parent or (turn.parent is not None and turn.parent.rid in gone):
                gone.add(rid)
        digests: set[bytes] = set()
        for rid in gone:
            turn = self.turns.pop(rid)
            self.num_bytes -= turn.num_bytes
            digests.add(turn.digest)
        for digest in digests & self._by_digest.keys():  # thousands of turns may have one
            left = [one for one in self._by_digest.pop(digest) if one.rid not in gone]
            if left:
                self._by_digest[digest] = left
