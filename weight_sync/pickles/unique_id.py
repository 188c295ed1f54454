"""NCCL's unique id as vLLM's StatelessProcessGroup broadcasts it: a pickled ctypes structure of 128 bytes.

It is read as every payload is, through a closed table of names and without a call of any of them, and written byte by
byte, so that neither end needs vLLM.
"""

from __future__ import annotations

from .inert import Call, Global, parse

ID_BYTES = 128
_MODULE, _NAME = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"
_MAKER, _STRUCTURE = Global("_ctypes", "_unpickle"), Global(_MODULE, _NAME)
ALLOWED = frozenset((name.module, name.name) for name in (_MAKER, _STRUCTURE))
_MAX_BYTES = 4096  # an id takes about 250


def read_unique_id(data: bytes) -> bytes:
    """Return the id in a pickle. Raises UnsafePickle for names that are not in the table, ValueError for a pickle of
    something else and for an id of another length."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"the NCCL id is a pickle of {len(data)} bytes; the limit is {_MAX_BYTES}")
    made = parse(data, ALLOWED)
    if type(made) is not Call or made.function != _MAKER or made.state is not None or len(made.arguments) != 2:
        raise ValueError(f"the pickle of the NCCL id holds something else than a {_NAME}")
    structure, content = made.arguments
    if structure != _STRUCTURE or type(content) is not tuple or len(content) != 2 or content[0] != {}:
        raise ValueError(f"the pickle of the NCCL id holds something else than a {_NAME}")
    unique_id = content[1]
    if type(unique_id) is not bytes or len(unique_id) != ID_BYTES:
        found = f"{len(unique_id)} bytes" if type(unique_id) is bytes else "something else"
        raise ValueError(f"the NCCL id must have {ID_BYTES} bytes, and has {found}")
    return unique_id


def write_unique_id(unique_id: bytes) -> bytes:
    """Return the pickle from which vLLM's receivers load an id. Raises ValueError for another length."""
    if len(unique_id) != ID_BYTES:
        raise ValueError(f"the NCCL id must have {ID_BYTES} bytes, and has {len(unique_id)}")
    # Protocol 3; both names; an empty dict and the bytes, as a pair; the structure and that pair; a call; the end.
    names = f"c{_MAKER.module}\n{_MAKER.name}\nc{_MODULE}\n{_NAME}\n".encode()
    return b"\x80\x03" + names + b"}C" + bytes([ID_BYTES]) + unique_id + b"\x86\x86R."
