"""Tensors as JSON: every datatype's values, and what is no value of it."""

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.serve.messages import NUMBERS, InferTensor, ServeError, Status
from tierstore.serve.rest.json_tensors import parse_json_data, write_json_data
from tierstore.serve.tensors import parse_head


def parse(datatype: str, shape: list[int], data: Any) -> np.ndarray:
    """As if it had come as text."""
    tensor = parse_json_data(parse_head("x", datatype, shape), orjson.loads(orjson.dumps(data)))
    assert tensor.datatype == datatype
    assert tensor.data.dtype == NUMBERS[datatype]
    assert tensor.data.flags.c_contiguous
    return tensor.data


def refusal(datatype: str, shape: list[int], data: Any) -> str:
    with pytest.raises(ServeError) as raised:
        parse(datatype, shape, data)
    assert raised.value.status is Status.INVALID
    assert "input 'x'" in str(raised.value)
    return str(raised.value)


def written(data: np.ndarray) -> Any:
    return orjson.loads(orjson.dumps(asyncio.run(write_json_data(InferTensor("FP32", data)))))


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 3], [1, 2, 3, 4, 5, 6]),
        ([2, 3], [[1, 2, 3], [4, 5, 6]]),
        ([2, 1, 3], [[[1, 2, 3]], [[4, 5, 6]]]),
        ([2, 1, 3], [1, 2, 3, 4, 5, 6]),
        ([2, 0, 3], [[], []]),
        ([], [7]),
        ([0], []),
        ([2, 0], []),
        ([2, 0], [[], []]),
        ([0, 3], []),
    ],
)
def test_flat_and_nested(shape: list[int], data: Any) -> None:
    for datatype in NUMBERS:
        np.testing.assert_array_equal(parse(datatype, shape, data), np.array(data, np.float64).reshape(shape))


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 3], [1, 2, 3]),
        ([2], [[1, 2]]),
        ([2, 2], [[1, 2], [3]]),
        ([2, 2], [[1, 2, 3, 4]]),
        ([2, 2], [[1, 2], 3, 4]),
        ([2, 2], [1, 2, [3, 4]]),
        ([2, 2, 1], [[1, 2], [3, 4]]),
        ([4], [[1, 2], [3, 4]]),
        ([2, 0], [[], [], []]),
        ([0, 3], [[]]),
        ([], []),
        ([], 5),
        ([1], {"0": 1}),
        ([1], "1"),
        ([1], None),
        ([10**9], [1]),
    ],
)
def test_data_that_does_not_match_the_shape(shape: list[int], data: Any) -> None:
    assert refusal("INT32", shape, data)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_integers_at_their_bounds(datatype: str) -> None:
    info = np.iinfo(NUMBERS[datatype])
    assert parse(datatype, [2], [info.min, info.max]).tolist() == [info.min, info.max]
    assert "cannot hold" in refusal(datatype, [1], [info.max + 1])


@pytest.mark.parametrize(
    ("datatype", "value", "says"),
    [
        ("INT32", 1.0, "INT32 takes integers, but data has 1.0"),
        ("INT32", True, "data has True"),
        ("INT32", "1", "data has '1'"),
        ("INT32", None, "data has None"),
        ("FP32", True, "FP32 takes numbers, but data has True"),
        ("FP32", "NaN", "data has 'NaN'"),
        ("FP32", None, "data has None"),
        ("FP32", {}, "data has {}"),
        ("FP32", [1], "data has [1]"),
        ("FP32", -3.5e38, "FP32 cannot hold"),
    ],
)
def test_values_of_the_wrong_kind(datatype: str, value: Any, says: str) -> None:
    assert says in refusal(datatype, [3], [1, 1, value])


def test_an_integer_beyond_64_bits() -> None:
    with pytest.raises(ServeError, match="takes integers, but data has 1"):
        parse_json_data(parse_head("x", "INT64", [1]), orjson.loads(b"[18446744073709551616]"))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_numbers_come_back_as_the_same_bits(values: list[float]) -> None:
    data = np.array(values, np.float32)
    assert parse("FP32", [len(values)], written(data)).tobytes() == data.tobytes()


def test_what_json_cannot_carry_becomes_null() -> None:
    assert written(np.array([np.nan, np.inf, -np.inf, 1], np.float32)) == [None, None, None, 1]
