"""A server whose random model answers agents with texts of a script, by grammars that a proxy adds to their requests.

So an agent that calls tools has calls to make, and every token is still drawn by the engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import torch

from lockstep.integration.http.chat.grammar import Writer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.bpe_tokenizer import train_tokenizer
from lockstep.tests.support.chat.tokenizer import chat_template
from lockstep.tests.support.random_models import random_model

MODEL = "policy"
_PATIENCE = 900.0  # seconds: prompts are long, and machines may be slow
_DROPPED = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}

Script = Callable[[dict[str, Any]], str]  # the answer to a request's body


class Scripted:
    """The server, with the proxy before it that agents call."""

    def __init__(self, service: RolloutService, url: str, proxy_url: str) -> None:
        self.service, self.url, self.proxy_url = service, url, proxy_url
        self.requests: list[tuple[str, int]] = []  # paths and statuses

    def open_session(self) -> str:
        """Open a session and return its id; `{proxy_url}/sessions/{id}` is an agent's address."""
        return httpx.post(f"{self.url}/open_session", json={}).raise_for_status().json()

    def branches(self, session: str) -> list[dict[str, Any]]:
        """Return the report of each branch of a session, with log-probabilities."""

        def info(**fields: object) -> Any:
            params = {"session_id": session, **fields}
            return httpx.get(f"{self.url}/session_info", params=params, timeout=60).raise_for_status().json()

        return [info(rid=leaf, logprobs=True) for leaf in info()["leaves"]]

    def gap(self, branch: dict[str, Any]) -> float:
        """Return the largest difference between a branch's log-probabilities and those of the trainer's forward."""
        ids = torch.tensor([branch["token_ids"]])
        with self.service.training_numerics(), torch.no_grad():
            logits = self.service.engine.model.module(input_ids=ids, use_cache=False).logits[0, :-1]
            temperature = branch["sampled"][0]["temperature"]
            trained = selected_logprobs(logits, ids[0, 1:], temperature)
        gaps = []
        for run in branch["sampled"]:
            told = torch.tensor(run["logprobs"], dtype=torch.float32)
            gaps.append((trained[run["start"] - 1 : run["end"] - 1] - told).abs().max().item())
        return max(gaps)


@contextmanager
def scripted(script: Script, *, context: int) -> Iterator[Scripted]:
    """Yield a server whose answers to generations are those of the script. context: tokens of the model's."""
    torch.set_num_threads(2)
    tokenizer = train_tokenizer()
    tokenizer.chat_template = chat_template("hermes", thinks=True)
    model = random_model("qwen3", vocab_size=1000, max_position_embeddings=context, eos_token_id=tokenizer.eos_token_id)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=2 * context // 16), tokenizer=tokenizer))
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    with service.rollout(), serve_in_background(service, HttpConfig(port=0, model_name=MODEL)) as server:
        found = Scripted(service, server.url, f"http://127.0.0.1:{proxy.server_port}")
        proxy.script, proxy.found = script, found
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            proxy.shutdown()
            proxy.server_close()
            thread.join()
    service.engine.stop()
    service.close()


class _Proxy(BaseHTTPRequestHandler):
    """Pass calls on, generations with a grammar."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Write nothing."""

    def _pass_on(self) -> None:
        found: Scripted = self.server.found
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.command == "POST" and self.path.partition("?")[0].endswith(("/messages", "/responses", "/completions")):
            values = json.loads(body)
            text = {"type": "sequence", "elements": Writer({}).text(self.server.script(values))}
            body = json.dumps({**values, "response_format": {"type": "structural_tag", "format": text}}).encode()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
        with httpx.stream(
            self.command, found.url + self.path, content=body, headers=headers, timeout=_PATIENCE
        ) as answer:
            found.requests.append((self.path, answer.status_code))
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.send_header("connection", "close")
            self.end_headers()
            for data in answer.iter_raw():
                self.wfile.write(data)
        self.close_connection = True

    do_GET = do_HEAD = do_POST = _pass_on
