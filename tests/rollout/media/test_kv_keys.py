"""Keys of blocks with images: equal where the KV follows from equal things, whatever comes behind, else different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.rollout.media.images import Images
from lockstep.rollout.media.kv_keys import block_keys

SIZE = 4


def images(
    digests: Sequence[str], tokens: Sequence[Sequence[int]], positions: Any = None, offset: int = 0, **more: Any
) -> Images:
    """Return images of these digests, with the tokens of each; positions: of a rotary with two parts."""
    ends = [sum(map(len, tokens[: index + 1])) for index in range(len(tokens))]
    flat = [token for own in tokens for token in own]
    rotary = None if positions is None else torch.tensor(positions, dtype=torch.int64)
    inputs: list[dict[str, torch.Tensor]] = [{} for _ in digests]
    return Images(inputs, flat, ends, "all", digests, rotary, offset, **more)


def test_a_block_has_a_key_where_its_own_tokens_are_of_images():
    keys = block_keys(images(["a", "b"], [[5, 6], [7, 8, 9]]), SIZE)
    assert sorted(keys) == [1, 2]
    assert keys[1] != keys[2] and all(len(key) == 64 for key in keys.values())


def test_images_behind_a_block_do_not_change_its_key():
    one, two = (block_keys(images(d, t), SIZE) for d, t in (("a", [[1, 2]]), ("ab", [[1, 2], [9, 10, 11, 12]])))
    assert one == {0: two[0]} and sorted(two) == [0, 2, 3]


@pytest.mark.parametrize(
    "other",
    [
        images("b", [[2, 3, 4, 5]]),
        images("a", [[1, 2, 3, 4, 5]]),
        images("aa", [[2, 3], [4, 5]]),
        images("ab", [[2, 3, 4], [5]]),
        images("a", [[2, 3, 4, 5]], [[0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]], -2),
        images("a", [[2, 3, 4, 5]], blocks=[(2, 6)], block_tokens=["t"]),
    ],
    ids=["another image", "more tokens", "two images", "other cuts", "positions", "both ways"],
)
def test_other_images_positions_or_blocks_give_another_key(other):
    keys, others = block_keys(images("a", [[2, 3, 4, 5]]), SIZE), block_keys(other, SIZE)
    assert any(keys.get(number) != others.get(number) for number in (0, 1))


def test_the_rest_of_an_image_is_told_by_the_features_of_each_block():
    early, late = block_keys(images("a", [[0, 1, 2, 3, 4, 5]]), SIZE), block_keys(images("a", [[2, 3, 4, 5]]), SIZE)
    assert early[1] != late[1], "the rows take other features"


def test_positions_of_a_block_are_told_as_steps_also_of_the_first_token_behind_the_prompt():
    prompt = images("a", [[1, 2]], [[0, 1, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]], -1)
    apart = images("a", [[1, 2]], [[0, 1, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]], 3)
    assert sorted(block_keys(prompt, SIZE)) == [0, 1], "the second part goes back behind the prompt"
    assert block_keys(prompt, SIZE)[0] == block_keys(apart, SIZE)[0]
    assert block_keys(prompt, SIZE)[1] != block_keys(apart, SIZE)[1]
    longer = images("a", [[1, 2]], [[0, 1, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 5, 6, 7]], -1)
    assert block_keys(longer, SIZE) == block_keys(prompt, SIZE), "a next turn of text has the keys of this one"


def test_tokens_that_see_each_other_are_told_in_each_block_that_has_some_of_them():
    two = images("ab", [[2, 3, 4], [5, 6, 9]], blocks=[(2, 7)], block_tokens=["t"])
    for other in (
        images("ac", [[2, 3, 4], [5, 6, 9]], blocks=[(2, 7)], block_tokens=["t"]),
        images("ab", [[2, 3, 4], [5, 6, 9]], blocks=[(2, 7)], block_tokens=["u"]),
        images("ab", [[2, 3, 4], [5, 6, 9]], blocks=[(2, 6)], block_tokens=["t"]),
    ):
        assert block_keys(two, SIZE)[0] != block_keys(other, SIZE)[0]
    behind = replace(two, tokens=[2, 3, 4, 5, 6, 10], block_keys={})
    assert block_keys(two, SIZE)[0] == block_keys(behind, SIZE)[0]


def test_keys_are_made_once_a_size():
    one = images("a", [[1, 2]])
    assert block_keys(one, SIZE) is block_keys(one, SIZE) and sorted(block_keys(one, 1)) == [1, 2]
