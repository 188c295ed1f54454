"""The weight groups of one process, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import TransferFailed
from .communicator import Communicators
from .joining import Joining
from .weight_group import JOIN_ANEW, WeightGroup

logger = logging.getLogger(__name__)

NOT_RECEIVED = "an update over it failed before its broadcasts were received"  # why a group is broken


class GroupRegistry:
    """The groups of one process by name. Thread-safe."""

    def __init__(self, communicators: Communicators | None = None) -> None:
        """Begin without groups. communicators: the library that joins vLLM's trainers; None: NCCL, where the model is
        on a GPU."""
        self.communicators = communicators
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup | Joining] = {}

    def init(self, rendezvous: Joining) -> WeightGroup:
        """Join the rendezvous and keep the group under its name, in the place of a group whose sender has ended: one
        that starts again may not know of it. Raises ValueError for a name that is taken or is joining."""
        group_name = rendezvous.group_name
        self._leave_lost(group_name)
        with self._lock:
            if group_name in self._groups:
                rendezvous.cancel()
                raise ValueError(f"a group named {group_name!r} exists already; destroy it first")
            self._groups[group_name] = rendezvous
        group: WeightGroup | None = None
        try:
            group = rendezvous.join()
        finally:
            with self._lock:
                wanted = self._groups.get(group_name) is rendezvous
                if wanted and group is not None:
                    self._groups[group_name] = group
                elif wanted:
                    del self._groups[group_name]
        if not wanted:  # destroyed at the moment when it was complete
            group.destroy()
            raise TransferFailed(f"{group.at('rendezvous')}: destroyed while it was joining")
        return group

    def _leave_lost(self, group_name: str) -> None:
        """Destroy the group of that name if its sender has ended."""
        with self._lock:
            group = self._groups.get(group_name)
        if not isinstance(group, WeightGroup) or not group.has_lost_its_sender():
            return
        with self._lock:
            if self._groups.get(group_name) is not group:  # meanwhile another call has destroyed it
                return
            del self._groups[group_name]
        logger.warning("%s: its sender has ended, and another one joins under its name", group.at("left"))
        group.destroy()

    def get(self, group_name: str) -> WeightGroup:
        """Return a group. Raises ValueError for a name that is unknown or still joining."""
        with self._lock:
            group = self._groups.get(group_name)
            names = sorted(name for name, value in self._groups.items() if isinstance(value, WeightGroup))
        if not isinstance(group, WeightGroup):
            state = "is still joining" if group is not None else "does not exist"
            raise ValueError(f"group {group_name!r} {state}; groups: {', '.join(names) or 'none'}")
        return group

    def state(self) -> dict[str, str]:
        """Return, by name, "joining", "ready", or the reason why a group is broken. Waits at most for a lookup of
        another thread."""
        with self._lock:
            groups = dict(self._groups)
        return {
            name: (group.broken or "ready") if isinstance(group, WeightGroup) else "joining"
            for name, group in groups.items()
        }

    def destroy(self, group_name: str) -> None:
        """Destroy a group, or cancel its rendezvous. Raises ValueError for an unknown name."""
        with self._lock:
            group = self._groups.pop(group_name, None)
        if group is None:
            raise ValueError("The group to be destroyed does not exist.")
        if isinstance(group, WeightGroup):
            group.destroy()
        else:
            group.cancel()

    def break_off(self, group_name: str | None, why: str) -> None:
        """Break a group that is ready: the broadcasts of its other ranks fail at once, instead of waiting for this one.
        It is kept until `destroy`. Does nothing where there is no such group. None: every group that was joined without
        a secret, as those of other frameworks' senders are."""
        with self._lock:
            groups = [group for group in self._groups.values() if isinstance(group, WeightGroup)]
        for group in groups:
            is_meant = not group.has_secret if group_name is None else group.name == group_name
            if is_meant and group.broken is None:
                group.abort(why)

    @contextmanager
    def in_step(self, group_name: str) -> Iterator[Callable[[], None]]:
        """Break the group where the block fails before it has called the yielded function, which says that this rank
        has received the broadcasts of an update. Other frameworks' senders start them beside the call that asks for it,
        also where it is refused: the next update would take them for its own."""
        have_arrived: list[bool] = []
        try:
            yield lambda: have_arrived.append(True)
        except BaseException as error:
            if not have_arrived:
                self.break_off(group_name, NOT_RECEIVED)
                error.add_note(f"group {group_name!r} is broken: {JOIN_ANEW}")
            raise

    def close(self) -> None:
        """Destroy all groups."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            if isinstance(group, WeightGroup):
                group.destroy()
            else:
                group.cancel()
