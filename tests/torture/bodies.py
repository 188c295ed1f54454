"""Hostile bodies: huge, deep, with many prompts or alternatives, of invalid text, and cases of the malformed tests."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack

from lockstep.tests.torture.attackers import Attacker, Scene
from lockstep.tests.torture.wire import request_bytes

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


def conversation(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Send many messages, each of which would fit."""
    length = draw.choice([1, 100, 2000])
    message = json.dumps({"role": "user", "content": "the fox " * length}).encode()
    return "/v1/chat/completions", repeated(b'{"model":"","max_tokens":1,"messages":[', message, b"]}", num_bytes)


def echoes(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Ask for a long prompt back with each sample."""
    body = {"model": "", "prompt": "the fox " * draw.choice([10, 100]), "echo": True, "n": draw.choice([1, 16, 256]),
            "max_tokens": 1, "stream": draw.random() < 0.5}  # fmt: skip
    return "/v1/completions", json.dumps(body).encode()


def many_settings(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Send prompts whose sampling parameters all differ."""
    num = min(draw.choice([200, 2600, 4097]), num_bytes // 16)
    params = [{"top_k": index + 1, "max_new_tokens": 1} for index in range(num)]
    return GENERATE, json.dumps({"input_ids": [[1]] * num, "sampling_params": params}).encode()


def long_stops(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Stream text with stops that begin alike, or with what a small model repeats."""
    piece = draw.choice(["a", " ", "the ", "é"])
    stops = [f"{index:02}"[: draw.choice([0, 2])] + piece * (2000 // len(piece.encode())) for index in range(32)]
    params = {"stop": stops, "max_new_tokens": 60, "ignore_eos": True}
    return GENERATE, json.dumps({"text": piece * 20, "stream": True, "sampling_params": params}).encode()


def whole_contexts(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Send a prompt near the end of usual contexts, for some samples."""
    num = draw.choice([500, 1000, 1023, 1024, 4000, 4095, 4096])
    params = {"n": draw.choice([1, 4, 64]), "max_new_tokens": draw.choice([1, 10**6])}
    return GENERATE, json.dumps({"input_ids": [1] * num, "sampling_params": params}).encode()


def streams(draw: random.Random, num_bytes: int) -> tuple[str, bytes]:
    """Stream samples with alternatives."""
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "top_logprobs_num": draw.choice([5, 20]), "stream": True,
            "sampling_params": {"n": draw.choice([1, 8]), "max_new_tokens": 60, "ignore_eos": True}}  # fmt: skip
    return GENERATE, json.dumps(body).encode()


COSTLY: tuple[Maker, ...] = (
    conversation, echoes, many_settings, long_stops, whole_contexts, streams, many_samples, many_prompts,
)  # fmt: skip
MAKERS: tuple[Maker, ...] = (
    many_prompts, many_choices, many_samples, many_alternatives, biases, numbers, long_text, deep, other_routes,
    conversation, echoes, many_settings, long_stops, whole_contexts, streams,
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


class Crowds(Attacker):
    """Send many equal requests at once whose small bodies cost much, and leave before they are answered."""

    name = "crowds"

    def step(self, draw: random.Random) -> None:
        make, num = draw.choice(COSTLY), draw.choice([64, 120, 250])
        path, body = make(draw, 20_000)
        data = request_bytes("POST", path, body, self.scene.address.api_key)
        sent = self.wire.record.open(self.name, self.wire.step, f"{num} of {make.__name__} at once", data)
        try:
            with ExitStack() as stack:
                for _ in range(num):
                    connection = socket.create_connection(self.scene.address.place, timeout=5)
                    stack.enter_context(connection).sendall(data)
                self.scene.over.wait(draw.choice([0.1, 1.0, 5.0]))
        except OSError as error:
            self.wire.record.close(sent, type(error).__name__)
            self.scene.over.wait(0.2)
        else:
            self.wire.record.close(sent, "left")


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
