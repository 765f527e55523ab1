"""Tensors as JSON: every datatype's values, and what is no value of it."""

from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.serve.messages import DATATYPES, InferTensor, ServeError, Status
from tierstore.serve.rest.json_tensors import json_data, parse_json_data
from tierstore.serve.tensors import parse_head

INTEGERS = [name for name, dtype in DATATYPES.items() if dtype.kind in "iu" and name != "BF16"]
FLOATS = ["FP16", "BF16", "FP32", "FP64"]


def parse(datatype: str, shape: list[int], data: Any) -> np.ndarray:
    """As if it had come as text."""
    tensor = parse_json_data(parse_head("x", datatype, shape), orjson.loads(orjson.dumps(data)))
    assert tensor.datatype == datatype
    assert tensor.data.dtype == DATATYPES[datatype]
    assert tensor.data.flags.c_contiguous
    return tensor.data


def refusal(datatype: str, shape: list[int], data: Any) -> str:
    with pytest.raises(ServeError) as raised:
        parse(datatype, shape, data)
    assert raised.value.status is Status.INVALID
    assert "input 'x'" in str(raised.value)
    return str(raised.value)


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
    for datatype in INTEGERS + FLOATS:
        array = parse(datatype, shape, data)
        flat = np.array(data, np.float64).reshape(-1)
        expected = flat.astype(ml_dtypes.bfloat16).view(np.uint16) if datatype == "BF16" else flat
        np.testing.assert_array_equal(array, expected.reshape(shape))


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


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_at_their_bounds(datatype: str) -> None:
    info = np.iinfo(DATATYPES[datatype])
    assert parse(datatype, [2], [info.min, info.max]).tolist() == [info.min, info.max]
    for beyond in (info.min - 1, info.max + 1):
        if -(2**63) <= beyond < 2**64:
            assert "cannot hold" in refusal(datatype, [1], [beyond])


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
        ("BF16", {}, "data has {}"),
        ("BOOL", 1, "BOOL takes booleans, but data has 1"),
        ("BYTES", 1, "BYTES takes strings, but data has 1"),
        ("BYTES", [1], "data has [1]"),
        ("FP16", 65520, "FP16 cannot hold"),
        ("BF16", 3.4e38, "BF16 cannot hold"),
        ("FP32", -3.5e38, "FP32 cannot hold"),
    ],
)
def test_values_of_the_wrong_kind(datatype: str, value: Any, says: str) -> None:
    good = {"BOOL": True, "BYTES": "a"}.get(datatype, 1)
    assert says in refusal(datatype, [3], [good, good, value])


def test_an_integer_beyond_64_bits() -> None:
    head = parse_head("x", "UINT64", [1])
    with pytest.raises(ServeError, match="takes integers, but data has 1"):
        parse_json_data(head, orjson.loads(b"[18446744073709551616]"))


def test_text() -> None:
    assert parse("BYTES", [2, 1], [["é"], [""]]).tolist() == [["é".encode()], [b""]]
    assert json_data("y", InferTensor("BYTES", np.array([b"\xc3\xa9"], np.object_))) == ["é"]
    with pytest.raises(ServeError, match="output 'y' is not UTF-8"):
        json_data("y", InferTensor("BYTES", np.array([b"\xff"], np.object_)))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bf16_rounds_to_nearest_even(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(values, np.float32).astype(ml_dtypes.bfloat16)
    if np.isfinite(expected.astype(np.float32)).all():
        np.testing.assert_array_equal(parse("BF16", [len(values)], values), expected.view(np.uint16))
    else:
        assert refusal("BF16", [len(values)], values)


@given(st.sampled_from([*INTEGERS, *FLOATS, "BOOL"]), st.integers(0, 2**32))
def test_numbers_come_back_as_the_same_bits(datatype: str, seed: int) -> None:
    dtype = DATATYPES[datatype]
    random = np.random.default_rng(seed)
    if datatype == "BOOL":
        data = random.integers(0, 2, 20).astype(dtype)
    else:
        data = np.frombuffer(random.bytes(20 * dtype.itemsize), dtype).copy()
        values = data.view(ml_dtypes.bfloat16).astype(np.float32) if datatype == "BF16" else data
        data[~np.isfinite(values)] = 0
    text = orjson.dumps(json_data("y", InferTensor(datatype, data)), option=orjson.OPT_SERIALIZE_NUMPY)
    assert parse(datatype, [20], orjson.loads(text)).tobytes() == data.tobytes()


def test_what_json_cannot_carry_becomes_null() -> None:
    data = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    text = orjson.dumps(json_data("y", InferTensor("FP32", data)), option=orjson.OPT_SERIALIZE_NUMPY)
    assert orjson.loads(text) == [None, None, None, 1]
