"""Hostile bodies: huge, deep, with many prompts or alternatives, of invalid text, and cases of the malformed tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from lockstep.tests.torture.attackers import Attacker, Scene

LARGEST = 32 << 20  # bytes: the default limit of a body
GENERATE = "/generate"
Maker = Callable[[random.Random, int], tuple[str, bytes]]  # of a size in bytes: the path and the body


def repeated(head: bytes, piece: bytes, tail: bytes, num_bytes: int) -> bytes:
    """Build a body of about `num_bytes` that repeats one piece, separated by commas."""
    return head + b",".join([piece] * max(1, num_bytes // (len(piece) + 1))) + tail


def many_prompts(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    field, piece = draw.choice([(b"input_ids", b"[1]"), (b"text", b'"a"'), (b"input_ids", b"[]")])
    tail = b'],"sampling_params":{"max_new_tokens":1}}'
    return GENERATE, repeated(b'{"' + field + b'":[', piece, tail, num_bytes)


def many_choices(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    body = {"model": "", "prompt": ["a"] * draw.choice([1, 100, num_bytes // 100]), "n": draw.choice([1, 128, 10**9]),
            "best_of": 1, "max_tokens": 1}  # fmt: skip
    return "/v1/completions", json.dumps(body).encode()


def many_samples(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Ask for samples of a long prompt: each may keep a copy of it."""
    params = {"n": draw.choice([16, 256, 4096, 4097, 10**9]), "max_new_tokens": 1}
    prompt = [1] * draw.choice([10, 300, num_bytes // 1000])
    return GENERATE, json.dumps({"input_ids": prompt, "sampling_params": params}).encode()


def many_alternatives(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Ask for many alternatives at many positions."""
    count = draw.choice([5, 128, 129, 1000, 10**5, 10**9, 2**63])
    if draw.random() < 0.3:
        field = draw.choice([{"logprobs": count}, {"logprobs": True, "top_logprobs": count}])
        body = {"model": "", "prompt": "a" * 300, "max_tokens": 4, "echo": True}
        return "/v1/completions", json.dumps(body | field).encode()
    prompt = [i % 100 for i in range(draw.choice([3, 300]))]
    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 4},
    }
    ids = list(range(100)) * max(1, num_bytes // 500)
    return GENERATE, json.dumps(body | draw.choice([{"top_logprobs_num": count}, {"token_ids_logprob": ids}])).encode()


def biases(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    entries = b",".join(b'"%d":1' % (key % 10**9) for key in range(max(1, num_bytes // 12)))
    if draw.random() < 0.5:
        return "/v1/completions", b'{"model":"","prompt":"a","max_tokens":1,"logit_bias":{' + entries + b"}}"
    return GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":1,"logit_bias":{' + entries + b"}}}"


def numbers(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Send a body of numbers, with a surrogate or without."""
    piece = draw.choice([b"1", b"0.1", b"1e5", b'"\\ud800"', b"null", b"{}", b"1e999", b"-0.0"])
    start = draw.choice([b'{"a":"\\ud800","input_ids":[', b'{"input_ids":[', b'{"text":"a","x":['])
    return draw.choice([GENERATE, "/v1/chat/completions"]), repeated(start, piece, b"]}", num_bytes)


def long_text(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    piece = draw.choice([b"a", b"a ", b"the ", "é".encode(), b"\\n", b"<|im_start|>"])
    text = piece * (num_bytes // len(piece))
    if draw.random() < 0.3:
        return (
            "/v1/chat/completions",
            b'{"model":"","messages":[{"role":"user","content":"' + text + b'"}],"max_tokens":1}',
        )
    field = draw.choice([b'"text":"%s"', b'"text":"a","rid":"%s"', b'"text":"a","extra_key":"%s"',
                         b'"text":"a","sampling_params":{"max_new_tokens":1,"stop":"%s"}', b'"%s":1'])  # fmt: skip
    return GENERATE, b"{" + field.replace(b"%s", text) + b"}"


def deep(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = min(num_bytes // 6, draw.choice([60, 900, 2000, 10**6]))
    return GENERATE, b'{"text":"a","x":' + opening * depth + b"1" + closing * depth + b"}"


def other_routes(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Send the body to a path that needs none, or not this key."""
    path = draw.choice(
        ["/state", "/model_info", "/pause_generation", "/v1/models", "/none", "/flush_cache", "/v1/chat"]
    )
    return path, repeated(b'{"op_id":"x","a":[', b"[1]", b"]}", num_bytes)


MAKERS: tuple[Maker, ...] = (
    many_prompts, many_choices, many_samples, many_alternatives, biases, numbers, long_text, deep, other_routes,
)  # fmt: skip


class Bodies(Attacker):
    """Send bodies that cost a server much more than they cost their sender."""

    name = "bodies"
    num_lanes = 2

    def step(self, draw: random.Random) -> None:
        make = draw.choice(MAKERS)
        num_bytes = draw.choice([20_000, 1 << 20, 4 << 20, LARGEST - 100_000, LARGEST + 1])
        path, body = make(draw, num_bytes)
        self.wire.call("POST", path, body, name=f"{make.__name__} {len(body) >> 10} KiB to {path}")


class Malformed(Attacker):
    """Send malformed requests of every kind that the server's own tests know."""

    name = "malformed"

    def __init__(self, scene: Scene, lane: int = 0) -> None:
        super().__init__(scene, lane)
        from lockstep.tests.integration.http.edge import test_malformed as malformed  # takes seconds

        draw, described = random.Random(f"{scene.seed}/{self.name}"), scene.description
        self._cases = malformed.of_generation(described, draw) + malformed.of_wrong_types(
            described, scene.address.api_key
        )
        self._cases += malformed.of_no_object(described, scene.address.api_key) + malformed.of_headers(draw)
        self._cases += malformed.of_queries(described, draw) + malformed.of_bytes(draw, 150)
        self._cases += malformed.of_nesting(scene.address.api_key)
        draw.shuffle(self._cases)

    def step(self, draw: random.Random) -> None:
        case = self._cases[draw.randrange(len(self._cases))]
        data, key = case.data, self.scene.address.api_key.encode()
        if key and not case.ends and b"\r\nAuthorization:" not in data:
            data = data.replace(b"\r\n", b"\r\nAuthorization: Bearer " + key + b"\r\n", 1)
        self.wire.send(case.name, data, ends=case.ends or case.name.startswith("header"))
