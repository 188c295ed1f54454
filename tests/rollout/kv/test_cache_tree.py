"""The report of the prefix cache: its blocks, their holders and pins, and the point where a prompt leaves it."""

from __future__ import annotations

import json

import pytest

from lockstep.rollout.kv.cache_tree import CacheTree, cache_tree
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.kv.prefix import Prefix
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

SIZE = 4


@pytest.fixture
def ledger() -> KVLedger:
    """Build a stem of two blocks with two branches, one pinned and one held, and a prompt of another key."""
    ledger = KVLedger(16, SIZE, True, pin_budget=0.5, clock=lambda: 0.0)
    put(ledger, words(1, 2, 3, 4))
    put(ledger, words(9, 9), key="k")
    run(ledger, [*words(1, 2, 5), 7])
    ledger.pins.pin([hash_of(words(1, 2, 3))], "router")
    ledger.pins.pin([hash_of(words(1, 2, 3))] * 2)
    return ledger


def words(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(SIZE)]


def hash_of(token_ids: list[int], key: str = "") -> int:
    """Return the hash of the last full block of a prompt."""
    return Prefix(token_ids, SIZE, key).hash(len(token_ids) // SIZE - 1)


def run(ledger: KVLedger, token_ids: list[int], key: str = "") -> Request:
    request = Request(Sequence("r", token_ids), SamplingParams(), RequestOptions(extra_key=key), 0, 0, 0.0, 0, None)
    ledger.open(request, ledger.match(request))
    assert ledger.grow(request, len(token_ids)) is not None
    ledger.publish(request, len(token_ids))
    return request


def put(ledger: KVLedger, token_ids: list[int], key: str = "") -> None:
    ledger.close(run(ledger, token_ids, key))


def look(ledger: KVLedger, prompt: list[int], key: str = "") -> CacheTree:
    return cache_tree(ledger, prompt=Prefix(prompt, SIZE, key), num_prompt_blocks=len(prompt) // SIZE)


def test_blocks_stand_after_their_parents_with_what_is_below_each_following_it(ledger):
    nodes = cache_tree(ledger).nodes
    assert [node.token_ids[0] for node in nodes] == [1, 2, 3, 4, 5, 9, 9]
    assert [node.depth for node in nodes] == [0, 1, 2, 3, 2, 0, 1]
    assert nodes[4].parent == nodes[1].hash and nodes[0].parent is None
    assert [node.hash for node in nodes[:4]] == [hash_of(words(*range(1, n))) for n in (2, 3, 4, 5)]
    assert nodes[6].hash == hash_of(words(9, 9), "k") and nodes[6].salt == "k"
    assert [node.num_tokens for node in nodes] == [SIZE] * 7
    assert [node.num_children for node in nodes] == [1, 2, 1, 0, 0, 1, 0]


def test_holders_pins_owners_and_hits_stand_beside_each_block(ledger):
    nodes = cache_tree(ledger).nodes
    assert [node.num_holders for node in nodes] == [1, 1, 0, 0, 1, 0, 0]
    assert [node.num_hits for node in nodes] == [1, 1, 0, 0, 0, 0, 0]
    assert [node.num_pins for node in nodes] == [0, 0, 3, 0, 0, 0, 0]
    assert nodes[2].owners == {"router": 1, "": 2} and nodes[0].owners == {}
    assert [node.is_protected for node in nodes] == [True, True, True, False, False, False, False]
    assert all(0 <= node.idle_s < 60 for node in nodes)


def test_totals_add_up_to_the_pool_and_are_those_of_the_blocks(ledger):
    tree = cache_tree(ledger)
    assert (tree.num_free, tree.num_cached, tree.num_held, tree.num_pinned) == (8, 3, 4, 1)
    assert tree.num_free + tree.num_cached + tree.num_held + tree.num_pinned == tree.num_blocks == 16
    assert tree.num_cached == sum(not node.num_holders and not node.is_protected for node in tree.nodes)
    assert tree.num_pinned == sum(not node.num_holders and node.is_protected for node in tree.nodes)
    assert (tree.num_protected, tree.pin_budget, tree.num_pins) == (3, 8, 1)
    assert (tree.num_looked_up_tokens, tree.num_hit_tokens) == (16 + 8 + 13, 8)
    assert (tree.epoch, tree.block_size, tree.eviction_pressure, tree.num_evicted) == (0, SIZE, 0.0, 0)


def test_eviction_pressure_rises_while_blocks_must_be_evicted_and_falls_afterwards(ledger):
    for number in range(20, 40):
        put(ledger, words(number, number))
    pressed = cache_tree(ledger)
    assert pressed.num_evicted > 30 and 0.5 < pressed.eviction_pressure <= 1
    ledger.flush()
    for number in range(2):
        put(ledger, words(50 + number))
    assert cache_tree(ledger).eviction_pressure < pressed.eviction_pressure


@pytest.mark.parametrize(("depth", "shown"), [(1, [1, 9]), (2, [1, 2, 9, 9]), (3, [1, 2, 3, 5, 9, 9]), (99, None)])
def test_depth_is_how_many_levels_are_shown(ledger, depth, shown):
    nodes = cache_tree(ledger, depth=depth).nodes
    assert [node.token_ids[0] for node in nodes] == (shown or [1, 2, 3, 4, 5, 9, 9])


def test_what_is_below_a_block_begins_with_itself(ledger):
    tree = cache_tree(ledger, under=hash_of(words(1, 2)))
    assert [node.token_ids[0] for node in tree.nodes] == [2, 3, 4, 5]
    tree = cache_tree(ledger, depth=2, under=hash_of(words(1, 2)))
    assert [node.token_ids[0] for node in tree.nodes] == [2, 3, 5]
    assert tree.num_blocks == 16  # totals are of the whole pool


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"under": 5}, "no cached block has the hash 5"),
        ({"depth": 0}, "depth must be at least 1, not 0"),
        ({"depth": True}, "not True"),
        ({"depth": 1.5}, "not 1.5"),
    ],
)
def test_what_cannot_be_shown_is_named(ledger, ask, message):
    with pytest.raises(ValueError, match=message):
        cache_tree(ledger, **ask)


@pytest.mark.parametrize(
    ("prompt", "matched", "at", "common"),
    [
        ([*words(1, 2, 3), 4, 4, 8, 8, 8], 3, 4, 14),  # two tokens of the block [4, 4, 4, 4]
        ([*words(1, 2), 5, 5, 5, 3], 2, 5, 11),  # nearer to [5, 5, 5, 5] than to [3, 3, 3, 3]
        ([*words(1, 2), 8, 3, 3, 3], 2, 3, 8),  # nothing in common: any block at that place
        ([8, 8, 8, 8], 0, 1, 0),
        (words(1, 2, 3, 4, 6), 4, None, 16),  # no block at that place
    ],
    ids=["late", "nearer", "nothing equal", "at once", "beyond"],
)
def test_a_prompt_is_followed_to_its_first_block_that_is_not_there(ledger, prompt, matched, at, common):
    found = look(ledger, prompt).divergence
    assert (found.num_blocks, found.num_matched, found.num_common_tokens) == (len(prompt) // SIZE, matched, common)
    assert found.hash == hash_of(prompt[: (matched + 1) * SIZE])
    nearest = ledger.cache.get(found.nearest) if found.nearest is not None else None
    assert (nearest and nearest.token_ids[0]) == at
    assert f"leaves the cache at block {matched}, hash {found.hash}" in look(ledger, prompt).text()


def test_a_prompt_that_is_cached_leaves_the_cache_nowhere(ledger):
    tree = look(ledger, [*words(1, 2, 3), 4, 4])
    assert tree.divergence.hash is tree.divergence.nearest is None
    assert (tree.divergence.num_matched, tree.divergence.num_common_tokens) == (3, 12)
    assert tree.text().endswith("the prompt of 3 full blocks is cached")
    assert cache_tree(ledger).divergence is None


def test_a_prompt_of_another_key_finds_only_what_has_its_key(ledger):
    assert look(ledger, words(1, 2)).divergence.num_matched == 2
    found = look(ledger, words(1, 2), "k").divergence
    assert (found.num_matched, found.nearest) == (0, hash_of(words(9), "k"))
    assert look(ledger, words(9), "other").divergence.nearest is None


def test_looking_changes_nothing_but_expired_pins():
    now = [0.0]
    ledger = KVLedger(8, SIZE, True, clock=lambda: now[0])
    put(ledger, words(1, 2))
    ledger.pins.pin([hash_of(words(1, 2))], ttl_s=5)
    before = [node.num_hits for node in cache_tree(ledger).nodes]
    assert look(ledger, words(1, 2, 3)).num_protected == 2
    assert [node.num_hits for node in cache_tree(ledger).nodes] == before
    now[0] = 5.0
    tree = cache_tree(ledger)
    assert (tree.num_protected, tree.num_pins, tree.num_expired_pins, tree.num_cached) == (0, 0, 1, 2)
    assert not any(node.is_protected for node in tree.nodes)


def test_a_tree_names_the_last_events_it_contains(ledger):
    batches = []
    ledger.events.attach(batches.append)
    put(ledger, words(30))
    ledger.pins.pin([hash_of(words(30))])
    tree = cache_tree(ledger)  # publishes the recorded events, so that the report and the events agree
    assert [(batch.topic, batch.seq) for batch in batches] == [("kv", tree.event_seq), ("pins", tree.pin_event_seq)]
    put(ledger, words(31))
    assert cache_tree(ledger).event_seq == tree.event_seq + 1 == batches[-1].seq


def test_a_tree_travels_as_json(ledger):
    tree = look(ledger, words(1, 2, 7))
    values = json.loads(json.dumps(tree.as_dict()))
    assert values["num_blocks"] == 16 and values["divergence"]["num_matched"] == 2
    assert values["nodes"][2]["hash"] == hash_of(words(1, 2, 3))
    assert values["nodes"][2]["owners"] == {"router": 1, "": 2}
    assert [node["token_ids"] for node in values["nodes"][:2]] == [words(1), words(2)]


def test_text_is_an_indented_tree_with_runs_of_blocks_in_one_line(ledger):
    put(ledger, words(1, 2, 3, 4, 6, 7))
    totals, stem, pinned, tail, *rest = cache_tree(ledger).text(max_tokens_shown=2).splitlines()
    assert totals == (
        "epoch 0: 16 blocks of 4 tokens: 6 free, 5 cached, 4 held, 1 pinned; 3 of at most 8 protected; "
        "eviction pressure 0.00"
    )
    a, b, c = (hash_of(words(*range(1, n))) for n in (2, 3, 4))
    assert stem.startswith(f"  {a} .. {b}: 2 blocks, 8 tokens [1 1 ...], held by 1, protected from below, 2 hits, idle")
    assert pinned.startswith(f"    {c}: 1 block, 4 tokens [3 3 ...], pinned by router x1, (nobody) x2, 1 hits, idle ")
    assert tail.startswith(f"      {hash_of(words(1, 2, 3, 4))}: 1 block") and rest[0].startswith("        ")
    held = f"    {hash_of(words(1, 2, 5))}: 1 block, 4 tokens [5 5 ...], held by 1, 0 hits, idle "
    assert any(line.startswith(held) for line in rest)
    first, last = hash_of(words(9), "k"), hash_of(words(9, 9), "k")
    assert rest[-1].startswith(f"  {first} .. {last}: 2 blocks, 8 tokens [9 9 ...], 0 hits, idle ")


def test_an_empty_cache_is_one_line():
    assert cache_tree(KVLedger(4, SIZE, True)).text() == (
        "epoch 0: 4 blocks of 4 tokens: 4 free, 0 cached, 0 held, 0 pinned; 0 of at most 2 protected; "
        "eviction pressure 0.00"
    )
