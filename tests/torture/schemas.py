"""Requests drawn by schemathesis from the server's OpenAPI document, with values that earlier answers had."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException

from lockstep.integration.http.edge.auth import Level, level_of
from lockstep.tests.torture.attackers import Attacker, Scene
from lockstep.tests.torture.verbs import is_usable, restore
from lockstep.tests.torture.wire import Answer

CASES = 6  # of a step: one operation, mostly with equal fields
# Paths in a body that a server may create or write: they stay inside the folder of the storm.
FOLDERS = ("output_dir", "local_checkpoint_dir", "source_dir", "model_path", "weight_dir")
MAX_KNOWN = 200
ENDLESS = ("/lockstep/attend",)  # whose answers last as long as their connections
# Hypothesis parses functions' source, and has a callback of garbage collections, in which threads take turns. CPython
# 3.11 counts the depth of all threads' syntax trees in one place: "AST constructor recursion depth mismatch".
_drawing = threading.Lock()


class Schemas(Attacker):
    """Send what schemathesis draws for an operation, valid and invalid, with the ordinary key.

    State: the values of an answer's fields are kept by name, and take the place of drawn ones: ids of requests, hashes
    of blocks, versions.
    """

    name = "schemas"
    levels: tuple[Level, ...] = (Level.OPEN, Level.NORMAL)

    def __init__(self, scene: Scene, lane: int = 0) -> None:
        super().__init__(scene, lane)
        import schemathesis  # takes two seconds

        self._known: dict[str, list[Any]] = defaultdict(list)
        schema = schemathesis.openapi.from_dict(scene.description)
        operations = [result.ok() for result in schema.get_all_operations()]
        self._operations = [one for one in operations if level_of(one.path) in self.levels and one.path not in ENDLESS]
        self._modes = list(schemathesis.GenerationMode)

    def step(self, draw: random.Random) -> None:
        operation = draw.choice(self._operations)
        for case in self._draw(operation, draw.choice(self._modes), draw.getrandbits(32)):
            if self.scene.over.is_set():
                return
            sent = case.as_transport_kwargs(base_url="http://x")
            values = sent.get("json")
            body = self._placed(draw, values) if isinstance(values, dict) else values
            query = f"?{urlencode(sent['params'], doseq=True, errors='replace')}" if sent.get("params") else ""
            path = sent["url"].removeprefix("http://x").replace(" ", "%20") + query
            raw = sent.get("data", b"")
            raw = json.dumps(body).encode() if "json" in sent else raw if isinstance(raw, bytes) else str(raw).encode()
            self._learn(self._send(operation.path, case.method, path, raw))

    def _send(self, operation: str, method: str, path: str, body: bytes) -> Answer:
        return self.wire.call(method, path, body, name=f"{method} {operation}")

    def _draw(self, operation: Any, mode: Any, number: int) -> list[Any]:
        with _drawing:
            return self._drawn(operation.as_strategy(generation_mode=mode), number)

    def _drawn(self, strategy: Any, number: int) -> list[Any]:
        drawn: list[Any] = []

        @seed(number)
        @settings(max_examples=CASES, database=None, phases=[Phase.generate], deadline=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def collect(value: Any) -> None:
            drawn.append(value)

        with suppress(HypothesisException):  # an operation without invalid values
            collect()
        return drawn[:CASES]

    def _placed(self, draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
        """Replace some drawn values by known ones, and keep paths inside the storm's folder."""
        for name in list(values):
            if known := self._known.get(name):
                values[name] = draw.choice([values[name], draw.choice(known)])
            if name in FOLDERS and isinstance(values[name], str):
                values[name] = f"{self.scene.scratch}/none-{abs(hash(values[name])) % 1000}"
        if values.get("action") in ("reset_tensors", "reset"):
            values["action"] = "checksum"  # it destroys the weights, as it says
        if values.get("backend") == "nccl":
            values["backend"] = "gloo"
        return values

    def _learn(self, answer: Answer) -> None:
        todo: list[Any] = [answer.json()]
        for _ in range(200):
            if not todo:
                return
            item = todo.pop()
            if isinstance(item, list):
                todo += item[:20]
            elif isinstance(item, dict):
                for name, value in item.items():
                    name = {"id": "rid", "hash": "block_hashes"}.get(name, name)
                    if len(self._known[name]) < MAX_KNOWN:
                        self._known[name].append([value] if name == "block_hashes" else value)
                    todo.append(value)


class AdminSchemas(Schemas):
    """Do the same with the administrator's key and operations, and restore a usable state after each step."""

    name = "admin_schemas"
    needs_admin = True
    levels = (Level.ADMIN, Level.ADMIN_FORCED)

    def _send(self, operation: str, method: str, path: str, body: bytes) -> Answer:
        return self.wire.call(method, path, body, name=f"{method} {operation}", admin=True)

    def step(self, draw: random.Random) -> None:
        with self.scene.admin_turn:
            try:
                super().step(draw)
            finally:
                restore(self.wire, self.scene)
                is_usable(self.wire, self.scene)
