"""Specs and manifests of updates, and their JSON form."""

from __future__ import annotations

import json

import pytest
import torch

from lockstep.weight_sync.manifest import (
    Manifest,
    TensorSpec,
    differences,
    dtype_name,
    parse_dtype,
    specs_from_lists,
    specs_of,
)

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
SPECS = (TensorSpec("a", torch.bfloat16, (2, 3)), TensorSpec("b", torch.float8_e4m3fn, ()))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_survives_its_name(dtype):
    assert parse_dtype(dtype_name(dtype)) == parse_dtype(str(dtype)) == dtype
    assert "torch." not in dtype_name(dtype)


@pytest.mark.parametrize("name", ["float99", "", "nn", None, 5, ["float32"]])
def test_an_unknown_dtype_is_quoted(name):
    with pytest.raises(ValueError, match="unknown dtype") as error:
        parse_dtype(name)
    assert repr(name) in str(error.value)


def test_a_spec_counts_its_bytes():
    assert [spec.num_bytes for spec in SPECS] == [12, 1]
    assert TensorSpec("none", torch.float64, (0, 5)).num_bytes == 0
    assert SPECS[0].describe() == "a bfloat16[2, 3]"


def test_specs_of_tensors_keep_their_order():
    tensors = [("z", torch.zeros(2, 3).t()), ("a", torch.tensor(True))]
    assert specs_of(tensors) == (TensorSpec("z", torch.float32, (3, 2)), TensorSpec("a", torch.bool, ()))


def test_a_manifest_survives_json():
    manifest = Manifest("7", SPECS, {"a": "00ff"}, "abcd")
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.num_bytes == 13
    nothing = Manifest(None, ())
    assert Manifest.from_json(nothing.to_json().encode()) == nothing


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 names, 1 dtypes and 0 shapes"):
        specs_from_lists(["a", "b"], ["float32"], [])


def test_every_bad_entry_is_listed():
    names, dtypes = ["a", "b", "c", 4, "e", "e", "g"], ["float99", "float32", "int8", "int8", "int8", "int8", 3]
    shapes = [[1], [-1], [True], [1], [2], [2], "12"]
    with pytest.raises(ValueError) as error:
        specs_from_lists(names, dtypes, shapes)
    for part in ("a: unknown dtype 'float99'", "b: shape [-1]", "c: shape [True]", "name 4", "e is named", "g: shape"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "extra"),
        ({"version": 5}, "version"),
        ({"names": "ab"}, "names"),
        ({"names": 5}, "names"),
        ({"dtypes": None}, "dtypes"),
        ({"shapes": {}}, "shapes"),
        ({"digests": ["a"]}, "digests"),
        ({"digests": {"c": "00" * 32}}, "not in the manifest: c"),
        ({"digests": {"a": 3}}, "digests = {'a': 3}"),
        ({"model_digest": 3}, "model_digest"),
    ],
)
def test_a_manifest_with_a_wrong_field_names_it(change, message):
    values = json.loads(Manifest("7", SPECS).to_json()) | change
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", b"\xff\xfe\x00", "null"])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(ValueError):
        Manifest.from_json(text)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="digests, dtypes, model_digest, names, shapes"):
        Manifest.from_json('{"version": null}')


def test_differences_name_the_first_one_first():
    other = (SPECS[0], TensorSpec("b", torch.float32, (1,)), TensorSpec("c", torch.int8, ()))
    assert differences(SPECS, SPECS) == []
    assert differences(SPECS, other, "rank 0", "rank 1") == [
        "tensor 1: rank 0 b float8_e4m3fn[], rank 1 b float32[1]",
        "tensor 2: rank 0 nothing, rank 1 c int8[]",
    ]
    assert differences((TensorSpec("nothing", torch.int8, ()),), ()) != []
