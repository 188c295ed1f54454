"""Cached paths of requests: what samples of one prompt share, and what is remembered, is what is found anew."""

from __future__ import annotations

import hashlib

import pytest

from lockstep.rollout.kv import prefix as prefix_module
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.kv.prefix import Prefix
from lockstep.rollout.media.images import Images
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

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
