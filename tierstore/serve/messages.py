"""What the server is asked and answers, whichever protocol carries it: the Open Inference Protocol's terms, as numpy.

https://github.com/kserve/open-inference-protocol (v2). Both fronts, REST and gRPC, turn what arrives into these and
these into what leaves; models know nothing else. They share the checks of tensors' heads, and contents as bytes: the
elements in row-major order, little-endian. Those stand behind the JSON with the binary tensor data extension, and in
gRPC's raw contents.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import TierstoreError
from ..system.checks import excerpt

NUMBERS: Final[Mapping[str, "np.dtype[Any]"]] = {
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP32": np.dtype(np.float32),
}
"""Those of the protocol's datatypes that models take and give, and what they are in numpy, little-endian."""
DATATYPES: Final[Mapping[str, "np.dtype[Any]"]] = {**NUMBERS, "BYTES": np.dtype(np.object_)}
"""And texts, which models only take: ``bytes`` objects."""


class Status(Enum):
    """What became of a request that failed: (HTTP status, name of the gRPC status)."""

    INVALID = (400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED")
    NOT_FOUND = (404, "NOT_FOUND")
    RECEIVE_TIMEOUT = (408, "DEADLINE_EXCEEDED")
    TOO_LARGE = (413, "RESOURCE_EXHAUSTED")
    HEADERS_TOO_LARGE = (431, "RESOURCE_EXHAUSTED")
    INTERNAL = (500, "INTERNAL")
    OVERLOADED = (503, "RESOURCE_EXHAUSTED")
    UNAVAILABLE = (503, "UNAVAILABLE")
    DEADLINE = (504, "DEADLINE_EXCEEDED")

    def __init__(self, http: int, grpc: str) -> None:
        self.http = http
        self.grpc = grpc


class ServeError(TierstoreError):
    """A request that is refused or failed; the message names the field and the way out, and is the client's to read."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class InferTensor(NamedTuple):
    """``datatype`` is a key of ``DATATYPES``; ``data`` is C-contiguous, of its dtype, and not to be written to."""

    datatype: str
    data: NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model takes or gives under a name; -1 stands for a length that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """``versions``: those that may be asked for. ``parameters``: what else clients may want, as the order of
    features."""

    name: str
    versions: tuple[str, ...] = ()
    platform: str = "tierstore"
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """``version`` and ``client`` may be ""; ``outputs`` empty is all; ``deadline`` is of ``time.monotonic()``."""

    model: str
    version: str = ""
    id: str = ""
    inputs: Mapping[str, InferTensor]
    outputs: tuple[str, ...] = ()
    deadline: float | None = None
    protocol: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResponse:
    """``version``: of the store, whose rows and weights all outputs are of."""

    model: str
    version: str
    id: str
    outputs: Mapping[str, InferTensor]


JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes of a body are JSON; tensors follow."""
MAX_TENSORS: Final = 1024
"""Inputs of a request, and outputs asked for."""
MAX_DIMS: Final = 16
MAX_NAME_CHARACTERS: Final = 1000
MAX_ID_CHARACTERS: Final = 1000
PIECE_ELEMENTS: Final = 1 << 13
"""Numbers that are encoded one by one at a time: a third of a millisecond."""
_INTEGER: Final = {int}
MAX_TEXTS: Final = 1 << 16
"""Elements of BYTES in binary data, which are taken apart one by one: some 20 milliseconds."""
_LENGTH_BYTES: Final = 4
"""Before each element of BYTES."""
_MAX_BYTES: Final = (1 << 63) - 1
"""Of an array, had it one element where a dimension is 0: numpy takes no larger shape."""


class TensorHead(NamedTuple):
    """An input without its data."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    num_elements: int

    def invalid(self, problem: str) -> ServeError:
        return invalid_tensor("input", self.name, problem)


def invalid_tensor(kind: str, name: str, problem: str) -> ServeError:
    """``kind`` is "input" or "output"."""
    return ServeError(Status.INVALID, f"{kind} {excerpt(name)}: {problem}")


def require_supported(kind: str, name: str, parameters: Container[str]) -> None:
    """ServeError INVALID for a parameter that asks for what is not there."""
    for unsupported in ("shared_memory_region", "classification"):
        if unsupported in parameters:
            raise invalid_tensor(kind, name, f"parameter {unsupported} is not supported; leave it out")


def parse_head(
    name: object, datatype: object, shape: object, parameters: Container[str], inputs: Container[str]
) -> TensorHead:
    """The head of one of a request's inputs, as it stands in JSON; ``inputs`` are those before it. ServeError INVALID.
    A shape says nothing of its size: compare it with the data."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        wanted = f"a string of 1 to {MAX_NAME_CHARACTERS} characters"
        raise ServeError(Status.INVALID, f"an input's name must be {wanted}, not {excerpt(name)}")
    problem = ""
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        models = f"{', '.join(DATATYPES)}, which the models take and give"
        problem = f"datatype {excerpt(datatype)} is not one of {models}"
    elif not isinstance(shape, list) or not set(map(type, shape)) <= _INTEGER or min(shape, default=0) < 0:
        problem = f"shape {excerpt(shape)} must be a list of integers from 0 on"
    elif len(shape) > MAX_DIMS:
        problem = f"shape has {len(shape)} dimensions, more than {MAX_DIMS}"
    elif math.prod(filter(None, shape)) * DATATYPES[datatype].itemsize > _MAX_BYTES:
        problem = f"shape {excerpt(shape)} is too large"
    elif name in inputs:
        problem = "given twice"
    if problem:
        raise invalid_tensor("input", name, problem)
    assert isinstance(datatype, str)
    assert isinstance(shape, list)
    require_supported("input", name, parameters)
    return TensorHead(name, datatype, tuple(shape), math.prod(shape))


def require_id(given: str) -> str:
    """A request's id; ServeError INVALID if it is too long."""
    if len(given) > MAX_ID_CHARACTERS:
        raise ServeError(Status.INVALID, f"the request's id has more than {MAX_ID_CHARACTERS} characters")
    return given


def parse_timeout(timeout: object) -> float | None:
    """Seconds of a request's parameter "timeout", in microseconds; None of 0, which means no limit."""
    if type(timeout) is not int or timeout < 0:
        raise ServeError(Status.INVALID, f"parameter timeout must be microseconds, 0 or more, not {excerpt(timeout)}")
    return timeout / 1e6 if timeout else None


def parse_binary_data(head: TensorHead, data: memoryview) -> InferTensor:
    """The tensor that all of ``data`` gives: read-only, over ``data`` itself where that is aligned. ServeError
    INVALID."""
    dtype = DATATYPES[head.datatype]
    if dtype.kind == "O":
        return InferTensor(head.datatype, _split(head, data).reshape(head.shape))
    expected = head.num_elements * dtype.itemsize
    if len(data) != expected:
        raise head.invalid(f"{head.datatype} {list(head.shape)} has {expected} bytes, but its binary data {len(data)}")
    array = np.frombuffer(data, dtype)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return InferTensor(head.datatype, array.reshape(head.shape))


def _split(head: TensorHead, data: memoryview) -> NDArray[Any]:
    """The elements of BYTES [n], each of which follows its length, a uint32."""
    if head.num_elements > MAX_TEXTS:
        raise ServeError(Status.TOO_LARGE, f"{head.num_elements} texts in one input; at most {MAX_TEXTS} are taken")
    elements: list[bytes] = []
    end = 0
    while end + _LENGTH_BYTES <= len(data) and len(elements) < head.num_elements:
        begin = end + _LENGTH_BYTES
        end = begin + int.from_bytes(data[end:begin], "little")
        elements.append(bytes(data[begin:end]))
    if end != len(data) or len(elements) != head.num_elements:
        raise head.invalid(
            f"BYTES {list(head.shape)} has {head.num_elements} elements, each after its length of 4 bytes; "
            f"its {len(data)} bytes of binary data do not"
        )
    return objects(elements)


def objects(elements: Sequence[bytes]) -> NDArray[np.object_]:
    """The elements of BYTES as an array [n]."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def binary_data(tensor: InferTensor) -> memoryview:
    """What ``parse_binary_data`` reads, of numbers over the tensor's own memory."""
    if tensor.data.dtype.kind == "O":
        texts = tensor.data.reshape(-1).tolist()
        return memoryview(b"".join(len(text).to_bytes(_LENGTH_BYTES, "little") + text for text in texts))
    return tensor.data.reshape(-1).view(np.uint8).data


async def pause() -> None:
    """Let the loop do what is due."""
    await asyncio.sleep(0)


async def pieces_of(flat: NDArray[Any]) -> AsyncIterator[NDArray[Any]]:
    """An array [n], whose numbers are encoded one by one, in pieces; others are served in between."""
    for first in range(0, len(flat), PIECE_ELEMENTS):
        if first:
            await pause()
        yield flat[first : first + PIECE_ELEMENTS]
