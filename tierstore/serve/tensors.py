"""What both protocols and the client share of tensors: heads that are checked, and contents as bytes.

Those are the elements in row-major order, little-endian; of BYTES each with its length before it, 4 bytes: what stands
behind the JSON with the binary tensor data extension, and in gRPC's raw contents.
"""

import math
import struct
from collections.abc import Container
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..system.excerpt import excerpt
from .messages import DATATYPES, InferTensor, ServeError, Status

__all__ = [
    "JSON_LENGTH_HEADER",
    "MAX_BYTES_ELEMENTS",
    "MAX_DIMS",
    "MAX_NAME_CHARACTERS",
    "MAX_TENSORS",
    "TensorHead",
    "binary_data",
    "bytes_of",
    "invalid_tensor",
    "parse_binary_data",
    "parse_head",
    "require_supported",
]

JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes of a body are JSON; tensors follow."""

MAX_BYTES_ELEMENTS: Final = 1 << 16
"""Of a request. They are read one by one, and nobody else is served meanwhile."""
_LENGTH: Final = struct.Struct("<I")
MAX_TENSORS: Final = 1024
"""Inputs of a request, and outputs asked for."""
MAX_DIMS: Final = 16
MAX_NAME_CHARACTERS: Final = 1000
_INTEGER: Final = {int}
_MAX_BYTES: Final = (1 << 63) - 1
"""Of an array, had it one element where a dimension is 0: numpy takes no larger shape."""
_UNSUPPORTED: Final = ("shared_memory_region", "classification")


class TensorHead(NamedTuple):
    """A tensor without its data.

    Attributes:
        num_elements: the product of the shape.
        kind: "input" or "output", for messages.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    num_elements: int
    kind: str

    def invalid(self, problem: str) -> ServeError:
        """The error for a tensor that cannot be used."""
        return invalid_tensor(self.kind, self.name, problem)


def invalid_tensor(kind: str, name: str, problem: str) -> ServeError:
    """The error for an "input" or "output" that cannot be used."""
    return ServeError(Status.INVALID, f"{kind} {excerpt(name)}: {problem}")


def require_supported(kind: str, name: str, parameters: Container[str]) -> None:
    """ServeError INVALID for a parameter of an "input" or "output" that asks for what is not there."""
    for unsupported in _UNSUPPORTED:
        if unsupported in parameters:
            raise invalid_tensor(kind, name, f"parameter {unsupported} is not supported; leave it out")


def parse_head(name: object, datatype: object, shape: object, *, kind: str = "input") -> TensorHead:
    """The three, as they stand in JSON.

    Raises:
        ServeError: INVALID. That a shape passed says nothing of its size: compare it with the data before allocating.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ServeError(
            Status.INVALID,
            f"an {kind}'s name must be a string of 1 to {MAX_NAME_CHARACTERS} characters, not {excerpt(name)}",
        )
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise invalid_tensor(kind, name, f"datatype {excerpt(datatype)} is not one of {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _INTEGER or min(shape, default=0) < 0:
        raise invalid_tensor(kind, name, f"shape {excerpt(shape)} must be a list of integers from 0 on")
    if len(shape) > MAX_DIMS:
        raise invalid_tensor(kind, name, f"shape has {len(shape)} dimensions, more than {MAX_DIMS}")
    num_elements = math.prod(shape)
    if (num_elements or math.prod(filter(None, shape))) * DATATYPES[datatype].itemsize > _MAX_BYTES:
        raise invalid_tensor(kind, name, f"shape {excerpt(shape)} is too large")
    return TensorHead(name, datatype, tuple(shape), num_elements, kind)


def parse_binary_data(head: TensorHead, data: memoryview) -> InferTensor:
    """The tensor that all of ``data`` gives.

    Returns:
        A read-only array over ``data`` itself, which it keeps alive; a copy if ``data`` is not aligned to the datatype,
        or of BYTES.

    Raises:
        ServeError: INVALID; names the input.
    """
    if head.datatype == "BYTES":
        return InferTensor("BYTES", _parse_elements(head, data).reshape(head.shape))
    dtype = DATATYPES[head.datatype]
    expected = head.num_elements * dtype.itemsize
    if len(data) != expected:
        raise head.invalid(f"{head.datatype} {list(head.shape)} has {expected} bytes, but its binary data {len(data)}")
    array = np.frombuffer(data, dtype)
    if head.datatype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise head.invalid("BOOL takes bytes of 0 and 1, but its binary data has another")
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return InferTensor(head.datatype, array.reshape(head.shape))


def _parse_elements(head: TensorHead, data: memoryview) -> NDArray[Any]:
    count = head.num_elements
    if count > MAX_BYTES_ELEMENTS:
        raise head.invalid(f"BYTES of {count} elements; at most {MAX_BYTES_ELEMENTS} are taken")
    if count * _LENGTH.size > len(data):
        raise head.invalid(f"{count} elements of BYTES do not fit into {len(data)} bytes")
    elements = np.empty(count, np.object_)
    at = 0
    for index in range(count):
        start = at + _LENGTH.size
        if start > len(data):
            raise head.invalid(f"its binary data ends before element {index}")
        (length,) = _LENGTH.unpack_from(data, at)
        at = start + length
        if at > len(data):
            raise head.invalid(f"element {index} has {length} bytes, more than are left")
        elements[index] = bytes(data[start:at])
    if at != len(data):
        raise head.invalid(f"its binary data has {len(data) - at} bytes too many")
    elements.flags.writeable = False
    return elements


def bytes_of(element: str | bytes) -> bytes:
    """An element of a BYTES tensor."""
    return element.encode() if isinstance(element, str) else bytes(element)


def binary_data(tensor: InferTensor) -> bytes | memoryview:
    """What ``parse_binary_data`` reads; over the tensor's own memory, but for BYTES."""
    flat = tensor.data.reshape(-1)
    if tensor.datatype == "BYTES":
        elements = [bytes_of(element) for element in flat]
        return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))
    return flat.view(np.uint8).data
