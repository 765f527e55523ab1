"""Large contents, in and out of messages without protobuf's copies of them.

Protobuf's Python copies a bytes field when it parses a message and again when the field is read. Here the one
large field of a request, and that of a response, are cut out of the bytes and put into them; the rest is protobuf's.
https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterable
from typing import Final

from ..messages import ServeError, Status

MAX_FIELDS: Final = 4096
"""Top-level fields of a message: an empty one takes two bytes on the wire, and some hundred once it is parsed."""

_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_MAX_VARINT_BYTES: Final = 10
_MAX_TAG: Final = 1 << 32


def _malformed(what: str) -> ServeError:
    return ServeError(Status.INVALID, f"the message is malformed: {what}")


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """A variable-length integer and the position after it."""
    if position < len(data) and data[position] < 0x80:  # as nearly all: without an iterator
        return data[position], position + 1
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise _malformed("an integer does not end")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def split_field(message: bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Take a bytes field out of a message: the rest, and the field's values, views of ``message``. ServeError
    INVALID."""
    data = memoryview(message)
    rest, values = [], []
    position = count = 0
    while position < len(data):
        count += 1
        if count > MAX_FIELDS:
            raise ServeError(Status.INVALID, f"the message has more than {MAX_FIELDS} fields at its top level")
        tag, start = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size_bytes, start = _read_varint(data, start)
            stop = start + size_bytes
        elif wire_type == 0:
            stop = _read_varint(data, start)[1]
        elif wire_type in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire_type]
        else:
            raise _malformed(f"wire type {wire_type}")
        if stop > len(data) or not 8 <= tag < _MAX_TAG:
            raise _malformed("a field is cut off or has no valid number")
        if tag == number << 3 | _LENGTH_DELIMITED:
            values.append(data[start:stop])
        else:
            rest.append(data[position:stop])
        position = stop
    return b"".join(rest), values


def join_fields(rest: bytes, number: int, values: Iterable[memoryview | bytes]) -> bytes:
    """The message with values of a length-delimited field appended to it."""
    parts: list[memoryview | bytes] = [rest]
    tag = _varint(number << 3 | _LENGTH_DELIMITED)
    for value in values:
        parts += [tag, _varint(len(value)), value]
    return b"".join(parts)
