"""The messages of the Open Inference Protocol over gRPC, and of gRPC's health check; and inference requests and
responses, from and to their bytes.

``protocol.binpb`` describes the messages; ``protoc --descriptor_set_out=protocol.binpb inference.proto health.proto``
makes it. They live in a pool of their own. A process that also imports a client's generated messages, which bear the
same names, would otherwise fail at the second description.

Tensors are "raw" (little-endian bytes) or typed (repeated numbers, which Python handles one by one). Raw contents are
cut out of the message's bytes and put back into them here, since protobuf's Python copies them more than once
(https://protobuf.dev/programming-guides/encoding).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ..limits import MAX_ELEMENTS
from ..messages import (
    DATATYPES,
    MAX_TENSORS,
    InferRequest,
    InferResponse,
    InferTensor,
    ServeError,
    Status,
    TensorHead,
    binary_data,
    invalid_tensor,
    parse_binary_data,
    parse_head,
    parse_timeout,
    pieces_of,
    require_id,
    require_supported,
)

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"


def _classes() -> dict[str, Any]:
    pool, found = descriptor_pool.DescriptorPool(), {}
    described = Path(__file__).with_name("protocol.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(file)
        for message in file.message_type:
            described = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = message_factory.GetMessageClass(described)
    return found


MESSAGES: Final = _classes()
"""The class of each message by its name, as "ModelInferRequest"."""

_RAW_INPUTS: Final = 7
_RAW_OUTPUTS: Final = 6
"""Numbers of fields."""
_CONTENTS: Final = {
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


class RawRequest(NamedTuple):
    """A ``ModelInferRequest`` not yet checked: all but its raw contents, and those, as views of the bytes that
    arrived."""

    message: Any
    raws: list[memoryview]


def parse(name: str, data: bytes) -> Any:
    """The message of that name; ServeError INVALID if the bytes are none."""
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError:
        raise ServeError(Status.INVALID, f"the message is no {name}") from None


def read_request(data: bytes) -> RawRequest:
    """Parse a ``ModelInferRequest``; ServeError INVALID if the bytes are none."""
    rest, raws = split_field(data, _RAW_INPUTS)
    return RawRequest(parse("ModelInferRequest", rest), raws)


def decode_request(raw_request: RawRequest, *, seconds_left: float | None = None, client: str = "") -> InferRequest:
    """Check a request; its inputs may be views of the bytes that arrived. ServeError INVALID or TOO_LARGE."""
    arrival = time.monotonic()
    message, raws = raw_request
    limits = [seconds for seconds in (seconds_left, _timeout_seconds(message)) if seconds is not None]
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=require_id(message.id),
        inputs=_decode_tensors(message.inputs, raws),
        outputs=_wanted_outputs(message),
        deadline=arrival + min(limits) if limits else None,
        protocol="grpc",
        client=client,
    )


def _timeout_seconds(message: Any) -> float | None:
    if "timeout" not in message.parameters:
        return None
    value = message.parameters["timeout"]
    choice = value.WhichOneof("parameter_choice")
    return parse_timeout(choice and getattr(value, choice))


def _wanted_outputs(message: Any) -> tuple[str, ...]:
    if len(message.outputs) > MAX_TENSORS:
        raise ServeError(Status.INVALID, f"{len(message.outputs)} outputs; at most {MAX_TENSORS} are taken")
    names: dict[str, None] = {}
    for output in message.outputs:
        require_supported("output", output.name, output.parameters)
        if output.name in names:
            raise invalid_tensor("output", output.name, "asked for twice")
        names[output.name] = None
    return tuple(names)


def _decode_tensors(tensors: Sequence[Any], raws: Sequence[memoryview]) -> dict[str, InferTensor]:
    """A request's inputs by name, none writable; ``raws``: the contents of each, or empty where they are typed."""
    if len(tensors) > MAX_TENSORS:
        raise ServeError(Status.INVALID, f"{len(tensors)} inputs; at most {MAX_TENSORS} are taken")
    if raws and len(raws) != len(tensors):
        raise ServeError(Status.INVALID, f"{len(raws)} raw_input_contents for {len(tensors)} inputs")
    inputs: dict[str, InferTensor] = {}
    typed_elements = 0
    for index, tensor in enumerate(tensors):
        head = parse_head(tensor.name, tensor.datatype, list(tensor.shape), tensor.parameters, inputs)
        if raws:
            if tensor.HasField("contents"):
                raise head.invalid("contents are set as well as raw_input_contents; use one of them for all inputs")
            inputs[head.name] = parse_binary_data(head, raws[index])
            continue
        typed_elements += head.num_elements
        if typed_elements > MAX_ELEMENTS:
            raise ServeError(
                Status.TOO_LARGE,
                f"{typed_elements} elements as typed contents; at most {MAX_ELEMENTS} are taken, "
                "more as raw_input_contents",
            )
        inputs[head.name] = InferTensor(head.datatype, _from_contents(head, tensor.contents).reshape(head.shape))
    return inputs


def _from_contents(head: TensorHead, contents: Any) -> NDArray[Any]:
    name = _CONTENTS[head.datatype]
    for descriptor, _ in contents.ListFields():
        if descriptor.name != name:
            raise head.invalid(f"{descriptor.name} is set, but {head.datatype} goes into {name}")
    values, count = getattr(contents, name), head.num_elements
    if len(values) != count:
        raise head.invalid(f"shape {list(head.shape)} has {count} elements, but {name} has {len(values)}")
    array = np.fromiter(values, DATATYPES[head.datatype], count)
    array.setflags(write=False)
    return array


async def encode_response(response: InferResponse, *, is_raw: bool) -> bytes:
    message = MESSAGES["ModelInferResponse"](model_name=response.model, model_version=response.version, id=response.id)
    for name, tensor in response.outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.data.shape)
        if not is_raw:
            values = getattr(output.contents, _CONTENTS[tensor.datatype])
            async for piece in pieces_of(tensor.data.reshape(-1)):
                values.extend(piece.tolist())
    parts: list[memoryview | bytes] = [bytes(message.SerializeToString())]
    for tensor in response.outputs.values() if is_raw else ():
        data = binary_data(tensor)
        parts += [_varint(_RAW_OUTPUTS << 3 | _LENGTH_DELIMITED), _varint(len(data)), data]
    return b"".join(parts)


MAX_FIELDS: Final = 4096
"""Top-level fields of a message: an empty one takes two bytes on the wire, and some hundred once it is parsed."""

_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_MAX_VARINT_BYTES: Final = 10
_MAX_TAG: Final = 1 << 32


def _malformed(what: str) -> ServeError:
    return ServeError(Status.INVALID, f"the message is malformed: {what}")


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """A variable-length integer and the position after it."""
    if position < len(data) and data[position] < 0x80:  # as nearly all: without an iterator
        return data[position], position + 1
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise _malformed("an integer does not end")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def split_field(message: bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Take a bytes field out of a message: the rest, and the field's values, views of ``message``. ServeError
    INVALID."""
    data = memoryview(message)
    rest, values = [], []
    position = count = 0
    while position < len(data):
        count += 1
        if count > MAX_FIELDS:
            raise ServeError(Status.INVALID, f"the message has more than {MAX_FIELDS} fields at its top level")
        tag, start = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size_bytes, start = _read_varint(data, start)
            stop = start + size_bytes
        elif wire_type == 0:
            stop = _read_varint(data, start)[1]
        elif wire_type in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire_type]
        else:
            raise _malformed(f"wire type {wire_type}")
        if stop > len(data) or not 8 <= tag < _MAX_TAG:
            raise _malformed("a field is cut off or has no valid number")
        if tag == number << 3 | _LENGTH_DELIMITED:
            values.append(data[start:stop])
        else:
            rest.append(data[position:stop])
        position = stop
    return b"".join(rest), values
