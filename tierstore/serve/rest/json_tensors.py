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
import torch
from numpy.typing import NDArray

from ...system.excerpt import excerpt
from ..encoding import pieces_of
from ..messages import DATATYPES, InferTensor, ServeError, Status
from ..tensors import TensorHead

__all__ = ["json_data", "parse_json_data", "write_json_data"]

_TAKEN: Final[dict[str, tuple[set[type], str]]] = {
    "f": ({int, float}, "numbers"),
    "b": ({bool}, "booleans"),
    "O": ({str}, "strings"),
    "i": ({int}, "integers"),
    "u": ({int}, "integers"),
}
"""What elements a kind of numpy's dtypes takes in JSON."""


def parse_json_data(head: TensorHead, data: object) -> InferTensor:
    """The tensor that ``data`` gives, flat or nested as the shape says.

    Raises:
        ServeError: INVALID; names the input.
    """
    if not isinstance(data, list):
        raise head.invalid(f"data must be a list, not {excerpt(data)}")
    flat = _flatten(head, data)
    if len(flat) != head.num_elements:
        raise head.invalid(f"shape {list(head.shape)} has {head.num_elements} elements, but data has {len(flat)}")
    dtype = np.dtype(np.float32) if head.datatype == "BF16" else DATATYPES[head.datatype]
    taken, what = _TAKEN[dtype.kind]
    if wrong := set(map(type, flat)) - taken:
        found = next(excerpt(element) for element in flat if type(element) in wrong)
        raise head.invalid(f"{head.datatype} takes {what}, but data has {found}")
    return InferTensor(head.datatype, _array(head, flat, dtype).reshape(head.shape))


def _flatten(head: TensorHead, data: list[Any]) -> list[Any]:
    """The elements in order. They are flat, or nested as deep as the shape."""
    if not data or type(data[0]) is not list:
        return data
    for depth, length in enumerate(head.shape[1:], 1):
        if len(data) != math.prod(head.shape[:depth]) or not all(
            type(row) is list and len(row) == length for row in data
        ):
            raise head.invalid(f"data is neither flat nor nested as shape {list(head.shape)} says")
        data = list(chain.from_iterable(data))
    return data


def _array(head: TensorHead, flat: list[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    if dtype.kind == "O":
        texts = np.empty(len(flat), dtype)
        texts[:] = [text.encode() for text in flat]
        return texts
    try:
        if dtype.kind != "f":
            return np.array(flat, dtype)
        with np.errstate(over="ignore"):
            found = np.array(flat, np.float64).astype(dtype)
        if head.datatype == "BF16":
            bits = torch.from_numpy(found).bfloat16()
            found, is_finite = bits.view(torch.int16).numpy().view(np.uint16), bits.isfinite().all()
        else:
            is_finite = np.isfinite(found).all()
        if is_finite:
            return found
    except OverflowError:
        pass
    raise head.invalid(f"data has a number that {head.datatype} cannot hold")


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


async def write_json_data(name: str, tensor: InferTensor) -> orjson.Fragment:
    """A tensor's flat ``data`` as text, written piece by piece.

    Raises:
        ServeError: as ``json_data``.
    """
    texts = [
        orjson.dumps(json_data(name, InferTensor(tensor.datatype, piece)), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        async for piece in pieces_of(tensor.data.reshape(-1))
    ]
    return orjson.Fragment(b"[%b]" % b",".join(texts))
