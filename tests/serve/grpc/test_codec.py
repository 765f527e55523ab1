"""The bytes of gRPC's messages: which are refused that REST cannot send, and the wire format against protobuf's own."""

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.serve.requests import Drawn, Tensor, decode, grpc_message, valid
from tierstore.serve.grpc import codec
from tierstore.serve.grpc.codec import split_field
from tierstore.serve.grpc.messages import MESSAGES
from tierstore.serve.messages import ServeError, Status

ONE = Drawn([Tensor("the_input", "INT64", [1], [7])])


def test_messages_that_do_not_agree_with_themselves() -> None:
    messages = [grpc_message(ONE, raw=False) for _ in range(3)]
    messages[0].inputs[0].contents.int_contents.append(1)
    messages[1].raw_input_contents.append(bytes(8))
    messages[2].parameters["timeout"].SetInParent()
    messages.append(service_pb2.ModelInferRequest(raw_input_contents=[b""]))
    says = ("input 'the_input': int_contents", "input 'the_input': contents", "timeout", "raw_input_contents for 0")
    for message, each in zip(messages, says, strict=True):
        with pytest.raises(ServeError, match=each) as raised:
            decode(message)
        assert raised.value.status is Status.INVALID


def test_numbers_of_elements_that_are_handled_one_by_one_and_of_fields_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 3)
    for count, raw in ((3, False), (4, True)):
        drawn = Drawn([Tensor("x", "FP32", [count], [1] * count)])
        assert decode(grpc_message(drawn, raw=raw)).inputs["x"].data.shape == (count,)
    with pytest.raises(ServeError, match="raw_input_contents") as raised:
        decode(grpc_message(drawn, raw=False))
    assert raised.value.status is Status.TOO_LARGE
    monkeypatch.setattr(codec, "MAX_FIELDS", 4)
    assert len(split_field(b"\x3a\0" * 4, 7)[1]) == 4
    with pytest.raises(ServeError, match="more than 4 fields"):
        split_field(b"\x3a\0" * 5, 7)


@given(st.binary(max_size=60) | valid().map(lambda drawn: grpc_message(drawn, raw=True).SerializeToString()))
def test_splitting_reads_what_protobuf_reads(data: bytes) -> None:
    try:
        rest, raws = split_field(data, 7)
        split = service_pb2.ModelInferRequest.FromString(rest)
    except (ServeError, DecodeError):
        return
    split.raw_input_contents.extend(bytes(raw) for raw in raws)
    assert split == service_pb2.ModelInferRequest.FromString(data)


FIELD = re.compile(r"(\w+) = (\d+);")
PARTS = {"ModelConfig", "ModelInput", "ModelOutput", "ModelParameter", "InferBatchStatistics", "ModelStatistics"}
"""Of which we describe what we send."""


def fields(message: Any) -> list[tuple[Any, ...]]:
    return sorted(
        (
            field.number,
            field.name,
            field.TYPE_INT32 if field.type == field.TYPE_ENUM else field.type,
            field.label,
            field.message_type and field.message_type.full_name,
            field.containing_oneof and field.containing_oneof.name,
            field.message_type and field.message_type.GetOptions().map_entry,
        )
        for field in message.fields
    )


@pytest.mark.filterwarnings("ignore:label:DeprecationWarning")
def test_fields_are_the_protocols() -> None:
    assert model_config_pb2.DESCRIPTOR.package == "inference"
    pool = service_pb2.DESCRIPTOR.pool
    for name in MESSAGES:
        if name.startswith("HealthCheck"):
            continue
        ours, there = MESSAGES[name].DESCRIPTOR, pool.FindMessageTypeByName(f"inference.{name}")
        for own, other in [
            (ours, there),
            *((each, there.nested_types_by_name[each.name]) for each in ours.nested_types),
        ]:
            assert own.full_name == other.full_name
            kept = (
                fields(other)
                if own.name not in PARTS
                else [field for field in fields(other) if field[1] in own.fields_by_name]
            )
            assert fields(own) == kept


def test_the_descriptors_are_of_the_proto_files() -> None:
    described = [MESSAGES[name].DESCRIPTOR for name in MESSAGES]
    numbers = [(field.name, field.number) for each in described for field in each.fields]
    numbers += [
        (field.name, field.number)
        for each in described
        for inner in each.nested_types
        if not inner.GetOptions().map_entry
        for field in inner.fields
    ]
    texts = [path.read_text() for path in Path(codec.__file__).parent.glob("*.proto")]
    assert sorted(numbers) == sorted((name, int(number)) for text in texts for name, number in FIELD.findall(text))
    assert described[0].file.pool is not service_pb2.DESCRIPTOR.pool, "the pool is our own"
