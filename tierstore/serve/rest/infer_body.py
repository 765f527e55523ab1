"""The body of an infer request and of its response: JSON, and behind it the tensors that travel as binary data.

The Open Inference Protocol's REST form with the binary tensor data extension. Whatever bytes come in, what leaves the
parser is a request or a ServeError, and it takes memory in proportion to the bytes.
"""

import math
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson

from ...system.checks import excerpt
from ..messages import (
    DATATYPES,
    JSON_LENGTH_HEADER,
    MAX_TENSORS,
    InferRequest,
    InferResponse,
    InferTensor,
    ServeError,
    Status,
    TensorHead,
    binary_data,
    invalid_tensor,
    objects,
    parse_binary_data,
    parse_head,
    parse_timeout,
    pieces_of,
    require_id,
    require_supported,
)

Header = tuple[bytes, bytes]
JSON: Final[Header] = (b"content-type", b"application/json")
MAX_JSON_LISTS: Final = 1 << 16
"""Lists and objects in the JSON. Each takes 25 times its two bytes, and far longer to parse than a number."""
_EMPTY: Final[dict[str, Any]] = {}
_KINDS: Final = {dict: "a JSON object", list: "a list", bool: "true or false", str: "a string"}

_T = TypeVar("_T")


class Reply(NamedTuple):
    """A whole HTTP answer; ``headers`` are all but content-length."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = (JSON,)


class InferCall(NamedTuple):
    """A request, and which outputs its client wants as binary data: some by name, and all others."""

    request: InferRequest
    binary: Mapping[str, bool]
    binary_default: bool

    def is_binary(self, output: str) -> bool:
        return self.binary.get(output, self.binary_default)


def parse_infer(
    body: bytes | bytearray | memoryview,
    *,
    json_bytes: int | None = None,
    json_bytes_max: int,
    model: str,
    version: str = "",
    default_id: str = "",
    client: str = "",
) -> InferCall:
    """The request in a body, whose first ``json_bytes`` are JSON (None: all); ``default_id`` if it has none. Tensors
    of binary data are read-only views of ``body``, which must not change. ServeError INVALID, naming the input,
    or TOO_LARGE."""
    view = memoryview(body).toreadonly()
    end = len(view) if json_bytes is None else json_bytes
    if not 0 <= end <= len(view):
        raise ServeError(Status.INVALID, f"{JSON_LENGTH_HEADER} is {end}, but the body has {len(view)} bytes")
    if end > json_bytes_max:
        raise ServeError(
            Status.TOO_LARGE, f"JSON of {end} bytes is longer than {json_bytes_max}; send large tensors as binary data"
        )
    message = _typed(dict, _parse_json(bytes(view[:end])), "the request")
    parameters = _typed(dict, message.get("parameters", _EMPTY), "parameters")
    inputs = _inputs(message, view[end:])
    default = _typed(bool, parameters.get("binary_data_output", False), "parameter binary_data_output")
    seconds = parse_timeout(parameters.get("timeout", 0))
    wanted = _wanted(message, default)
    request = InferRequest(
        model=model,
        version=version,
        id=require_id(_typed(str, message.get("id", default_id), "id") or default_id),
        inputs=inputs,
        outputs=tuple(wanted),
        deadline=None if seconds is None else time.monotonic() + seconds,
        protocol="http",
        client=client,
    )
    return InferCall(request, wanted, default)


def _parse_json(text: bytes) -> object:
    if text.count(b"[") + text.count(b"{") > MAX_JSON_LISTS:
        raise ServeError(
            Status.TOO_LARGE, f"more than {MAX_JSON_LISTS} lists in the JSON; send data flat, or as binary"
        )
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ServeError(Status.INVALID, f"the request is not JSON: {error}") from None


def _typed(kind: type[_T], value: object, what: str) -> _T:
    if not isinstance(value, kind):
        raise ServeError(Status.INVALID, f"{what} must be {_KINDS[kind]}, not {excerpt(value)}")
    return value


def _entries(message: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The objects of a list of inputs or outputs; their parameters are objects, too."""
    values = _typed(list, message[key], key)
    if len(values) > MAX_TENSORS:
        raise ServeError(Status.INVALID, f"{len(values)} {key}; at most {MAX_TENSORS} are taken")
    for number, value in enumerate(values):  # texts are made only where they are needed: there may be many
        if type(value) is not dict:
            raise ServeError(Status.INVALID, f"{key}[{number}] must be a JSON object, not {excerpt(value)}")
        if type(value.get("parameters", _EMPTY)) is not dict:
            of = f"parameters of {key[:-1]} {excerpt(value.get('name'))}"
            raise ServeError(Status.INVALID, f"{of} must be a JSON object")
        yield value


def _inputs(message: dict[str, Any], binary: memoryview) -> dict[str, InferTensor]:
    """Inputs by name; those of binary data are taken from ``binary`` in their order, and leave nothing of it."""
    if "inputs" not in message:
        raise ServeError(Status.INVALID, "the request has no inputs")
    inputs: dict[str, InferTensor] = {}
    for entry in _entries(message, "inputs"):
        parameters = entry.get("parameters", _EMPTY)
        head = parse_head(entry.get("name"), entry.get("datatype"), entry.get("shape"), parameters, inputs)
        if ("data" in entry) == ("binary_data_size" in parameters):
            raise head.invalid("needs either data or the parameter binary_data_size")
        if "data" in entry:
            inputs[head.name] = parse_json_data(head, entry["data"])
            continue
        size = parameters["binary_data_size"]
        if type(size) is not int or size < 0:
            raise head.invalid(f"binary_data_size {excerpt(size)} must be an integer from 0 on")
        if size > len(binary):
            raise head.invalid(f"binary_data_size is {size}, but only {len(binary)} bytes are left")
        inputs[head.name] = parse_binary_data(head, binary[:size])
        binary = binary[size:]
    if binary:
        raise ServeError(Status.INVALID, f"{len(binary)} bytes of binary data belong to no input")
    return inputs


def _wanted(message: dict[str, Any], default: bool) -> dict[str, bool]:
    wanted: dict[str, bool] = {}
    for number, entry in enumerate(_entries(message, "outputs") if "outputs" in message else ()):
        name = entry.get("name")
        if not isinstance(name, str):
            raise ServeError(Status.INVALID, f"outputs[{number}] must have a name, not {excerpt(name)}")
        if name in wanted:
            raise invalid_tensor("output", name, "asked for twice")
        parameters = entry.get("parameters", _EMPTY)
        require_supported("output", name, parameters)
        wanted[name] = _typed(bool, parameters.get("binary_data", default), f"binary_data of output {excerpt(name)}")
    return wanted


async def write_infer(response: InferResponse, call: InferCall) -> Reply:
    outputs: list[dict[str, Any]] = []
    parts: list[memoryview] = []
    for name, tensor in response.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.data.shape}
        if call.is_binary(name):
            parts.append(binary_data(tensor))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = await write_json_data(tensor)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    answer |= {"id": response.id} if response.id else {}
    head = orjson.dumps({**answer, "outputs": outputs})
    if not parts:
        return Reply(200, head)
    length = (JSON_LENGTH_HEADER.lower().encode(), b"%d" % len(head))
    return Reply(200, b"".join([head, *parts]), ((b"content-type", b"application/octet-stream"), length))


def parse_json_data(head: TensorHead, data: object) -> InferTensor:
    """The tensor that ``data`` gives, flat or nested as the shape says. Floating-point numbers are rounded to the
    nearest. ServeError INVALID names the input: ``null``, or a number that the datatype cannot hold."""
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
    """A tensor's flat ``data`` as text, written piece by piece; NaN and infinity, which JSON lacks, as ``null``."""
    texts = [
        orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        async for piece in pieces_of(tensor.data.reshape(-1))
    ]
    return orjson.Fragment(b"[%b]" % b",".join(texts))
