"""The clients of the serve benchmark: a separate process that imports only the standard library.

Reads one JSON object a line from standard input, each a load: host, port, path, concurrency, and the bodies of the
requests.
Plays it with that many connections at a time and writes one JSON object a line: seconds, tokens, and per request the
seconds to its first event and between its events.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from itertools import pairwise

CUMULATIVE = "/generate"  # whose events repeat all tokens before
_LIMIT = 1 << 26  # bytes of one line


async def one_request(host: str, port: int, path: str, body: bytes) -> tuple[list[bytes], float, list[float]]:
    """Send a request; returns its events (the last one where each repeats those before), the seconds to its first one,
    and those between them."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status!r}: {(await reader.read())[-500:]!r}")
    times: list[float] = []
    events: list[bytes] = []
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise RuntimeError("the stream ended without [DONE]")
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
            if path == CUMULATIVE:
                events.clear()
            events.append(line)
    writer.close()
    return events, times[0] - began, [later - earlier for earlier, later in pairwise(times)]


def count_tokens(events: list[bytes]) -> int:
    """Count the tokens of a stream."""
    read = [json.loads(event[6:]) for event in events]
    return sum(len(part["token_ids" if "choices" in one else "output_ids"])
               for one in read for part in one.get("choices", [one]))  # fmt: skip


async def play(load: dict) -> dict[str, object]:
    """Play a load: each connection takes the next request when its last one has ended."""
    bodies = deque(json.dumps(body).encode() for body in load["bodies"])
    results: list[tuple[list[bytes], float, list[float]]] = []

    async def client() -> None:
        while bodies:
            results.append(await one_request(load["host"], load["port"], load["path"], bodies.popleft()))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load["concurrency"])))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "num_tokens": sum(count_tokens(events) for events, _, _ in results),
        "first_s": [first for _, first, _ in results],
        "between_s": [gap for _, _, gaps in results for gap in gaps],
    }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(play(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
