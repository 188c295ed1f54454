"""The engine, its publisher and foreign listeners of the tests beside this file, which are skipped without ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.integration.kv_events.publisher import KVEventPublisher
    from lockstep.tests.integration.kv_events.ledger_engine import Foreigner, LedgerEngine


@pytest.fixture
def engine() -> LedgerEngine:
    from lockstep.tests.integration.kv_events.ledger_engine import LedgerEngine

    return LedgerEngine()


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    from lockstep.integration.kv_events.publisher import KVEventPublisher
    from lockstep.tests.integration.kv_events.ledger_engine import ANY_PORT

    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as publisher:
        yield publisher


@pytest.fixture
def listen(publisher) -> Iterator[Callable[..., Foreigner]]:
    from lockstep.tests.integration.kv_events.ledger_engine import Foreigner

    made = []

    def make(*topics: bytes, **settings: int) -> Foreigner:
        made.append(Foreigner(publisher, *topics, **settings))
        return made[-1]

    yield make
    for foreigner in made:
        foreigner.close()
