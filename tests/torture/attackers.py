"""An attacker: a seeded generator of bounded steps. `Scene` holds what all attackers of a storm share."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.tests.torture.wire import Address, Record, Verdict, Wire

if TYPE_CHECKING:
    from lockstep.tests.torture.own_server import Process


@dataclass
class Scene:
    """The server under attack, and the things that the attackers share."""

    address: Address
    description: dict[str, Any]  # the server's OpenAPI document
    scratch: Path  # a folder of this storm
    seed: int
    is_admin_allowed: bool = True
    own: Process | None = None  # the server's process, where we started it
    may_end: bool = False  # the server ends by itself when its job is over
    model_folder: str = ""  # where the server read its weights; "" where that is not known
    record: Record = field(default_factory=Record)
    verdict: Verdict = field(default_factory=Verdict)
    over: threading.Event = field(default_factory=threading.Event)
    # One attacker at a time acts as the administrator, so that it may leave a usable state behind and look that it did.
    admin_turn: threading.Lock = field(default_factory=threading.Lock)

    def wire(self, attacker: str) -> Wire:
        return Wire(self.address, self.record, self.verdict, attacker, self.is_over)

    @property
    def is_gone(self) -> bool:
        """Whether the server's process has ended."""
        return self.own is not None and not self.own.is_alive

    def is_over(self) -> bool:
        """Whether a request without an answer is no fault any more: the server has ended, or may do so."""
        return self.is_gone or (self.may_end and self.over.is_set())

    @property
    def is_lockstep(self) -> bool:
        """Whether the server is ours, so that it has fields which SGLang has not."""
        return self.has("/lockstep/{verb}")

    def has(self, path: str) -> bool:
        """Whether the server lists this path."""
        return path in self.description.get("paths", {})


class Attacker(ABC):
    """One way of attack. A step is a function of the seed, the attacker's name and the number of the step."""

    name: str
    num_lanes = 1  # attackers of this kind at a time; each takes every num_lanes-th step
    needs_admin = False  # uses the admin key
    needs_own = False  # acts on the process of the server

    def __init__(self, scene: Scene, lane: int = 0) -> None:
        self.scene, self.lane = scene, lane
        self.wire = scene.wire(self.name)

    @abstractmethod
    def step(self, draw: random.Random) -> None:
        """Attack once. Ends within a minute or so, and leaves a server that can be used."""

    def take_step(self, number: int) -> None:
        """Take the step of that number."""
        self.wire.step = number
        self.step(random.Random(f"{self.scene.seed}/{self.name}/{number}"))

    def run(self) -> int:
        """Take one step after the other until the storm is over; returns their number."""
        num_taken = 0
        while not self.scene.over.is_set():
            self.take_step(self.lane + num_taken * self.num_lanes)
            num_taken += 1
        return num_taken
