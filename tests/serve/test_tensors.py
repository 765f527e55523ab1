"""Bodies as they may come from anyone: what is valid gives exactly its bytes, and all else one kind of error."""

import asyncio
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.serve.messages import NUMBERS, InferResponse, InferTensor, ServeError, Status
from tierstore.serve.rest import infer_body
from tierstore.serve.rest.infer_body import InferCall, parse_infer, write_infer
from tierstore.serve.tensors import MAX_DIMS, MAX_TENSORS, MAX_TEXTS, binary_data, objects

JSON_MAX = 1 << 20


def body_of(inputs: list[Any], binary: bytes = b"", **more: Any) -> tuple[bytes, int]:
    text = orjson.dumps({"inputs": inputs, **more})
    return text + binary, len(text)


def entry(
    size: Any, *, name: Any = "x", datatype: Any = "FP32", shape: Any = (2,), **parameters: Any
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size, **parameters}}


def parse(body: bytes, json_bytes: int | None) -> InferCall:
    return parse_infer(body, json_bytes=json_bytes, json_bytes_max=JSON_MAX, model="m")


def refusal(inputs: list[Any], binary: bytes = b"", **more: Any) -> str:
    with pytest.raises(ServeError) as raised:
        parse(*body_of(inputs, binary, **more))
    assert raised.value.status is Status.INVALID
    return str(raised.value)


def test_binary_tensors_are_views_of_the_body() -> None:
    values = np.arange(6, dtype=np.float32)
    for padding in range(8):
        body, length = body_of([entry(24, shape=[2, 3])], values.tobytes(), id="i" * (padding + 1))
        (tensor,) = parse(body, length).request.inputs.values()
        np.testing.assert_array_equal(tensor.data, values.reshape(2, 3))
        assert tensor.data.flags.aligned
        assert not tensor.data.flags.writeable
        start = np.frombuffer(body, np.uint8).ctypes.data
        shared = start <= tensor.data.ctypes.data < start + len(body)
        assert shared == ((start + length) % 4 == 0)


@pytest.mark.parametrize(
    ("size", "shape", "binary", "says"),
    [
        (8, [2], b"\0" * 7, "binary_data_size is 8, but only 7 bytes are left"),
        (7, [2], b"\0" * 7, r"FP32 [2] has 8 bytes, but its binary data 7"),
        (8, [3], b"\0" * 8, "has 12 bytes"),
        (8, [2], b"\0" * 9, "1 bytes of binary data belong to no input"),
        (2**62, [2], b"\0" * 8, "only 8 bytes are left"),
        (2**64 - 1, [2], b"\0" * 8, "only 8 bytes are left"),
        (-8, [2], b"\0" * 8, "binary_data_size -8"),
        (8.0, [2], b"\0" * 8, "binary_data_size 8.0"),
        (True, [2], b"\0" * 8, "binary_data_size True"),
        ("8", [2], b"\0" * 8, "binary_data_size '8'"),
        (None, [2], b"\0" * 8, "binary_data_size None"),
        (8, [-2], b"\0" * 8, "from 0 on"),
        (8, [2.0], b"\0" * 8, "from 0 on"),
        (8, [True, 2], b"\0" * 8, "from 0 on"),
        (8, 2, b"\0" * 8, "from 0 on"),
        (8, None, b"\0" * 8, "from 0 on"),
        (8, [1] * (MAX_DIMS + 1), b"\0" * 8, "17 dimensions, more than 16"),
        (0, [2**32, 2**32, 0], b"", "too large"),
        (0, [2**63, 2], b"", "too large"),
        (8, [2**64 - 1], b"\0" * 8, "too large"),
        (8, [2**33, 2**31], b"\0" * 8, "too large"),
        (8, [2**31, 2**29], b"\0" * 8, "has 4611686018427387904 bytes, but its binary data 8"),
    ],
)
def test_sizes_that_do_not_match(size: Any, shape: Any, binary: bytes, says: str) -> None:
    message = refusal([entry(size, shape=shape)], binary)
    assert says in message
    assert "input 'x'" in message or "no input" in message


@pytest.mark.parametrize(
    ("name", "datatype", "says"),
    [
        (5, "FP32", "name"),
        ("", "FP32", "name"),
        (None, "FP32", "name"),
        ("n" * 2000, "FP32", "name"),
        ("x", "FP64", "INT32, INT64, FP32"),
        ("x", "fp32", "FP32"),
        ("x", None, "datatype None"),
        ("x", ["FP32"], "datatype"),
    ],
)
def test_heads_that_are_wrong(name: Any, datatype: Any, says: str) -> None:
    message = refusal([entry(8, name=name, datatype=datatype)], b"\0" * 8)
    assert says in message
    assert len(message) < 300


def test_inputs_are_told_apart_and_bounded() -> None:
    assert "input 'x': given twice" in refusal([entry(0, shape=[0]), entry(0, shape=[0])])
    many = [entry(0, name=str(number), shape=[0]) for number in range(MAX_TENSORS + 1)]
    assert f"more than {MAX_TENSORS}" in refusal(many)
    assert len(parse(*body_of(many[:-1])).request.inputs) == MAX_TENSORS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": []}, "parameters must be a JSON object"),
        ({"parameters": {"binary_data_output": 1}}, "binary_data_output must be true or false"),
        ({"parameters": {"timeout": -1}}, "timeout must be microseconds"),
        ({"parameters": {"timeout": 1.5}}, "timeout must be microseconds"),
        ({"parameters": {"timeout": True}}, "timeout must be microseconds"),
        ({"id": 5}, "id must be"),
        ({"id": "i" * 1001}, "id must be"),
        ({"outputs": {}}, "outputs must be a list"),
        ({"outputs": ["y"]}, "outputs[0] must be a JSON object"),
        ({"outputs": [{}]}, "outputs[0] must have a name"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "outputs[1] must have a name of its own"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]}, "binary_data of output 'y'"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification is not supported"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "not supported"),
        ({"outputs": [{"name": str(number)} for number in range(5000)]}, "more than 1024"),
    ],
)
def test_what_stands_beside_the_inputs(change: dict[str, Any], says: str) -> None:
    assert says in refusal([], **change)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (5, "inputs must be a list"),
        ([5], "inputs[0] must be a JSON object"),
        ([{"name": "x", "datatype": "FP32", "shape": [1]}], "either data or"),
        ([{"name": "x", "datatype": "FP32", "shape": [1], "parameters": 3}], "parameters of input 'x'"),
        ([{**entry(4, shape=[1]), "data": [1]}], "either data or"),
        ([entry(4, shape=[1], shared_memory_region="r")], "shared_memory_region is not supported"),
    ],
)
def test_inputs_that_are_no_tensors(inputs: Any, says: str) -> None:
    assert says in refusal(inputs)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"5", b"null", b"\xff", b"[" * 5000, b'{"inputs":[NaN]}', b'"\\ud800"', b"{}"]
)
def test_bodies_that_are_no_request(text: bytes) -> None:
    with pytest.raises(ServeError) as raised:
        parse(text, None)
    assert raised.value.status is Status.INVALID


def test_the_length_of_the_json() -> None:
    body, length = body_of([entry(8)], b"\0" * 8)
    for wrong in (-1, len(body) + 1, 2**63, length - 1, length + 1, 0):
        with pytest.raises(ServeError) as raised:
            parse(body, wrong)
        assert raised.value.status is Status.INVALID
    with pytest.raises(ServeError, match="binary data") as raised:
        parse_infer(body, json_bytes=length, json_bytes_max=length - 1, model="m")
    assert raised.value.status is Status.TOO_LARGE


@pytest.mark.parametrize(
    "one",
    [
        entry(0, shape=[2**40]),
        entry(2**40, shape=[2**38]),
        entry(0, shape=[0, 2**60]),
        {"name": "x", "datatype": "FP32", "shape": [2**40], "data": []},
    ],
)
def test_a_number_in_a_request_takes_no_memory(one: dict[str, Any]) -> None:
    body, length = body_of([one])
    tracemalloc.start()
    try:
        parse(body, length)
    except ServeError:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_lists_are_bounded_before_they_are_made() -> None:
    with pytest.raises(ServeError, match="send data flat") as raised:
        parse(b"[" * (infer_body.MAX_JSON_LISTS + 1), None)
    assert raised.value.status is Status.TOO_LARGE


def test_timeout_becomes_a_deadline() -> None:
    before = time.monotonic()
    request = parse(*body_of([], parameters={"timeout": 1_500_000, "other": [1]})).request
    assert request.deadline is not None
    assert before + 1.5 <= request.deadline <= time.monotonic() + 1.5
    assert parse(*body_of([], parameters={"timeout": 0})).request.deadline is None


TENSORS = st.sampled_from(sorted(NUMBERS)).flatmap(
    lambda datatype: st.tuples(
        st.just(datatype), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**32), st.booleans()
    )
)


def random_tensor(datatype: str, shape: list[int], seed: int) -> InferTensor:
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    dtype = NUMBERS[datatype]
    return InferTensor(datatype, np.frombuffer(random.bytes(count * dtype.itemsize), dtype).reshape(shape))


def written(tensors: dict[str, InferTensor]) -> tuple[bytes, int | None]:
    """A response in binary, turned into a request by one word: both have the same tensors."""
    response = InferResponse(model="m", version="1", id="", outputs=tensors)
    _, body, headers = asyncio.run(write_infer(response, InferCall(Any, {}, True)))
    lengths = [int(value) for name, value in headers if name == b"inference-header-content-length"]
    length = lengths[0] if lengths else len(body)
    text = body[:length].replace(b'"outputs":[', b'"inputs":[', 1)
    return text + body[length:], len(text) if lengths else None


@given(st.lists(TENSORS, max_size=4))
def test_what_is_written_is_read_back(drawn: list[tuple[str, list[int], int, bool]]) -> None:
    tensors = {str(number): random_tensor(*each[:3]) for number, each in enumerate(drawn)}
    calls = parse(*written(tensors))
    assert list(calls.request.inputs) == list(tensors)
    for name, tensor in calls.request.inputs.items():
        assert tensor.datatype == tensors[name].datatype
        assert tensor.data.shape == tensors[name].data.shape
        assert tensor.data.tobytes() == tensors[name].data.tobytes()


TEXTS = st.lists(st.binary(max_size=9), max_size=5)


def texts_of(data: bytes, count: int) -> list[bytes]:
    """What ``count`` elements of BYTES in binary data give."""
    body, length = body_of([entry(len(data), datatype="BYTES", shape=[count])], data)
    found: list[bytes] = parse(body, length).request.inputs["x"].data.tolist()
    return found


@given(TEXTS)
def test_texts_are_read_back(texts: list[bytes]) -> None:
    data = bytes(binary_data(InferTensor("BYTES", objects(texts))))
    assert data == b"".join(struct.pack("<I", len(text)) + text for text in texts)
    assert texts_of(data, len(texts)) == texts


@given(TEXTS, st.data())
def test_broken_texts_are_refused_or_other_texts(texts: list[bytes], draws: st.DataObject) -> None:
    data = bytearray(binary_data(InferTensor("BYTES", objects(texts))))
    place = draws.draw(st.integers(0, len(data)))
    data[place : place + draws.draw(st.integers(0, 3))] = draws.draw(st.binary(max_size=3))
    count = draws.draw(st.integers(0, 6))
    try:
        found = texts_of(bytes(data), count)
    except ServeError:
        return
    assert b"".join(struct.pack("<I", len(text)) + text for text in found) == data
    assert len(found) == count


def test_more_texts_than_are_taken() -> None:
    with pytest.raises(ServeError, match="at most 65536 are taken") as raised:
        texts_of(bytes(4 * (MAX_TEXTS + 1)), MAX_TEXTS + 1)
    assert raised.value.status is Status.TOO_LARGE


WORDS = st.sampled_from(
    [b"-1", b"0", b"9" * 30, b"18446744073709551615", b"null", b"true", b"1e999", b"[", b"]", b'"', b"INT64", bytes(4)]
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, int]:
    """A valid request with some bytes changed, put in or taken out, and perhaps another length of the JSON."""
    drawn = draw(st.lists(TENSORS, min_size=1, max_size=3))
    tensors = {str(number): random_tensor(*each[:3]) for number, each in enumerate(drawn)}
    body, length = written(tensors)
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.one_of(WORDS, st.binary(max_size=3)))
    assert length is not None
    return bytes(data), max(length + draw(st.sampled_from([0, 0, 0, 1, -1, 7])) + (len(data) - len(body)), 0)


@given(mutated())
def test_mutations(case: tuple[bytes, int]) -> None:
    body, length = case
    try:
        call = parse(body, length)
    except ServeError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.status is Status.INVALID
        assert len(str(refused)) < 1000
        return
    # What was taken is what stands there: the tensors in order, each its bytes, and nothing left.
    message = orjson.loads(body[:length])
    at = length
    for given_input in message["inputs"]:
        tensor = call.request.inputs[given_input["name"]]
        assert list(tensor.data.shape) == given_input["shape"]
        if "data" in given_input:
            continue
        size = given_input["parameters"]["binary_data_size"]
        assert tensor.data.tobytes() == body[at : at + size]
        at += size
    assert at == len(body)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 250)))
def test_any_bytes(body: bytes, length: int | None) -> None:
    with pytest.raises(ServeError):
        parse(body, length)
