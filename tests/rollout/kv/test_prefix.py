"""The names of blocks: chained, reproducible, distinct by salt; each block is hashed once however the tokens grow."""

from __future__ import annotations

import hashlib
import random

import pytest

from lockstep.rollout.kv import prefix as prefix_module
from lockstep.rollout.kv.prefix import Prefix, block_hash, root_hash, token_bytes, token_list

SIZE = 4


def hashes(prefix: Prefix, num_blocks: int) -> list[int]:
    return [prefix.hash(index) for index in range(num_blocks)]


def test_names_are_what_they_were_when_caches_were_last_shared():
    """Keep these numbers fixed: a change breaks the wire, and routers and engines would no longer mean the same
    block."""
    assert root_hash() == 2549633117408344349
    assert hashes(Prefix([1, 2, 3, 4, 5, 6, 7, 8], SIZE, "tenant"), 2) == [
        4289092039614710792,
        3635749035701080918,
    ]


def test_hash_of_a_prefix_is_that_of_its_blocks_one_after_the_other():
    prefix = Prefix(list(range(11)), SIZE, "salt")
    first = block_hash(root_hash("salt"), token_bytes([0, 1, 2, 3]))
    assert hashes(prefix, 2) == [first, block_hash(first, token_bytes([4, 5, 6, 7]))]
    assert [token_list(prefix.tokens(index)) for index in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_each_block_depends_on_all_before_it_and_on_the_salt():
    tokens = list(range(40))
    plain, salted = hashes(Prefix(tokens, SIZE), 10), hashes(Prefix(tokens, SIZE, "a"), 10)
    assert set(plain).isdisjoint(salted)
    for changed in range(40):
        other = hashes(Prefix([*tokens[:changed], 99, *tokens[changed + 1 :]], SIZE), 10)
        assert [a == b for a, b in zip(plain, other, strict=True)] == [i < changed // SIZE for i in range(10)]


def test_a_salt_that_looks_like_another_with_tokens_does_not_meet_it():
    seen = {hash for salt in ("", "a", "aa", "\0", "a\0", "ä") for hash in hashes(Prefix([1] * 8, SIZE, salt), 2)}
    assert len(seen) == 12


@pytest.mark.parametrize("seed", range(10))
def test_tokens_that_come_bit_by_bit_get_the_same_hashes_as_all_at_once(seed):
    dice = random.Random(seed)
    tokens = [dice.randrange(2**31) for _ in range(200)]
    growing: list[int] = []
    prefix = Prefix(growing, SIZE)
    for token in tokens:
        growing.append(token)
        if dice.random() < 0.2 and len(growing) >= SIZE:
            prefix.hash(dice.randrange(len(growing) // SIZE))
    whole = Prefix(tokens, SIZE)
    assert hashes(prefix, 50) == hashes(whole, 50)
    assert b"".join(map(prefix.tokens, range(50))) == token_bytes(tokens)
    assert all(-(2**63) <= hash < 2**63 for hash in hashes(whole, 50))


def test_every_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(prefix_module, "hashlib", _Counting(calls))
    tokens = list(range(12))
    prefix = Prefix(tokens, SIZE)
    for _ in range(3):
        hashes(prefix, 3)
    tokens += [1] * 8
    prefix.tokens(4)
    assert [len(data) for data in calls if len(data) == 8 + 4 * SIZE] == [24] * 5


class _Counting:
    """A hashlib that counts its calls."""

    def __init__(self, calls: list[bytes]) -> None:
        self._calls = calls

    def blake2b(self, data: bytes, **settings: int):
        self._calls.append(data)
        return hashlib.blake2b(data, **settings)


def test_only_full_blocks_have_a_name():
    with pytest.raises(AssertionError, match="only full blocks"):
        Prefix([1] * 7, SIZE).hash(1)
