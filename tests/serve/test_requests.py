"""Requests as they may come from anyone: the same one in every encoding, and what is none is refused with one error."""

import asyncio
import itertools
import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tierstore.serve.grpc.codec import decode_request, read_request
from tierstore.serve.messages import (
    DATATYPES,
    MAX_TENSORS,
    MAX_TEXTS,
    NUMBERS,
    PIECE_ELEMENTS,
    InferRequest,
    InferTensor,
    ServeError,
    Status,
)
from tierstore.serve.rest.infer_body import MAX_JSON_LISTS, parse_infer, write_json_data

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


def _of_other_size(more: bool) -> Callable[[Drawn], Drawn]:
    """An element more than the shape says, or one less, where there is any."""

    def change(drawn: Drawn) -> Drawn:
        values = drawn.inputs[0].values
        one = "" if drawn.inputs[0].datatype == "BYTES" else 0
        return _first(values=[*values, one] if more or not values else values[:-1])(drawn)

    return change


def _outputs(*outputs: tuple[str, dict[str, str]]) -> Callable[[Drawn], Drawn]:
    return lambda drawn: drawn._replace(outputs=outputs)


FAULTS: dict[str, Callable[[Drawn], Drawn]] = {
    **{f"input {str(fields)[:40]}": _first(**fields) for fields in _BAD_HEADS},
    "too few elements": _of_other_size(False),
    "too many elements": _of_other_size(True),
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
    for name, wanted in drawn.outputs:
        parameters = message.outputs.add(name=name).parameters
        for parameter, value in wanted.items():
            parameters[parameter].string_param = value
    if drawn.timeout is not None:
        field = {int: "int64_param", bool: "bool_param", str: "string_param"}[type(drawn.timeout)]
        setattr(message.parameters["timeout"], field, drawn.timeout)
    return message


def decode(message: Any, **options: Any) -> InferRequest:
    return decode_request(read_request(message.SerializeToString()), **options)


WAYS: dict[str, Callable[[Drawn], InferRequest]] = {
    "REST, JSON": lambda drawn: parse(rest_body(drawn, binary=False)[0]),
    "REST, binary": lambda drawn: parse(*rest_body(drawn, binary=True)),
    "gRPC, raw": lambda drawn: decode(grpc_message(drawn, raw=True)),
    "gRPC, typed": lambda drawn: decode(grpc_message(drawn, raw=False)),
}


def refusal(work: Any, *arguments: Any, status: Status | None = Status.INVALID) -> str:
    """The message; without a status, of one that says that it is too large, or wrong."""
    with pytest.raises(ServeError) as raised:
        work(*arguments)
    assert raised.value.status in ([status] if status else [Status.INVALID, Status.TOO_LARGE])
    assert len(str(raised.value)) < 1000
    return str(raised.value)


@given(valid())
def test_a_request_is_the_same_in_every_encoding(drawn: Drawn) -> None:
    for way, read in WAYS.items():
        before = time.monotonic()
        request = read(drawn)
        after = time.monotonic()
        assert (request.id, request.outputs) == (drawn.id, tuple(name for name, _ in drawn.outputs)), way
        assert list(request.inputs) == [each.name for each in drawn.inputs], way
        if drawn.timeout:
            assert before <= request.deadline - drawn.timeout / 1e6 <= after + 1e-3, way
        else:
            assert request.deadline is None, way
        for each in drawn.inputs:
            tensor = request.inputs[each.name]
            array = tensor.data
            expected = [value.encode() for value in each.values] if each.datatype == "BYTES" else each.values
            assert (tensor.datatype, array.dtype) == (each.datatype, DATATYPES[each.datatype]), way
            assert (list(array.shape), array.reshape(-1).tolist()) == (each.shape, expected), way
            assert array.flags.c_contiguous
            assert array.flags.aligned


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=5)
@given(drawn=valid())
def test_a_mistake_is_refused_in_every_encoding(fault: str, drawn: Drawn) -> None:
    wrong = FAULTS[fault](drawn)
    name, messages = wrong.inputs[0].name, {}
    for way, read in WAYS.items():
        message = refusal(read, wrong, status=None if wrong.inputs[0].shape == [1 << 38] else Status.INVALID)
        messages[way] = message
        if 0 < len(name) < 9 and fault.startswith("input") and wrong.inputs[0].shape != [1 << 38]:
            assert f"input {name!r}" in message
    assert messages["REST, binary"] == messages["gRPC, raw"]


COMPLETE: dict[str, Any] = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "z", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]},
    ]
}


def with_data(message: Any, data: bytes = bytes(4)) -> tuple[bytes, int]:
    text = orjson.dumps(message)
    return text + data, len(text)


def test_bounds_of_rest() -> None:
    for text in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 5000, b'{"inputs":[NaN]}', b'"\\ud800"', b"{}"):
        refusal(parse, text)
    body, length = with_data(COMPLETE)
    for wrong in (-1, len(body) + 1, 2**63, length - 1, length + 1, 0):
        refusal(parse, body, wrong)
    refusal(parse, *with_data({**COMPLETE, "id": "i" * 1001}))
    for size in (True, -1, 4.0, "4", None, 3, 5):
        refusal(parse, *with_data({"inputs": [COMPLETE["inputs"][0] | {"parameters": {"binary_data_size": size}}]}))
    refusal(parse, *with_data({**COMPLETE, "inputs": [{**COMPLETE["inputs"][0], "data": [1]}]}))

    def parse_short() -> None:
        parse_infer(body, json_bytes=length, json_bytes_max=length - 1, model="m")

    assert "binary data" in refusal(parse_short, status=Status.TOO_LARGE)
    assert "send data flat" in refusal(parse, b"[" * (MAX_JSON_LISTS + 1), status=Status.TOO_LARGE)
    many = [Tensor(str(number), "FP32", [0], []) for number in range(MAX_TENSORS)]
    for read in WAYS.values():
        assert len(read(Drawn(many)).inputs) == MAX_TENSORS
    texts = Drawn([Tensor("x", "BYTES", [MAX_TEXTS + 1], [""] * (MAX_TEXTS + 1))])
    for way in ("REST, binary", "gRPC, raw"):
        refusal(WAYS[way], texts, status=Status.TOO_LARGE)


def test_data_is_flat_or_nested_as_the_shape_says() -> None:
    """Right ones come first in each row."""
    rows: list[tuple[list[int], int, list[Any]]] = [
        ([], 1, [[0], 0, [0, 1], [[0]], None]),
        ([3], 1, [[0, 1, 2], [0, 1], [[0, 1, 2]], [0, [1], 2], 5, "1", {"0": 1}]),
        ([2, 2], 2, [[0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 1], 2, 3], [[0], [1, 2, 3]], [[[0, 1]], [[2, 3]]]]),
        ([2, 1, 2], 2, [[0, 1, 2, 3], [[[0, 1]], [[2, 3]]], [[0, 1], [2, 3]], [[[0], [1]], [[2], [3]]], []]),
        ([0, 2], 1, [[], [[], []], [0]]),
    ]
    for shape, num_right, given_ in rows:
        for place, data in enumerate(given_):
            body = orjson.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": shape, "data": data}]})
            if place < num_right:
                array = parse(body).inputs["x"].data
                assert (array.reshape(-1).tolist(), list(array.shape)) == (list(range(math.prod(shape))), shape)
            else:
                assert "input 'x'" in refusal(parse, body)


BOUNDS = [(1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 63]
ELEMENTS = [*BOUNDS, 1, 1.0, -2.5, True, "1", None, [1], {}, 3.4e38, -3.5e38, "NaN"]


def test_elements_that_a_datatype_can_hold() -> None:
    for datatype, element in itertools.product(DATATYPES, ELEMENTS):
        if datatype == "BYTES":
            is_held = type(element) is str
        elif datatype == "FP32":
            is_held = type(element) in (int, float) and abs(element) < 3.403e38
        else:
            info = np.iinfo(NUMBERS[datatype])
            is_held = type(element) is int and info.min <= element <= info.max
        body = {"name": "x", "datatype": datatype, "shape": [1], "data": [element]}
        if not is_held:
            refusal(parse, orjson.dumps({"inputs": [body]}))
            continue
        found = parse(orjson.dumps({"inputs": [body]})).inputs["x"].data
        assert found.tolist() == np.array([element.encode() if type(element) is str else element], found.dtype).tolist()
    refusal(parse, b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1],"data":[18446744073709551616]}]}')


def test_claims_cost_no_memory() -> None:
    """A request of a few bytes may name a shape of any size."""
    claims = [Drawn([Tensor("x", "INT64", shape, [0])]) for shape in ([1 << 19, 2], [1 << 39], [1 << 20], [0, 1 << 60])]
    for read, drawn in itertools.product(WAYS.values(), claims):
        tracemalloc.start()
        refusal(read, drawn, status=None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1 << 19


@given(st.lists(st.floats(width=32)) | st.integers(0, 2 * PIECE_ELEMENTS + 1).map(lambda count: [0.5] * count))
def test_numbers_come_back_from_json_as_the_same_bits(values: list[float]) -> None:
    """But those that it has no words for, which become null."""
    data = np.array(values, np.float32)
    found = orjson.loads(orjson.dumps(asyncio.run(write_json_data(InferTensor("FP32", data)))))
    finite = np.isfinite(data)
    assert [each is not None for each in found] == finite.tolist()
    assert np.array([each for each in found if each is not None], np.float32).tobytes() == data[finite].tobytes()
