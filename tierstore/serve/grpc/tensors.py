"""Tensors in gRPC messages, "raw" (little-endian bytes) and typed (repeated numbers), from and to numpy."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..encoding import MAX_ELEMENTS, Pause, go_on, pieces_of
from ..messages import DATATYPES, InferTensor, ServeError, Status
from ..tensors.binary import bytes_of, parse_binary_data
from ..tensors.shapes import MAX_TENSORS, TensorHead, parse_head, require_supported

__all__ = [
    "MAX_SLOW_ELEMENTS",
    "RAW_ONLY",
    "decode_tensors",
    "fill_contents",
]

MAX_SLOW_ELEMENTS: Final = MAX_ELEMENTS
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


def _from_contents(head: TensorHead, contents: Any) -> NDArray[Any]:
    datatype, count = head.datatype, head.num_elements
    if datatype in RAW_ONLY:
        raise head.invalid(f"{datatype} has no typed contents; send raw_input_contents")
    name = _CONTENTS[datatype]
    for descriptor, _ in contents.ListFields():
        if descriptor.name != name:
            raise head.invalid(f"{descriptor.name} is set, but {datatype} goes into {name}")
    values = getattr(contents, name)
    if len(values) != count:
        raise head.invalid(f"{name} has {len(values)} elements, but its shape {count}")
    dtype = DATATYPES[datatype]
    carried = np.fromiter(values, dtype=_CARRIERS.get(name, dtype), count=count)
    array = carried.astype(dtype, copy=False)
    if name in _CARRIERS and np.any(array != carried):
        raise head.invalid(f"{name} has a value outside of {datatype}")
    array.setflags(write=False)
    return array


def _require_few(slow_elements: int) -> None:
    if slow_elements > MAX_SLOW_ELEMENTS:
        raise ServeError(
            Status.TOO_LARGE,
            f"{slow_elements} elements as typed contents or BYTES; at most {MAX_SLOW_ELEMENTS} are taken, "
            "more of any other datatype as raw_input_contents",
        )


def _decode_tensor(head: TensorHead, tensor: Any, raw: memoryview | None) -> InferTensor:
    if raw is None:
        return InferTensor(head.datatype, _from_contents(head, tensor.contents).reshape(head.shape))
    if tensor.HasField("contents"):
        raise head.invalid("contents are set beside raw_input_contents; use one of them for all inputs")
    return parse_binary_data(head, raw)


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
        head = parse_head(tensor.name, tensor.datatype, list(tensor.shape))
        require_supported(head.kind, head.name, tensor.parameters)
        if head.name in inputs:
            raise head.invalid("given twice")
        if not raws or head.datatype == "BYTES":
            slow_elements += head.num_elements
            _require_few(slow_elements)
        inputs[head.name] = _decode_tensor(head, tensor, raws[index] if raws else None)
    return inputs


def fill_contents(contents: Any, tensor: InferTensor, pause: Pause = go_on) -> None:
    """Put a tensor into an ``InferTensorContents``, piece by piece; not for those of ``RAW_ONLY``."""
    values = getattr(contents, _CONTENTS[tensor.datatype])
    for piece in pieces_of(tensor.data.reshape(-1), pause):
        values.extend(map(bytes_of, piece) if tensor.datatype == "BYTES" else piece.tolist())
