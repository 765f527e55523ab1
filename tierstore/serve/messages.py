"""What the server is asked and answers, whichever protocol carries it: the Open Inference Protocol's terms, as numpy.

https://github.com/kserve/open-inference-protocol (v2). Both fronts, REST and gRPC, turn what arrives into these and
these into what leaves; models know nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import TierstoreError

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
