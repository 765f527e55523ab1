"""Requests as they may come from anyone: the same one in every encoding, and what is none is refused with one error."""

import asyncio
import itertools
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.requests import FAULTS, WAYS, Drawn, Tensor, parse, valid
from tierstore.serve.messages import DATATYPES, NUMBERS, InferTensor, ServeError, Status
from tierstore.serve.rest.infer_body import MAX_JSON_LISTS, parse_infer, write_json_data
from tierstore.serve.tensors import MAX_TENSORS, MAX_TEXTS, PIECE_ELEMENTS


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
            assert request.deadline is not None
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


# What only REST's bodies can say.

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
        x = COMPLETE["inputs"][0] | {"parameters": {"binary_data_size": size}}
        refusal(parse, *with_data({"inputs": [x]}))
    both = [{**COMPLETE["inputs"][0], "data": [1]}]
    refusal(parse, *with_data({**COMPLETE, "inputs": both}))

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


# Data in JSON.


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


# Memory.


def test_claims_cost_no_memory() -> None:
    """A request of a few bytes may name a shape of any size."""
    claims = [Drawn([Tensor("x", "INT64", shape, [0])]) for shape in ([1 << 19, 2], [1 << 39], [1 << 20], [0, 1 << 60])]
    for read, drawn in itertools.product(WAYS.values(), claims):
        tracemalloc.start()
        refusal(read, drawn, status=None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1 << 19


# Answers, which have the same tensors, and any bytes.


@given(st.lists(st.floats(width=32)) | st.integers(0, 2 * PIECE_ELEMENTS + 1).map(lambda count: [0.5] * count))
def test_numbers_come_back_from_json_as_the_same_bits(values: list[float]) -> None:
    """But those that it has no words for, which become null."""
    data = np.array(values, np.float32)
    found = orjson.loads(orjson.dumps(asyncio.run(write_json_data(InferTensor("FP32", data)))))
    finite = np.isfinite(data)
    assert [each is not None for each in found] == finite.tolist()
    assert np.array([each for each in found if each is not None], np.float32).tobytes() == data[finite].tobytes()
