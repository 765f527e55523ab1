"""Inference requests and responses, from and to the bytes that gRPC carries."""

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from ...system.excerpt import excerpt
from ..encoding import Pause, go_on
from ..messages import InferRequest, InferResponse, Parameters, ServeError, Status
from ..tensors.binary import binary_data
from ..tensors.shapes import MAX_TENSORS, invalid_tensor, require_supported
from .messages import message_class
from .tensors import RAW_ONLY, decode_tensors, fill_contents
from .wire import join_fields, split_field

__all__ = [
    "RawRequest",
    "count_slow_elements",
    "decode_request",
    "encode_response",
    "encode_stream_error",
    "encode_stream_response",
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
        inputs=decode_tensors(message.inputs, raws),
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
    return is_raw or any(tensor.datatype in RAW_ONLY for tensor in response.outputs.values())


def count_slow_elements(response: InferResponse, *, is_raw: bool) -> int:
    """Elements of a response that are encoded one by one: those of typed contents, and BYTES."""
    leaves_raw = _leaves_raw(response, is_raw=is_raw)
    return sum(tensor.data.size for tensor in response.outputs.values() if not leaves_raw or tensor.datatype == "BYTES")


def encode_response(response: InferResponse, *, is_raw: bool, pause: Pause = go_on) -> bytes:
    """A ``ModelInferResponse``; raw in any case if an output has no typed form.

    Args:
        pause: called between pieces of what is encoded element by element.
    """
    message = message_class("ModelInferResponse")(
        model_name=response.model, model_version=response.version, id=response.id
    )
    _fill_parameters(message.parameters, response.parameters)
    is_raw = _leaves_raw(response, is_raw=is_raw)
    for name, tensor in response.outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.data.shape)
        if not is_raw:
            fill_contents(output.contents, tensor, pause)
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
