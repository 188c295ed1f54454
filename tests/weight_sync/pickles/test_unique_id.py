"""NCCL's id as vLLM pickles it: read without running anything, written so that vLLM reads it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from lockstep.tests.support.vllm.trainer import MODULE, pickled, unpickled
from lockstep.weight_sync.pickles.inert import UnsafePickle
from lockstep.weight_sync.pickles.unique_id import read_unique_id, write_unique_id

ID = bytes(range(128, 256))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_is_read_in_every_protocol_of_bytes(protocol):
    if protocol == 2:  # has no bytes: they are text that a function encodes, which the table does not name
        with pytest.raises(UnsafePickle, match="_codecs"):
            read_unique_id(pickled(ID, protocol))
    else:
        assert read_unique_id(pickled(ID, protocol)) == ID


def test_vllm_reads_what_is_written():
    assert unpickled(write_unique_id(ID)) == ID
    assert read_unique_id(write_unique_id(ID)) == ID
    with pytest.raises(ValueError, match="128 bytes, and has 3"):
        write_unique_id(b"abc")


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_by_name(tmp_path):
    with pytest.raises(UnsafePickle, match=r"mkdir"):
        read_unique_id(pickle.dumps(_Hostile(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


def _of(structure: str, content: bytes) -> bytes:
    return b"\x80\x03c_ctypes\n_unpickle\n" + structure.encode() + b"}" + content + b"\x86\x86R."


OTHER = "cvllm.other\nncclUniqueId\n"
OURS = f"c{MODULE}\nncclUniqueId\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps(ID), "something else"),
        (pickle.dumps([1, 2]), "something else"),
        (pickle.dumps(None), "something else"),
        (b"", "pickle"),
        (b"\x80\x03", "pickle"),
        (ID, "pickle"),
        (bytes(5000), "4096"),
        (_of(OTHER, b"C\x80" + ID), "blocked unsafe global vllm.other.ncclUniqueId"),
        (_of(OURS, b"C\x04abcd"), "128 bytes, and has 4 bytes"),
        (_of(OURS, b"K\x01"), "128 bytes, and has something else"),
        (_of("c_ctypes\n_unpickle\n", b"C\x80" + ID), "something else"),
        (f"c{MODULE}\nncclUniqueId\n.".encode(), "something else"),
        (b"\x80\x03c_ctypes\n_unpickle\n" + OURS.encode() + b")\x86R.", "something else"),
        (pickled(ID)[:-1] + b"}b.", "something else"),  # with a state
    ],
)
def test_everything_else_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        read_unique_id(data)
