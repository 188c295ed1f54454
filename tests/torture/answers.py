"""Seeded generations beside the attacks: every token and every log-probability is compared with answers made before."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.grammars.jump_forward import MAX_ROLLBACK_TOKENS
from lockstep.tests.torture.attackers import Scene
from lockstep.tests.torture.wire import Answer

NAME = "answers"
NUM_CLIENTS = 3
LONGEST_S = 120.0  # within which a request must be answered, refusals with 503 and repetitions included
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["the value", "ключ"]}, "items": {"type": "array",
          "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}}, "required": ["name", "items"],
          "additionalProperties": False}  # fmt: skip


@dataclass(frozen=True)
class Bits:
    """The tokens of an answer, their log-probabilities, and the reason of its end."""

    tokens: list[list[int]]  # of each sample
    logprobs: list[list[Any]]
    reasons: list[str]

    def begins(self, other: Bits, num_open: int = 0) -> bool:
        """Whether these samples are beginnings of the other's samples, bit for bit, but for their last `num_open`
        tokens."""
        lengths = [max(len(tokens) - num_open, 0) for tokens in self.tokens]
        return len(self.tokens) == len(other.tokens) and all(
            mine[:length] == theirs[:length] for field in ("tokens", "logprobs")
            for mine, theirs, length in zip(getattr(self, field), getattr(other, field), lengths, strict=True)
        )  # fmt: skip


def questions(is_lockstep: bool) -> list[dict[str, Any]]:
    """List the bodies: sampled, greedy, streamed, several samples, and grammars with jumps and without."""
    bodies: list[dict[str, Any]] = []
    for index in range(8):
        params = {"max_new_tokens": 6 + 9 * index, "ignore_eos": True, "temperature": float(index % 3 > 0),
                  "sampling_seed": 100 + index}  # fmt: skip
        prompt = [2 + (7 * index + at * at) % 900 for at in range(3 + 37 * index)]
        bodies.append({"input_ids": prompt, "sampling_params": params, "stream": index % 4 == 3})
    bodies[2]["sampling_params"]["n"] = 3
    bodies[5]["top_logprobs_num"] = 2
    for mode, grammar in itertools.product(
        ("text", "exact", "off"), ({"json_schema": json.dumps(SCHEMA)}, {"regex": "(the|and) [a-z]{2,9} = [0-9]{3}"})
    ):
        params = {"max_new_tokens": 40, "sampling_seed": 7, **grammar} | ({"jump_forward": mode} if is_lockstep else {})
        bodies.append({"text": "name: ", "sampling_params": params})
    return [body | {"return_logprob": True} for body in bodies]


def num_open_tokens(body: dict[str, Any]) -> int:
    """Return how many of the last tokens a jump may still have replaced where an answer is aborted."""
    return MAX_ROLLBACK_TOKENS if body["sampling_params"].get("jump_forward") == "text" else 0


def bits_of(answer: Answer, body: dict[str, Any]) -> Bits | None:
    """Read the final answer; None where a stream has ended before it."""
    said: Any
    if body.get("stream"):
        lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line]
        if len(lines) < 2 or lines[-1] != b"[DONE]":
            return None
        said = json.loads(lines[-2])
    else:
        said = answer.json()
    samples = said if isinstance(said, list) else [said]
    if not all(isinstance(one, dict) and "meta_info" in one for one in samples):
        return None
    metas = [one["meta_info"] for one in samples]
    logprobs = [meta["output_token_logprobs"] for meta in metas]
    tokens = [[triple[1] for triple in triples] for triples in logprobs]
    return Bits(tokens, logprobs, [(meta["finish_reason"] or {}).get("type") for meta in metas])


class SeededAnswers:
    """Clients that repeat seeded requests during the storm."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.wire = scene, scene.wire(NAME)
        self.bodies = questions(scene.is_lockstep)
        self.expected: list[Bits | None] = []
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Ask each question twice, alone. One that is answered differently is left out, and counted. Raises
        RuntimeError where a question is refused."""
        for body in self.bodies:
            one, other = (self._bits(body) for _ in range(2))
            self.expected.append(one if one == other else None)
        self.counts["not deterministic"] = self.expected.count(None)

    def _bits(self, body: dict[str, Any]) -> Bits:
        answer = self.wire.call("POST", "/generate", body, name="before the storm")
        bits = bits_of(answer, body) if answer.status == 200 else None
        if bits is None:
            raise RuntimeError(f"{json.dumps(body)[:300]} alone: {answer.status} {answer.body[:300]!r}")
        return bits

    def start(self, may_abort: bool) -> list[threading.Thread]:
        """Start the clients; they end with the storm. may_abort: an administrator may end requests."""
        threads = [
            threading.Thread(target=self._repeat, args=(index, may_abort), daemon=True) for index in range(NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _repeat(self, client: int, may_abort: bool) -> None:
        draw = random.Random(f"{self.scene.seed}/{NAME}/{client}")
        while not self.scene.over.is_set():
            self.check(draw.randrange(len(self.bodies)), may_abort)

    def check(self, index: int, may_abort: bool) -> None:
        """Ask one question, again where the server says that it is full, and compare the answer."""
        body, expected = self.bodies[index], self.expected[index]
        began = time.monotonic()
        while True:
            answer = self.wire.call("POST", "/generate", body, name=f"question {index}", patience_s=LONGEST_S)
            bits = bits_of(answer, body) if answer.status == 200 else None
            waited_s = time.monotonic() - began
            if bits is not None or self.scene.over.is_set() or waited_s > LONGEST_S:
                break
            if answer.status != 503 and not self.scene.verdict.is_excused(began, time.monotonic()):
                break
            self._count("asked again")
            self.scene.over.wait(0.3)
        if bits is None:
            if not self.scene.is_over() and not (self.scene.over.is_set() and answer.status == 503):
                self._count("lost")
                under_way = self.scene.record.between(began, time.monotonic())
                self.wire.tell("lost", f"question {index} after {waited_s:.1f} s", answer, under_way)
        elif expected is None or bits == expected:
            self._count("equal" if expected is not None else "not compared")
        elif (
            "abort" in bits.reasons
            and bits.begins(expected, num_open_tokens(body))
            and (may_abort or self.scene.verdict.is_excused(began, time.monotonic()))
        ):
            self._count("aborted by the administrator, equal so far")
        else:
            self._wrong("altered", index, began, f"{bits.reasons} {bits.tokens} is not {expected.tokens}")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _wrong(self, kind: str, index: int, began: float, what: str) -> None:
        self._count(kind)
        under_way = self.scene.record.between(began, time.monotonic())
        self.scene.verdict.add(kind, f"question {index}: {what}", under_way)
