"""Inference requests and responses, from and to the bytes that gRPC carries.

Tensors are "raw" (little-endian bytes) or typed (repeated numbers, which Python handles one by one).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ...system.excerpt import excerpt
from ..encoding import pieces_of
from ..limits import MAX_ELEMENTS
from ..messages import DATATYPES, InferRequest, InferResponse, InferTensor, Parameters, ServeError, Status
from ..tensors import (
    MAX_TENSORS,
    TensorHead,
    binary_data,
    bytes_of,
    invalid_tensor,
    parse_binary_data,
    parse_head,
    require_supported,
)
from .messages import message_class
from .wire import join_fields, split_field

__all__ = [
    "RawRequest",
    "count_slow_elements",
    "decode_request",
    "encode_response",
    "encode_stream_error",
    "encode_stream_response",
    "id_of",
    "parse",
    "read_request",
]

_RAW_INPUTS: Final = 7
_RAW_OUTPUTS: Final = 6
_STREAM_RESPONSE: Final = 2
"""Numbers of fields."""

_TIMEOUT: Final = "timeout"
"""The request's parameter: microseconds from its arrival; 0 for no limit."""

_INT64_MAX: Final = (1 << 63) - 1

_RAW_ONLY: Final = frozenset({"FP16", "BF16"})
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


class RawRequest(NamedTuple):
    """A ``ModelInferRequest``, parsed and not yet checked.

    Attributes:
        message: all of it but its raw contents.
        raws: those, as views of the bytes that arrived. Outputs leave raw if inputs came so.
    """

    message: Any
    raws: list[memoryview]


def parse(name: str, data: bytes) -> Any:
    """The message of that name; ServeError INVALID if the bytes are none."""
    try:
        return message_class(name).FromString(data)
    except DecodeError:
        raise ServeError(Status.INVALID, f"the message is no {name}") from None


def _parameters(message: Any) -> dict[str, bool | int | float | str]:
    parameters = {}
    for name, value in message.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise ServeError(Status.INVALID, f"parameter {excerpt(name)} has no value")
        parameters[name] = getattr(value, choice)
    return parameters


def _timeout_seconds(parameters: Parameters) -> float | None:
    timeout_us = parameters.get(_TIMEOUT, 0)
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or timeout_us < 0:
        raise ServeError(
            Status.INVALID, f"parameter 'timeout' is {excerpt(timeout_us)}; it takes microseconds, 0 or more"
        )
    return timeout_us / 1e6 if timeout_us else None


def _wanted_outputs(message: Any) -> tuple[str, ...]:
    if len(message.outputs) > MAX_TENSORS:
        raise ServeError(Status.INVALID, f"{len(message.outputs)} outputs; at most {MAX_TENSORS} are taken")
    names = tuple(output.name for output in message.outputs)
    for output in message.outputs:
        require_supported("output", output.name, output.parameters)
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise invalid_tensor("output", twice, "asked for twice")
    return names


def read_request(data: bytes) -> RawRequest:
    """Parse a ``ModelInferRequest``; ServeError INVALID if the bytes are none."""
    rest, raws = split_field(data, _RAW_INPUTS)
    return RawRequest(parse("ModelInferRequest", rest), raws)


def id_of(data: bytes) -> str:
    """The id of a ``ModelInferRequest``; "" if the bytes are none."""
    try:
        return str(read_request(data).message.id)
    except ServeError:
        return ""


def decode_request(raw_request: RawRequest, *, seconds_left: float | None = None) -> InferRequest:
    """Check a request; its inputs may be views of the bytes that arrived.

    Args:
        raw_request: just arrived.
        seconds_left: until the call's deadline; the request's parameter "timeout" may end it sooner.

    Raises:
        ServeError: INVALID or TOO_LARGE.
    """
    arrival = time.monotonic()
    message, raws = raw_request
    parameters = _parameters(message)
    limits = [limit for limit in (seconds_left, _timeout_seconds(parameters)) if limit is not None]
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        inputs=_decode_tensors(message.inputs, raws),
        outputs=_wanted_outputs(message),
        deadline=arrival + min(limits) if limits else None,
        parameters=parameters,
        protocol="grpc",
    )


def _fill_parameters(field: Any, parameters: Mapping[str, bool | int | float | str]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            field[name].bool_param = value
        elif isinstance(value, int) and value > _INT64_MAX:
            field[name].uint64_param = value
        elif isinstance(value, int):
            field[name].int64_param = value
        elif isinstance(value, float):
            field[name].double_param = value
        else:
            field[name].string_param = value


def _leaves_raw(response: InferResponse, *, is_raw: bool) -> bool:
    return is_raw or any(tensor.datatype in _RAW_ONLY for tensor in response.outputs.values())


def count_slow_elements(response: InferResponse, *, is_raw: bool) -> int:
    """Elements of a response that are encoded one by one: those of typed contents, and BYTES."""
    leaves_raw = _leaves_raw(response, is_raw=is_raw)
    return sum(tensor.data.size for tensor in response.outputs.values() if not leaves_raw or tensor.datatype == "BYTES")


async def encode_response(response: InferResponse, *, is_raw: bool) -> bytes:
    """A ``ModelInferResponse``; raw in any case if an output has no typed form."""
    message = message_class("ModelInferResponse")(
        model_name=response.model, model_version=response.version, id=response.id
    )
    _fill_parameters(message.parameters, response.parameters)
    is_raw = _leaves_raw(response, is_raw=is_raw)
    for name, tensor in response.outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.data.shape)
        if not is_raw:
            await _fill_contents(output.contents, tensor)
    rest = message.SerializeToString()
    if not is_raw:
        return bytes(rest)
    return join_fields(rest, _RAW_OUTPUTS, ([binary_data(tensor)] for tensor in response.outputs.values()))


def encode_stream_response(response: bytes) -> bytes:
    """A ``ModelStreamInferResponse`` around a response's bytes."""
    return join_fields(b"", _STREAM_RESPONSE, [[response]])


def encode_stream_error(text: str, request_id: str) -> bytes:
    """A ``ModelStreamInferResponse`` that tells why a request of a stream failed."""
    message = message_class("ModelStreamInferResponse")(error_message=text)
    message.infer_response.id = request_id
    return bytes(message.SerializeToString())


def _from_contents(head: TensorHead, contents: Any) -> NDArray[Any]:
    datatype, count = head.datatype, head.num_elements
    if datatype in _RAW_ONLY:
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
    if slow_elements > MAX_ELEMENTS:
        raise ServeError(
            Status.TOO_LARGE,
            f"{slow_elements} elements as typed contents or BYTES; at most {MAX_ELEMENTS} are taken, "
            "more of any other datatype as raw_input_contents",
        )


def _decode_tensor(head: TensorHead, tensor: Any, raw: memoryview | None) -> InferTensor:
    if raw is None:
        return InferTensor(head.datatype, _from_contents(head, tensor.contents).reshape(head.shape))
    if tensor.HasField("contents"):
        raise head.invalid("contents are set beside raw_input_contents; use one of them for all inputs")
    return parse_binary_data(head, raw)


def _decode_tensors(tensors: Sequence[Any], raws: Sequence[memoryview]) -> dict[str, InferTensor]:
    """A request's inputs by name; arrays of numbers may be views of ``raws``, and none is writable.

    Args:
        tensors: ``InferInputTensor`` messages.
        raws: the contents of each, in the same order, or empty where contents are typed.

    Raises:
        ServeError: INVALID, with the input's name; TOO_LARGE beyond ``MAX_ELEMENTS``.
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


async def _fill_contents(contents: Any, tensor: InferTensor) -> None:
    """Put a tensor into an ``InferTensorContents``, piece by piece; not for those of ``_RAW_ONLY``."""
    values = getattr(contents, _CONTENTS[tensor.datatype])
    async for piece in pieces_of(tensor.data.reshape(-1)):
        values.extend(map(bytes_of, piece) if tensor.datatype == "BYTES" else piece.tolist())
