"""Buckets: every byte of every tensor is sent exactly once, aligned, for all dtypes and shapes."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.weight_sync.digests.checker import byte_chunks
from lockstep.weight_sync.digests.model_digest import tensor_leaves
from lockstep.weight_sync.layout.bucket import ALIGNMENT, byte_view, plan_buckets, word_view
from lockstep.weight_sync.layout.flat_bytes import FlatBytes
from lockstep.weight_sync.manifest import TensorSpec, specs_of


def constructible_dtypes() -> list[torch.dtype]:
    """Return every dtype of this torch except the quantized ones, which carry scales beside their bytes."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((d for d in dtypes if not str(d).startswith(("torch.q", "torch.quint"))), key=str)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Build a tensor of any dtype from random bytes."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


SPECS = st.lists(
    st.tuples(
        st.sampled_from(constructible_dtypes()),
        st.one_of(st.just(()), st.tuples(st.integers(0, 300)), st.tuples(st.integers(0, 40), st.integers(0, 40))),
    ),
    max_size=12,
).map(lambda pairs: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)])


@given(SPECS, st.integers(ALIGNMENT, 4096))
@settings(max_examples=300, deadline=None)
def test_every_byte_is_in_exactly_one_piece_and_every_piece_is_aligned_and_fits(specs, bucket_bytes):
    plans = plan_buckets(specs, bucket_bytes)
    pieces = [(plan, piece) for plan in plans for piece in plan.pieces]
    order = list(dict.fromkeys(piece.name for _, piece in pieces))
    assert order == [spec.name for spec in specs]
    for spec in specs:
        mine = [piece for _, piece in pieces if piece.name == spec.name]
        assert mine[0].tensor_offset == 0
        ends = [piece.tensor_offset + piece.num_bytes for piece in mine]
        assert [piece.tensor_offset for piece in mine[1:]] == ends[:-1]
        assert ends[-1] == spec.num_bytes
        assert all(piece.num_bytes > 0 for piece in mine) or spec.num_bytes == 0
    for index, plan in enumerate(plans):
        assert plan.index == index and plan.num_bytes <= bucket_bytes
        end = 0
        for piece in plan.pieces:
            assert piece.bucket_offset % ALIGNMENT == piece.tensor_offset % ALIGNMENT == 0
            assert end <= piece.bucket_offset < end + ALIGNMENT
            end = piece.bucket_offset + piece.num_bytes
        assert plan.num_bytes == end


@given(SPECS, st.integers(ALIGNMENT, 4096))
@settings(max_examples=100, deadline=None)
def test_a_tensor_that_fits_into_a_bucket_is_not_cut(specs, bucket_bytes):
    cut = [p.name for plan in plan_buckets(specs, bucket_bytes) for p in plan.pieces if p.tensor_offset]
    fits = bucket_bytes // ALIGNMENT * ALIGNMENT
    assert all(spec.num_bytes > fits for spec in specs if spec.name in cut)


def test_small_tensors_share_a_bucket_and_a_large_one_spans_several():
    specs = specs_of([("a", torch.zeros(3)), ("b", torch.zeros(())), ("big", torch.zeros(100)), ("c", torch.zeros(1))])
    plans = plan_buckets(specs, 256)
    assert [plan.names for plan in plans] == [("a", "b", "big"), ("big",), ("big", "c")]
    assert [piece.num_bytes for plan in plans for piece in plan.pieces if piece.name == "big"] == [128, 256, 16]


def test_no_tensors_make_no_buckets_and_an_empty_tensor_makes_a_piece():
    assert plan_buckets([]) == ()
    (plan,) = plan_buckets([TensorSpec("none", torch.float32, (0, 4))])
    assert plan.num_bytes == 0 and plan.names == ("none",)


def test_a_bucket_below_the_alignment_is_refused():
    with pytest.raises(ValueError, match="at least 64, not 63"):
        plan_buckets([], 63)


@pytest.mark.parametrize("dtype", constructible_dtypes(), ids=str)
def test_the_bytes_of_every_dtype_are_those_in_memory(dtype):
    for shape in ((), (0,), (7,), (3, 5)):
        tensor = tensor_of(dtype, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some dtypes experimental
            view = byte_view(tensor)
        assert view.dtype == torch.uint8 and view.shape == (tensor.nbytes,)
        assert tensor.numel() == 0 or view.data_ptr() == tensor.data_ptr()
    turned = tensor_of(dtype, (3, 5)).t()
    one_by_one = [byte_view(turned[i, j]) for i in range(5) for j in range(3)]
    assert torch.equal(byte_view(turned), torch.cat(one_by_one))


def thin(dtype: torch.dtype) -> list[torch.Tensor]:
    """Make tensors of at most one element whose strides a slice has left as they were."""
    whole = tensor_of(dtype, (3, 5))
    return [whole.t()[:1, :1], whole[:, 2][:1], whole[0, ::2][:0], whole[:1, :1].squeeze(0)[:1].expand(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=str)
def test_a_tensor_of_one_element_has_its_bytes_whatever_its_strides(dtype):
    for tensor in thin(dtype):
        plain = torch.tensor(tensor.tolist(), dtype=dtype)
        assert torch.equal(byte_view(tensor), byte_view(plain))
        assert [chunk.tolist() for chunk in byte_chunks(tensor)] == [chunk.tolist() for chunk in byte_chunks(plain)]
        assert tensor_leaves(tensor) == tensor_leaves(plain.view(tensor.shape))
        if tensor.numel():
            assert byte_view(tensor).data_ptr() == tensor.data_ptr()
            FlatBytes(tensor).write(0, byte_view(torch.ones(1, dtype=dtype)))
            assert tensor.flatten().tolist() == [1]


def test_lazy_conjugation_and_negation_are_in_the_bytes():
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert torch.equal(byte_view(values.conj()), byte_view(torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64)))
    assert torch.equal(byte_view(values.conj().imag), byte_view(torch.tensor([-2.0, 4.0])))


def test_a_parameter_gives_a_view_without_a_gradient():
    parameter = torch.nn.Parameter(torch.zeros(4))
    view = byte_view(parameter)
    view.fill_(0xFF)
    assert not view.requires_grad and parameter.isnan().all()
    assert word_view(parameter.detach()).tolist() == [-1] * 4
