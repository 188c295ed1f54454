"""A storm: attackers, clients and a watch around one server for a while, and the checks after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.tests.torture.answers import SeededAnswers
from lockstep.tests.torture.attackers import Attacker, Scene
from lockstep.tests.torture.verbs import is_usable, restore
from lockstep.tests.torture.watch import sample

JOIN_S = 240.0  # after the storm, for the requests under way
SETTLE_S = 60.0  # after it, until sequences have ended and descriptors and threads are back
GROWTH = 1.2  # of the resident memory since the start, before the named limits are added
NUM_GRAMMAR_SHARES = 3  # of grammar_memory_mb: two processes that compile, and all compiled grammars
SLACK_DESCRIPTORS, SLACK_THREADS = 8, 8


@dataclass(frozen=True)
class Limits:
    """The requirements of a storm."""

    latency_s: float = 2.0  # of /health and /state, and of a loop without a step
    allowance: int = 0  # bytes of memory beyond 1.2 times the start: the server's named limits


@dataclass
class Measures:
    """The figures of the watch."""

    start: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)  # of each watched path, outside of injected faults


def named_limits(scene: Scene) -> dict[str, int]:
    """Return, in bytes, each setting of the server that limits memory: those that it reports, else our defaults."""
    said: Any = scene.wire("limits").call("GET", "/server_info").json()
    said = said if isinstance(said, dict) else {}
    found = {}
    for config in (HttpConfig, ServiceConfig, EngineConfig):
        for one in fields(config):
            value = said.get(one.name, one.default)
            unit = 1 if one.name.endswith("_bytes") else 1 << 20 if one.name.endswith("_mb") else 0
            if unit and "admin" not in one.name and isinstance(value, int):
                found[one.name] = value * unit * (NUM_GRAMMAR_SHARES if one.name == "grammar_memory_mb" else 1)
    return found


class Rises:
    """The rises of a figure above its limit, each told once, however slowly it rises."""

    def __init__(self) -> None:
        self._told = 0.0

    def is_new(self, figure: float, limit: float) -> bool:
        """Return whether the figure is above the limit, and by a twentieth above the last one that was told."""
        if is_new := figure > max(limit, 1.05 * self._told):
            self._told = figure
        return is_new


class WatchProcess:
    """The watch in a process of its own; what it finds becomes violations and measures."""

    def __init__(self, scene: Scene, limits: Limits, pid: int | None) -> None:
        self.scene, self.measures = scene, Measures()
        paths = ["/health", *(["/state"] if scene.has("/state") else [])]
        command = [sys.executable, "-m", "lockstep.tests.torture.watch", "--url", scene.address.url]
        command += ["--limit-s", str(limits.latency_s), "--path", *paths]
        command += ["--pid", str(pid)] if pid is not None else []
        environment = os.environ | {"TORTURE_API_KEY": scene.address.api_key}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._memory, self._rises = limits.allowance, Rises()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            kind = line.pop("event")
            if kind == "sample":
                self._on_sample(line)
            elif not self.scene.is_over() and not self._is_excused(kind, line["began"], line["ended"]):
                if kind == "answered":
                    self._on_answer(**line)
                    continue
                self.scene.verdict.add(kind, json.dumps(line), self.scene.record.between(line["began"], line["ended"]))

    def _is_excused(self, kind: str, began: float, ended: float) -> bool:
        is_late = kind in ("late", "stalled", "answered")
        return self.scene.verdict.is_excused(began, ended, is_late)

    def _on_answer(self, path: str, began: float, ended: float, seconds: float) -> None:
        longest = self.measures.longest_s
        longest[path] = max(longest.get(path, 0.0), seconds)
        longest["by the clock"] = max(longest.get("by the clock", 0.0), round(ended - began, 3))

    def _on_sample(self, line: dict[str, Any]) -> None:
        measures, now = self.measures, line.pop("at")
        if not measures.start:
            measures.start = dict(line)
        measures.most = {key: max(value, measures.most.get(key, 0)) for key, value in line.items()}
        measures.end = line
        limit = GROWTH * measures.start["rss"] + self._memory
        if self._rises.is_new(line["rss"], limit):
            what = f"{line['rss'] >> 20} MiB are more than {GROWTH} x {measures.start['rss'] >> 20} MiB and the named "
            self.scene.verdict.add("memory", f"{what}{self._memory >> 20} MiB", self.scene.record.between(now - 2, now))

    def end(self) -> Measures:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(JOIN_S)
        self._process.kill()
        self._process.wait()
        return self.measures


def warm_up(scene: Scene) -> None:
    """Let the server fill its pools of threads, so that the descriptors and threads of the start are those of a server
    in use: many calls of each kind at a time."""
    wire = scene.wire("warm-up")
    asked = {"text": "a", "sampling_params": {"max_new_tokens": 8, "regex": "[a-z]+", "stop_regex": "zz"}}
    with ThreadPoolExecutor(96) as threads:
        list(threads.map(lambda index: wire.call("GET", ("/state", "/server_info")[index % 2]), range(96)))
        list(threads.map(lambda _: wire.call("POST", "/generate", asked), range(96)))
    if scene.is_admin_allowed:
        restore(wire, scene)
    is_usable(wire, scene)
    end = time.monotonic() + SETTLE_S
    while scene.own is not None and time.monotonic() < end:  # until the connections of these calls are closed
        before = sample(scene.own.pid)["descriptors"]
        scene.over.wait(0.5)
        if before == sample(scene.own.pid)["descriptors"]:
            break


class Storm:
    """The attackers and clients of one scene."""

    def __init__(self, scene: Scene, attackers: Sequence[Attacker], answers: SeededAnswers | None) -> None:
        self.scene, self.attackers, self.answers = scene, attackers, answers
        self.num_steps: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.may_abort = any(attacker.needs_admin for attacker in attackers)

    def rage(self, seconds: float, ends: Callable[[], bool] = lambda: False) -> None:
        """Run everything for a while, or until the server is gone, or `ends()`."""
        threads = [
            threading.Thread(target=self._run, args=(one,), name=one.name, daemon=True) for one in self.attackers
        ]
        for thread in threads:
            thread.start()
        threads += self.answers.start(self.may_abort) if self.answers else []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ends() and not self.scene.is_gone:
            self.scene.over.wait(0.2)
        if self.scene.is_gone and not ends():
            self._on_crash()
        self.scene.over.set()
        end = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.scene.verdict.add("hang", f"{thread.name} has a request that does not end")

    def take(self, steps: Sequence[str]) -> None:
        """Take single steps, `attacker:step`, one after the other, and compare all answers after each."""
        by_name = {one.name: one for one in self.attackers}
        for step in steps:
            name, _, number = step.partition(":")
            by_name[name].take_step(int(number))
            if self.scene.is_gone:
                self._on_crash()
                break
            for index in range(len(self.answers.bodies) if self.answers else 0):
                self.answers.check(index, may_abort=False)
        self.scene.over.set()

    def _run(self, attacker: Attacker) -> None:
        try:
            num_steps = attacker.run()
        except Exception as error:  # noqa: BLE001 - a fault of the suite's own: the storm must not pass with fewer attackers
            if not self.scene.is_gone:
                self.scene.verdict.add("broken_attacker", f"{attacker.name}:{attacker.wire.step}: {error!r}")
        else:
            with self._lock:
                self.num_steps[attacker.name] += num_steps

    def _on_crash(self) -> None:
        now, own = time.monotonic(), self.scene.own
        assert own is not None
        under_way = self.scene.record.between(now - 3, now)
        self.scene.verdict.add("crash", f"the server ended: {own.ending()}", under_way)


def look_after(scene: Scene, answers: SeededAnswers | None, start: dict[str, int]) -> dict[str, int]:
    """Check a server after its storm: usable, idle with an exact ledger, equal answers, descriptors and threads back.
    Returns the last sample of its process."""
    scene.over.clear()
    wire = scene.wire("after")
    if scene.is_admin_allowed:
        restore(wire, scene)
    works = is_usable(wire, scene) and not scene.verdict.counts["hang"]  # or an attacker still acts
    if scene.has("/state"):
        _check_ledger(scene)
    for index in range(len(answers.bodies) if answers and works else 0):
        answers.check(index, may_abort=False)
    return _check_process(scene, start) if scene.own is not None and start else {}


def _check_ledger(scene: Scene) -> None:
    wire, end = scene.wire("after"), time.monotonic() + SETTLE_S
    state: Any = None
    while time.monotonic() < end:
        state = wire.call("GET", "/state").json()
        if isinstance(state, dict) and state["num_running"] + state["num_waiting"] == 0:
            break
        scene.over.wait(0.2)
    if not isinstance(state, dict) or "num_blocks" not in state:
        scene.verdict.add("ledger", f"no state: {state}")
        return
    kept = sum(state[f"num_{kind}_blocks"] for kind in ("free", "cached", "pinned"))
    if state["num_running"] or state["num_waiting"] or state["num_held_blocks"] or kept != state["num_blocks"]:
        shown = {key: value for key, value in state.items() if key.startswith("num_")}
        scene.verdict.add("ledger", f"not idle, or blocks are lost: {shown}")


def _check_process(scene: Scene, start: dict[str, int]) -> dict[str, int]:
    assert scene.own is not None
    end, now = time.monotonic() + SETTLE_S, sample(scene.own.pid)

    def is_back() -> bool:
        return (now["descriptors"] <= start["descriptors"] + SLACK_DESCRIPTORS
                and now["threads"] <= start["threads"] + SLACK_THREADS)  # fmt: skip

    while not is_back() and time.monotonic() < end:
        scene.over.wait(0.5)
        now = sample(scene.own.pid)
    if not is_back():
        scene.verdict.add("leak", f"descriptors and threads do not come back: {now}, at the start {start}")
    return now
