"""Tensors in gRPC messages, "raw" (little-endian bytes) and typed (repeated numbers), from and to numpy."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..excerpt import excerpt, excerpt_names
from .messages import DATATYPES, InferTensor, ServeError, Status

__all__ = [
    "MAX_DIMS",
    "MAX_SLOW_ELEMENTS",
    "MAX_TENSORS",
    "RAW_ONLY",
    "decode_tensors",
    "fill_contents",
    "raw_pieces",
]

MAX_TENSORS: Final = 1024
MAX_DIMS: Final = 16
MAX_ELEMENTS: Final = 1 << 40
"""Of a shape, its zeros taken as ones: numpy refuses empty arrays whose other dimensions overflow."""
MAX_SLOW_ELEMENTS: Final = 1 << 20
"""Elements of a request that Python handles one by one: those of typed contents, and BYTES."""

RAW_ONLY: Final = frozenset({"FP16", "BF16"})
"""Datatypes without typed contents."""

_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_CARRIERS: Final = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}
"""What numbers of fewer bits travel as."""

_LENGTH: Final = struct.Struct("<I")
"""Before each element of raw BYTES."""


class _TensorError(Exception):
    """What is wrong with a tensor, without its name."""


def _checked_shape(tensor: Any) -> tuple[int, ...]:
    if tensor.datatype not in DATATYPES:
        raise _TensorError(f"datatype {excerpt(tensor.datatype)} is not one of {excerpt_names(DATATYPES)}")
    if len(tensor.shape) > MAX_DIMS:
        raise _TensorError(f"{len(tensor.shape)} dimensions; at most {MAX_DIMS} are taken")
    shape = tuple(tensor.shape)
    if any(length < 0 for length in shape):
        raise _TensorError(f"shape {list(shape)} has a negative dimension")
    if math.prod(max(length, 1) for length in shape) > MAX_ELEMENTS:
        raise _TensorError(f"shape {list(shape)} is beyond {MAX_ELEMENTS} elements")
    for parameter in ("shared_memory_region", "classification"):
        if parameter in tensor.parameters:
            raise _TensorError(f"parameter {parameter!r} is not supported")
    return shape


def _objects(elements: Sequence[bytes]) -> NDArray[Any]:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def _raw_bytes_elements(raw: memoryview, count: int) -> Iterator[bytes]:
    position = 0
    for index in range(count):
        start = position + _LENGTH.size
        stop = start + _LENGTH.unpack_from(raw, position)[0] if start <= len(raw) else start
        if stop > len(raw):
            raise _TensorError(f"its raw contents of {len(raw)} bytes end within element {index} of {count}")
        yield bytes(raw[start:stop])
        position = stop
    if position != len(raw):
        raise _TensorError(f"{len(raw) - position} bytes follow the last of {count} elements in its raw contents")


def _from_raw(datatype: str, count: int, raw: memoryview) -> NDArray[Any]:
    if datatype == "BYTES":
        if count * _LENGTH.size > len(raw):
            raise _TensorError(f"raw contents of {len(raw)} bytes are too short for {count} elements of BYTES")
        return _objects(list(_raw_bytes_elements(raw, count)))
    dtype = DATATYPES[datatype]
    if len(raw) != count * dtype.itemsize:
        expected = f"{count} elements of {datatype} take {count * dtype.itemsize}"
        raise _TensorError(f"raw contents of {len(raw)} bytes, but {expected}")
    if datatype == "BOOL" and np.any(np.frombuffer(raw, dtype=np.uint8) > 1):
        raise _TensorError("a byte of BOOL is neither 0 nor 1")
    # A view, copied only where the message's layout left it unaligned.
    return np.require(np.frombuffer(raw, dtype=dtype), requirements="A")


def _from_contents(datatype: str, count: int, contents: Any) -> NDArray[Any]:
    if datatype in RAW_ONLY:
        raise _TensorError(f"{datatype} has no typed contents; send raw_input_contents")
    name = _CONTENTS[datatype]
    for descriptor, _ in contents.ListFields():
        if descriptor.name != name:
            raise _TensorError(f"{descriptor.name} is set, but {datatype} goes into {name}")
    values = getattr(contents, name)
    if len(values) != count:
        raise _TensorError(f"{name} has {len(values)} elements, but its shape {count}")
    if datatype == "BYTES":
        return _objects(list(values))
    dtype = DATATYPES[datatype]
    carried = np.fromiter(values, dtype=_CARRIERS.get(name, dtype), count=count)
    array = carried.astype(dtype, copy=False)
    if name in _CARRIERS and np.any(array != carried):
        raise _TensorError(f"{name} has a value outside of {datatype}")
    return array


def _require_few(slow_elements: int) -> None:
    if slow_elements > MAX_SLOW_ELEMENTS:
        raise ServeError(
            Status.TOO_LARGE,
            f"{slow_elements} elements as typed contents or BYTES; at most {MAX_SLOW_ELEMENTS} are taken, "
            "more of any other datatype as raw_input_contents",
        )


def _decode_tensor(tensor: Any, raw: memoryview | None) -> InferTensor:
    shape = _checked_shape(tensor)
    count = math.prod(shape)
    if raw is None:
        array = _from_contents(tensor.datatype, count, tensor.contents)
    elif tensor.HasField("contents"):
        raise _TensorError("contents are set beside raw_input_contents; use one of them for all inputs")
    else:
        array = _from_raw(tensor.datatype, count, raw)
    array = array.reshape(shape)
    array.setflags(write=False)
    return InferTensor(tensor.datatype, array)


def decode_tensors(tensors: Sequence[Any], raws: Sequence[memoryview]) -> dict[str, InferTensor]:
    """A request's inputs by name; arrays of numbers may be views of ``raws``, and none is writable.

    Args:
        tensors: ``InferInputTensor`` messages.
        raws: the contents of each, in the same order, or empty where contents are typed.

    Raises:
        ServeError: INVALID, with the input's name; TOO_LARGE beyond ``MAX_SLOW_ELEMENTS``.
    """
    if len(tensors) > MAX_TENSORS:
        raise ServeError(Status.INVALID, f"{len(tensors)} inputs; at most {MAX_TENSORS} are taken")
    if raws and len(raws) != len(tensors):
        raise ServeError(Status.INVALID, f"{len(raws)} raw_input_contents for {len(tensors)} inputs")
    inputs: dict[str, InferTensor] = {}
    slow_elements = 0
    for index, tensor in enumerate(tensors):
        try:
            if tensor.name in inputs:
                raise _TensorError("is given twice")
            if not raws or tensor.datatype == "BYTES":
                slow_elements += math.prod(_checked_shape(tensor))
                _require_few(slow_elements)
            inputs[tensor.name] = _decode_tensor(tensor, raws[index] if raws else None)
        except _TensorError as error:
            raise ServeError(Status.INVALID, f"input {excerpt(tensor.name)}: {error}") from None
    return inputs


def _as_bytes(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


def raw_pieces(tensor: InferTensor) -> list[memoryview | bytes]:
    """A tensor's raw contents in pieces, views of it where it holds numbers."""
    flat = tensor.data.reshape(-1)
    if tensor.datatype != "BYTES":
        return [flat.view(np.uint8).data]
    elements = [_as_bytes(element) for element in flat]
    return [piece for element in elements for piece in (_LENGTH.pack(len(element)), element)]


def fill_contents(contents: Any, tensor: InferTensor) -> None:
    """Put a tensor into an ``InferTensorContents``; not for those of ``RAW_ONLY``."""
    flat = tensor.data.reshape(-1)
    values = map(_as_bytes, flat) if tensor.datatype == "BYTES" else flat.tolist()
    getattr(contents, _CONTENTS[tensor.datatype]).extend(values)
