"""A mirror in another process equals the prefix cache, whatever the wire loses."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from lockstep.rollout.kv.cache_tree import CacheTree
from lockstep.rollout.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    PinEvent,
)
from lockstep.tests.support import prepared_python

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from lockstep.integration.kv_events.publisher import KVEventPublisher  # noqa: E402
from lockstep.integration.kv_events.subscriber import (  # noqa: E402
    KVEventSubscriber,
)
from lockstep.integration.kv_events.wire import decode_batch, encode_batch  # noqa: E402
from lockstep.tests.integration.kv_events.ledger_engine import (  # noqa: E402
    ANY_PORT,
    DEADLINE_S,
    STORED,
    LedgerEngine,
    LossyLine,
    emit,
)

# -- both ends in processes of their own ----------------------------------------------------------------------------


def follow(settings: dict) -> None:
    """Run the other process: mirror up to a given batch, and print the mirror.

    It requests snapshots, and receives the end, in lines of JSON.
    """
    told: queue.SimpleQueue[dict] = queue.SimpleQueue()
    threading.Thread(target=lambda: [told.put(json.loads(line)) for line in sys.stdin], daemon=True).start()
    until: list[int] = []

    def listen(timeout_s: float) -> dict | None:
        try:
            message = told.get(timeout=timeout_s)
        except queue.Empty:
            return None
        until.extend([message["until"]] if "until" in message else [])
        return message.get("tree")

    def snapshot() -> dict:
        say({"ask": "snapshot"})
        while (tree := listen(DEADLINE_S)) is None:
            pass
        return tree

    deadline = time.monotonic() + DEADLINE_S
    is_sleepy = settings.pop("is_sleepy")
    with KVEventSubscriber(**settings.pop("settings"), snapshot=snapshot if settings["snapshot"] else None) as sub:
        say({"ask": "nothing"})
        while not until or sub.mirror.seq < until[0]:
            assert time.monotonic() < deadline, f"stuck at batch {sub.mirror.seq} of {until}"
            listen(0.05 if is_sleepy else 0.0)
            if (not is_sleepy or until) and not sub.poll(0.05) and until:
                sub.sync()
        blocks = {hash: [block.parent, block.token_ids, block.salt] for hash, block in sub.mirror.blocks.items()}
        say({"blocks": blocks, "gaps": sub.num_gaps, "replays": sub.num_replays, "snapshots": sub.num_snapshots})


def say(message: dict) -> None:
    print(json.dumps(message), flush=True)


class Follower:
    """The other process, as seen from this one."""

    def __init__(
        self, engine: LedgerEngine, endpoint: str, replay: str | None, *, snapshot: bool, is_sleepy: bool = False,
        hwm: int = 100_000,
    ) -> None:  # fmt: skip
        self._engine = engine
        subscriber = {"endpoint": endpoint, "replay_endpoint": replay, "hwm": hwm, "timeout_s": DEADLINE_S}
        settings = {"settings": subscriber, "snapshot": snapshot, "is_sleepy": is_sleepy}
        command = [sys.executable, __file__, json.dumps(settings)]
        self._process = prepared_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._heard: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._write_lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def wait_until_ready(self) -> None:
        assert self._heard.get(timeout=DEADLINE_S) == {"ask": "nothing"}

    def finish(self, until: int) -> dict:
        self._tell({"until": until})
        result = self._heard.get(timeout=DEADLINE_S)
        assert self._process.wait(DEADLINE_S) == 0
        return result

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    def _serve(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            if message == {"ask": "snapshot"}:
                self._tell({"tree": self._engine.cache_tree().as_dict()})
            else:
                self._heard.put(message)

    def _tell(self, message: dict) -> None:
        with self._write_lock:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def assert_equals_the_tree(result: dict, engine: LedgerEngine) -> None:
    blocks = {int(hash): (parent, tuple(tokens), salt) for hash, (parent, tokens, salt) in result["blocks"].items()}
    tree = engine.cache_tree()
    assert len(tree.nodes) > 20, "an empty cache shows nothing"
    assert blocks == {node.hash: (node.parent, node.token_ids, node.salt) for node in tree.nodes}


@pytest.mark.parametrize("way", ["replay", pytest.param("snapshot", marks=pytest.mark.slow)])
def test_another_process_mirrors_the_cache_from_events_alone(engine, publisher, way):
    publisher.attach(engine)
    replay = publisher.replay_endpoint if way == "replay" else None
    with Follower(engine, publisher.endpoint, replay, snapshot=way == "snapshot") as follower:
        follower.wait_until_ready()
        engine.run(5000)
        result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert (result["gaps"], result["snapshots"]) == (0, int(way == "snapshot"))


@pytest.mark.parametrize("way", [pytest.param("replay", marks=pytest.mark.slow), "snapshot"])
def test_a_process_that_joins_in_the_middle_mirrors_it_too(engine, publisher, way):
    publisher.attach(engine)
    engine.run(2500)
    replay = publisher.replay_endpoint if way == "replay" else None
    with Follower(engine, publisher.endpoint, replay, snapshot=way == "snapshot") as follower:
        follower.wait_until_ready()
        engine.run(2500)
        result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert (result["gaps"], result["snapshots"]) == (0, int(way == "snapshot"))


@pytest.mark.parametrize("way", ["replay", pytest.param("snapshot", marks=pytest.mark.slow)])
def test_lost_messages_are_made_up_for(engine, publisher, way):
    publisher.attach(engine)
    engine.run(100)
    replay = publisher.replay_endpoint if way == "replay" else None
    with LossyLine(publisher.endpoint, k=7) as line:
        with Follower(engine, line.endpoint, replay, snapshot=way == "snapshot") as follower:
            follower.wait_until_ready()
            engine.run(2000)
            result = follower.finish(engine.kv_events.last_seq("kv"))
        assert line.num_lost > 100
    assert_equals_the_tree(result, engine)
    assert result["gaps"] > 0
    assert (result["replays"] > 1) if way == "replay" else (result["snapshots"] > 1)


def test_what_a_high_water_mark_drops_is_made_up_for(engine):
    with (
        tempfile.TemporaryDirectory() as folder,  # a pipe has a small buffer there, unlike TCP
        KVEventPublisher(f"ipc://{folder}/kv", replay_endpoint=f"ipc://{folder}/replay", hwm=1) as publisher,
    ):
        publisher.attach(engine)
        with Follower(
            engine, publisher.endpoint, publisher.replay_endpoint, snapshot=False, is_sleepy=True, hwm=1
        ) as follower:  # fmt: skip
            follower.wait_until_ready()
            engine.run(5000)
            result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert result["gaps"] > 0


# -- the wire --------------------------------------------------------------------------------------------------------


def test_a_foreign_decoder_reads_the_events_as_described(engine, publisher, listen):
    foreigner = listen(b"")  # everything, as routers do
    publisher.attach(engine)
    before = time.time()
    emit(engine, STORED, BlockStored((5,), STORED.block_hashes[1], (9, 9, 9, 9), 4, "salt"))
    emit(engine, BlockStored((6, 7), 5, (8,) * 8, 4, "", ("", "image")))
    emit(engine, PinEvent("pinned", (5,), "me"))
    emit(engine, BlockRemoved((5,)))
    emit(engine, AllBlocksCleared())
    messages = [foreigner.next() for _ in range(5)]
    assert [(topic, seq) for topic, seq, _ in messages] == [(b"kv-events", seq) for seq in range(5)]  # and no pins
    for _, _, (timestamp, _, dp_rank) in messages:
        assert before - 60 < timestamp < time.time() + 60 and dp_rank == 0
    nothing = {"lora_id": None, "session_id": None, "lora_name": None, "extra_keys": None}
    assert [events for _, _, (_, events, _) in messages] == [
        [{"type": "AllBlocksCleared"}],  # the blocks that were cached when it was attached
        [
            {
                "type": "BlockStored", "block_hashes": [-(2**63), 2**63 - 1], "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "block_size": 4, "medium": "GPU", "cache_salt": None, **nothing,
            },
            {
                "type": "BlockStored", "block_hashes": [5], "parent_block_hash": 2**63 - 1,
                "token_ids": [9, 9, 9, 9], "block_size": 4, "medium": "GPU", "cache_salt": "salt", **nothing,
            },
        ],
        [
            {
                "type": "BlockStored", "block_hashes": [6, 7], "parent_block_hash": 5, "token_ids": [8] * 8,
                "block_size": 4, "medium": "GPU", "cache_salt": None, **nothing, "extra_keys": [None, ["image"]],
            },
        ],
        [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}],
        [{"type": "AllBlocksCleared"}],
    ]  # fmt: skip


def test_pins_have_a_topic_and_numbers_of_their_own(engine, publisher, listen):
    foreigner = listen(b"pins")
    publisher.attach(engine)
    emit(engine, STORED)
    emit(engine, PinEvent("auto_unpinned", (5, 5), None, "no room"))
    emit(engine, STORED, PinEvent("expired", (6,), "me"))
    messages = [foreigner.next(), foreigner.next()]
    assert [(topic, seq) for topic, seq, _ in messages] == [(b"pins", 1), (b"pins", 2)]
    assert messages[0][2][1] == [
        {"type": "PinEvent", "kind": "auto_unpinned", "block_hashes": [5, 5], "owner": None, "reason": "no room"}
    ]
    assert foreigner.replay(2, b"pins")[0][1][1][0]["owner"] == "me"


@pytest.mark.parametrize("topic", ["kv", "pins"])
def test_batches_come_back_from_the_wire_as_they_were(topic):
    events = {
        "kv": (STORED, BlockStored((1,), 7, (2, 3), 2, "salt", ("image",)), BlockRemoved((1, 2)), AllBlocksCleared()),
        "pins": (PinEvent("dropped", (1, 1), "owner", "why"), PinEvent("unpinned", (), None)),
    }
    batch = EventBatch(topic, 3, 0.5, events[topic])
    assert decode_batch(topic, 3, encode_batch(batch)) == batch


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x00\x90", msgpack.packb([0.0, [{"type": "New"}], 0])])
def test_a_payload_that_is_none_is_refused_by_number(payload):
    with pytest.raises(ValueError, match="batch 3 of kv cannot be read"):
        decode_batch("kv", 3, payload)


def test_replay_sends_what_is_wanted_and_says_where_it_ends(engine, publisher, listen):
    foreigner = listen()
    publisher.attach(engine)
    for hash in range(5):
        emit(engine, BlockStored((hash,), None, (1,), 1))
    assert [seq for seq, _ in foreigner.replay(3)] == [3, 4, 5, -1]
    assert foreigner.replay(6) == [(-1, b"")]
    [(end, summary)] = foreigner.replay(6, b"kv-events")
    assert (end, summary) == (-1, {"stream": publisher.stream, "oldest": 0, "newest": 5})
    assert foreigner.replay(0, b"unknown")[-1][1]["newest"] is None


def test_requests_that_make_no_sense_are_passed_over(engine, publisher, listen):
    foreigner = listen()
    publisher.attach(engine)
    for frames in ([b""], [b"x", b"y"], [b"", b"short"], [b"", b"12345678", b"kv-events", b"more"]):
        foreigner._replay.send_multipart(frames)
    assert [seq for seq, _ in foreigner.replay(0)] == [0, -1]


def test_a_client_that_never_reads_its_replays_stops_nobody(engine, publisher, listen):
    greedy = listen()
    publisher.attach(engine)
    for _ in range(300):
        emit(engine, BlockStored((1,), None, tuple(range(1000)), 1000), BlockRemoved((1,)))
    for _ in range(200):
        greedy._replay.send_multipart([b"", bytes(8)])  # 200 x 1 MB
    assert [seq for seq, _ in listen().replay(299)] == [299, 300, -1]


# -- the publisher's own behaviour ------------------------------------------------------------------------------------


def test_closing_ends_the_thread_frees_the_ports_and_turns_the_events_off(engine):
    before = set(threading.enumerate())
    publisher = KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT)
    publisher.attach(engine)
    assert engine.kv_events.is_on and set(threading.enumerate()) != before
    publisher.close()
    publisher.close()
    assert not engine.kv_events.is_on and set(threading.enumerate()) == before
    with pytest.raises(ValueError, match="closed"):
        publisher.attach(engine)
    KVEventPublisher(publisher.endpoint, replay_endpoint=publisher.replay_endpoint).close()


def test_the_last_batches_leave_before_it_closes(engine, publisher, listen):
    foreigner = listen(b"kv-events", hwm=1)
    publisher.attach(engine)
    numbers: list[int] = []
    reader = threading.Thread(target=lambda: numbers.extend(foreigner.next()[1] for _ in range(501)), daemon=True)
    for _ in range(500):
        emit(engine, BlockStored((1,), None, (2**31 - 1,) * 5000, 5000))  # 12 MB: much waits in the publisher
    reader.start()
    publisher.close()
    reader.join(DEADLINE_S)
    assert numbers == list(range(501))


def test_an_address_that_is_taken_is_an_error_at_once_and_leaves_nothing_behind(publisher):
    before = set(threading.enumerate())
    with pytest.raises(zmq.ZMQError, match="in use"):
        KVEventPublisher(ANY_PORT, replay_endpoint=publisher.endpoint)
    assert set(threading.enumerate()) == before


def test_the_engine_never_waits_for_listeners(engine):
    with KVEventPublisher(ANY_PORT, hwm=1) as publisher, zmq.Context() as context:
        publisher.attach(engine)
        with context.socket(zmq.SUB) as deaf:
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.subscribe(b"hello/there")
            deaf.connect(publisher.endpoint)
            assert deaf.poll(DEADLINE_S * 1000)  # it is connected, and reads no more
            deaf.subscribe(b"kv-events")
            events = BlockStored((1,), None, tuple(range(1000)), 1000), BlockRemoved((1,))
            runner = threading.Thread(target=lambda: [emit(engine, *events) for _ in range(5000)], daemon=True)
            runner.start()
            runner.join(DEADLINE_S)
            assert not runner.is_alive(), "10 MB for one that does not read held the engine up"
            assert engine.kv_events.last_seq("kv") == 5000


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://eth0:1", "tcp://10.0.0.1:1", "pgm://x"]
)
def test_other_machines_are_let_in_only_when_that_is_meant(endpoint):
    with pytest.raises(ValueError, match="allow_remote"):
        KVEventPublisher(endpoint)
    with pytest.raises(ValueError, match="allow_remote"):
        KVEventPublisher(ANY_PORT, replay_endpoint=endpoint)


def test_a_remote_address_is_bound_when_it_is_meant():
    KVEventPublisher("tcp://0.0.0.0:*", allow_remote=True).close()


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(ValueError, match=r"tcp://\*:1 can be.*topic 'pin' must.*hwm.*-1.*num_replayable.*0"):
        KVEventPublisher("tcp://*:1", topic="pin", hwm=-1, num_replayable=0)


def test_a_second_engine_is_refused(engine, publisher):
    publisher.attach(engine)
    with pytest.raises(ValueError, match="attached already"):
        publisher.attach(LedgerEngine())


def test_an_engine_that_cannot_tell_its_state_is_not_left_listened_to(engine, publisher, monkeypatch):
    class Broken(LedgerEngine):
        def cache_tree(self) -> CacheTree:
            raise RuntimeError("broken")

    broken = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        publisher.attach(broken)
    assert not broken.kv_events.is_on
    publisher.attach(engine)


if __name__ == "__main__":
    follow(json.loads(sys.argv[1]))
