"""Tests of malformed requests beside clients that generate: no server error, no lost or altered answer, no leak."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.auth import Level, level_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

KEY = "the-admin-key"
NUM_CLIENTS = 16
NUM_SENDERS = 6
PATIENCE_S = 60.0
LIMIT = 1 << 20  # bytes of a body
SOUND = {"/generate": {"text": "1 + 2"}, "/v1/completions": {"model": "", "prompt": "1 + 2"},
         "/v1/chat/completions": {"model": "", "messages": [{"role": "user", "content": "1 + 2"}]}}  # fmt: skip
# Paths in a body that a server may create or write.
FOLDERS = ("output_dir", "local_checkpoint_dir", "source_dir", "model_path")


@dataclass(frozen=True)
class Case:
    """The bytes of one request, and the expected kind of answer."""

    name: str
    data: bytes
    is_wrong: bool = False  # the answer must be a 4xx
    ends: bool = False  # the client sends nothing after it


def request(
    name: str, method: str, target: str, body: bytes = b"", key: str | None = None, is_wrong: bool = False,
    headers: Sequence[bytes] = (),
) -> Case:  # fmt: skip
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"Connection: close", *headers]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    if key is not None:
        lines.append(b"Authorization: Bearer " + key.encode())
    return Case(f"{name}: {method} {target[:60]}", b"\r\n".join(lines) + b"\r\n\r\n" + body, is_wrong)


# -- cases ------------------------------------------------------------------------------------------------------------

NO_OBJECTS = [
    b"{", b"[1]", b"null", b'"text"', b"7", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": "\xff\xfe"}',
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": ' * 20_000, b"[" * 100_000 + b"]" * 100_000, b'{"\\ud800": 1}',
    b'{"a": [{"b": "\\udfff"}]}', b"\x00\x01\x02\x03", b"\xef\xbb\xbf{}", b"{}{}", b"{'a': 1}", b'{"a": 1,}',
    b"x" * (LIMIT + 1),
]  # fmt: skip
WRONG_VALUES = [
    {}, {"a": [1]}, [], [[]], [None], [[[1]]], "", "x", "\U0001f600" * 50, -1, 0, 2**31, 2**63, -(2**63) - 1, 10**300,
    0.5, -0.0, 1e308, 5e-324, True, "1e999", "nan", ["a"], [1, "a"], [-1], [2**70], {"n": {"n": {}}},
]  # fmt: skip
PARAMETERS = [
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
    "ebnf", "ignore_eos", "skip_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed",
    "custom_params", "kept_special_tokens", "no_such_thing",
]  # fmt: skip


def operations_of(description: dict) -> list[tuple[str, str, dict]]:
    """List (method, path, properties of the body) of every operation in the server's OpenAPI document."""
    found = []
    for path, methods in description["paths"].items():
        for method, what in methods.items():
            content = what.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            found.append((method.upper(), path, schema.get("properties", {})))
    return found


def of_no_object(description: dict, key: str) -> list[Case]:
    """Make bodies that are not JSON objects, for every operation with a body."""
    reads = [(m, path) for m, path, properties in operations_of(description) if properties]
    return [
        request("no object", method, path, body, key, is_wrong=True)
        for method, path in reads for body in NO_OBJECTS if len(body) <= LIMIT or path in SOUND
    ]  # fmt: skip


def of_wrong_types(description: dict, key: str) -> list[Case]:
    """Make bodies with one field of a type that even lenient reading refuses."""
    cases = []
    for method, path, properties in operations_of(description):
        for name, schema in properties.items():
            types = {one.get("type") for one in schema.get("anyOf", [schema])}
            if None in types:
                continue
            wrong = [value for kind, value in (("object", {"x": 1}), ("array", [{}, []])) if kind not in types]
            for value in [*wrong, {"number": -1, "integer": 10**400}.get(next(iter(types - {"null"})))]:
                if value is None or (isinstance(value, int) and (types & {"string"} or name == "seed")):
                    continue
                body = json.dumps(SOUND.get(path, {}) | {name: value}).encode()
                cases.append(request(f"type of {name}", method, path, body, key, is_wrong=isinstance(value, dict)))
    return cases


def of_generation(description: dict, generator: random.Random) -> list[Case]:
    """Make generation requests with one or two odd fields; some of them are valid nevertheless."""
    fields = {path: sorted(properties) for _, path, properties in operations_of(description) if path in SOUND}
    cases = []
    for path, sound in SOUND.items():
        names = fields[path] or sorted(sound)
        for name in [*names, "image_data", "lora_path", "logprobs", "max_tokens", "seed", "echo"]:
            for value in WRONG_VALUES:
                short = {"sampling_params": {"max_new_tokens": 3}} if path == "/generate" else {"max_tokens": 3}
                body = sound | short | {name: value, "stream": generator.random() < 0.2}
                if name == "input_ids":
                    body.pop("text", None)
                cases.append(request(f"field {name}", "POST", path, json.dumps(body).encode()))
    for name in PARAMETERS:
        for value in WRONG_VALUES:
            params = {"max_new_tokens": 3, generator.choice(PARAMETERS): generator.choice(WRONG_VALUES), name: value}
            body = {"text": "1 + 2", "sampling_params": params, "stream": generator.random() < 0.2}
            cases.append(request(f"parameter {name}", "POST", "/generate", json.dumps(body).encode()))
    return generator.sample(cases, len(cases))


def of_queries(description: dict, generator: random.Random) -> list[Case]:
    """Make paths and queries that are not valid text, without a key."""
    texts = ["%ff%fe", "%00", "%ed%a0%80", quote("\U0001f600"), "a" * 5000, "%", "..%2f..%2fetc", "1e999", "-1", "nan"]
    cases = []
    for method, path, _ in operations_of(description):
        text = generator.choice(texts)
        target = path.replace("{model}", text).replace("{verb}", text)
        cases.append(request("query", method, f"{target}?timeout={text}&depth={text}&name={text}&{text}"))
        cases.append(request("method", generator.choice(["BREW", "PATCH", "DELETE", "TRACE", "HEAD"]), path))
    cases += [request("path", "GET", f"/{text}", is_wrong=True) for text in texts]
    return cases


def of_nesting(key: str) -> list[Case]:
    """Make values nested to the limit of the JSON parser and a little deeper, in fields that accept any value."""
    places = [
        ("/generate", '{{"text": "1", "sampling_params": {{"max_new_tokens": 2, "custom_params": {{"a": {}}}}}}}'),
        ("/generate", '{{"text": "1", "sampling_params": {{"max_new_tokens": 2, "logit_bias": {}}}}}'),
        ("/generate", '{{"input_ids": {}}}'), ("/generate", '{{"text": "1", "image_data": {}}}'),
        ("/v1/chat/completions", '{{"model": "", "messages": {}, "max_tokens": 2}}'),
        ("/v1/chat/completions",
         '{{"model": "", "max_tokens": 2, "messages": [{{"role": "user", "content": "1", "x": {}}}]}}'),
        ("/v1/completions", '{{"model": "", "prompt": {}, "max_tokens": 2}}'),
        ("/v1/completions", '{{"model": "", "prompt": "1", "max_tokens": 2, "response_format": {}}}'),
        ("/abort_request", '{{"rid": "none", "finished_reason": {}, "op_id": "DEPTH"}}'),
        ("/update_weights_from_tensor", '{{"descriptions": [{{"a": {}}}], "op_id": "DEPTH"}}'),
        ("/lockstep/update_weights_from_tensor", '{{"descriptions": [{{"a": {}}}], "op_id": "l-DEPTH"}}'),
        ("/lockstep/abort_request", '{{"rid": "none", "finished_reason": {}, "op_id": "l-DEPTH"}}'),
        ("/start_profile", '{{"num_steps": {}}}'),
    ]  # fmt: skip
    return [
        request(f"nested {depth}", "POST", path, body.format(opening * depth + inner + closing * depth)
                .replace("DEPTH", f"{depth}{len(opening)}").encode(), key)
        for depth in (60, 180, 300, 500, 700, 800, 850, 900, 930, 960, 990, 1100)
        for opening, inner, closing in (("[", "", "]"), ('{"a":', "1", "}"))
        for path, body in places
    ]  # fmt: skip


def of_headers(generator: random.Random) -> list[Case]:
    """Make requests with invalid headers."""
    junk = [b"", b"\xff\xfe", b"a" * 4000, b"1e999", b"-1", b"'; --", b"\x01", b"Bearer", b"Bearer \xff", b"Basic \xe9"]
    names = [b"Authorization", b"Accept", b"Content-Encoding", b"Origin", b"X-Forwarded-For", b"Range", b"Cookie",
             b"Expect", b"Upgrade", b"Transfer-Encoding", b"Accept-Encoding", b"If-None-Match", b"Host"]  # fmt: skip
    paths = ["/generate", "/metrics", "/state", "/pause_generation", "/v1/models"]
    return [
        request(f"header {name!r}", "GET" if path in ("/metrics", "/state", "/v1/models") else "POST", path, b"{",
                headers=[name + b": " + value])
        for name in names for value in junk for path in generator.sample(paths, 2)
    ]  # fmt: skip


def of_bytes(generator: random.Random, count: int) -> list[Case]:
    """Make bytes that are not HTTP, or an incomplete request."""
    whole = request("cut", "POST", "/generate", json.dumps(SOUND["/generate"]).encode()).data
    cases = []
    for index in range(count):
        kind = index % 6
        if kind == 0:
            data = generator.randbytes(generator.randrange(1, 3000))
        elif kind == 1:
            data = whole[: generator.randrange(1, len(whole))]
        elif kind == 2:
            data = b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + generator.randbytes(50) + b"\r\n\r\n"
        elif kind == 3:
            length = generator.choice([-1, 9, 10**30])
            data = b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n{}" % length
        elif kind == 4:
            data = b"POST /generate HTTP/1.1\r\nHost: 1.1.1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n{}"
        else:
            at = generator.randrange(len(whole))
            data = whole[:at] + generator.randbytes(3) + whole[at + 3 :]
        cases.append(Case(f"bytes {kind}", data, ends=True))
    return cases


def of_schemathesis(description: dict, keys: dict[Level, tuple[str | None, int]], folder: str) -> list[Case]:
    """Make valid and invalid requests from the OpenAPI document. keys: by level the key and the number of cases."""
    import schemathesis  # takes two seconds

    cases = []
    for result in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = result.ok()
        if operation.path == "/lockstep/attend":  # its answer lasts as long as its connection
            continue
        key, count = keys.get(level_of(operation.path), (None, 0))
        for mode in schemathesis.GenerationMode:
            drawn = _draw(operation.as_strategy(generation_mode=mode), count)
            cases += [_as_request(case, key, f"schemathesis {mode.value}", folder) for case in drawn]
    return cases


def _draw(strategy: st.SearchStrategy, count: int) -> list:
    """Return the first values of a strategy; none for an operation without invalid values."""
    drawn = []

    @seed(11)
    @settings(
        max_examples=max(count, 1), database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(value: object) -> None:
        drawn.append(value)

    with suppress(Unsatisfiable):
        collect()
    return drawn[:count]


def _as_request(case, key: str | None, name: str, folder: str) -> Case:
    sent = case.as_transport_kwargs(base_url="http://x")
    body = sent.get("data", b"")
    if "json" in sent:
        values = sent["json"]
        if isinstance(values, dict):
            values = values | {name: folder + quote(values[name], safe="")[:40]
                               for name in FOLDERS if isinstance(values.get(name), str)}  # fmt: skip
        body = json.dumps(values).encode()
    body = body if isinstance(body, bytes) else str(body).encode()
    query = f"?{urlencode(sent['params'], doseq=True, errors='replace')}" if sent.get("params") else ""
    return request(name, case.method, sent["url"].removeprefix("http://x").replace(" ", "%20") + query, body, key)


# -- sending ----------------------------------------------------------------------------------------------------------


class Malice:
    """Send cases from several threads and count the answers."""

    def __init__(self, server: BackgroundServer) -> None:
        self._address = ("127.0.0.1", server.port)
        self._lock = threading.Lock()
        self.statuses: Counter[int | str] = Counter()
        self.faults: list[str] = []

    def send(self, cases: Sequence[Case], *, is_allowed_503: bool = False) -> None:
        self._is_allowed_503 = is_allowed_503
        with ThreadPoolExecutor(NUM_SENDERS) as threads:
            for _ in threads.map(self._send, cases):
                pass

    def _send(self, case: Case) -> None:
        answer = self._exchange(case)
        status: int | str = int(answer[9:12]) if answer[:9] == b"HTTP/1.1 " else "closed" if not answer else "?"
        fault = None
        if status == "?" or (status == "closed" and not case.ends):
            fault = f"no answer: {answer[:80]!r}"
        elif isinstance(status, int) and status >= 500 and not (status == 503 and self._is_allowed_503):
            fault = answer[-400:].decode(errors="replace")
        elif case.is_wrong and not 400 <= int(status) < 500:
            fault = f"was taken: {answer[-200:]!r}"
        with self._lock:
            self.statuses[status] += 1
            if fault is not None:
                self.faults.append(f"{case.name} -> {status}: {fault} <- {case.data[-200:]!r}")

    def _exchange(self, case: Case) -> bytes:
        """Return the bytes of the answer until the server closes, or as many as the client needs."""
        answer = b""
        with socket.create_connection(self._address, timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(case.data)
                if case.ends:
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    answer += part
            except ConnectionError:  # the server had answered without reading the whole body
                pass
        return answer


# -- clients that generate --------------------------------------------------------------------------------------------


def ask(index: int) -> dict[str, object]:
    """Make the fields of a client's request: seeded sampling or greedy, streamed or not."""
    params = {"max_new_tokens": 12 + index, "ignore_eos": True, "temperature": index % 2, "sampling_seed": 100 + index}
    prompt = [(7 * index + at * at) % 120 for at in range(5 + 3 * index)]
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": index % 4 > 1}


def generate(client: httpx.Client, body: dict[str, object]) -> tuple[object, ...]:
    """Return the final answer to a request: tokens, their log-probabilities, and the finish reason."""
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        said = json.loads(events[-2])
    else:
        said = answer.json()
    meta = said["meta_info"]
    return said["output_ids"], meta["output_token_logprobs"], meta["finish_reason"], meta["weight_version"]


@contextmanager
def generating(url: str, solo: Sequence[tuple[object, ...]]) -> Iterator[Counter[str]]:
    """Run clients that repeat one request each. Counts the answers equal to those of a solo run, and the others."""
    over, counts, lock = threading.Event(), Counter[str](), threading.Lock()

    def client(index: int) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as connection:
            while not over.is_set():
                is_same = generate(connection, ask(index)) == solo[index]
                with lock:
                    counts["same" if is_same else f"altered {index}"] += 1

    with ThreadPoolExecutor(len(solo)) as threads:
        clients = [threads.submit(client, index) for index in range(len(solo))]
        try:
            yield counts
        finally:
            over.set()
        for one in clients:
            one.result()


@pytest.fixture
def served(make_model, tmp_path, monkeypatch) -> Iterator[tuple[RolloutService, BackgroundServer]]:
    """Yield a server with an admin key, over an engine with weights of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path))  # some of what is sent begins a profile
    make_model("qwen3", vocab_size=128).save_pretrained(tmp_path / "model")
    engine = Engine(
        tmp_path / "model", EngineConfig(kv_cache="320 blocks", max_num_seqs=24), tokenizer=build_tokenizer()
    )
    service = RolloutService(engine, ServiceConfig(weight_timeout_s=2))
    config = HttpConfig(port=0, admin_api_key=KEY, max_body_bytes=LIMIT)
    with serve_in_background(service, config) as server:
        yield service, server
    service.close()


def solo_answers(url: str, count: int) -> list[tuple[object, ...]]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        return [generate(client, ask(index)) for index in range(count)]


def settle(service: RolloutService, until) -> None:
    """Wait until no sequence runs, and check the ledger of blocks."""
    state = service.engine.state
    until(lambda: state()["num_running"] + state()["num_waiting"] == 0)
    service.engine.check_integrity()
    blocks = state()
    assert blocks["num_held_blocks"] == 0
    assert blocks["num_free_blocks"] + blocks["num_cached_blocks"] == blocks["num_blocks"]


def test_malformed_requests_harm_nobody(served, until, restore_threads):
    service, server = served
    generator, description = random.Random(5), server.app.openapi()
    cases = of_generation(description, generator)[:50]
    cases += generator.sample(of_wrong_types(description, KEY), 40)
    cases += generator.sample(of_no_object(description, KEY), 40)
    cases += generator.sample(of_queries(description, generator), 20) + of_bytes(generator, 12)
    cases += generator.sample(of_nesting(KEY), 20)
    solo, malice = solo_answers(server.url, 4), Malice(server)
    with generating(server.url, solo) as counts:
        malice.send(cases)
    assert not malice.faults, "\n".join(malice.faults)
    assert set(counts) == {"same"} and sum(malice.statuses.values()) == len(cases) > 150
    settle(service, until)
    assert solo_answers(server.url, 4) == solo


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_cases", [pytest.param(2000, id="a-sample"), pytest.param(None, id="all", marks=pytest.mark.exhaustive)]
)
def test_two_thousand_malformed_requests_while_sixteen_clients_generate(
    served, until, restore_threads, tmp_path, num_cases
):
    service, server = served
    generator, description = random.Random(6), server.app.openapi()
    keys = {Level.OPEN: (None, 8), Level.NORMAL: (None, 30), Level.ADMIN: (None, 2)}
    cases = of_schemathesis(description, keys, f"{tmp_path}/none-")
    cases += of_generation(description, generator)[:600] + of_wrong_types(description, KEY)
    cases += generator.sample(of_no_object(description, KEY), 400) + of_queries(description, generator)
    cases += of_nesting(KEY) + of_headers(generator) + of_bytes(generator, 150)
    generator.shuffle(cases)
    cases = cases[:num_cases]
    solo, malice, digest = solo_answers(server.url, NUM_CLIENTS), Malice(server), service.model_digest()
    with generating(server.url, solo) as counts:
        malice.send(cases)
    print(f"{len(cases)} malformed requests beside {counts.total()} generations: {dict(malice.statuses)}")
    assert not malice.faults, "\n".join(malice.faults)
    assert set(counts) == {"same"} and counts["same"] >= NUM_CLIENTS
    assert sum(malice.statuses.values()) == len(cases) >= 2000
    settle(service, until)
    assert service.model_digest() == digest and solo_answers(server.url, NUM_CLIENTS) == solo


@pytest.mark.slow
def test_administrative_verbs_with_the_key_survive_whatever_schemathesis_sends(served, until, tmp_path):
    service, server = served
    solo, malice, digest = solo_answers(server.url, 4), Malice(server), service.model_digest()
    cases = of_schemathesis(server.app.openapi(), {Level.ADMIN: (KEY, 6)}, f"{tmp_path}/none-")
    random.Random(7).shuffle(cases)
    malice.send(cases, is_allowed_503=False)
    print(f"{len(cases)} administrative requests: {dict(malice.statuses)}")
    assert not malice.faults, "\n".join(malice.faults)
    # The cases may leave a paused engine, released memory or an open session: all of them can be undone.
    admin = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {KEY}"})
    with admin:
        admin.post("/stop_profile", json={})
        admin.post("/abort_weight_update", json={})
        for verb, body in (
            ("resume_memory_occupation", {}), ("update_weights_from_disk", {"model_path": str(tmp_path / "model")}),
            ("continue_generation", {}), ("update_weight_version", {"new_version": "default"}), ("flush_cache", {}),
        ):  # fmt: skip
            answer = admin.post(f"/{verb}", json=body)
            assert answer.status_code == 200, (verb, answer.text)
    settle(service, until)
    assert service.model_digest() == digest and solo_answers(server.url, 4) == solo
