"""What a message says of a tensor before its data: the name, the datatype and the shape, checked."""

import math
from collections.abc import Container
from typing import Final, NamedTuple

from ...system.excerpt import excerpt
from ..messages import DATATYPES, ServeError, Status

__all__ = [
    "MAX_DIMS",
    "MAX_NAME_CHARACTERS",
    "MAX_TENSORS",
    "TensorHead",
    "invalid_tensor",
    "parse_head",
    "require_supported",
]

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
