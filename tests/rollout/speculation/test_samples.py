"""Earlier tokens that drafts come from: places in texts, siblings and histories by prompt, in a bounded store."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest

from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.speculation.caller import CallersDraft
from lockstep.rollout.speculation.history_file import read_histories, write_histories
from lockstep.rollout.speculation.own_past import OwnPast
from lockstep.rollout.speculation.samples import MAX_SAMPLES, History, Samples, Siblings
from lockstep.rollout.speculation.token_history import LENGTHS, NUM_PLACES, TokenHistory, token_bytes


def a_request(prompt: list[int], output: list[int] = (), **options: object) -> Request:
    request = Request(Sequence("r", prompt), SamplingParams(), RequestOptions(**options), 0, 0, 0.0, 0, None)
    request.sequence.token_ids += output
    return request


def naive_places(tokens: list[int], ending: list[int], most: int) -> tuple[int, list[bytes]]:
    for length in LENGTHS:
        if length > len(ending):
            continue
        ends = (n for n in range(len(tokens) - 1, length - 1, -1) if tokens[n - length : n] == ending[-length:])
        if found := [token_bytes(tokens[end : end + most]) for end in ends]:
            return length, found[:NUM_PLACES]
    return 0, []


@pytest.mark.parametrize("ids", [(0, 1), (0, 256, 65536, 1), (255, 0xFFFF, 0xFFFFFF), tuple(range(9))])
def test_places_are_those_of_a_naive_search(ids):
    dice = random.Random(len(ids))
    for _ in range(300):
        tokens = [dice.choice(ids) for _ in range(dice.randrange(40))]
        ending = [dice.choice(ids) for _ in range(dice.randrange(15))]
        most = dice.randrange(1, 9)
        history = TokenHistory(tokens)
        assert history.places(TokenHistory(ending).last(LENGTHS[0]), most) == naive_places(tokens, ending[-12:], most)
        assert history.places(history.last(LENGTHS[0]), most) == naive_places(tokens, tokens[-12:], most)


def test_a_place_at_the_end_does_not_hide_one_that_goes_on():
    ending = TokenHistory([1, 2, 3]).last(12)
    assert TokenHistory([1, 2, 3, 9, 1, 2, 3]).places(ending, 2) == (3, [token_bytes([9, 1])])


def test_histories_grow_are_cut_and_count_their_bytes():
    history = TokenHistory([1, 2])
    history.extend([3, 4, 5])
    history.cut(4)
    assert len(history) == 4
    assert history.last(2) == TokenHistory([3, 4]).last(2) and history.last(99) == history.last(4)


def test_the_past_follows_its_sequence_also_where_a_jump_takes_tokens_back():
    past, request = OwnPast(), a_request([1, 2, 3, 1, 2])
    assert past.propose(request, 2).token_ids == [3, 1]
    request.sequence.token_ids += [3, 7]
    assert len(past.history(request)) == 7
    request.sequence.token_ids += [8, 9, 4, 5]  # of which the past was not asked
    del request.sequence.token_ids[6:]  # more than it knows behind its end
    past.on_tokens(request, 5)
    request.sequence.token_ids += [6, 1, 2]
    assert past.propose(request, 3).token_ids == [3, 6, 1]
    assert past.history(request).last(99) == TokenHistory(request.sequence.token_ids).last(99)
    past.on_tokens(request, 10**6)
    assert past.history(request).last(99) == TokenHistory(request.sequence.token_ids).last(99)
    past.on_end(request)
    past.on_end(request)
    assert not past._histories


def test_the_callers_draft_is_followed_left_and_found_again():
    source, request = CallersDraft(), a_request([5], [], draft_token_ids=(1, 2, 3, 4, 5, 6, 7))
    assert tuple(source.propose(request, 3).token_ids) == (1, 2, 3)
    request.sequence.token_ids += [1, 2]
    assert tuple(source.propose(request, 9).token_ids) == (3, 4, 5, 6, 7)
    request.sequence.token_ids += [9]
    assert not source.propose(request, 9).token_ids
    request.sequence.token_ids += [4, 5]
    assert tuple(source.propose(request, 1).token_ids) == (6,)
    request.sequence.token_ids += [6, 7]
    assert not source.propose(request, 9).token_ids
    source.on_end(request)
    assert not source._num_equal and not source._given
    assert not source.propose(a_request([5]), 3).token_ids


class Store:
    """A store of samples with its two sources."""

    def __init__(self, max_bytes: int = 10**6) -> None:
        self.past = OwnPast()
        self.samples = Samples(self.past, max_bytes)
        self.siblings, self.history = Siblings(self.samples), History(self.samples)

    def end(self, request: Request, output: list[int] = ()) -> None:
        request.sequence.token_ids += output
        self.siblings.on_end(request)
        self.past.on_end(request)

    def sample(self, prompt: list[int], output: list[int], **options: object) -> None:
        request = a_request(prompt, **options)
        self.samples.live(request)
        self.end(request, output)

    def check(self) -> None:
        kept = self.samples._prompts.values()
        assert self.samples.num_bytes == sum(prompt.num_bytes for prompt in kept) <= self.samples.max_bytes
        assert all(prompt.live or prompt.ended or prompt.history for prompt in kept)


def test_siblings_become_history_when_the_last_of_them_has_ended():
    store, prompt = Store(), [1, 2, 3]
    first, second = a_request(prompt), a_request(prompt)
    assert not store.siblings.propose(first, 4).token_ids and not store.siblings.propose(second, 4).token_ids
    first.sequence.token_ids += [7, 8, 9]
    assert store.siblings.propose(second, 4).token_ids == [7, 8, 9]  # from a live one
    store.end(first)
    assert store.siblings.propose(second, 4).token_ids == [7, 8, 9]  # from an ended one
    assert not store.history.propose(second, 4).token_ids
    store.end(second, [7, 6])
    later = a_request(prompt)
    assert not store.siblings.propose(later, 4).token_ids
    assert store.history.propose(later, 4).token_ids == [7, 6]  # the newest
    later.sequence.token_ids += [7, 8]
    assert store.history.propose(later, 4).token_ids == [9]  # the longest match
    store.check()


def test_samples_of_another_key_or_prompt_are_never_seen():
    store = Store()
    store.sample([1, 2, 3], [7, 8], extra_key="a")
    for other in (a_request([1, 2, 3]), a_request([1, 2, 3], extra_key="b"), a_request([0, 1, 2, 3], extra_key="a")):
        assert not store.history.propose(other, 4).token_ids and not store.siblings.propose(other, 4).token_ids
    assert store.history.propose(a_request([1, 2, 3], extra_key="a"), 4).token_ids == [7, 8]


def test_the_least_recently_used_prompts_make_room_in_bytes():
    store = Store(max_bytes=60_000)
    for number in range(500):
        store.sample([number, 1, 2], list(range(number % 50)))
        if number > 100:  # used, so that it stays
            assert store.history.propose(a_request([100, 1, 2], [0, 1, 2]), 2).token_ids == ()
        store.check()
    assert 10 < len(store.samples) < 400


def test_few_tokens_of_many_prompts_do_not_take_more_memory_than_is_allowed():
    """Objects of samples take memory besides their tokens: it counts too."""
    store = Store(max_bytes=400_000)
    tracemalloc.start()
    try:
        for number in range(3000):
            store.sample([number], [5])
        store.check()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100 < len(store.samples) < 1000
    assert 0.4 * store.samples.max_bytes < num_bytes < store.samples.max_bytes


def test_a_prompt_whose_requests_never_all_end_keeps_a_bounded_number():
    store, lasting = Store(max_bytes=200_000), a_request([1, 2])
    store.samples.live(lasting)
    for number in range(3 * MAX_SAMPLES):
        store.sample([1, 2], [number, 5, 6])
        store.check()
    assert len(store.samples.live(lasting).ended) == MAX_SAMPLES
    small, lasting = Store(max_bytes=2_000), a_request([1, 2])
    small.samples.live(lasting)
    for number in range(3 * MAX_SAMPLES):
        small.sample([1, 2], list(range(number)))
        small.check()
    assert len(small.samples) == 1  # the live one
    small.end(lasting)
    small.check()


def test_nothing_is_kept_where_nothing_may_be():
    store = Store(max_bytes=0)
    one, two = a_request([1, 2]), a_request([1, 2])
    store.samples.live(one)
    two.sequence.token_ids += [5, 6]
    assert not store.siblings.propose(two, 4).token_ids and store.siblings.propose(one, 4).token_ids == [5, 6]
    store.end(two)
    store.end(one)
    assert len(store.samples) == store.samples.num_bytes == 0


def test_what_was_saved_is_known_after_a_load(tmp_path):
    store, path = Store(), tmp_path / "samples.json"
    store.sample([1, 2, 3], [7, 8, 9])
    store.sample([1, 2, 3], [7, 5], extra_key="key")
    store.sample([4], list(range(100)))
    write_histories(path, store.samples.histories())
    assert [p.name for p in tmp_path.iterdir()] == ["samples.json"]
    other = Store()
    other.sample([1, 2, 3], [7, 8, 4])
    other.samples.add_histories(read_histories(path, 1000, other.samples.max_bytes))
    other.check()
    assert other.history.propose(a_request([1, 2, 3]), 9).token_ids == [7, 8, 4]  # newer than the file's
    assert other.history.propose(a_request([1, 2, 3], [7, 8, 9, 6]), 9).token_ids == ()
    assert other.history.propose(a_request([1, 2, 3], extra_key="key"), 9).token_ids == [7, 5]
    assert other.history.propose(a_request([4], [50, 51]), 2).token_ids == [52, 53]
    small = Store(max_bytes=1500)
    small.samples.add_histories(read_histories(path, 1000, small.samples.max_bytes))
    small.check()
    assert 0 < len(small.samples) < 3


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    store, path = Store(), tmp_path / "samples.json"
    store.sample([1, 2], [3])
    write_histories(path, store.samples.histories())
    before = json.loads(path.read_text())
    store.sample([1, 2], [4])
    with pytest.raises(OSError, match="gone"):
        write_histories(tmp_path / "gone" / "samples.json", store.samples.histories())
    assert json.loads(path.read_text()) == before and len(list(tmp_path.iterdir())) == 1
