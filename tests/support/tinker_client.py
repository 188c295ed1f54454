"""A client of the Tinker API without its SDK: what the SDK sends, by httpx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import httpx
import numpy as np

from lockstep.integration.tinker.wire.protobuf import (
    double,
    entry,
    fields,
    numbers,
    octets,
    put_bytes,
    put_doubles_by_name,
    put_numbers,
    put_text,
    put_varint,
    text,
    varint,
)

PROTO = "application/x-protobuf"


class Failed(Exception):
    """A request whose answer is an error. Its category is the API's."""

    def __init__(self, text: str, category: str) -> None:
        super().__init__(text)
        self.category = category


def datum(tokens: Sequence[int], **inputs: Sequence[float] | np.ndarray) -> bytes:
    """Encode a Datum: model_input, and loss_fn_inputs by name; integers for `target_tokens`, else float32."""
    chunk = put_bytes(1, put_bytes(1, np.asarray(tokens, "<i4").tobytes()))
    parts = [put_bytes(1, chunk)]
    for name, values in inputs.items():
        kind = "<i8" if name == "target_tokens" else "<f4"
        parts.append(put_bytes(2, put_text(1, name) + put_bytes(2, tensor(np.asarray(values, kind)))))
    return b"".join(parts)


def tensor(array: np.ndarray) -> bytes:
    """Encode a dense Tensor."""
    kind = 2 if array.dtype.kind == "i" else 1
    return put_bytes(1, array.tobytes()) + put_varint(3, kind) + put_numbers(4, array.shape)


def pass_body(
    model_id: str, seq_id: int, data: Sequence[bytes], loss_fn: str, config: Mapping[str, float], forward_only: bool
) -> bytes:
    """Encode a ForwardBackwardRequest."""
    return (
        put_text(1, model_id) + put_varint(2, seq_id) + b"".join(put_bytes(3, one) for one in data)
        + put_text(4, loss_fn) + put_doubles_by_name(5, config) + put_varint(6, forward_only)
    )  # fmt: skip


def read_pass(body: bytes) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """Decode a ForwardBackwardOutput: float32 arrays by name of each datum, and the metrics."""
    outputs: list[dict[str, np.ndarray]] = []
    metrics = {}
    for number, value in fields(body):
        if number == 3:
            key, its = entry(value)
            metrics[key] = double(its)
        elif number == 2:
            arrays = dict(_batched(part) for inner, part in fields(octets(value)) if inner == 2)
            outputs += [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
    return outputs, metrics


def _batched(value: memoryview) -> tuple[str, list[np.ndarray]]:
    name, record = entry(value)
    parts = {number: its for number, its in fields(octets(record)) if number != 4}
    shape = [one for number, its in fields(octets(record)) if number == 4 for one in numbers(its)]
    ends = np.frombuffer(parts[2], "<i8")
    return name, [np.frombuffer(parts[1][begin:end], "<f4").reshape(-1, *shape) for begin, end in pairwise(ends)]


def read_samples(body: bytes) -> dict:
    """Decode a SampleResponse: sequences (tokens, logprobs, has_stopped), and prompt_logprobs."""
    found: dict = {"sequences": [], "prompt_logprobs": None, "cached": 0}
    for number, value in fields(body):
        if number == 1:
            parts = dict(fields(octets(value)))
            found["sequences"].append(
                {
                    "tokens": np.frombuffer(parts[2], "<i4").tolist(),
                    "logprobs": np.frombuffer(parts[3], "<f4").tolist(),
                    "has_stopped": parts[1] == 0,
                }
            )
        elif number == 2:
            found["prompt_logprobs"] = np.frombuffer(octets(value), "<f4").tolist()
        elif number == 4:
            found["cached"] = varint(value)
    return found


class Client:
    """One session."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"X-API-Key": key}
        self.http = httpx.Client(base_url=f"{url}/api/v1", timeout=60, headers=headers)
        [model] = self.get("get_server_capabilities")["supported_models"]
        self.base = model["model_name"]
        self.session = self.post("create_session", tags=[], sdk_version="test")["session_id"]
        self._num_samplers = self._num_models = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.post(f"sessions/{self.session}/finish", json={"reason": {"type": "success"}})
        self.http.close()

    def get(self, path: str) -> dict:
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str, /, **body: object) -> dict:
        return self.http.post(path, json=body).raise_for_status().json()

    def answer(self, request_id: str, accept: str = PROTO) -> httpx.Response:
        """Wait for the answer to a request. Raises Failed."""
        while True:
            headers = {"Accept": accept}
            answer = self.http.post("retrieve_future", json={"request_id": request_id}, headers=headers)
            if answer.status_code == 408:
                continue
            answer.raise_for_status()
            if not answer.headers["content-type"].startswith(PROTO) and "error" in answer.json():
                raise Failed(answer.json()["error"], answer.json()["category"])
            return answer

    def model(self, rank: int = 4, **lora: object) -> Model:
        """Create a model."""
        number, self._num_models = self._num_models, self._num_models + 1
        made = self.post(
            "create_model", session_id=self.session, model_seq_id=number, base_model=self.base,
            lora_config={"rank": rank, **lora},
        )  # fmt: skip
        return Model(self, self.answer(made["request_id"]).json()["model_id"])

    def model_from(self, path: str, *, optimizer: bool) -> Model:
        """Create a model from a checkpoint."""
        number, self._num_models = self._num_models, self._num_models + 1
        made = self.post(
            "load_weights", session_id=self.session, model_seq_id=number, path=path, optimizer=optimizer
        )  # fmt: skip
        return Model(self, self.answer(made["request_id"]).json()["model_id"])

    def next_sampler(self) -> int:
        self._num_samplers += 1
        return self._num_samplers

    def sampler(self, path: str | None = None) -> Sampler:
        """Create a sampler of a checkpoint, or of the base."""
        named = {"base_model": self.base} if path is None else {"model_path": path}
        made = self.post(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=self.next_sampler(), **named
        )  # fmt: skip
        return Sampler(self, made["sampling_session_id"])


class Model:
    """A model in training."""

    def __init__(self, client: Client, model_id: str) -> None:
        self.client, self.model_id, self.seq = client, model_id, 0

    def send_pass(
        self, data: Sequence[bytes], loss_fn: str = "cross_entropy", *, forward_only: bool = False,
        seq: int | None = None, **config: float,
    ) -> httpx.Response:  # fmt: skip
        if seq is None:
            self.seq += 1
        body = pass_body(self.model_id, seq or self.seq, data, loss_fn, config, forward_only)
        return self.client.http.post("forward_backward", content=body, headers={"Content-Type": PROTO})

    def run(self, data: Sequence[bytes], loss_fn: str = "cross_entropy", **options):
        """Run data forward and backward. Returns outputs and metrics."""
        sent = self.send_pass(data, loss_fn, **options).raise_for_status()
        return read_pass(self.client.answer(sent.json()["request_id"]).content)

    def call(self, path: str, /, **body: object) -> dict:
        """Make another call of the model, and wait for its answer."""
        self.seq += 1
        sent = self.client.post(path, model_id=self.model_id, seq_id=self.seq, **body)
        return self.client.answer(sent["request_id"], "application/json").json()

    def step(self, **params: float) -> dict:
        return self.call("optim_step", adam_params=params)["metrics"]

    def train(self, data: Sequence[bytes], loss_fn: str = "cross_entropy", learning_rate: float = 1e-2):
        """Run data forward and backward, and step. Returns the log-probabilities of each datum."""
        outputs, _ = self.run(data, loss_fn)
        self.step(learning_rate=learning_rate)
        return [one["logprobs"].tolist() for one in outputs]

    def sampler(self) -> Sampler:
        """Save the weights for a sampler of this session."""
        number = self.client.next_sampler()
        saved = self.call("save_weights_for_sampler", sampling_session_seq_id=number)
        return Sampler(self.client, saved["sampling_session_id"])


class Sampler:
    """A sampler."""

    def __init__(self, client: Client, sampler_id: str) -> None:
        self.client, self.sampler_id, self.seq = client, sampler_id, -1

    def send(self, prompt: Sequence[int], num_samples: int = 1, *, seq: int | None = None, extra=(), **params: object):
        if seq is None:
            self.seq += 1
        body = {
            "sampling_session_id": self.sampler_id, "seq_id": self.seq if seq is None else seq,
            "num_samples": num_samples, "sampling_params": params, "type": "sample",
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, **dict(extra),
        }  # fmt: skip
        return self.client.http.post("asample", json=body)

    def draw(self, prompt: Sequence[int], num_samples: int = 1, **options: object) -> dict:
        """Draw samples, and wait for them. The answer has the digest of the weights, too."""
        sent = self.send(prompt, num_samples, **options).raise_for_status().json()
        answer = self.client.answer(sent["request_id"])
        return read_samples(answer.content) | {"digest": answer.headers["x-lockstep-weight-digest"]}


def sampled_datum(prompt: Sequence[int], sequence: Mapping, advantage: float = 1.0) -> bytes:
    """Encode a sample for a loss of policies."""
    tokens, before = sequence["tokens"], [0.0] * (len(prompt) - 1)
    return datum(
        [*prompt, *tokens[:-1]], target_tokens=[*prompt[1:], *tokens],
        logprobs=[*before, *sequence["logprobs"]], advantages=[*before, *[advantage] * len(tokens)],
    )  # fmt: skip


__all__ = [
    "Client",
    "Failed",
    "Model",
    "Sampler",
    "datum",
    "read_pass",
    "read_samples",
    "sampled_datum",
    "tensor",
    "text",
]
