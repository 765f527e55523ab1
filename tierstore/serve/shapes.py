"""What a request says of a tensor before its data: the name, the datatype and the shape, checked."""

import math
from typing import Final, NamedTuple

from ..excerpt import excerpt
from .messages import DATATYPES, ServeError, Status

__all__ = ["MAX_DIMS", "MAX_NAME_CHARACTERS", "TensorHead", "invalid_input", "parse_head"]

MAX_DIMS: Final = 16
MAX_NAME_CHARACTERS: Final = 1000
_INTEGER: Final = {int}
_MAX_BYTES: Final = (1 << 63) - 1
"""Of an array, had it one element where a dimension is 0: numpy takes no larger shape."""


class TensorHead(NamedTuple):
    """A tensor without its data; ``num_elements`` is the product of the shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    num_elements: int


def invalid_input(name: str, problem: str) -> ServeError:
    """The error for an input that cannot be used."""
    return ServeError(Status.INVALID, f"input {excerpt(name)}: {problem}")


def parse_head(name: object, datatype: object, shape: object) -> TensorHead:
    """The three, as they stand in JSON.

    Raises:
        ServeError: INVALID. That a shape passed says nothing of its size: compare it with the data before allocating.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ServeError(
            Status.INVALID,
            f"an input's name must be a string of 1 to {MAX_NAME_CHARACTERS} characters, not {excerpt(name)}",
        )
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise invalid_input(name, f"datatype {excerpt(datatype)} is not one of {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _INTEGER or min(shape, default=0) < 0:
        raise invalid_input(name, f"shape {excerpt(shape)} must be a list of integers from 0 on")
    if len(shape) > MAX_DIMS:
        raise invalid_input(name, f"shape has {len(shape)} dimensions, more than {MAX_DIMS}")
    num_elements = math.prod(shape)
    if (num_elements or math.prod(filter(None, shape))) * DATATYPES[datatype].itemsize > _MAX_BYTES:
        raise invalid_input(name, f"shape {excerpt(shape)} is too large")
    return TensorHead(name, datatype, tuple(shape), num_elements)
