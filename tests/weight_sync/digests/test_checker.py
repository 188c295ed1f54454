"""The weights checker: digests that cover names and bytes, and comparisons that name every change."""

import hashlib
import struct

import pytest
import torch

from lockstep.weight_sync.digests.checker import (
    byte_chunks,
    checksum,
    compare,
    reset_tensors,
    snapshot,
    tensor_sha256,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
]


def small_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed.weight": torch.randn(50, 16, generator=generator).bfloat16(),
        "norm.weight": torch.randn(16, generator=generator),
        "scale": torch.tensor(2.5),
        "step": torch.arange(4),
        "empty": torch.empty(0, 3),
    }


def test_a_tensors_digest_has_the_documented_bytes():
    weight = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    fields = [b"w", b"int16", struct.pack("<2Q", 2, 3), struct.pack("<6h", *range(6))]
    expected = hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()
    assert tensor_sha256("w", weight) == expected
    report = checksum([("w", weight)])
    assert report.tensors == {"w": expected.hex()}
    assert report.rank_digest == hashlib.sha256(expected).hexdigest()


def test_the_rank_digest_covers_the_sorted_tensor_digests():
    model = small_model()
    report = checksum(model.items())
    joined = b"".join(tensor_sha256(name, model[name]) for name in sorted(model))
    assert report.rank_digest == hashlib.sha256(joined).hexdigest()
    assert report.num_bytes == sum(t.numel() * t.element_size() for t in model.values()) and report.seconds > 0
    for num_threads in (1, 3):
        again = checksum(reversed(model.items()), num_threads)
        assert again.rank_digest == report.rank_digest and again.tensors == report.tensors


def test_name_dtype_shape_and_every_byte_count():
    weight = torch.zeros(4, 6, dtype=torch.int16)
    changed = weight.clone()
    changed[3, 5] = 1
    digests = {
        tensor_sha256("w", weight),
        tensor_sha256("v", weight),
        tensor_sha256("w", weight.view(torch.bfloat16)),
        tensor_sha256("w", weight.view(6, 4)),
        tensor_sha256("w", changed),
    }
    assert len(digests) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_summed_reset_snapshot_and_compared(dtype):
    tensors = {"w": torch.zeros(7, 9).to(dtype), "scalar": torch.zeros(()).to(dtype)}
    taken, before = snapshot(tensors.items()), checksum(tensors.items())
    assert compare(tensors.items(), taken).is_equal
    assert reset_tensors(tensors.items(), seed=5) == ("w", "scalar")
    assert checksum(tensors.items()).tensors["w"] != before.tensors["w"]
    changed = next(difference for difference in compare(tensors.items(), taken).changed if difference.name == "w")
    values = tensors["w"].to(torch.complex128 if dtype.is_complex else torch.float64)
    assert changed.max_abs_err == values.abs().max().item()
    assert changed.mean_abs_err == pytest.approx(values.abs().mean().item())
    assert changed.num_differing == int((values != 0).sum())


def test_strided_tensors_are_read_in_row_major_order():
    whole = torch.randn(6, 40, 30)
    for view in (whole.transpose(0, 2), whole[:, ::3], whole[2].t(), whole[1, 2].expand(5, 30), whole[:, :, 7]):
        assert tensor_sha256("w", view) == tensor_sha256("w", view.contiguous())
        for chunk_bytes in (64, 512, 8192):
            chunks = list(byte_chunks(view, chunk_bytes))
            assert max(map(len, chunks)) <= chunk_bytes
            assert torch.equal(torch.cat(chunks), view.contiguous().view(-1).view(torch.uint8))


def test_contiguous_tensors_are_read_where_they_lie():
    tensor = torch.randn(100, 10)
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert all(start <= chunk.data_ptr() < stop for chunk in byte_chunks(tensor, 1024))


def test_compare_names_what_is_matched_missing_unexpected_and_changed():
    model = small_model()
    taken = snapshot(model.items())
    del model["scale"]
    model["extra"] = torch.ones(2)
    model["norm.weight"][[2, 5]] += torch.tensor([0.5, 2.0])
    model["step"] = model["step"].view(2, 2)
    report = compare(model.items(), taken)
    assert not report.is_equal
    assert (report.matched, report.missing, report.unexpected) == (("embed.weight", "empty"), ("scale",), ("extra",))
    norm, step = report.changed
    assert (norm.name, norm.num_differing) == ("norm.weight", 2)
    assert norm.max_abs_err == pytest.approx(2.0, abs=1e-6)
    assert norm.mean_abs_err == pytest.approx(2.5 / 16, abs=1e-6)
    assert (step.name, step.expected, step.actual, step.num_differing) == ("step", "int64[4]", "int64[2, 2]", 4)


def test_compare_is_about_bytes_so_equal_nans_match_and_signed_zeros_do_not():
    values = torch.tensor([float("nan"), 0.0, float("inf"), 1.0])
    taken = snapshot([("w", values)])
    assert compare([("w", values)], taken).is_equal
    values[1] = -0.0
    (difference,) = compare([("w", values)], taken).changed
    assert (difference.num_differing, difference.max_abs_err) == (1, 0.0)
    values[3] = float("nan")
    (difference,) = compare([("w", values)], taken).changed
    assert (difference.num_differing, difference.max_abs_err) == (2, float("inf"))


def test_a_snapshot_does_not_follow_the_tensors():
    model = small_model()
    taken = snapshot(model.items())
    model["norm.weight"].zero_()
    assert not compare(model.items(), taken).is_equal
    model["norm.weight"].copy_(taken["norm.weight"])
    assert compare(model.items(), taken).is_equal


def test_reset_is_in_place_seeded_and_in_the_documented_ranges():
    tensors = {
        "half": torch.full((4000,), 7, dtype=torch.bfloat16),
        "fp8": torch.full((4000,), 7.0).to(torch.float8_e4m3fn),
        "int": torch.zeros(4000, dtype=torch.int16),
        "coin": torch.zeros(4000, dtype=torch.bool),
        "strided": torch.zeros(60, 50).t(),
    }
    addresses = [t.data_ptr() for t in tensors.values()]
    reset_tensors(tensors.items(), seed=1)
    first = checksum(tensors.items()).tensors
    assert [t.data_ptr() for t in tensors.values()] == addresses
    for name in ("half", "fp8", "strided"):
        values = tensors[name].float()
        assert 0 <= values.min() < 0.1 and 0.85 < values.max() < 1, name
    assert tensors["int"].min() < -30_000 and tensors["int"].max() > 30_000
    assert 0.4 < tensors["coin"].float().mean() < 0.6
    reset_tensors(tensors.items(), seed=1)
    assert checksum(tensors.items()).tensors == first
    reset_tensors(tensors.items(), seed=2)
    assert not set(checksum(tensors.items()).tensors.values()) & set(first.values())
    reset_tensors(tensors.items())
    assert not set(checksum(tensors.items()).tensors.values()) & set(first.values())


def test_derived_tables_marked_tensors_and_named_parts_are_skipped_everywhere():
    model = {"a.weight": torch.zeros(3), "rotary.inv_freq": torch.zeros(3), "b.weight": torch.zeros(3)}
    model["b.weight"]._skip_weight_check = True
    model["c.bias"] = torch.zeros(3)
    assert list(checksum(model.items(), skip=["bias"]).tensors) == ["a.weight"]
    assert list(snapshot(model.items())) == ["a.weight", "c.bias"]
    assert reset_tensors(model.items(), seed=0, skip=["c."]) == ("a.weight",)
    assert all(not model[name].any() for name in ("rotary.inv_freq", "b.weight", "c.bias"))
    report = compare(model.items(), {"c.bias": torch.ones(3), "a.weight": model["a.weight"]}, skip=["bias"])
    assert report.is_equal and report.matched == ("a.weight",)


def test_tied_tensors_count_once_under_their_first_name():
    head = torch.nn.Parameter(torch.randn(5, 4))
    tied = [("embed.weight", head), ("lm_head.weight", head), ("alias", head.detach()), ("part", head[:2])]
    assert list(checksum(tied).tensors) == ["embed.weight", "part"]
    empties = [("a", torch.empty(0)), ("b", torch.empty(0))]
    assert list(checksum(empties).tensors) == ["a", "b"]


def test_names_that_come_twice_are_all_listed():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="more than once: a, b"):
        checksum([("b", zero), ("a", zero), ("a", zero), ("b", zero), ("c", zero)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_have_the_digests_of_their_cpu_copies():
    model = {name: tensor.cuda() for name, tensor in small_model().items()}
    model["big"] = torch.randn(5000, 2000, device="cuda").t()
    taken = snapshot(model.items())
    assert checksum(model.items()).tensors == checksum(taken.items()).tensors
    assert compare(model.items(), taken).is_equal
    reset_tensors(model.items(), seed=1)
    assert {difference.name for difference in compare(model.items(), taken).changed} == set(model) - {"empty"}
