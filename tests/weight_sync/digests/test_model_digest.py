"""The model digest: a tree whose leaves are equal for every layout of one model."""

import hashlib
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels.sha256.tiles import is_native, tile_hashes_of_all, tile_hashes_reference
from lockstep.weight_sync.digests.model_digest import (
    MAX_TILE_ELEMENTS,
    merge_leaves,
    model_digest,
    model_root,
    shard_leaves,
    tensor_leaves,
    tensor_root,
    tensor_roots,
    tile_grid,
)

SHAPES = [
    (),
    (1,),
    (7,),
    (48,),
    (64, 48),
    (3, 5),
    (4, 32, 16),
    (2, 3, 16, 8),
    (50, 33_000),
    (400, 1024),
    (16, 600_000),
]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def leaves_by_the_definition(tensor: torch.Tensor) -> list[bytes]:
    """Compute leaves loop by loop, with only slicing and hashlib."""
    shape = (1, 1, *tensor.shape)[-max(2, tensor.dim()) :]
    flat = tensor.reshape(-1, *shape[-2:])
    rows, cols = shape[-2] // math.gcd(shape[-2], 16), shape[-1] // math.gcd(shape[-1], 16)
    leaves = []
    for entry in flat:
        for i in range(0, shape[-2], rows):
            for j in range(0, shape[-1], cols):
                cell = entry[i : i + rows, j : j + cols]
                step = max(1, MAX_TILE_ELEMENTS // cols)
                for k in range(0, rows, step):
                    strip = cell[k : k + step].reshape(-1)
                    for piece in strip.split(MAX_TILE_ELEMENTS):
                        raw = piece.contiguous().view(torch.uint8).numpy().tobytes()
                        leaves.append(hashlib.sha256(raw).digest())
    return leaves


@pytest.mark.parametrize("shape", SHAPES)
def test_leaves_are_the_tiles_of_the_definition(shape):
    tensor = random_bytes(shape, torch.float32)
    assert tensor_leaves(tensor) == leaves_by_the_definition(tensor)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tile_is_larger_than_the_bound(shape):
    grid = tile_grid(shape)
    assert min(grid.strip_rows, grid.rows) * grid.piece_cols <= MAX_TILE_ELEMENTS


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (48, 32)])
def test_every_dtype_is_hashed_by_its_bytes(shape, dtype):
    tensor = random_bytes(shape, dtype)
    assert tensor_leaves(tensor) == leaves_by_the_definition(tensor)


def test_model_digest_has_the_documented_bytes():
    weight, scale = torch.arange(6, dtype=torch.int16).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16)

    def field(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    # [2, 3]: two rows of one cell each, because 16 and 3 share no factor.
    rows = [hashlib.sha256(struct.pack("<3h", *row)).digest() for row in ((0, 1, 2), (3, 4, 5))]
    header = field(b"w") + field(b"int16") + field(struct.pack("<2Q", 2, 3))
    weight_root = hashlib.sha256(header + struct.pack("<Q", 2) + b"".join(rows)).digest()
    header = field(b"s") + field(b"bfloat16") + field(b"")
    scale_root = hashlib.sha256(header + struct.pack("<Q", 1) + hashlib.sha256(b"\xc0\x3f").digest()).digest()
    expected = hashlib.sha256(struct.pack("<Q", 2) + scale_root + weight_root).hexdigest()
    assert model_digest([("w", weight), ("s", scale)]) == expected


def test_empty_tensors_count_by_name_and_shape():
    empty = model_digest([("a", torch.empty(0, 4))])
    assert tensor_leaves(torch.empty(0, 4)) == []
    assert len({empty, model_digest([("a", torch.empty(4, 0))]), model_digest([("b", torch.empty(0, 4))])}) == 3
    assert len({empty, model_digest([])}) == 2


def test_strides_do_not_count_only_values_do():
    tensor = random_bytes((48, 64), torch.bfloat16)
    assert tensor_leaves(tensor.t().contiguous().t()) == tensor_leaves(tensor)
    assert tensor_leaves(torch.nn.Parameter(tensor)) == tensor_leaves(tensor)


@pytest.mark.parametrize("ways", [2, 4, 8, 16])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(64, 48), (320, 1024), (16, 32)])
def test_shards_along_rows_or_columns_merge_to_the_whole(shape, dim, ways):
    tensor = random_bytes(shape, torch.bfloat16)
    parts = []
    for rank, shard in enumerate(tensor.chunk(ways, dim)):
        offsets = [0, 0]
        offsets[dim] = rank * shape[dim] // ways
        parts.append(shard_leaves(shard, shape, offsets))
    assert sum(map(len, parts)) == tile_grid(shape).num_tiles
    assert merge_leaves(shape, parts) == tensor_leaves(tensor)


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    ways=st.tuples(*[st.sampled_from([1, 2, 4, 8, 16])] * 2),
    rest=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cut_lead=st.booleans(),
)
def test_two_dimensional_shards_of_experts_merge_to_the_whole(lead, ways, rest, cut_lead):
    shape = (*lead, ways[0] * rest[0], ways[1] * rest[1])
    tensor = random_bytes(shape, torch.int16)
    parts = []
    for i in range(ways[0]):
        for j in range(ways[1]):
            shard = tensor[..., i * rest[0] : (i + 1) * rest[0], j * rest[1] : (j + 1) * rest[1]]
            for k in range(lead[0] if lead and cut_lead else 1):
                piece = shard[k : k + 1] if lead and cut_lead else shard
                offsets = (*[0] * len(lead), i * rest[0], j * rest[1])
                offsets = (k, *offsets[1:]) if lead and cut_lead else offsets
                parts.append(shard_leaves(piece, shape, offsets))
    assert merge_leaves(shape, parts) == tensor_leaves(tensor)


def test_vector_and_scalar_shards():
    vector = random_bytes((96,), torch.float32)
    parts = [shard_leaves(part, (96,), (24 * k,)) for k, part in enumerate(vector.chunk(4))]
    assert merge_leaves((96,), parts) == tensor_leaves(vector)
    scalar = torch.tensor(3.0)
    assert merge_leaves((), [shard_leaves(scalar, (), ())] * 2) == tensor_leaves(scalar)


def test_shard_that_cuts_a_cell_is_refused_by_dimension():
    with pytest.raises(ValueError, match=r"dim 0.*multiples of 4; dim 1.*multiples of 3"):
        shard_leaves(torch.zeros(6, 4), (64, 48), (2, 0))
    with pytest.raises(ValueError, match="dim 0"):
        shard_leaves(torch.zeros(32, 48), (64, 48), (48, 0))
    with pytest.raises(ValueError, match="rank"):
        shard_leaves(torch.zeros(6), (64, 48), (0, 0))


def test_merge_names_missing_unknown_and_differing_tiles():
    leaves = dict(enumerate(tensor_leaves(torch.zeros(16))))
    del leaves[3]
    with pytest.raises(ValueError, match=r"missing tiles 3; unknown tiles 16; differing tiles 5"):
        merge_leaves((16,), [leaves, {16: b"", 5: b"other"}])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_flipped_bit_changes_exactly_one_leaf(data):
    shape = data.draw(st.sampled_from([(7,), (64, 48), (2, 16, 24), (400, 64)]))
    tensor = random_bytes(shape, torch.bfloat16)
    before, digest = tensor_leaves(tensor), model_digest([("w", tensor)])
    raw = tensor.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sum(a != b for a, b in zip(before, tensor_leaves(tensor), strict=True)) == 1
    assert model_digest([("w", tensor)]) != digest


def test_name_dtype_and_shape_count_and_order_does_not():
    a, b = random_bytes((16, 16), torch.int16), random_bytes((32,), torch.float32, seed=1)
    digests = [
        model_digest([("a", a), ("b", b)]),
        model_digest([("a", a), ("c", b)]),
        model_digest([("b", a), ("a", b)]),
        model_digest([("a", a.view(torch.float16)), ("b", b)]),
        model_digest([("a", a), ("b", b.view(1, 32))]),
        model_digest([("a", a)]),
    ]
    assert len(set(digests)) == len(digests)
    assert model_digest([("b", b), ("a", a)]) == digests[0]


def test_digest_does_not_depend_on_the_number_of_threads():
    tensors = [(f"t{i}", random_bytes((512, 256 * (i + 1)), torch.bfloat16, i)) for i in range(9)]
    tensors.append(("big", random_bytes((1024, 4096), torch.float32)))  # several blocks, hashed by different threads
    assert len({model_digest(tensors, num_threads) for num_threads in (1, 2, 5, None)}) == 1


def test_roots_from_exchanged_leaves_give_the_model_digest():
    tensors = {"a": random_bytes((32, 32), torch.float32), "b": random_bytes((5,), torch.float32)}
    roots = [(name, tensor_root(name, t.dtype, t.shape, tensor_leaves(t))) for name, t in tensors.items()]
    assert model_root(reversed(roots)) == model_digest(tensors.items())


def test_tensor_roots_are_the_roots_of_the_leaves_in_the_order_of_the_tensors():
    tensors = {name: random_bytes(shape, torch.bfloat16) for name, shape in zip("zbq", SHAPES[3:6], strict=True)}
    tensors["empty"] = torch.empty(3, 0)
    expected = {name: tensor_root(name, t.dtype, t.shape, tensor_leaves(t)) for name, t in tensors.items()}
    for num_threads in (1, 3):
        roots = tensor_roots(tensors.items(), num_threads)
        assert roots == expected and list(roots) == list(tensors)
    assert model_root(roots.items()) == model_digest(tensors.items())
    with pytest.raises(ValueError, match="more than once: z"):
        tensor_roots([("z", tensors["z"]), ("b", tensors["b"]), ("z", tensors["z"])])


def test_tensors_of_any_strides_have_the_digest_of_their_contiguous_copies():
    whole = random_bytes((32, 48, 80), torch.float16)
    views = {
        "transposed": whole[0].t(),
        "every other column": whole[0][:, ::2],
        "every other row": whole[0][::2],
        "leading dimensions swapped": whole.transpose(0, 1),
        "all reversed": whole.permute(2, 1, 0),
        "expanded": whole[0, 0].expand(64, 80),
        "column": whole[0, :, 3],
        "conjugate": torch.view_as_complex(torch.randn(16, 6, 2)).conj(),
    }
    for name, view in views.items():
        assert tensor_leaves(view) == tensor_leaves(view.resolve_conj().clone().contiguous()), name


@pytest.mark.skipif(not is_native(), reason="needs a C++ compiler")
@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(1, 90)),
    strip_rows=st.integers(1, 8),
    piece=st.integers(1, 90),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    is_strided=st.booleans(),
)
def test_native_tile_hashes_equal_hashlib(shape, strip_rows, piece, dtype, is_strided):
    block = random_bytes((*shape[:3], shape[3] + 3), dtype)[..., : shape[3]]
    block = block.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) if is_strided else block
    cut = (1, min(piece, shape[3])) if piece % 2 else (strip_rows, shape[3])
    assert tile_hashes_of_all([(block, *cut)]) == [tile_hashes_reference(block, *cut)]


@pytest.mark.skipif(not is_native(), reason="needs a C++ compiler")
def test_tiles_of_many_sizes_hashed_together_keep_their_digests_and_their_order():
    widths = [1, 3000, 55, 56, 64, 200, 1, 4096, 119, 120]
    blocks = [(random_bytes((2, rows, 2, width), torch.uint8), 1, width) for rows in (1, 5) for width in widths]
    blocks.insert(3, (torch.empty(0, 4, 1, 8), 4, 8))
    assert tile_hashes_of_all(blocks) == [tile_hashes_reference(*block) for block in blocks]


def test_every_message_length_is_padded_as_sha256_demands():
    raw = random_bytes((200,), torch.uint8)
    for size in range(1, 200):
        found = tile_hashes_of_all([(raw[:size].view(1, 1, 1, size), 1, size)])
        assert found == [hashlib.sha256(raw[:size].numpy()).digest()]


def test_duplicate_names_and_wrong_leaf_counts_are_refused():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="more than once: a, b"):
        model_digest([("b", zero), ("a", zero), ("c", zero), ("a", zero), ("b", zero)])
    with pytest.raises(ValueError, match=r"w: .* 16 tiles, not 0"):
        tensor_root("w", torch.float32, (16,), [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_have_the_leaves_of_their_cpu_copies():
    tensor = random_bytes((1024, 4096), torch.bfloat16)
    assert tensor_leaves(tensor.cuda()) == tensor_leaves(tensor)
    assert tensor_leaves(tensor.cuda().t()) == tensor_leaves(tensor.t())
