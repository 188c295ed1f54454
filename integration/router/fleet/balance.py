"""The choice of a worker for a request: the least loaded one, unless a worker that knows the prompt is not much busier.

So the samples of one group, and the turns of one conversation, find their cached prompt. The idea to weigh the match of
a prefix against the balance of the load is from SGLang's router, which uses a tree of texts; here it is a table of
chained hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 64
CHUNK_CHARACTERS = 256
MAX_KEYS = 512  # pieces of one prompt that are hashed; longer prompts are compared by their beginning
_MAX_WORKERS_PER_KEY = 4
_PROMPTS = (
    "input_ids",
    "prompt_token_ids",
    "token_ids",
    "text",
    "prompt",
)  # SGLang's, vLLM's, OpenAI's fields
_SYSTEM = ("system", "instructions")  # of Anthropic's API and of the Responses API, before all messages
_NAMESPACES = (
    "model",
    "extra_key",
    "cache_salt",
    "lora_path",
    "image_data",
)  # equal prompts share no cache across them


@dataclass(frozen=True)
class WorkerLoad:
    """The load of a worker."""

    worker_id: str
    num_running: int  # running sequences
    num_routed: int = 0  # sequences sent to it so far: of workers with equal loads, the one with fewer is chosen


def choose(loads: Sequence[WorkerLoad], knows_prompt: Collection[str], slack: int) -> str:
    """Choose the worker for the next request. Returns its id. Changes nothing.

    knows_prompt: ids of workers whose cache probably holds the prompt. One of them is chosen if it runs at most `slack`
    sequences more than the least loaded worker. `loads` must not be empty.
    """
    assert loads

    def order(load: WorkerLoad) -> tuple[int, int, str]:
        return load.num_running, load.num_routed, load.worker_id

    least = min(loads, key=order)
    knowing = min((load for load in loads if load.worker_id in knows_prompt), key=order, default=None)
    if knowing is not None and knowing.num_running <= least.num_running + slack:
        return knowing.worker_id
    return least.worker_id


def prompt_keys(body: Mapping[str, object], routing_key: str | None = None) -> tuple[bytes, ...]:
    """Hash longer and longer beginnings of a request's prompt. Returns () for a request without a readable prompt.

    Equal beginnings have equal hashes. Of a batch, the first prompt is used. A routing key replaces the prompt.
    """
    try:
        seed = json.dumps([body.get(name) for name in _NAMESPACES])
        pieces = _pieces(body) if routing_key is None else [f"key {routing_key}"]
    except RecursionError:  # nested too deeply: the worker will report it
        return ()
    keys, running = [], hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16)
    for piece in pieces[:MAX_KEYS]:
        running.update(piece.encode("utf-8", "surrogatepass") + b"\0")
        keys.append(running.digest())
    return tuple(keys)


def num_sequences(body: Mapping[str, object]) -> int:
    """Count the sequences that a request will run: prompts times samples, or 1 where the body does not show it."""
    prompt = next((body[name] for name in _PROMPTS if body.get(name)), None)
    num_prompts = len(prompt) if isinstance(prompt, list) and not _are_tokens(prompt) else 1
    params = body.get("sampling_params")
    samples = body.get("n") or (params.get("n") if isinstance(params, dict) else None)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 0 < samples <= 4096:
        return num_prompts
    return num_prompts * samples


class PrefixTable:
    """A bounded table from beginnings of prompts to the workers that got such prompts last. The oldest beginning is
    dropped first."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._workers: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def knowing(self, keys: Sequence[bytes]) -> tuple[str, ...]:
        """Return the ids of the workers that know the longest beginning. Changes nothing."""
        return next((self._workers[key] for key in reversed(keys) if key in self._workers), ())

    def record(self, keys: Sequence[bytes], worker_id: str) -> None:
        """Note that the worker got this prompt."""
        for key in keys:
            others = [known for known in self._workers.pop(key, ()) if known != worker_id]
            self._workers[key] = (worker_id, *others[: _MAX_WORKERS_PER_KEY - 1])
        while len(self._workers) > self._max_keys:
            self._workers.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """Drop a worker whose cache is lost."""
        for key, ids in list(self._workers.items()):
            if worker_id in ids:
                rest = tuple(known for known in ids if known != worker_id)
                if rest:
                    self._workers[key] = rest
                else:
                    del self._workers[key]


def _pieces(body: Mapping[str, object]) -> list[str]:
    given = body.get("messages") or body.get("input")  # of chats and Anthropic's API, of the Responses API
    if isinstance(given, list | str) and not body.get("input_ids") and not body.get("prompt_token_ids"):
        before = [one for name in _SYSTEM if (one := body.get(name))]
        messages = given if isinstance(given, list) else [given]
        return [json.dumps(message, sort_keys=True) for message in [*before, *messages][:MAX_KEYS]]
    prompt = next((body[name] for name in _PROMPTS if body.get(name)), None)
    if isinstance(prompt, list) and prompt and not _are_tokens(prompt):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [prompt[i : i + CHUNK_CHARACTERS] for i in range(0, len(prompt), CHUNK_CHARACTERS)]
    if isinstance(prompt, list) and _are_tokens(prompt):
        return [repr(prompt[i : i + CHUNK_TOKENS]) for i in range(0, len(prompt), CHUNK_TOKENS)]
    return []


def _are_tokens(items: Sequence[object]) -> bool:
    return bool(items) and all(type(item) is int for item in items)
