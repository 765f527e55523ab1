"""Tensors as bytes: the elements in row-major order, little-endian; of BYTES each with its length before it, 4 bytes.

What the binary tensor data extension puts behind the JSON of a request or a response, and gRPC's raw contents.
"""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..messages import DATATYPES, InferTensor
from .shapes import TensorHead

__all__ = ["JSON_LENGTH_HEADER", "MAX_BYTES_ELEMENTS", "binary_data", "bytes_of", "parse_binary_data"]

JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes of a body are JSON; tensors follow."""

MAX_BYTES_ELEMENTS: Final = 1 << 16
"""Of a request. They are read one by one, and nobody else is served meanwhile."""
_LENGTH: Final = struct.Struct("<I")


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
