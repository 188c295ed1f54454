"""Messages of Protocol Buffers as fields by number: the encoding alone, without a schema.

Source: "Encoding", protobuf.dev/programming-guides/encoding. A message is a row of fields, each a tag (number times 8
plus the kind of its value) and a value: a varint, 8 or 4 bytes, or a length with so many bytes. An unknown field is
skipped, as the format demands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from ....rollout.giving_way import give_way

Value = int | memoryview  # of a varint, or the bytes of any other kind
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10
_FIELDS_A_SLICE = 256


class BadMessage(ValueError):
    """Bytes that are no message of the expected kind."""


def fields(data: bytes | memoryview) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field of a message, in their order. Raises BadMessage for broken bytes.

    A message may have millions, so other threads go first now and then (`give_way`).
    """
    view, at, num_fields = memoryview(data), 0, 0
    while at < len(view):
        num_fields += 1
        if num_fields % _FIELDS_A_SLICE == 0:
            give_way()
        tag, at = _varint(view, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise BadMessage("a field has the number 0")
        if kind == _VARINT:
            value, at = _varint(view, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BadMessage(f"field {number} is of the kind {kind}, which is not supported")
        if size > len(view) - at:
            raise BadMessage(f"field {number} has {size} bytes, and the message has {len(view) - at} more")
        yield number, view[at : at + size]
        at += size


def varint(value: Value) -> int:
    """Return a varint that a message holds. Raises BadMessage for another kind of value."""
    if not isinstance(value, int):
        raise BadMessage("a field is no whole number")
    return value


def signed(value: Value) -> int:
    """Return a varint as the int32 or int64 that it stands for."""
    number = varint(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def octets(value: Value) -> memoryview:
    """Return the bytes of a field. Raises BadMessage for a varint."""
    if isinstance(value, int):
        raise BadMessage(f"a field is the number {value}, not bytes")
    return value


def text(value: Value) -> str:
    """Return the text of a field. Raises BadMessage for bytes that are no UTF-8."""
    try:
        return bytes(octets(value)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadMessage(f"a text is not UTF-8: {error}") from error


def double(value: Value) -> float:
    """Return the number of a field of 8 bytes."""
    data = octets(value)
    if len(data) != 8:
        raise BadMessage(f"a double has {len(data)} bytes")
    number: float = struct.unpack("<d", data)[0]
    return number


def numbers(value: Value) -> list[int]:
    """Return the entries of a repeated field of varints, which come packed or one by one."""
    if isinstance(value, int):
        return [signed(value)]
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(signed(one))
    return found


def entry(value: Value) -> tuple[str, Value | None]:
    """Return key and value of an entry of a map with texts as keys; None: the value has its default."""
    key, found = "", None
    for number, its in fields(octets(value)):
        if number == 1:
            key = text(its)
        elif number == 2:
            found = its
    return key, found


def put_varint(number: int, value: int) -> bytes:
    """Encode a field of a whole number."""
    return _tag(number, _VARINT) + _as_varint(value)


def put_bytes(number: int, value: bytes) -> bytes:
    """Encode a field of bytes, a text's or a message's among them."""
    return _tag(number, _BYTES) + _as_varint(len(value)) + value


def put_text(number: int, value: str) -> bytes:
    """Encode a field of text."""
    return put_bytes(number, value.encode("utf-8"))


def put_numbers(number: int, values: Sequence[int]) -> bytes:
    """Encode a repeated field of whole numbers, packed; nothing where there are none."""
    return put_bytes(number, b"".join(_as_varint(value) for value in values)) if values else b""


def put_doubles_by_name(number: int, values: Mapping[str, float]) -> bytes:
    """Encode a map of numbers by name."""
    return b"".join(
        put_bytes(number, put_text(1, name) + _tag(2, _FIXED64) + struct.pack("<d", value))
        for name, value in values.items()
    )


def _tag(number: int, kind: int) -> bytes:
    return _as_varint(number << 3 | kind)


def _as_varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number stands for its 64 bits
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the varint that begins at a place, and the place behind it."""
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        if at + index >= len(view):
            raise BadMessage("the message ends inside of a number")
        byte = view[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & (1 << 64) - 1, at + index + 1
    raise BadMessage("a number has more than 10 bytes")
