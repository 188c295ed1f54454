"""The digests of SGLang's weights checker for the same bytes."""

import hashlib

import pytest
import torch

from lockstep.weight_sync.digests.sglang import (
    TILE_WORDS,
    Parallelism,
    per_engine_checksum,
    per_gpu_checksum,
    rank_record,
    tensor_digest,
)

# Results of SGLang 0.5.23's Triton kernel and of its CPU path.
VECTORS = {
    "four bytes": (torch.tensor([0, 1, 2, 3], dtype=torch.uint8), "d5c10aceba95ba56", "054edec1d0211f62"),
    "five bytes": (torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), "3185f1435efcaf8d", "74f81fe167d99b4c"),
    "zeros": (torch.zeros(8, dtype=torch.bfloat16), "9a177c3376896bdd", "374708fff7719dd5"),
    "ones": (torch.ones(3, 5, dtype=torch.bfloat16), "03e88cf28cef3f01", "ea6803ff3ff5d10d"),
    "a thousand floats": (torch.arange(1000, dtype=torch.float32), "cb747b9e358c891f", "55fa639ca9827820"),
    "three tiles": (torch.arange(20_000, dtype=torch.int32), "3fadc80e297acd67", "bc995f75a4732ad8"),
    "empty": (torch.empty(0), "0000000000000000", "e3b0c44298fc1c14"),
}


@pytest.mark.parametrize("which", VECTORS)
def test_both_kinds_reproduce_the_vectors(which):
    tensor, cuda, cpu = VECTORS[which]
    assert tensor_digest(tensor, "cuda") == cuda
    assert tensor_digest(tensor, "cpu") == tensor_digest(tensor) == cpu


def words_hash_by_the_definition(raw: bytes) -> int:
    """Compute the hash word by word, with Python's integers."""
    low32, low64 = 2**32 - 1, 2**64 - 1

    def rotl(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & low32

    def fmix32(value: int) -> int:
        value = (value ^ value >> 16) * 0x85EBCA6B & low32
        value = (value ^ value >> 13) * 0xC2B2AE35 & low32
        return value ^ value >> 16

    raw += bytes(-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    seed1 = 0x243F6A88
    seed2 = (seed1 * 0x9E3779B1 ^ 0xDEADBEEF) & low32
    total = 0
    for start in range(0, len(words), TILE_WORDS):
        tile = list(enumerate(words))[start : start + TILE_WORDS]
        sum1 = sum(fmix32(w ^ ((i * 0x27D4EB2D + seed1) & low32 ^ rotl(i, 15))) for i, w in tile)
        sum2 = sum(fmix32(w ^ ((i * 0x165667B1 + seed2) & low32 ^ rotl(i, 13))) for i, w in tile)
        size = 4 * len(words) & low32
        total += (fmix32(sum1 & low32 ^ size) << 32) + fmix32(sum2 & low32 ^ size)
    total &= low64
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & low64
    total = (total ^ total >> 27) * 0x94D049BB133111EB & low64
    return total ^ total >> 31


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4 * TILE_WORDS, 4 * TILE_WORDS + 1, 16 * 4 * TILE_WORDS + 39])
def test_the_word_hash_is_the_one_defined_also_across_its_chunks(num_bytes):
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert int(tensor_digest(raw, "cuda"), 16) == words_hash_by_the_definition(raw.numpy().tobytes())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_digests_do_not_depend_on_strides_or_on_where_a_view_starts(kind):
    tensor = torch.randint(0, 256, (40, 60), dtype=torch.uint8)
    assert tensor_digest(tensor.t(), kind) == tensor_digest(tensor.t().contiguous(), kind)
    flat = tensor.view(-1)
    for start in (1, 2, 3):
        assert tensor_digest(flat[start:], kind) == tensor_digest(flat[start:].clone(), kind)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_dtype_shape_and_name_are_not_hashed_but_every_bit_is(kind):
    tensor = torch.randint(-999, 999, (20, 30), dtype=torch.int16)
    same = tensor_digest(tensor.view(torch.bfloat16).view(600), kind)
    assert tensor_digest(tensor, kind) == same
    tensor[19, 29] ^= 1
    assert tensor_digest(tensor, kind) != same


def test_a_record_has_the_documented_fields_and_digests():
    weights = {"b": torch.ones(3, 5, dtype=torch.bfloat16), "a": torch.arange(1000.0), "x.inv_freq": torch.ones(2)}
    weights["tied"] = weights["b"]
    roles = (Parallelism(tp_rank=1, tp_size=2, rank=1, size=2), Parallelism(role="draft"))
    record = rank_record(weights.items(), roles, kind="cuda")
    assert record["checksums"] == {"b": "03e88cf28cef3f01", "a": "cb747b9e358c891f"}
    expected = hashlib.sha256(b"acb747b9e358c891fb03e88cf28cef3f01").hexdigest()
    assert record["per_gpu_checksum"] == per_gpu_checksum(record["checksums"]) == expected
    target, draft = record["parallelism_info"]
    assert target == {
        **{"role": "target", "tp_rank": 1, "tp_size": 2, "dp_rank": 0, "dp_size": 1},
        **{"pp_rank": 0, "pp_size": 1, "rank": 1, "size": 2},
    }
    assert draft["role"] == "draft"
    assert per_engine_checksum([expected, "00"]) == hashlib.sha256((expected + "00").encode()).hexdigest()
    on_cpu = rank_record(weights.items(), skip=["b"])["checksums"]
    assert on_cpu == {"a": "55fa639ca9827820", "tied": "ea6803ff3ff5d10d"}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match='"cpu" or "cuda", not \'rocm\''):
        tensor_digest(torch.zeros(1), "rocm")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("which", VECTORS)
def test_cuda_tensors_have_both_kinds_of_digest(which):
    tensor, cuda, cpu = VECTORS[which]
    assert tensor_digest(tensor.cuda()) == cuda
    assert tensor_digest(tensor.cuda(), "cpu") == cpu
