"""Deltas are lossless for every dtype and density, and harmless when applied twice, to the wrong base, or in part."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.tests.support.covering import covering
from lockstep.weight_sync.delta.apply import Check, apply_delta, prepare, write
from lockstep.weight_sync.delta.chunk import (
    DeltaChunk,
    DeltaStats,
    decode_elements,
    make_payload,
    parse_header,
    sha256,
    squeeze,
    stats_by_tensor,
)
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import (
    DATA_FILE,
    DELTA_MANIFEST_FILE,
    DeltaManifest,
    load_delta,
    pack_chunks,
    save_delta,
    unpack_chunks,
)
from lockstep.weight_sync.digests.model_digest import model_digest, model_root, tensor_leaves, tensor_root
from lockstep.weight_sync.disk.safetensors_file import DTYPE_CODES
from lockstep.weight_sync.errors import DigestMismatch, TransferFailed
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction

torch.set_num_threads(1)

DTYPES = [*DTYPE_CODES.values(), torch.complex32, torch.complex128, torch.float4_e2m1fn_x2]
CHECKS = ["touched", "pre", "pre+post"]
Tensors = dict[str, Tensor]


def apply_chunk(chunk: DeltaChunk, sink: Sink, check: Check) -> None:
    write(prepare(chunk, sink, check), sink, check)


def inverse(chunk: DeltaChunk) -> DeltaChunk:
    """Return the chunk that undoes this one. Not for a full chunk, which does not contain the old bytes."""
    header = chunk.header
    touched = header.touched and (header.touched[1], header.touched[0])
    return DeltaChunk(replace(header, pre=header.post, post=header.pre, touched=touched), chunk.payload)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Make a tensor of any bit patterns, NaNs and negative zeros included."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype)
    byte_view(tensor).random_(0, 2 if dtype == torch.bool else 256, generator=generator)
    return tensor


def changed(tensor: Tensor, density: float, seed: int = 1) -> Tensor:
    """Return a copy in which about this share of the elements has one bit flipped."""
    generator = torch.Generator().manual_seed(seed)
    raw = byte_view(tensor.clone()).view(-1, tensor.itemsize).clone()
    rows = torch.rand(raw.shape[0], generator=generator) < density
    raw[rows, 0] ^= 1
    return raw.view(-1).view(tensor.dtype).view(tensor.shape)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(byte_view(a[n]), byte_view(b[n])) for n in a)


def sink_over(resident: Tensors) -> WeightTransaction:
    return WeightTransaction(resident.items(), coverage="partial")


@pytest.fixture(scope="module")
def states() -> tuple[Tensors, Tensors]:
    """Return two states of a model whose delta has all kinds of chunks, many of them with 256-byte chunks."""
    base = {
        "sparse": random_tensor(torch.bfloat16, (40, 32)),
        "dense": random_tensor(torch.float32, (15, 7)),
        "frozen": random_tensor(torch.float16, (300,)),
        "lowest bits": random_tensor(torch.int64, (512,)),
        "scalar": random_tensor(torch.float64, ()),
        "empty": random_tensor(torch.float32, (0, 3)),
    }
    new = copied(base)
    new["sparse"] = changed(base["sparse"], 0.05)
    new["dense"] = changed(base["dense"], 1.0)
    new["lowest bits"] = base["lowest bits"] ^ 1
    new["scalar"] = changed(base["scalar"], 1.0)
    return base, new


def encode(states: tuple[Tensors, Tensors], **options) -> list[DeltaChunk]:
    base, new = states
    # "lowest bits" changes every element and would be sent in full below this density.
    return list(encode_delta(base, new.items(), **{"chunk_bytes": 256, "density_limit": 1.0} | options))


def result_manifest(new: Tensors, version: str = "2") -> Manifest:
    roots = {n: tensor_root(n, t.dtype, t.shape, tensor_leaves(t)) for n, t in new.items()}
    return Manifest(version, specs_of(new.items()), {n: r.hex() for n, r in roots.items()}, model_root(roots.items()))


# --- lossless


@covering(1, rest="slow", density=[0.0, 0.02, 0.4, 1.0], dtype=DTYPES)
def test_a_delta_turns_the_base_into_the_new_state_bit_by_bit(dtype, density):
    base = {"w": random_tensor(dtype, (37, 16)), "s": random_tensor(dtype, ())}
    new = {"w": changed(base["w"], density), "s": changed(base["s"], density)}
    for density_limit in (0.15, 1.0):
        for check in CHECKS:
            resident = copied(base)
            transaction = WeightTransaction(resident.items())
            chunks = encode_delta(base, new.items(), chunk_bytes=256, density_limit=density_limit)
            apply_delta(specs_of(new.items()), chunks, transaction, check=check)
            transaction.commit()  # every tensor counts as written
            assert equal(resident, new)


def test_all_four_kinds_are_chosen_where_they_should_be(states):
    kinds: dict[str, set[str]] = {}
    for chunk in encode(states):
        kinds.setdefault(chunk.header.name, set()).add(chunk.header.kind)
    assert kinds["sparse"] >= {"elements"}
    assert kinds["frozen"] == kinds["empty"] == {"same"}
    assert kinds["lowest bits"] == {"xor"}
    assert kinds["scalar"] == {"full"}
    assert {c.header.kind for c in encode(states, density_limit=0.15) if c.header.name == "dense"} == {"full"}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_two_byte_strings_are_a_sound_pair_of_states(data):
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
    size = data.draw(st.integers(0, 80)) * dtype.itemsize
    raw = st.binary(min_size=size, max_size=size)
    base, new = ({"w": make_payload([part]).clone().view(dtype)} for part in (data.draw(raw), data.draw(raw)))
    resident = copied(base)
    chunks = list(encode_delta(base, new.items(), density_limit=data.draw(st.floats(0, 1)), chunk_bytes=64))
    buffers = pack_chunks(chunks, data.draw(st.integers(1, 500)))
    check = data.draw(st.sampled_from(CHECKS))
    apply_delta(specs_of(new.items()), unpack_chunks(buffers), sink_over(resident), check=check)
    assert equal(resident, new)
    for chunk in chunks:
        assert parse_header(chunk.header.to_json().encode()) == chunk.header


def test_nans_and_negative_zeros_are_compared_as_bytes():
    base = {"w": torch.tensor([float("nan"), 0.0, 1.0, 2.0] * 8)}
    new = {"w": torch.tensor([float("nan"), -0.0, 1.0, 2.0] * 8)}
    (chunk,) = encode_delta(base, new.items(), density_limit=1.0)
    assert chunk.header.num_changed == 8
    (chunk,) = encode_delta(base, base.items())
    assert chunk.header.kind == "same"


def test_non_contiguous_states_and_residents():
    base, new = {"w": random_tensor(torch.float32, (30, 20)).t()}, {}
    new["w"] = changed(base["w"].contiguous(), 0.1).t().contiguous().t()
    resident = {"w": base["w"].clone(memory_format=torch.preserve_format)}
    assert not resident["w"].is_contiguous() and not new["w"].is_contiguous()
    apply_delta(specs_of(new.items()), encode_delta(base, new.items(), chunk_bytes=256), sink_over(resident))
    assert equal(resident, new)


@pytest.mark.parametrize("check", CHECKS)
def test_a_tied_tensor_that_comes_under_both_names_is_changed_once(check):
    base = {"embed": random_tensor(torch.bfloat16, (64, 16)), "frozen": torch.zeros(3)}
    base["head"] = base["embed"]
    new = {"embed": changed(base["embed"], 0.1), "frozen": torch.zeros(3)}
    new["head"] = new["embed"]
    for density_limit in (0.0, 1.0):
        for _ in range(20):  # the second name may be hashed while the first is written
            resident = {name: base[name].clone() for name in ("embed", "frozen")}
            transaction = WeightTransaction(resident.items(), aliases={"head": "embed"})
            chunks = encode_delta(base, new.items(), chunk_bytes=2048, density_limit=density_limit)
            apply_delta(specs_of(new.items()), chunks, transaction, check=check)
            assert torch.equal(byte_view(resident["embed"]), byte_view(new["embed"]))


def test_states_of_different_models_are_refused_with_every_tensor_named():
    base = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    new = [("a", torch.zeros(3)), ("b", torch.zeros(2)), ("d", torch.zeros(2)), ("b", torch.zeros(2))]
    with pytest.raises(ValueError) as caught:
        list(encode_delta(base, new))
    for part in ("base a float32[2], new a float32[3]", "d: the base does not", "b: comes twice", "c: only the base"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="multiple of 64"):
        list(encode_delta(base, base.items(), chunk_bytes=100))


def test_stats_tell_density_and_bytes_by_tensor_and_overall(states):
    base, new = states
    stats = stats_by_tensor(chunk.header for chunk in encode(states))
    assert {name: s.num_elements for name, s in stats.items()} == {name: t.numel() for name, t in base.items()}
    assert stats["frozen"].density == 0 and stats["lowest bits"].density == 1
    assert stats["sparse"].num_changed == int((byte_view(base["sparse"]) != byte_view(new["sparse"])).sum())
    total = sum(stats.values(), DeltaStats())
    assert total.bytes_full == sum(t.nbytes for t in base.values())
    assert total.bytes_moved > sum(chunk.payload.numel() for chunk in encode(states))


def test_a_real_optimizer_step_travels_in_a_fraction_of_the_bytes():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(512, 512) * 0.02)
    optimizer = torch.optim.AdamW([weight], lr=1e-6)
    base = {"w": weight.detach().bfloat16()}
    (torch.randn(64, 512) @ weight).pow(2).mean().backward()
    optimizer.step()
    new = {"w": weight.detach().bfloat16()}
    stats = stats_by_tensor(chunk.header for chunk in encode_delta(base, new.items()))["w"]
    assert 0.005 < stats.density < 0.1
    assert stats.bytes_moved < 0.06 * stats.bytes_full
    print(f"density {stats.density:.2%}, {stats.bytes_moved} of {stats.bytes_full} bytes")


# --- twice, in part, on the wrong base


@pytest.mark.parametrize("check", CHECKS)
def test_applying_twice_changes_nothing_more(states, check):
    base, new = states
    chunks = encode(states)
    resident = copied(base)
    first = apply_delta(specs_of(new.items()), chunks, sink_over(resident), check=check)
    again = apply_delta(specs_of(new.items()), chunks, sink_over(resident), check=check)
    assert equal(resident, new)
    kinds = [chunk.header.kind for chunk in chunks]
    assert first == len(kinds) - kinds.count("same")
    # Without the digest of the whole chunk it is not known what a full chunk replaces; it is just written again.
    assert again == (kinds.count("full") if check == "touched" else 0)


@pytest.mark.parametrize("check", CHECKS)
def test_interrupted_at_every_chunk_it_can_be_completed_or_undone(states, check):
    base, new = states
    chunks = [chunk for chunk in encode(states) if chunk.header.kind != "full" and chunk.header.name != "dense"]
    kept = {chunk.header.name for chunk in chunks}
    base, new = ({name: t for name, t in state.items() if name in kept} for state in (base, new))
    for stop in range(len(chunks) + 1):
        resident = copied(base)
        transaction = sink_over(resident)
        for chunk in chunks[:stop]:
            apply_chunk(chunk, transaction, check)
        if stop % 3 == 0:
            transaction.rollback()
            assert equal(resident, base)
        elif stop % 3 == 1:
            for chunk in reversed(chunks[:stop]):
                apply_chunk(inverse(chunk), sink_over(resident), check)
            assert equal(resident, base)
        else:
            apply_delta(specs_of(new.items()), chunks, sink_over(resident), check=check)
            assert equal(resident, new)


def test_the_wrong_base_is_refused_in_whatever_chunk_it_differs(states):
    base, new = states
    chunks = encode(states)
    for name, tensor in base.items():
        for position in range(0, tensor.nbytes, 256):
            wrong = copied(base)
            byte_view(wrong[name])[position] ^= 128
            resident = copied(wrong)
            transaction = sink_over(resident)
            with pytest.raises(DigestMismatch) as caught:
                apply_delta(specs_of(new.items()), chunks, transaction)
            assert caught.value.names == (name,)
            transaction.rollback()
            assert equal(resident, wrong)


def test_even_the_cheapest_check_refuses_a_base_that_differs_where_the_delta_changes_it(states):
    base, _new = states
    wrong = copied(base)
    for chunk in encode(states):
        if chunk.header.kind == "elements":
            positions, _ = decode_elements(chunk)
            wrong["sparse"].view(torch.int16).view(-1)[positions[-1]] ^= 2
            before = copied(wrong)
            with pytest.raises(DigestMismatch, match="sparse"):
                apply_chunk(chunk, sink_over(wrong), "touched")
            assert equal(wrong, before)


def test_a_delta_without_chunk_digests_can_only_be_applied_with_the_cheapest_check(states):
    base, new = states
    chunks = encode(states, chunk_digests=False)
    with pytest.raises(ValueError, match='only check="touched"'):
        apply_delta(specs_of(new.items()), chunks, sink_over(copied(base)))
    resident = copied(base)
    for _ in range(2):
        apply_delta(specs_of(new.items()), chunks, sink_over(resident), check="touched")
        assert equal(resident, new)


def test_chunks_that_are_missing_doubled_or_foreign_are_refused(states):
    base, new = states
    chunks, specs = encode(states), specs_of(new.items())
    for wrong in (chunks[1:], chunks[:-1], [*chunks[:2], *chunks[1:]], [*chunks, chunks[0]], chunks[::-1]):
        with pytest.raises(TransferFailed, match="delta: "):
            apply_delta(specs, wrong, sink_over(copied(base)))
    with pytest.raises(TransferFailed, match="deadline"):
        apply_delta(specs, chunks, sink_over(copied(base)), timeout_s=-1.0)
    with pytest.raises(ValueError, match="not a tensor of this model"):
        apply_delta(specs, chunks, sink_over({"other": torch.zeros(1)}))
    with pytest.raises(ValueError, match="check must be"):
        apply_delta(specs, chunks, sink_over(copied(base)), check="none")


def test_a_chunk_of_another_tensor_is_not_taken_for_the_one_that_is_missing():
    base = {name: torch.zeros(32) for name in "ab"}
    new = {name: torch.arange(32.0) for name in "ab"}
    chunks = {(c.header.name, c.header.offset): c for c in encode_delta(base, new.items(), chunk_bytes=64)}
    specs, resident = specs_of(new.items()), copied(base)
    order = [("a", 0), ("b", 64), ("a", 0), ("a", 64)]  # b's second chunk stands where a's would begin
    transaction = sink_over(resident)
    with pytest.raises(TransferFailed, match=r"b bytes \[64, 128\) .* expected was byte 0 of b"):
        apply_delta(specs, [chunks[place] for place in order], transaction)
    transaction.rollback()
    assert equal(resident, base)
    apply_delta(specs, [chunks[place] for place in (("a", 0), ("b", 0), ("a", 64), ("b", 64))], sink_over(resident))
    assert equal(resident, new)


def test_a_damaged_payload_is_refused_before_its_chunk_is_written(states):
    base, _ = states
    for chunk in encode(states):
        for position in range(0, chunk.payload.numel(), 7):
            payload = chunk.payload.clone()
            payload[position] ^= 4
            resident = copied(base)
            with pytest.raises(DigestMismatch, match="damaged"):
                apply_chunk(DeltaChunk(chunk.header, payload), sink_over(resident), "touched")
            assert equal(resident, base)


def test_a_payload_that_promises_more_than_it_holds_is_refused(states):
    base, _ = states
    chunk = next(c for c in encode(states) if c.header.kind == "elements" and c.header.num_changed > 2)
    _, xors = chunk.payload.split(chunk.header.parts)
    bomb = squeeze(torch.zeros(10_000_000, dtype=torch.uint8).numpy())
    far = squeeze(torch.full((chunk.header.num_changed,), 200, dtype=torch.uint8).numpy())
    for gaps, message in [(bomb, "inflates to"), (b"xx", "does not inflate"), (far, "outside")]:
        parts = [gaps, xors.numpy().tobytes()]
        payload = make_payload(parts)
        header = replace(chunk.header, parts=tuple(map(len, parts)), payload_sha256=sha256(payload), gap_bytes=1)
        with pytest.raises(ValueError, match=message):
            apply_chunk(DeltaChunk(header, payload), sink_over(copied(base)), "touched")


@pytest.mark.parametrize(
    "gaps",
    [[40, 2**64 - 30], [2**64 - 9], [2**63 - 1, 2**63 - 1], [2**64 - 1, 3], [63, 0]],
    ids=["backwards", "before the chunk", "twice around", "before it and back", "behind it"],
)
def test_gaps_that_lead_backwards_or_out_of_the_chunk_are_refused(gaps):
    """Of 64 elements; the tensor has others before and behind the chunk, which would take the changes."""
    base, new = torch.zeros(192), torch.zeros(192)
    new[64:66] = 1.0
    chunks = encode_delta({"a": base}, [("a", new)], chunk_bytes=256, density_limit=1.0)
    chunk = next(chunk for chunk in chunks if chunk.header.offset == 256)
    count = len(gaps)
    parts = [squeeze(np.array(gaps, "<u8")), squeeze(np.ones(count, "<u4"))]
    payload = make_payload(parts)
    header = replace(
        chunk.header, num_changed=count, parts=tuple(map(len, parts)), payload_sha256=sha256(payload), gap_bytes=8
    )
    with pytest.raises(ValueError, match="has positions outside itself"):
        decode_elements(DeltaChunk(header, payload))
    resident = {"a": base.clone()}
    with pytest.raises(ValueError, match="has positions outside itself"):
        apply_chunk(DeltaChunk(header, payload), sink_over(resident), "touched")
    assert torch.equal(resident["a"], base)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("name", 5), ("kind", "other"), ("shape", [-1]), ("shape", [2]), ("offset", 32), ("offset", 1 << 40)],
        *[("parts", [1]), ("num_bytes", 3), ("num_bytes", True), ("gap_bytes", 3), ("num_changed", 10_000)],
        *[("pre", "00"), ("touched", None), ("touched", ["0" * 64]), ("payload_sha256", None)],
        *[("dtype", "f7"), ("dtype", "torch.bfloat16")],
        *[("shape", [2**61] * 60_000), ("parts", [0, 10**4000]), ("num_changed", 10**4000)],
    ],
)
def test_headers_that_make_no_sense_are_refused(states, key, value):
    header = next(chunk.header for chunk in encode(states) if chunk.header.kind == "elements")
    with pytest.raises(ValueError):
        parse_header(json.dumps(json.loads(header.to_json()) | {key: value}).encode())


# --- as a stream


@pytest.mark.parametrize("max_bytes", [1, 17, 256, 1 << 20])
@pytest.mark.parametrize("is_reused", [False, True])
def test_buffers_carry_chunks_as_they_are(states, max_bytes, is_reused):
    chunks = encode(states)
    buffer = torch.empty(max_bytes, dtype=torch.uint8) if is_reused else None
    buffers = pack_chunks(chunks, max_bytes, buffer)
    received = list(unpack_chunks(buffers if is_reused else list(buffers)))
    assert [chunk.header for chunk in received] == [chunk.header for chunk in chunks]
    assert all(torch.equal(a.payload, b.payload) for a, b in zip(received, chunks, strict=True))


def test_a_bucket_that_is_dropped_doubled_swapped_or_cut_breaks_the_stream(states):
    base, new = states
    buffers = list(pack_chunks(encode(states), 700))
    assert len(buffers) > 10
    for i in range(len(buffers)):
        broken = [
            [*buffers[:i], *buffers[i + 1 :]],
            [*buffers[: i + 1], *buffers[i:]],
            [*buffers[:i], buffers[i][: buffers[i].numel() // 2], *buffers[i + 1 :]],
            buffers[:i],
        ]
        if i:
            broken.append([*buffers[: i - 1], buffers[i], buffers[i - 1], *buffers[i + 1 :]])
        for wrong in broken:
            resident = copied(base)
            transaction = sink_over(resident)
            with pytest.raises((TransferFailed, DigestMismatch)):
                apply_delta(specs_of(new.items()), unpack_chunks(wrong), transaction)
            transaction.rollback()
            assert equal(resident, base)


def test_sizes_of_buffers_are_checked(states):
    for max_bytes, buffer in [(0, None), (10, torch.empty(9, dtype=torch.uint8))]:
        with pytest.raises(ValueError, match="buffers of"):
            next(pack_chunks([], max_bytes, buffer))


# --- on disk


def saved(folder, states, **options):
    _base, new = states
    manifest = result_manifest(new)
    return save_delta(folder, "1", "2", encode(states), result=manifest, **options)


def test_a_delta_folder_goes_there_and_back(tmp_path, states):
    base, new = states
    stored = saved(tmp_path / "d", states, base_model_digest=model_digest(base.items()))
    loaded = load_delta(tmp_path / "d")
    assert loaded == stored
    assert loaded.manifest.base_version == "1" and loaded.manifest.manifest.version == "2"
    assert loaded.manifest.base_model_digest == model_digest(base.items())
    assert loaded.stats.num_elements == sum(t.numel() for t in base.values())
    resident = copied(base)
    apply_delta(loaded.specs, loaded.chunks(), sink_over(resident))
    assert equal(resident, new)
    assert loaded.manifest.manifest.model_digest == model_digest(resident.items())


def test_a_delta_that_fails_to_be_written_leaves_no_folder(tmp_path, states):
    base, _new = states
    with pytest.raises(ValueError, match="not those of the delta"):
        save_delta(tmp_path / "d", "1", "2", encode(states), result=result_manifest({"w": torch.zeros(1)}))
    with pytest.raises(ValueError, match="only the base"):
        save_delta(tmp_path / "d", "1", "2", encode_delta(base, []))
    assert list(tmp_path.iterdir()) == []
    saved(tmp_path / "d", states)
    with pytest.raises(ValueError, match="exists already"):
        saved(tmp_path / "d", states)


def test_a_delta_file_cut_anywhere_is_refused_before_anything_is_applied(tmp_path, states):
    saved(tmp_path / "d", states)
    path = tmp_path / "d" / DATA_FILE
    raw = path.read_bytes()
    for size in [*range(0, len(raw), 41), len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"delta\.bin"):
            load_delta(tmp_path / "d")
    path.write_bytes(raw + b"\0")
    with pytest.raises(ValueError, match="goes on after its end"):
        load_delta(tmp_path / "d")


def test_a_byte_damaged_anywhere_never_reaches_the_weights(tmp_path, states):
    base, _new = states
    stored = saved(tmp_path / "d", states)
    path = tmp_path / "d" / DATA_FILE
    raw = path.read_bytes()
    payloads = {o + i for o, h in zip(stored.payload_offsets, stored.headers, strict=True) for i in range(sum(h.parts))}
    for position in range(0, len(raw), 67):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        if position not in payloads:
            with pytest.raises(ValueError, match=r"delta\.bin"):
                load_delta(tmp_path / "d")
            continue
        loaded = load_delta(tmp_path / "d")
        resident = copied(base)
        transaction = sink_over(resident)
        with pytest.raises(DigestMismatch, match="damaged"):
            apply_delta(loaded.specs, loaded.chunks(), transaction, check="touched")
        transaction.rollback()
        assert equal(resident, base)


def test_a_damaged_delta_manifest_is_refused_or_means_the_same(tmp_path, states):
    sound = saved(tmp_path / "d", states).manifest
    path = tmp_path / "d" / DELTA_MANIFEST_FILE
    raw = path.read_bytes()
    num_refused = 0
    for position in range(0, len(raw), 5):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 7
        path.write_bytes(damaged)
        try:
            assert load_delta(tmp_path / "d").manifest == sound  # a blank that became another blank
        except ValueError:
            num_refused += 1
    assert num_refused > 0.9 * len(raw) / 5
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not the manifest of a delta"):
        load_delta(tmp_path / "d")
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        load_delta(tmp_path / "d")


def test_a_manifest_of_other_tensors_than_the_file_is_refused(tmp_path, states):
    _base, new = states
    saved(tmp_path / "d", states)
    other = result_manifest({**{n: t for n, t in new.items() if n != "dense"}, "more": torch.zeros(2)})
    (tmp_path / "d" / DELTA_MANIFEST_FILE).write_text(DeltaManifest("1", other).to_json())
    with pytest.raises(ValueError, match=r"more float32\[2\].*dense float32\[15, 7\]"):
        load_delta(tmp_path / "d")


@pytest.mark.parametrize("change", ["append", "replace", "delete"])
def test_a_file_that_changes_while_it_is_applied_fails_and_rolls_back(tmp_path, states, change):
    base, _new = states
    stored = saved(tmp_path / "d", states)
    path = tmp_path / "d" / DATA_FILE
    chunks = stored.chunks()
    if change != "delete":
        first = next(chunks)
    match change:
        case "append":
            with open(path, "ab") as file:
                file.write(b"x")
        case "replace":
            raw = path.read_bytes()
            os.truncate(path, 100)
            path.write_bytes(raw)
            os.utime(path, ns=(1, 1))
        case "delete":
            path.unlink()
    resident = copied(base)
    transaction = sink_over(resident)
    with pytest.raises(TransferFailed, match=r"changed|No such file"):
        apply_delta(stored.specs, chunks if change == "delete" else _after(first, chunks), transaction)
    transaction.rollback()
    assert equal(resident, base)


def _after(first, rest):
    yield first
    yield from rest


@pytest.mark.parametrize("name", [DATA_FILE, DELTA_MANIFEST_FILE])
def test_a_pipe_in_a_delta_folder_is_named_and_not_waited_for(tmp_path, states, name):
    save_delta(tmp_path / "delta", None, "2", encode(states))
    (tmp_path / "delta" / name).unlink()
    os.mkfifo(tmp_path / "delta" / name)
    with pytest.raises(ValueError, match=f"{name}: is not a regular file"):
        load_delta(tmp_path / "delta")


def test_a_pipe_that_comes_in_the_place_of_a_checked_delta_is_not_waited_for(tmp_path, states):
    save_delta(tmp_path / "delta", None, "2", encode(states))
    delta = load_delta(tmp_path / "delta")
    (tmp_path / "delta" / DATA_FILE).unlink()
    os.mkfifo(tmp_path / "delta" / DATA_FILE)
    with pytest.raises(TransferFailed, match="is not a regular file"):
        next(delta.chunks())
