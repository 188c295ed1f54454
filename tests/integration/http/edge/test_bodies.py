"""Tests of where bodies are parsed and checked."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from lockstep.integration.http.edge.bodies import parsed


@pytest.mark.parametrize(
    ("body", "is_on_loop"),
    [
        ({"text": "1 + 2", "sampling_params": {"max_new_tokens": 5}}, True),
        ({"text": "1" * 4000}, True),
        ({"text": "1" * 5000}, False),
        ({"input_ids": [[1]] * 200, "sampling_params": [{"top_k": 1}] * 100}, False),
        ({"text": "1" * 100_000}, False),
        ({"text": "1" * 2_000_000}, False),
    ],
    ids=["small", "text", "longer", "many settings", "medium", "long"],
)
def test_the_event_loop_checks_only_bodies_that_are_small_and_have_few_parts(body, is_on_loop):
    data = json.dumps(body).encode()

    def check(values: dict[str, object]) -> bool:
        assert values == body
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(parsed(data, 1 << 18, check)) is is_on_loop
