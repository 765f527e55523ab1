"""Tensors as JSON: the ``data`` of an input or an output.

JSON has no NaN and no infinity. In an input they cannot be written, and ``null`` is no number; in an output both become
``null``. Whoever needs them uses the binary tensor data extension. A number that a datatype cannot hold is an error,
except that floating-point numbers are rounded to the nearest; BF16 is rounded by way of float32.
"""

import math
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from ...system.excerpt import excerpt
from ..encoding import Pause, go_on, pieces_of
from ..messages import DATATYPES, InferTensor, ServeError, Status
from ..tensors.shapes import TensorHead

__all__ = ["json_data", "parse_json_data", "write_json_data"]

_JSON_NAMES: Final[dict[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction or beyond 64 bits",
    str: "a string",
    type(None): "null",
    list: "a list",
    dict: "an object",
}


def parse_json_data(head: TensorHead, data: object) -> InferTensor:
    """The tensor that ``data`` gives, flat or nested as the shape says.

    Raises:
        ServeError: INVALID; names the input.
    """
    if not isinstance(data, list):
        raise head.invalid(f"data must be a list, not {_JSON_NAMES[type(data)]}")
    flat = _flatten(head, data)
    if len(flat) != head.num_elements:
        raise head.invalid(f"shape {list(head.shape)} has {head.num_elements} elements, but data has {len(flat)}")
    return InferTensor(head.datatype, _array(head, flat).reshape(head.shape))


def _flatten(head: TensorHead, data: list[Any]) -> list[Any]:
    """The elements in order. They are flat, or nested as deep as the shape."""
    for depth, length in enumerate(head.shape[1:], 1):
        is_nested = bool(data) and type(data[0]) is list
        if not is_nested and (depth == 1 or not data):
            break
        if (
            not is_nested
            or len(data) != math.prod(head.shape[:depth])
            or not all(type(row) is list and len(row) == length for row in data)
        ):
            raise head.invalid(f"data is neither flat nor nested as shape {list(head.shape)} says")
        data = list(chain.from_iterable(data))
    return data


def _array(head: TensorHead, flat: list[Any]) -> NDArray[Any]:
    """All elements, of the datatype's dtype."""
    dtype = DATATYPES[head.datatype]
    if dtype.kind == "f" or head.datatype == "BF16":
        _require_types(head, flat, (int, float), "numbers")
        return _floats(head, flat)
    if dtype.kind == "b":
        _require_types(head, flat, (bool,), "booleans")
        return np.array(flat, dtype)
    if dtype.kind == "O":
        _require_types(head, flat, (str,), "strings")
        texts = np.empty(len(flat), dtype)
        texts[:] = [text.encode() for text in flat]
        return texts
    _require_types(head, flat, (int,), "integers")
    try:
        return np.array(flat, dtype)
    except OverflowError:
        raise head.invalid(f"data has an integer that {head.datatype} cannot hold") from None


def _require_types(head: TensorHead, flat: list[Any], types: tuple[type, ...], what: str) -> None:
    wrong = set(map(type, flat)).difference(types)
    if wrong:
        found = sorted(_JSON_NAMES[each] for each in wrong)[0]
        raise head.invalid(f"{head.datatype} takes {what}, but data has {found}")


def _floats(head: TensorHead, flat: list[Any]) -> NDArray[Any]:
    dtype = np.dtype(np.float32) if head.datatype == "BF16" else DATATYPES[head.datatype]
    with np.errstate(over="ignore"):
        values = np.array(flat, np.float64).astype(dtype)
    if head.datatype == "BF16":
        bits = values.view(np.uint32)
        # Half of the last place that stays, less one where that is even: ties go to even. It may carry into infinity.
        values = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
            np.uint16
        )
        finite = (values & np.uint16(0x7F80)) != np.uint16(0x7F80)
    else:
        finite = np.isfinite(values)
    if not finite.all():
        raise head.invalid(f"data has a number that {head.datatype} cannot hold")
    return values


def json_data(name: str, tensor: InferTensor) -> NDArray[Any] | list[str]:
    """What orjson writes as the tensor's flat ``data``; the same numbers when read back, but for NaN and infinity.

    Raises:
        ServeError: INVALID, if an element of a BYTES tensor is not text.
    """
    flat = tensor.data.reshape(-1)
    if tensor.datatype == "BF16":
        return (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if tensor.datatype != "BYTES":
        return flat
    try:
        return [str(element, "utf-8") for element in flat]
    except UnicodeDecodeError:
        raise ServeError(
            Status.INVALID, f"output {excerpt(name)} is not UTF-8, which JSON needs; ask for it with binary_data"
        ) from None


def write_json_data(name: str, tensor: InferTensor, pause: Pause = go_on) -> orjson.Fragment:
    """A tensor's flat ``data`` as text, written piece by piece.

    Raises:
        ServeError: as ``json_data``.
    """
    texts = [
        orjson.dumps(json_data(name, InferTensor(tensor.datatype, piece)), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for piece in pieces_of(tensor.data.reshape(-1), pause)
    ]
    return orjson.Fragment(b"[%b]" % b",".join(texts))
