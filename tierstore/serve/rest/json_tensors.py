"""Tensors as JSON: the ``data`` of an input or an output.

JSON has no NaN and no infinity. In an input they cannot be written, and ``null`` is no number; in an output both become
``null``. The binary tensor data extension has them. A number that a datatype cannot hold is an error,
except that floating-point numbers are rounded to the nearest.
"""

import math
from itertools import chain
from typing import Any

import numpy as np
import orjson

from ...system.excerpt import excerpt
from ..messages import DATATYPES, InferTensor
from ..tensors import TensorHead, objects, pieces_of


def parse_json_data(head: TensorHead, data: object) -> InferTensor:
    """The tensor that ``data`` gives, flat or nested as the shape says. ServeError INVALID names the input."""
    if not isinstance(data, list):
        raise head.invalid(f"data must be a list, not {excerpt(data)}")
    flat = _flatten(head, data)
    if len(flat) != head.num_elements:
        raise head.invalid(f"shape {list(head.shape)} has {head.num_elements} elements, but data has {len(flat)}")
    dtype = DATATYPES[head.datatype]
    if dtype.kind == "O":
        if not all(type(element) is str for element in flat):
            found = next(excerpt(element) for element in flat if type(element) is not str)
            raise head.invalid(f"{head.datatype} takes strings, but data has {found}")
        return InferTensor(head.datatype, objects([text.encode() for text in flat]).reshape(head.shape))
    is_float = dtype.kind == "f"
    if wrong := set(map(type, flat)) - ({int, float} if is_float else {int}):
        found = next(excerpt(element) for element in flat if type(element) in wrong)
        raise head.invalid(f"{head.datatype} takes {'numbers' if is_float else 'integers'}, but data has {found}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, np.float64 if is_float else dtype).astype(dtype, copy=False)
        is_held = bool(np.isfinite(array).all())
    except OverflowError:
        is_held = False
    if not is_held:
        raise head.invalid(f"data has a number that {head.datatype} cannot hold")
    return InferTensor(head.datatype, array.reshape(head.shape))


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


async def write_json_data(tensor: InferTensor) -> orjson.Fragment:
    """A tensor's flat ``data`` as text, written piece by piece."""
    texts = [
        orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        async for piece in pieces_of(tensor.data.reshape(-1))
    ]
    return orjson.Fragment(b"[%b]" % b",".join(texts))
