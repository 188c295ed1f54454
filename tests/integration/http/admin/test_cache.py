"""Tests of pins, eviction and the tree over a socket."""

from __future__ import annotations

import httpx
import pytest

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PROMPT = list(range(1, 66))  # four full blocks and a bit


@pytest.fixture
def service(make_model, tmp_path):
    make_model("qwen2").save_pretrained(tmp_path)
    service = RolloutService(Engine(tmp_path, EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    service.engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
    yield service
    service.engine.check_integrity()
    service.close()


def _hashes(client: httpx.Client) -> list[int]:
    return [node["hash"] for node in client.get("/hicache/cache_tree").json()["nodes"]]


def test_blocks_are_pinned_and_unpinned_by_the_seeds_fields(client):
    hashes = _hashes(client)
    assert len(hashes) == 4
    answer = client.post("/hicache/pin_blocks", json={"block_hashes": [*hashes[:2], 12345], "owner": "me"})
    assert answer.status_code == 200 and answer.json()["pinned_count"] == 2
    assert answer.json()["report"]["num_unknown"] == 1
    assert client.get("/state").json()["num_pinned_blocks"] == 2
    text = {"block_hashes": [str(h) for h in hashes[:2]], "owner": "me"}  # JSON readers without 64-bit integers
    assert client.post("/hicache/unpin_blocks", json=text | {"owner": "you"}).json()["unpinned_count"] == 0
    assert client.post("/hicache/unpin_blocks", json=text).json()["unpinned_count"] == 2
    assert client.get("/state").json()["num_pinned_blocks"] == 0


def test_a_prefix_is_pinned_as_far_as_it_is_cached(client):
    body = {"token_ids": [*PROMPT[:48], *[9] * 20], "owner": "chat-1", "ttl_seconds": 60}
    report = client.post("/hicache/pin_prefix", json=body).json()
    assert (report["pinned_count"], report["report"]["num_unknown"]) == (3, 1)
    assert report["report"]["hashes"] == _hashes(client)[:3]
    assert client.post("/flush_cache").text == "Cache flushed: 4 blocks, 3 of them pinned.\n"


def test_a_prefix_is_pinned_for_300_s_unless_told_otherwise(client, service):
    client.post("/hicache/pin_prefix", json={"token_ids": PROMPT})
    pins = service.engine.parts.ledger.pins
    [(expiry, _), *_] = pins._expiries
    assert 290 < expiry - pins._clock() <= 300


def test_what_is_below_a_block_is_evicted(client):
    hashes = _hashes(client)
    answer = client.post("/hicache/evict_descendants", json={"block_hash": hashes[1]}).json()
    assert answer["evicted_count"] == 2 and answer["report"]["is_known"]
    assert _hashes(client) == hashes[:2]
    assert not client.post("/hicache/evict_descendants", json={"block_hash": 5}).json()["report"]["is_known"]


def test_the_tree_tells_where_a_prompt_leaves_it_by_query_or_body(client):
    hashes = _hashes(client)
    tree = client.post("/hicache/cache_tree", json={"token_ids": [*PROMPT[:20], *[200] * 20], "depth": 2}).json()
    assert [node["hash"] for node in tree["nodes"]] == hashes[:2]
    assert tree["divergence"]["num_matched"] == 1 and tree["divergence"]["num_common_tokens"] == 20
    assert tree["num_free"] + tree["num_cached"] + tree["num_held"] + tree["num_pinned"] == tree["num_blocks"] == 32
    below = client.get("/hicache/cache_tree", params={"under": hashes[2], "hashes": "text"}).json()
    assert [node["hash"] for node in below["nodes"]] == [str(h) for h in hashes[2:]]
    text = client.get("/hicache/cache_tree", params={"format": "text"})
    assert text.headers["content-type"].startswith("text/plain") and "32 blocks of 16 tokens" in text.text


WRONG_FIELDS = [
    ("pin_blocks", {}, "block_hashes"),
    ("pin_blocks", {"block_hashes": "1"}, "block_hashes"),
    ("pin_blocks", {"block_hashes": [2**63]}, "block_hashes.0"),
    ("pin_blocks", {"block_hashes": [1], "ttl_seconds": 0}, "ttl_seconds"),
    ("pin_blocks", {"block_hashes": [1.5]}, "block_hashes.0"),
    ("unpin_blocks", {"block_hashes": [None]}, "block_hashes.0"),
    ("pin_prefix", {}, "token_ids"),
    ("pin_prefix", {"token_ids": [1], "text": "a"}, "text"),
    ("pin_prefix", {"token_ids": [-1]}, "token_ids.0"),
    ("evict_descendants", {"block_hash": "x"}, "block_hash"),
    ("cache_tree", {"depth": 0}, "depth"),
    ("cache_tree", {"format": "xml"}, "format"),
    ("cache_tree", {"hashes": "hex"}, "hashes"),
]
REFUSALS = [
    ("pin_prefix", {"text": "hello"}, "tokenizer"),
    ("pin_prefix", {"token_ids": [256]}, "256"),
    ("cache_tree", {"under": 17}, "no cached block has the hash 17"),
    ("cache_tree", {"token_ids": []}, "empty"),
]


def test_a_wrong_field_is_a_400_that_names_it(client):
    for path, body, field in WRONG_FIELDS:
        answer = client.post(f"/hicache/{path}", json=body)
        assert (path, answer.status_code, answer.json()["param"]) == (path, 400, field)
    assert len(_hashes(client)) == 4


def test_what_the_engine_refuses_is_a_400_in_its_words(client):
    for path, body, says in REFUSALS:
        answer = client.post(f"/hicache/{path}", json=body)
        assert answer.status_code == 400 and says in answer.json()["message"]


def test_pins_change_nothing_by_get(client):
    for path in ("pin_blocks", "unpin_blocks", "pin_prefix", "evict_descendants"):
        assert client.get(f"/hicache/{path}").status_code == 405
