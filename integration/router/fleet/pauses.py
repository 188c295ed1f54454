"""The pause of a fleet that was begun through the router, until it goes on: workers that come meanwhile wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .worker import Worker

_MEMORY = frozenset({"kv_cache", "weights"})  # that a call is about which names none


class Pauses:
    """Whether the workers are paused or their memory is released, and which processes had part in it. A pause is over
    when one of them generates again, and both are when each of them is another process or was removed."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, int]] | None = None  # lives by worker id, while a call begins one
        self.num_changes = 0  # answers of workers that began or ended one: a probe from before is out of date
        self._verb = ""  # by which the last one began
        self._is_paused = False
        self._released: frozenset[str] = frozenset()  # tags of memory
        self._lives: dict[str, tuple[int, int]] = {}  # of the processes, by worker id

    @property
    def is_on(self) -> bool:
        """Whether the fleet is paused, or memory of it is released."""
        return self._is_paused or bool(self._released)

    @property
    def why(self) -> str | None:
        """The reason for which a worker that comes now gets no requests; None: there is none."""
        if not self.is_on and self._asked is None:
            return None
        by = f" by {self._verb}" if self._verb else ""
        return f"it came while the fleet is paused{by}, and waits until it goes on, or an operator enables it"

    def ask(self, workers: Sequence[Worker]) -> None:
        """Note that these workers, as they are now, are told to pause or to release memory. Workers that come before
        the `answered` wait, too."""
        self._asked = {worker.id: worker.life for worker in workers}

    def answered(self) -> None:
        """Note the end of the call."""
        self._asked = None

    def is_as_asked(self, worker: Worker) -> bool:
        """Return whether a worker is the process that was asked."""
        return self._asked is not None and self._asked.get(worker.id) == worker.life

    def begin(self, verb: str, workers: Iterable[Worker], pauses: bool, released: Collection[str] | None) -> None:
        """Note that these workers are paused, or that memory of these tags is released at them; None: all."""
        self._verb, self._is_paused = verb, self._is_paused or pauses
        self._released |= _MEMORY if released is None else frozenset(released)
        self._lives |= {worker.id: worker.life for worker in workers if self.is_as_asked(worker)}
        self.num_changes += 1

    def go_on(self) -> None:
        """Note that generation goes on."""
        self._is_paused = False
        self.num_changes += 1

    def give_back(self, returned: Collection[str] | None, wakes: bool) -> None:
        """Note that memory of these tags is there again; None: all. wakes: generation goes on with the last part."""
        self._released = frozenset() if returned is None else self._released - frozenset(returned)
        if wakes and not self._released:
            self.go_on()

    def look(self, workers: Sequence[Worker]) -> bool:
        """Note the end of a pause, where these workers, the router's, show it. Returns whether the fleet goes on."""
        now = {worker.id: worker for worker in workers}
        if all(self._has_gone(now.get(worker_id), life) for worker_id, life in self._lives.items()):
            self._is_paused, self._released = False, frozenset()
        elif any(one.is_alive and not one.paused and self._lives.get(one.id) == one.life for one in workers):
            self._is_paused = False
        if not self.is_on:
            self._lives.clear()
        return not self.is_on and self._asked is None

    @staticmethod
    def _has_gone(worker: Worker | None, life: tuple[int, int]) -> bool:
        return worker is None or (worker.is_alive and worker.life != life)
