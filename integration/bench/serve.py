"""The cost of HTTP: a load by streams over a socket, from clients in a separate process, and by the Python API.

A load is --requests random prompts, --concurrency of them at a time, each continued by exactly --new-tokens tokens with
their log-probabilities. Over HTTP every token is a separate event; those of SGLang's /generate repeat the tokens before
it, those of vLLM's /inference/v1/generate (--route) do not. The two take turns within each repeat, with equal prompts,
an empty cache and no drafts. tok_s is new tokens over the wall seconds of the whole load, median over the repeats;
http_cost is the share of throughput that HTTP loses against the direct run beside it, median over the repeats; ttft and
itl are times at the clients: to the first event, and between one and the next. Bar: HTTP costs at most 15 % at
concurrency 32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from ...rollout.completion import Completion, StreamChunk
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.errors import EngineStopped
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument
from .parts.load import positive
from .parts.presets import DTYPES, PRESETS, load_model

_WARM_UP_TOKENS = 4
ROUTES = ("/generate", "/inference/v1/generate")


@dataclass(frozen=True)
class ServeLoad:
    """The requests of one run."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Draw random token ids, a pure function of the load and the repeat."""
        generator = torch.Generator().manual_seed(2000 + repeat)
        return torch.randint(vocab_size, (self.num_requests, self.prompt_tokens), generator=generator).tolist()

    def params(self, index: int) -> dict[str, object]:
        return {"max_new_tokens": self.new_tokens, "ignore_eos": True, "sampling_seed": index}

    def body(self, route: str, index: int, prompt: list[int]) -> dict[str, object]:
        """Return the body of a request, with the names of the route."""
        if route == "/generate":
            return {"input_ids": prompt, "sampling_params": self.params(index), "stream": True, "return_logprob": True}
        params = {"max_tokens": self.new_tokens, "ignore_eos": True, "seed": index, "logprobs": 0}
        return {"token_ids": prompt, "sampling_params": params, "stream": True}


@dataclass(frozen=True)
class ServeRun:
    """The measurement of one load. Seconds."""

    tok_s: float
    requests_s: float
    first_s: tuple[float, ...] = ()  # of each request, to its first event
    between_s: tuple[float, ...] = ()  # from one event to the next, of all requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--concurrency", type=positive, default=32, help="requests at a time")
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3, help="the median counts")
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--route", choices=ROUTES, default=ROUTES[0], help="the call over HTTP")
    parser.add_argument("--overlap", action="store_true", help="deliver while the model runs")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for a load that the model has no room for."""
    if options.threads:
        torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    load = ServeLoad(options.requests, options.concurrency, options.prompt_tokens, options.new_tokens)
    engine = make_engine(options, load)
    runs: dict[str, list[ServeRun]] = {"direct": [], "http": []}
    with engine.model.rollout_phase(), served(engine) as (port, clients):
        rivals = {
            "direct": lambda load, prompts: run_direct(engine, load, prompts),
            "http": lambda load, prompts: run_http(clients, port, load, prompts, options.route),
        }
        warm_up = ServeLoad(load.concurrency, load.concurrency, load.prompt_tokens, _WARM_UP_TOKENS)
        for one in rivals.values():
            one(warm_up, warm_up.prompts(engine.model.vocab_size, -1))
        for repeat in budget.rounds(options.repeats):
            prompts = load.prompts(engine.model.vocab_size, repeat)
            for name in sorted(rivals, reverse=repeat % 2 == 1):  # the first one alternates
                engine.flush_cache()
                runs[name].append(rivals[name](load, prompts))
                print(f"repeat {repeat + 1}/{options.repeats} {name}: {runs[name][-1].tok_s:.0f} tok/s",
                      file=sys.stderr, flush=True)  # fmt: skip
    engine.close()
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "concurrency": load.concurrency,
        "requests": load.num_requests,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "repeats": len(runs["http"]),
        "overlap": options.overlap,
        "route": options.route,
    }
    return {**settings, **report(**runs)}


def report(direct: list[ServeRun], http: list[ServeRun]) -> dict[str, object]:
    """Compute medians over the repeats; latencies over all requests of all repeats."""
    costs = [1 - mine.tok_s / theirs.tok_s for mine, theirs in zip(http, direct, strict=True)]
    first = [seconds for run in http for seconds in run.first_s]
    between = [seconds for run in http for seconds in run.between_s]
    return {
        "direct_tok_s": round(statistics.median(run.tok_s for run in direct), 1),
        "http_tok_s": round(statistics.median(run.tok_s for run in http), 1),
        "http_cost": round(statistics.median(costs), 3),
        "http_cost_range": [round(min(costs), 3), round(max(costs), 3)],
        "requests_s": round(statistics.median(run.requests_s for run in http), 3),
        "ttft_ms_p50": _percentile_ms(first, 50),
        "ttft_ms_p99": _percentile_ms(first, 99),
        "itl_ms_p50": _percentile_ms(between, 50),
        "itl_ms_p99": _percentile_ms(between, 99),
    }


def make_engine(options: argparse.Namespace, load: ServeLoad) -> Engine:
    """Make an engine for the concurrency of the load. Raises ValueError when the context is too short."""
    length = load.prompt_tokens + load.new_tokens
    blocks_each = -(-(length + 1) // EngineConfig.block_size)
    config = EngineConfig(
        kv_cache=2 * load.concurrency * blocks_each, max_num_seqs=load.concurrency, overlap=options.overlap,
        speculation="off",  # the second of two equal runs would draw from the history of the first
    )  # fmt: skip
    engine = Engine(load_model(options.model, dtype=options.dtype), config)
    if length > engine.max_model_len:
        raise ValueError(f"{length} tokens (prompt and new) exceed the context of {engine.max_model_len}")
    return engine


@contextmanager
def served(engine: Engine) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server on the engine; yields its port, and the process of its clients."""
    from ..http.edge.config import HttpConfig
    from ..http.server import serve_in_background
    from ..service import RolloutService

    script = Path(__file__).parent / "parts" / "serve_client.py"
    pipe = subprocess.PIPE
    # -P: without it this folder's modules would hide the standard library's.
    command = [sys.executable, "-P", str(script)]
    with (
        serve_in_background(RolloutService(engine), HttpConfig(port=0)) as server,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as clients,
    ):
        yield server.port, clients


def run_http(
    clients: subprocess.Popen[str], port: int, load: ServeLoad, prompts: list[list[int]], route: str = ROUTES[0]
) -> ServeRun:
    """Run the load by streams of a route. Raises RuntimeError where a request failed."""
    bodies = [load.body(route, index, prompt) for index, prompt in enumerate(prompts)]
    assert clients.stdin is not None and clients.stdout is not None
    asked = {"host": "127.0.0.1", "port": port, "path": route, "concurrency": load.concurrency, "bodies": bodies}
    print(json.dumps(asked), file=clients.stdin, flush=True)
    line = clients.stdout.readline()
    if not line:
        raise RuntimeError("the clients have failed; see standard error")
    answer = json.loads(line)
    assert answer["num_tokens"] == load.num_requests * load.new_tokens
    rates = answer["num_tokens"] / answer["seconds"], load.num_requests / answer["seconds"]
    return ServeRun(*rates, tuple(answer["first_s"]), tuple(answer["between_s"]))


def run_direct(engine: Engine, load: ServeLoad, prompts: list[list[int]]) -> ServeRun:
    """Run the load by the Python API, at the same concurrency. The engine's thread runs the steps, as for HTTP."""
    answers = Answers()
    waiting = deque(enumerate(prompts))
    num_open = num_tokens = 0
    began = time.perf_counter()
    while waiting or num_open:
        while waiting and num_open < load.concurrency:
            index, prompt = waiting.popleft()
            params = SamplingParams(max_new_tokens=load.new_tokens, ignore_eos=True, sampling_seed=index)
            engine.requests.submit([prompt], [params], answers, streamed=False)
            num_open += 1
        num_tokens += len(answers.next().logprobs)
        num_open -= 1
    seconds = time.perf_counter() - began
    assert num_tokens == load.num_requests * load.new_tokens
    return ServeRun(num_tokens / seconds, load.num_requests / seconds)


class Answers:
    """A queue of completions from the engine's thread to the waiting one."""

    def __init__(self) -> None:
        self._news: SimpleQueue[StreamChunk | EngineStopped] = SimpleQueue()

    def on_chunk(self, chunk: StreamChunk) -> None:
        self._news.put(chunk)

    def on_failure(self, error: EngineStopped) -> None:
        self._news.put(error)

    def next(self) -> Completion:
        """Wait for the next answer. Raises EngineStopped when none will come."""
        news = self._news.get()
        if isinstance(news, EngineStopped):
            raise news
        assert news.completion is not None
        return news.completion


def _percentile_ms(seconds: list[float], percent: int) -> float | None:
    """Return a percentile in milliseconds; None without values: drafts and a slow reader may join all tokens in one."""
    if len(seconds) < 2:
        return round(seconds[0] * 1e3, 2) if seconds else None
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1e3, 2)
