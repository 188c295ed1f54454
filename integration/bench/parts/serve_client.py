"""The clients of the serve benchmark: a separate process that imports only the standard library.

Reads one JSON object a line from standard input, each a load: host, port, concurrency, and the bodies of the requests.
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

_LIMIT = 1 << 26  # bytes of one line: events repeat all tokens before


async def one_request(host: str, port: int, body: bytes) -> tuple[int, float, list[float]]:
    """Send a request; returns its tokens, the seconds to its first event, and those between its events."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status!r}: {(await reader.read())[-500:]!r}")
    times, last = [], b""
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise RuntimeError("the stream ended without [DONE]")
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
            last = line
    writer.close()
    num_tokens = len(json.loads(last[6:])["output_ids"])
    return num_tokens, times[0] - began, [later - earlier for earlier, later in pairwise(times)]


async def play(load: dict) -> dict[str, object]:
    """Play a load: each connection takes the next request when its last one has ended."""
    bodies = deque(json.dumps(body).encode() for body in load["bodies"])
    results: list[tuple[int, float, list[float]]] = []

    async def client() -> None:
        while bodies:
            results.append(await one_request(load["host"], load["port"], bodies.popleft()))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load["concurrency"])))
    return {
        "seconds": time.perf_counter() - began,
        "num_tokens": sum(num for num, _, _ in results),
        "first_s": [first for _, first, _ in results],
        "between_s": [gap for _, _, gaps in results for gap in gaps],
    }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(play(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
