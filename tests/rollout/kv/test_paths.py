"""Cached paths of requests: what samples of one prompt share, and what is remembered, is what is found anew."""

from __future__ import annotations

import hashlib
import random

import pytest

from lockstep.rollout.kv import prefix as prefix_module
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.kv.paths import CachedPaths
from lockstep.rollout.kv.prefix import Prefix
from lockstep.rollout.kv.radix_cache import Node, RadixCache
from lockstep.rollout.media.images import Images
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.admission import _num_evictable
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.states.slots import SlotLedger

SIZE = 4
PROMPT = list(range(400, 500))  # 25 blocks


def a_request(
    prompt: list[int], key: str = "", output: list[int] | None = None, images: Images | None = None
) -> Request:
    request = Request(
        Sequence("r", prompt), SamplingParams(), RequestOptions(extra_key=key), 0, 0, 0.0, 0, None, images=images
    )
    request.sequence.token_ids += output or []
    return request


def hashes(ledger: KVLedger, request: Request) -> list[int]:
    return [ledger.hash_of_block(request, index) for index in range(request.sequence.num_tokens // SIZE)]


def expected(request: Request) -> list[int]:
    prefix = Prefix(request.sequence.token_ids, SIZE, request.options.extra_key)
    return [prefix.hash(index) for index in range(request.sequence.num_tokens // SIZE)]


class CountingHashlib:
    """A hashlib that counts the blocks that are hashed."""

    num_blocks = 0

    def blake2b(self, data: bytes, **settings: int):
        self.num_blocks += len(data) == 8 + 4 * SIZE
        return hashlib.blake2b(data, **settings)


@pytest.fixture
def counted(monkeypatch):
    counting = CountingHashlib()
    monkeypatch.setattr(prefix_module, "hashlib", counting)
    return counting


# -- the hashes of a prompt ------------------------------------------------------------------------


def test_the_prompt_of_many_samples_is_hashed_once(counted):
    ledger = KVLedger(64, SIZE, True)
    scheduler = Scheduler(ledger, StepLimits(32, 200, 200, 200))
    samples = [a_request(PROMPT) for _ in range(32)]
    for sample in samples:
        scheduler.add(sample)
    assert len(scheduler.schedule().scheduled) == 1  # the others wait for its blocks
    assert counted.num_blocks == 25
    assert all(hashes(ledger, sample) == expected(samples[0]) for sample in samples)


def test_a_sample_begins_with_the_hashes_of_the_prompt_and_not_with_those_of_anothers_output(counted):
    ledger = KVLedger(64, SIZE, True)
    first = a_request(PROMPT[:10], output=[1] * 20)
    hashes(ledger, first)
    counted.num_blocks = 0
    second = a_request(PROMPT[:10], output=[2] * 20)
    assert hashes(ledger, second) == (known := expected(second)) and counted.num_blocks == (5 + 7)
    assert known[:2] == hashes(ledger, first)[:2] and known[2] != hashes(ledger, first)[2]


def test_a_prompt_stays_known_while_its_newest_request_lives(counted):
    ledger = KVLedger(64, SIZE, True)
    first, second, third = (a_request(PROMPT) for _ in range(3))
    hashes(ledger, first), hashes(ledger, second)
    ledger.forget(first)
    assert hashes(ledger, third) == hashes(ledger, second) and counted.num_blocks == 25
    ledger.forget(second)
    ledger.forget(third)
    hashes(ledger, a_request(PROMPT))
    assert counted.num_blocks == 50
    assert len(ledger.paths._prefixes) == len(ledger.paths._newest) == 1


def test_prompts_that_differ_in_one_token_share_nothing():
    ledger, seen = KVLedger(64, SIZE, True), set()
    for at in range(len(PROMPT)):
        other = a_request([*PROMPT[:at], 7, *PROMPT[at + 1 :]])
        assert hashes(ledger, other) == expected(other)
        seen.add(hashes(ledger, other)[-1])
    assert len(seen) == len(PROMPT)


def test_a_key_of_the_cache_and_other_images_separate_equal_prompts():
    ledger = KVLedger(64, SIZE, True)
    red, blue = (Images((), (), (), name, (), block_keys={SIZE: {0: name}}) for name in ("red", "blue"))
    requests = [a_request(PROMPT, key, images=images) for key in ("", "k") for images in (None, red, blue, red)]
    found = [tuple(hashes(ledger, request)) for request in requests]
    assert len(set(found)) == 6 and found[1] == found[3] and found[5] == found[7]


def test_hashes_that_the_other_has_cut_are_made_anew():
    ledger = KVLedger(64, SIZE, True)
    first, second = a_request(PROMPT), a_request(PROMPT)
    hashes(ledger, first)
    ledger.paths.cut(first, 3)
    assert hashes(ledger, second) == expected(second)


# -- the path of a request that waits --------------------------------------------------------------


def found_anew(ledger: KVLedger, request: Request) -> list[Node]:
    """Return the cached path of a request as a ledger finds it that has never looked for it."""
    return CachedPaths(ledger.cache, SIZE, True, ledger.states).match(request)


class CountingCache(RadixCache):
    """A tree that counts the lookups of nodes."""

    num_looks = 0

    def get(self, hash: int) -> Node | None:
        self.num_looks += 1
        return super().get(hash)

    def find(self, *block: object) -> Node | None:
        self.num_looks += 1
        return super().find(*block)


def test_a_request_that_does_not_fit_is_not_matched_anew_in_each_step():
    ledger = KVLedger(40, SIZE, True)
    ledger.cache = ledger.paths._cache = ledger.pins._cache = cache = CountingCache(SIZE, ledger.events)
    first = a_request(PROMPT)
    ledger.open(first, [])
    assert ledger.grow(first, len(PROMPT)) is not None
    ledger.publish(first, len(PROMPT))
    scheduler = Scheduler(ledger, StepLimits(4, 200, 200, 200))
    runs, waits = a_request([1] * 20), a_request([*PROMPT, *range(60)])
    scheduler.add(runs)
    assert len(scheduler.schedule().scheduled) == 1
    scheduler.add(waits)
    num_looks = []
    for _ in range(3):
        cache.num_looks = 0
        scheduler.schedule()
        num_looks.append(cache.num_looks)
    assert num_looks[0] > 25 and max(num_looks[1:]) <= 2
    assert scheduler.waiting() == [waits] and len(ledger.match(waits)) == 25


def test_tokens_that_were_taken_back_are_not_matched_any_more():
    ledger = KVLedger(40, SIZE, True)
    first = a_request(PROMPT[:8], output=[1] * 9)
    for num_matched in (0, 4):  # the second time with the path that was found while it waited
        nodes = ledger.match(first)
        assert len(nodes) == num_matched
        ledger.open(first, nodes)
        assert ledger.grow(first, 17) is not None
        ledger.publish(first, 17)
        if num_matched == 0:
            ledger.close(first)
    assert ledger.roll_back(first, 10) == 8
    first.sequence.token_ids[10:] = [2] * 7
    ledger.close(first)
    assert len(ledger.match(first)) == 2 == len(found_anew(ledger, first))


class Walk:
    """A random life of requests with common beginnings on a small pool. All paths are as if found anew."""

    def __init__(self, seed: int, has_states: bool) -> None:
        self.chance = random.Random(seed)
        states = SlotLedger(8, 3) if has_states else None
        self.ledger = KVLedger(20, SIZE, True, pin_budget=0.3, states=states)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_found = 0

    def tokens(self, num: int) -> list[int]:
        return [self.chance.randrange(2) for _ in range(num)]

    def arrive(self) -> None:
        common = [[5] * 12, [6] * 17, [5] * 8 + [7] * 9][self.chance.randrange(3)]
        self.waiting.append(a_request(common + self.tokens(self.chance.randrange(4))))

    def admit(self) -> None:
        if not self.waiting or len(self.running) == 4:
            return
        request = self.waiting[0]
        nodes = self.ledger.match(request)
        if self.ledger.num_blocks_for(request.sequence.num_tokens) > self.ledger.num_available - len(nodes):
            return
        self.ledger.open(request, nodes)
        assert self.ledger.grow(request, request.sequence.num_tokens) is not None
        self.ledger.plan_states(request, len(nodes) * SIZE, request.sequence.num_tokens)
        self.running.append(self.waiting.pop(0))

    def decode(self) -> None:
        for request in self.running:
            num_tokens = request.sequence.num_tokens
            self.ledger.publish(request, num_tokens)
            request.sequence.token_ids += self.tokens(1)
            if self.ledger.grow(request, num_tokens + 1) is None:
                request.sequence.token_ids.pop()
            else:
                self.ledger.plan_states(request, num_tokens, num_tokens + 1)

    def roll_back(self) -> None:
        for request in self.running[:1]:
            num_tokens = self.chance.randrange(request.sequence.num_prompt_tokens - 1, request.sequence.num_tokens)
            if self.ledger.states is None:
                self.ledger.roll_back(request, num_tokens)
                kept = request.sequence.token_ids[: max(num_tokens, request.sequence.num_prompt_tokens)]
                request.sequence.token_ids[:] = kept + self.tokens(2)
                self.retract(request)

    def retract(self, request: Request | None = None) -> None:
        if self.running:
            request = request or self.chance.choice(self.running)
            self.running.remove(request)
            self.ledger.close(request)
            self.waiting.append(request)

    def end(self) -> None:
        if self.running:
            self.retract()
            self.ledger.forget(self.waiting.pop())

    def pin(self) -> None:
        self.ledger.pins.pin([self.chance.choice([0, *(node.hash for node in self.ledger.cache)])])

    def unpin(self) -> None:
        self.ledger.pins.drop_all("test")

    def evict(self) -> None:
        nodes = list(self.ledger.cache)
        if nodes:
            self.ledger.evict_below(self.chance.choice(nodes))

    def flush(self) -> None:
        if self.chance.random() < 0.3:
            self.ledger.flush()

    def commit(self) -> None:
        if self.chance.random() < 0.3:
            self.ledger.start_epoch()

    def check(self) -> None:
        for request in self.waiting:
            if self.chance.random() < 0.7:  # others are looked for later, after more changes
                nodes = self.ledger.match(request)
                assert [*map(id, nodes)] == [*map(id, found_anew(self.ledger, request))]
                assert _num_evictable(nodes) == sum(node.is_free_to_go for node in nodes)
                self.num_found += len(nodes)
        self.ledger.check()


@pytest.mark.parametrize("has_states", [False, True])
def test_remembered_paths_are_those_that_are_found_anew_whatever_happens(has_states):
    num_found = 0
    for seed in range(12):
        walk = Walk(seed, has_states)
        deeds = [walk.arrive, walk.admit, walk.admit, walk.decode, walk.decode, walk.decode, walk.roll_back,
                 walk.retract, walk.end, walk.pin, walk.unpin, walk.evict, walk.flush, walk.commit]  # fmt: skip
        for _ in range(150):
            walk.chance.choice(deeds)()
            walk.check()
        num_found += walk.num_found
    assert num_found > 1000
