"""What a request's bytes are turned into, and which are refused; tensors of every kind, and random bytes."""

import asyncio
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tierstore.serve.grpc import codec
from tierstore.serve.grpc import wire as grpc_wire
from tierstore.serve.grpc.codec import decode_request, encode_response, read_request
from tierstore.serve.grpc.wire import join_fields, split_field
from tierstore.serve.messages import DATATYPES, InferRequest, InferResponse, InferTensor, ServeError, Status


def decode(message: Any, **options: Any) -> InferRequest:
    return decode_request(read_request(message.SerializeToString()), **options)


def raw_request(shape: list[int], raw: bytes, datatype: str = "FP32") -> Any:
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[raw])
    message.inputs.add(name="the_input", datatype=datatype, shape=shape)
    return message


def typed_request(shape: list[int], datatype: str, **contents: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m")
    made = message.inputs.add(name="the_input", datatype=datatype, shape=shape)
    made.contents.CopyFrom(service_pb2.InferTensorContents(**contents))
    return message


def two_inputs_of_one_name() -> Any:
    message = raw_request([0], b"")
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(b"")
    return message


def raw_beside_typed() -> Any:
    message = typed_request([1], "FP32", fp32_contents=[1])
    message.raw_input_contents.append(bytes(4))
    return message


def with_parameter(name: str, **value: Any) -> Any:
    message = raw_request([0], b"")
    message.inputs[0].parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    return message


BAD_TENSORS = {
    "too few bytes": (raw_request([2], bytes(7)), "FP32 [2] has 8 bytes, but its binary data 7"),
    "too many bytes": (raw_request([2], bytes(9)), "but its binary data 9"),
    "more than there is memory": (raw_request([1 << 38], bytes(8)), "has 1099511627776 bytes, but its binary data 8"),
    "an overflow": (raw_request([1 << 62, 1 << 62, 1 << 62], bytes(8)), "is too large"),
    "an overflow to zero": (raw_request([1 << 62, 4, 0], b""), "is too large"),
    "a negative dimension": (raw_request([-1, -2], bytes(8)), "must be a list of integers from 0 on"),
    "too many dimensions": (raw_request([1] * 17, bytes(4)), "17 dimensions, more than 16"),
    "no such datatype": (raw_request([1], bytes(4), "FP31"), "datatype 'FP31' is not one of INT32, INT64, FP32"),
    "a datatype of no model": (raw_request([1], bytes(8), "FP64"), "datatype 'FP64' is not one of"),
    "no datatype": (raw_request([1], bytes(4), ""), "datatype '' is not one of"),
    "a name twice": (two_inputs_of_one_name(), "given twice"),
    "raw beside typed": (raw_beside_typed(), "use one of them"),
    "shared memory": (with_parameter("shared_memory_region", string_param="a"), "is not supported"),
    "too few numbers": (typed_request([2], "FP32", fp32_contents=[1]), "1 elements, but its shape 2"),
    "too many numbers": (typed_request([2], "INT32", int_contents=[1] * 3), "3 elements, but its shape 2"),
    "no numbers": (typed_request([2], "INT64"), "0 elements, but its shape 2"),
    "another's field": (typed_request([1], "INT64", int_contents=[1]), "INT64 goes into int64_contents"),
    "a field too many": (typed_request([1], "INT32", int_contents=[1], fp32_contents=[1]), "goes into int_contents"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensor_is_named(case: str) -> None:
    message, why = BAD_TENSORS[case]
    with pytest.raises(ServeError) as raised:
        decode(message)
    assert raised.value.status is Status.INVALID
    assert str(raised.value).startswith("input 'the_input': ")
    assert why in str(raised.value)


def many_inputs(count: int) -> Any:
    message = service_pb2.ModelInferRequest()
    for index in range(count):
        message.inputs.add(name=str(index), datatype="FP32", shape=[0])
    return message


def wanting(*names: str, **parameters: Any) -> Any:
    message = service_pb2.ModelInferRequest()
    for name in names:
        for parameter, value in parameters.items():
            message.outputs.add(name=name).parameters[parameter].int64_param = value
        if not parameters:
            message.outputs.add(name=name)
    return message


def with_timeout(**value: Any) -> Any:
    message = service_pb2.ModelInferRequest()
    message.parameters["timeout"].CopyFrom(service_pb2.InferParameter(**value))
    return message


BAD_REQUESTS = {
    "too many inputs": (many_inputs(1025), "1025 inputs; at most 1024"),
    "a raw content too few": (service_pb2.ModelInferRequest(raw_input_contents=[b""]), "1 raw_input_contents for 0"),
    "an output twice": (wanting("a", "b", "a"), "output 'a': asked for twice"),
    "too many outputs": (wanting(*map(str, range(1025))), "1025 outputs; at most 1024"),
    "classification": (wanting("a", classification=2), "parameter classification is not supported"),
    "a negative timeout": (with_timeout(int64_param=-1), "must be microseconds"),
    "a timeout in words": (with_timeout(string_param="1s"), "must be microseconds"),
    "a timeout that is true": (with_timeout(bool_param=True), "must be microseconds"),
    "a parameter without value": (with_timeout(), "microseconds, 0 or more, not None"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request(case: str) -> None:
    message, why = BAD_REQUESTS[case]
    with pytest.raises(ServeError) as raised:
        decode(message)
    assert raised.value.status is Status.INVALID
    assert why in str(raised.value)


def test_claims_cost_no_memory() -> None:
    """A request of a few bytes may name a shape of any size."""
    claims = [[1 << 19, 2], [1 << 39], [1 << 20]]
    messages = [raw_request(shape, b"\0\0\0\0", "INT64") for shape in claims]
    messages += [typed_request(shape, "INT64") for shape in claims]
    tracemalloc.start()
    for message in messages:
        with pytest.raises(ServeError):
            decode(message)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_elements_handled_one_by_one_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 3)
    assert decode(typed_request([3], "FP32", fp32_contents=[1] * 3)).inputs["the_input"].data.shape == (3,)
    assert decode(raw_request([4], bytes(16))).inputs["the_input"].data.shape == (4,)
    with pytest.raises(ServeError, match="at most 3") as raised:
        decode(typed_request([4], "FP32", fp32_contents=[1] * 4))
    assert raised.value.status is Status.TOO_LARGE


def test_scalars_and_empty_tensors() -> None:
    assert decode(raw_request([], bytes(4))).inputs["the_input"].data.shape == ()
    assert decode(raw_request([3, 0, 5], b"")).inputs["the_input"].data.shape == (3, 0, 5)
    assert decode(typed_request([0], "INT64")).inputs["the_input"].data.shape == (0,)


def test_large_contents_are_not_copied() -> None:
    """Where the message's layout has them aligned; else once, so that compiled code may read them."""
    num_copied = 0
    for padding in range(1, 5):
        message = raw_request([1 << 20], bytes(4 << 20))
        message.id = "i" * padding
        data = message.SerializeToString()
        tracemalloc.start()
        array = decode_request(read_request(data)).inputs["the_input"].data
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert array.flags.aligned
        assert array.flags.c_contiguous
        assert not array.flags.writeable
        num_copied += peak > 1 << 20
        assert peak < 5 << 20
    assert num_copied == 3


def test_timeout_and_deadline() -> None:
    assert decode(with_timeout(int64_param=0)).deadline is None
    before = time.monotonic()
    for message, seconds_left in (
        (with_timeout(int64_param=2_000_000), None),
        (with_timeout(uint64_param=2_000_000), 9),
    ):
        deadline = decode(message, seconds_left=seconds_left).deadline
        assert before + 2 <= deadline <= time.monotonic() + 2
    assert decode(with_timeout(int64_param=9_000_000), seconds_left=2.0).deadline <= time.monotonic() + 2
    assert decode(with_timeout(uint64_param=(1 << 64) - 1)).deadline > before


def respond(is_raw: bool, **outputs: InferTensor) -> Any:
    response = InferResponse(model="m", version="7", id="i", outputs=outputs)
    return service_pb2.ModelInferResponse.FromString(asyncio.run(encode_response(response, is_raw=is_raw)))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 5000, 70_000])
def test_raw_outputs_of_any_size(size: int) -> None:
    data = np.arange(size, dtype=np.int32)
    response = respond(True, x=InferTensor("INT32", data), y=InferTensor("FP32", np.zeros((2, 0), np.float32)))
    assert list(response.raw_output_contents) == [data.tobytes(), b""]
    assert [list(output.shape) for output in response.outputs] == [[size], [2, 0]]
    assert (response.model_name, response.model_version, response.id) == ("m", "7", "i")


# The wire format, against protobuf's own reading of it.


def test_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_wire, "MAX_FIELDS", 4)
    assert len(split_field(b"\x3a\0" * 4, 7)[1]) == 4
    with pytest.raises(ServeError, match="more than 4 fields"):
        split_field(b"\x3a\0" * 5, 7)


@given(st.lists(st.binary(max_size=200), max_size=5), st.sampled_from([1, 7, 15, 16, 3000]))
def test_joined_fields_can_be_split(values: list[bytes], number: int) -> None:
    joined = join_fields(b"\x0a\x01m", number, values)
    rest, found = split_field(joined, number)
    kept = [b"m"] if number == 1 else []
    assert [bytes(each) for each in found] == kept + values
    assert rest == (b"" if number == 1 else b"\x0a\x01m")


# Whatever the bytes, they are a request or refused.


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Messages that are nearly right."""
    message = service_pb2.ModelInferRequest(model_name="m", id=draw(st.text(max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        name, datatype = draw(st.sampled_from("abc")), draw(st.sampled_from([*DATATYPES, "FP31"]))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, -1, 1 << 40]), max_size=3))
        made = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if draw(st.booleans()):
            made.contents.int_contents.extend(draw(st.lists(st.integers(-200, 200), max_size=3)))
        if draw(st.booleans()):
            message.raw_input_contents.append(draw(st.binary(max_size=16)))
    if draw(st.booleans()):
        message.parameters["timeout"].int64_param = draw(st.integers(-(1 << 63), (1 << 63) - 1))
    return message.SerializeToString()


def decode_or_refuse(data: bytes) -> None:
    try:
        request = decode_request(read_request(data))
    except ServeError:
        return
    for tensor in request.inputs.values():
        assert tensor.data.dtype == DATATYPES[tensor.datatype]
        assert tensor.data.flags.c_contiguous
    response = InferResponse(model="m", version="7", id=request.id, outputs=request.inputs)
    for is_raw in (True, False):
        service_pb2.ModelInferResponse.FromString(asyncio.run(encode_response(response, is_raw=is_raw)))


@given(st.binary(max_size=300) | requests())
def test_random_bytes_and_requests(data: bytes) -> None:
    decode_or_refuse(data)


@given(requests(), st.data())
def test_mutated_requests(request: bytes, data: st.DataObject) -> None:
    mutated = bytearray(request)
    for _ in range(data.draw(st.integers(1, 4))):
        if mutated:
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(mutated)))
    decode_or_refuse(bytes(mutated))
    decode_or_refuse(bytes(mutated[:cut]))


@given(st.one_of(st.binary(max_size=60), requests()))
def test_splitting_reads_what_protobuf_reads(data: bytes) -> None:
    try:
        rest, raws = split_field(data, 7)
        split = service_pb2.ModelInferRequest.FromString(rest)
    except (ServeError, DecodeError):
        return
    split.raw_input_contents.extend(bytes(raw) for raw in raws)
    assert split == service_pb2.ModelInferRequest.FromString(data)
