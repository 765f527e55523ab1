"""Requests drawn once and encoded in each of the protocols' four ways."""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tierstore.serve.grpc.codec import decode_request, read_request
from tierstore.serve.messages import DATATYPES, InferRequest
from tierstore.serve.rest.infer_body import parse_infer

JSON_MAX = 1 << 20
_FIELDS = {"INT32": "int", "INT64": "int64", "FP32": "fp32", "BYTES": "bytes"}
_FORMATS = {"INT32": "<i", "INT64": "<q", "FP32": "<f"}
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "INT32": st.integers(-(1 << 31), (1 << 31) - 1),
    "INT64": st.integers(-(1 << 63), (1 << 63) - 1),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "BYTES": st.text(max_size=5),
}


class Tensor(NamedTuple):
    """An input; ``values`` are its elements in row-major order."""

    name: str
    datatype: str
    shape: list[int]
    values: list[Any]
    parameters: Mapping[str, str] = MappingProxyType({})


class Drawn(NamedTuple):
    """A request; ``outputs`` are names with parameters, ``timeout`` is None where it has none."""

    inputs: list[Tensor]
    outputs: Sequence[tuple[str, dict[str, str]]] = ()
    id: str = ""
    timeout: Any = None


@st.composite
def tensors(draw: st.DrawFn, name: str = "x") -> Tensor:
    datatype = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    return Tensor(name, datatype, shape, draw(st.lists(_VALUES[datatype], min_size=count, max_size=count)))


@st.composite
def valid(draw: st.DrawFn) -> Drawn:
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3, unique=True))
    outputs = draw(st.lists(st.text(min_size=1, max_size=3), max_size=3, unique=True))
    return Drawn(
        inputs=[draw(tensors(name)) for name in names],
        outputs=[(name, {}) for name in outputs],
        id=draw(st.text(max_size=9)),
        timeout=draw(st.none() | st.integers(0, 1 << 40)),
    )


_REGION = {"shared_memory_region": "r"}
_BAD_HEADS: tuple[dict[str, Any], ...] = (
    {"datatype": "FP31"},
    {"datatype": "FP64"},
    {"datatype": "fp32"},
    {"datatype": ""},
    {"name": ""},
    {"name": "n" * 1001},
    {"parameters": _REGION},
    {"parameters": {"classification": "1"}},
    {"shape": [1] * 17},
    {"shape": [-1, -2]},
    {"shape": [1 << 62, 4, 0], "values": []},
    {"shape": [1 << 62, 1 << 62]},
    {"shape": [1 << 38]},
)


def _first(**fields: Any) -> Callable[[Drawn], Drawn]:
    return lambda drawn: drawn._replace(inputs=[drawn.inputs[0]._replace(**fields), *drawn.inputs[1:]])


def _fewer(drawn: Drawn) -> Drawn:
    """An element less than the shape says, or one more where there is none."""
    first = drawn.inputs[0]
    one = "" if first.datatype == "BYTES" else 0
    return _first(values=first.values[:-1] if first.values else [one])(drawn)


def _more(drawn: Drawn) -> Drawn:
    first = drawn.inputs[0]
    return _first(values=[*first.values, "" if first.datatype == "BYTES" else 0])(drawn)


def _outputs(*outputs: tuple[str, dict[str, str]]) -> Callable[[Drawn], Drawn]:
    return lambda drawn: drawn._replace(outputs=outputs)


FAULTS: dict[str, Callable[[Drawn], Drawn]] = {
    **{f"input {str(fields)[:40]}": _first(**fields) for fields in _BAD_HEADS},
    "too few elements": _fewer,
    "too many elements": _more,
    "an input twice": lambda drawn: drawn._replace(inputs=[*drawn.inputs, drawn.inputs[0]]),
    "too many inputs": lambda drawn: drawn._replace(inputs=[Tensor(str(n), "FP32", [0], []) for n in range(1025)]),
    "a long id": lambda drawn: drawn._replace(id="i" * 1001),
    "an output twice": _outputs(("a", {}), ("b", {}), ("a", {})),
    "classification of an output": _outputs(("a", {"classification": "2"})),
    "shared memory of an output": _outputs(("a", _REGION)),
    "too many outputs": _outputs(*((str(number), {}) for number in range(1025))),
    **{f"timeout {given!r}": lambda drawn, given=given: drawn._replace(timeout=given) for given in (-1, True, "1s")},
}
"""Mistakes that a request can make over any protocol."""


def contents(tensor: Tensor) -> bytes:
    """As binary data; of a datatype that there is not, zeros."""
    if tensor.datatype == "BYTES":
        texts = [str(value).encode() for value in tensor.values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return b"".join(struct.pack(_FORMATS.get(tensor.datatype, "4x"), *([value] if tensor.datatype in _FORMATS else []))
                    for value in tensor.values)  # fmt: skip


def rest_body(drawn: Drawn, *, binary: bool, **more: Any) -> tuple[bytes, int]:
    """A body, and the length of its JSON."""
    inputs, parts = [], []
    for each in drawn.inputs:
        entry: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
        parameters: dict[str, Any] = dict(each.parameters)
        if binary:
            parts.append(contents(each))
            parameters["binary_data_size"] = len(parts[-1])
        else:
            entry["data"] = each.values
        inputs.append(entry | ({"parameters": parameters} if parameters else {}))
    message: dict[str, Any] = {"inputs": inputs, **({"id": drawn.id} if drawn.id else {}), **more}
    if drawn.outputs:
        message["outputs"] = [{"name": name, "parameters": given} for name, given in drawn.outputs]
    if drawn.timeout is not None:
        message["parameters"] = {"timeout": drawn.timeout}
    text = json.dumps(message).encode()
    return text + b"".join(parts), len(text)


def parse(body: bytes, length: int | None = None) -> InferRequest:
    """What REST makes of a body."""
    return parse_infer(body, json_bytes=length, json_bytes_max=JSON_MAX, model="m").request


def grpc_message(drawn: Drawn, *, raw: bool) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m", id=drawn.id)
    for each in drawn.inputs:
        made = message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        for name, value in each.parameters.items():
            made.parameters[name].string_param = value
        if raw:
            message.raw_input_contents.append(contents(each))
        elif each.values:
            values = [value.encode() for value in each.values] if each.datatype == "BYTES" else each.values
            if each.datatype in _FIELDS:
                getattr(made.contents, f"{_FIELDS[each.datatype]}_contents").extend(values)
    for name, given in drawn.outputs:
        parameters = message.outputs.add(name=name).parameters
        for parameter, value in given.items():
            parameters[parameter].string_param = value
    if drawn.timeout is not None:
        field = {int: "int64_param", bool: "bool_param", str: "string_param"}[type(drawn.timeout)]
        setattr(message.parameters["timeout"], field, drawn.timeout)
    return message


def decode(message: Any, **options: Any) -> InferRequest:
    """What gRPC makes of a message."""
    return decode_request(read_request(message.SerializeToString()), **options)


WAYS: dict[str, Callable[[Drawn], InferRequest]] = {
    "REST, JSON": lambda drawn: parse(rest_body(drawn, binary=False)[0]),
    "REST, binary": lambda drawn: parse(*rest_body(drawn, binary=True)),
    "gRPC, raw": lambda drawn: decode(grpc_message(drawn, raw=True)),
    "gRPC, typed": lambda drawn: decode(grpc_message(drawn, raw=False)),
}
