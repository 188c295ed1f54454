"""The encoding of KV events, for publisher and subscriber.

A message on the PUB socket has three frames:

    topic      "kv-events", or as configured; pins are sent on "pins", with numbers of their own
    seq        8 bytes, big-endian
    payload    msgpack: [timestamp, events, dp_rank], each event a map with its "type"

    {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
     "cache_salt", "session_id", "lora_name", "extra_keys"}; a missing value is null. extra_keys, as vLLM's: of each
     block a list of the names of what its KV depends on beside its tokens, here of its images, or null
    {"type": "BlockRemoved", "block_hashes", "medium"}
    {"type": "AllBlocksCleared"}
    {"type": "PinEvent", "kind", "block_hashes", "owner", "reason"}, on "pins" only
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from ...rollout.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent, PinEvent, Topic

KV_TOPIC = "kv-events"
PINS_TOPIC = "pins"
HELLO = b"hello/"  # prefix of the topics whose subscriptions are answered
END_SEQ = -1  # of the last message of a replay

_MEDIUM = "GPU"  # the engine's device, whatever it is; there are no other tiers


def encode_seq(seq: int) -> bytes:
    """Encode a number in 8 bytes, big-endian; -1 is all ones."""
    return seq.to_bytes(8, "big", signed=True)


def decode_seq(frame: bytes) -> int:
    """Decode the bytes of `encode_seq`. Raises ValueError for another length."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def encode_batch(batch: EventBatch, dp_rank: int = 0) -> bytes:
    """Encode the payload frame of a batch."""
    return msgpack.packb([batch.timestamp, [_as_map(event) for event in batch.events], dp_rank])


def decode_batch(topic: Topic, seq: int, payload: bytes) -> EventBatch:
    """Decode the bytes of `encode_batch`. Raises ValueError for any other payload."""
    try:
        timestamp, maps, _ = msgpack.unpackb(payload)
        return EventBatch(topic, seq, timestamp, tuple(_FROM_MAP[event["type"]](event) for event in maps))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"batch {seq} of {topic} cannot be read: {error!r}") from error


def _as_map(event: KVEvent | PinEvent) -> dict[str, object]:
    if isinstance(event, BlockStored):
        return {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "cache_salt": event.cache_salt or None,
            "session_id": None,
            "lora_name": None,
            "extra_keys": [[key] if key else None for key in event.image_keys] or None,
        }
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": _MEDIUM}
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    return {
        "type": "PinEvent",
        "kind": event.kind,
        "block_hashes": event.block_hashes,
        "owner": event.owner,
        "reason": event.reason,
    }


_FROM_MAP: dict[str, Callable[[dict[str, Any]], KVEvent | PinEvent]] = {
    "BlockStored": lambda m: BlockStored(
        tuple(m["block_hashes"]), m["parent_block_hash"], tuple(m["token_ids"]), m["block_size"],
        m.get("cache_salt") or "", tuple("".join(keys or ()) for keys in m.get("extra_keys") or ()),
    ),
    "BlockRemoved": lambda m: BlockRemoved(tuple(m["block_hashes"])),
    "AllBlocksCleared": lambda m: AllBlocksCleared(),
    "PinEvent": lambda m: PinEvent(m["kind"], tuple(m["block_hashes"]), m["owner"], m["reason"]),
}  # fmt: skip
