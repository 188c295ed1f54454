"""Operations of an encoder of images: convolutions over patches as products, and attention within an image."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function

from lockstep.kernels.linear.linear import invariant_linear
from lockstep.rollout.model.encoders.vision import patch_convolution, whole_attention
from lockstep.rollout.model.operations.functions import invariant_functions
from lockstep.rollout.model.operations.packed_rows import hosted_mask


class Attention(nn.Module):
    """A stand-in for the attention of an encoder."""

    is_causal = False


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


@pytest.mark.parametrize(
    ("own", "x", "weight", "options"),
    [
        (F.conv2d, (3, 3, 32, 24), (16, 3, 8, 8), {"stride": (8, 8)}),
        (F.conv2d, (1, 3, 37, 29), (16, 3, 8, 8), {"stride": 8, "padding": "valid"}),  # with pixels that fill no patch
        (F.conv2d, (2, 3, 32, 24), (16, 3, 8, 4), {"stride": (8, 4), "padding": (0, 0)}),
        (F.conv3d, (7, 3, 2, 14, 14), (16, 3, 2, 14, 14), {"stride": (2, 14, 14)}),
        (F.conv3d, (2, 3, 4, 8, 12), (16, 3, 2, 4, 4), {"stride": [2, 4, 4]}),
        (F.conv2d, (2, 3, 16, 16), (16, 3, 3, 3), {"padding": 1}),  # windows that overlap are torch's own
        (F.conv2d, (2, 4, 16, 16), (4, 2, 4, 4), {"stride": 4, "groups": 2}),
    ],
)
def test_convolution_is_torchs(own, x, weight, options):
    pixels, kernel, bias = noise(*x), noise(*weight), noise(weight[0])
    found = patch_convolution(F.linear, own)(pixels, kernel, bias, **options)
    expected = own(pixels, kernel, bias, **options)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("channels", "window", "options"),
    [(3, 8, {"stride": 8}), (64, 3, {"padding": 1}), (64, 1, {}), (3, 3, {"stride": 2})],
)
def test_an_image_has_the_same_bits_beside_others(channels, window, options):
    convolution = patch_convolution(partial(invariant_linear, method="rows"), F.conv2d)
    pixels, kernel, bias = noise(9, channels, 32, 32), noise(16, channels, window, window), noise(16)
    together = convolution(pixels, kernel, bias, **options)
    for index in range(9):
        one = slice(index, index + 1)
        assert torch.equal(together[one], convolution(pixels[one], kernel, bias, **options))


def test_an_image_whose_channels_are_side_by_side_has_the_same_bits_beside_others():
    convolution = patch_convolution(partial(invariant_linear, method="rows"), F.conv2d)
    rows, kernel = noise(5, 16, 64), noise(128, 64, 3, 3)  # of patches, as a transformer has them
    together = convolution(rows.transpose(1, 2).unflatten(2, (4, 4)), kernel, stride=2, padding=1)
    for index in range(5):
        one = rows[index : index + 1].clone().transpose(1, 2).unflatten(2, (4, 4))
        assert torch.equal(together[index : index + 1], convolution(one, kernel, stride=2, padding=1))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_that_separates_images_is_attention_within_each(kind):
    sizes = [3, 8, 1, 5]
    query, key, value = noise(1, 4, 17, 16), noise(1, 2, 17, 16), noise(1, 2, 17, 16)
    seen = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool()[None, None]
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    found, _ = whole_attention(Attention(), query, key, value, mask, 0.25)
    alone = [
        whole_attention(Attention(), q, k, v, None, 0.25)[0]
        for q, k, v in zip(*(t.split(sizes, 2) for t in (query, key, value)), strict=True)
    ]
    assert torch.equal(found, torch.cat(alone, 1))
    expected = F.scaled_dot_product_attention(query, key, value, seen, scale=0.25, enable_gqa=True)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(17, 17).tril().bool()[None, None],
        torch.block_diag(torch.ones(9, 9), torch.ones(8, 8)).bool().roll(1, 1)[None, None],
        torch.arange(17)[None, None, None, :9] < 5,
        torch.zeros(1, 1, 1, 0),
    ],
    ids=["causal", "odd", "of fewer keys", "packed rows"],
)
def test_any_other_mask_is_refused_by_name(mask):
    rows = [noise(1, 4, 17, 16)] * 3
    with pytest.raises(ValueError, match="Attention of an encoder of images has a mask that neither separates images"):
        whole_attention(Attention(), *rows, mask, None)


@pytest.mark.parametrize("real", [[0, 1, 2, 3, 4, 5], [2, 3, 4, 8]], ids=["behind", "around"])
@pytest.mark.parametrize("kind", ["keys", "rows", "float"])
def test_what_pads_an_image_is_left_out_of_its_attention_with_the_bits_of_the_image_alone(real, kind):
    query, key, value = noise(2, 4, 9, 16), noise(2, 2, 9, 16), noise(2, 2, 9, 16)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1] = False
    mask[1, ..., real] = True
    mask = mask if kind == "keys" else mask.expand(2, 1, 9, 9)
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if kind == "float" else mask
    found, _ = whole_attention(Attention(), query, key, value, given, 0.25)
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.25, enable_gqa=True)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
    whole, _ = whole_attention(Attention(), query[:1], key[:1], value[:1], None, 0.25)
    assert torch.equal(found[:1], whole)
    rows = (t[1:, :, real].contiguous() for t in (query, key, value))
    assert torch.equal(found[1:, real], whole_attention(Attention(), *rows, None, 0.25)[0])


@pytest.mark.parametrize("mask", ["none", "padding", "of each head", "of all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_multi_head_attention_has_the_same_bits_for_an_image_beside_others(dtype, mask):
    attention = nn.MultiheadAttention(96, 4, batch_first=True).to(dtype)
    queries, keys = noise(5, 3, 96).to(dtype), noise(5, 16, 96).to(dtype)
    options: dict[str, Tensor] = {}
    if mask == "padding":
        options["key_padding_mask"] = torch.arange(16) > torch.arange(10, 15)[:, None]
    elif mask != "none":
        options["attn_mask"] = noise(20, 3, 16) > 1 if mask == "of each head" else noise(3, 16) > 1
    plain = attention(queries, keys, keys, **options)
    with invariant_functions(lambda x, weight, bias=None: invariant_linear(x, weight, bias, method="rows")):
        found = attention(queries, keys, keys, **options)
        for index in range(5):
            own = {name: m.chunk(5)[index] if len(m) % 5 == 0 else m for name, m in options.items()}
            one = slice(index, index + 1)
            out, weights = attention(queries[one], keys[one], keys[one], **own)
            assert torch.equal(out, found[0][one]) and torch.equal(weights, found[1][one])
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert all(torch.allclose(mine, its, atol=tolerance) for mine, its in zip(found, plain, strict=True))


@pytest.mark.parametrize("told", [True, None])
def test_a_causal_attention_of_an_encoder_sees_the_rows_before_and_its_own_block(told):
    rows = [noise(3, 4, 9, 16), noise(3, 2, 9, 16), noise(3, 2, 9, 16)]
    module = Attention()
    if told is None:
        module.is_causal = True
    for none in (None, torch.zeros(1, 1, 1, 1)):
        found, _ = whole_attention(module, *rows, none, 0.25, told)
        expected = F.scaled_dot_product_attention(*rows, is_causal=True, scale=0.25, enable_gqa=True)
        assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
    ids = torch.tensor([[0, 0, 0, 0, -1, -1, -1, -1, -1], [-1] * 9, [-1, 0, 0, 1, 1, 1, -1, -1, -1]])
    found, _ = whole_attention(module, *rows, ids[:, None, None], 0.25, told)
    seen = torch.ones(9, 9, dtype=torch.bool).tril() | ((ids[:, None] == ids[:, :, None]) & (ids[:, None] >= 0))
    expected = F.scaled_dot_product_attention(*rows, seen[:, None], scale=0.25, enable_gqa=True)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
    alone, _ = whole_attention(module, *(t[1:2] for t in rows), ids[1:2, None, None], 0.25, told)
    assert torch.equal(found[1:2], alone)


def test_rows_that_attend_to_others_see_those_that_are_no_padding():
    query, key, value = noise(1, 4, 5, 16), noise(1, 4, 12, 16), noise(1, 4, 12, 16)
    mask = torch.arange(12)[None, None, None] < 10
    found, _ = whole_attention(Attention(), query, key, value, mask, None)
    alone, _ = whole_attention(Attention(), query, key[:, :, :10], value[:, :, :10], None, None)
    assert torch.equal(found, alone)
    nothing, _ = whole_attention(Attention(), query, key, value, mask & False, None)
    assert not nothing.any()


def test_padding_inside_an_image_reaches_its_attention_and_none_does_not():
    mask = torch.ones(2, 9, dtype=torch.bool)
    assert hosted_mask(attention_mask=mask, mask_function=bidirectional_mask_function) is None
    mask[1, 6:] = False
    made = hosted_mask(attention_mask=mask, mask_function=bidirectional_mask_function)
    assert made is not None and torch.equal(made[:, 0, 0], mask)
