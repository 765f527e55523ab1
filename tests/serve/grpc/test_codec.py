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


def of_one(**contents: Any) -> Any:
    """Typed, with contents beside those of ``ONE``."""
    message = grpc_message(ONE, raw=False)
    message.inputs[0].contents.MergeFrom(service_pb2.InferTensorContents(**contents))
    return message


def raw_beside_typed() -> Any:
    message = of_one()
    message.raw_input_contents.append(bytes(8))
    return message


def timeout_without_value() -> Any:
    message = of_one()
    message.parameters["timeout"].SetInParent()
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (of_one(int_contents=[1]), "input 'the_input': int_contents"),
        (raw_beside_typed(), "input 'the_input': contents"),
        (service_pb2.ModelInferRequest(raw_input_contents=[b""]), "raw_input_contents for 0"),
        (timeout_without_value(), "timeout"),
    ],
)
def test_messages_that_do_not_agree_with_themselves(message: Any, says: str) -> None:
    with pytest.raises(ServeError, match=says) as raised:
        decode(message)
    assert raised.value.status is Status.INVALID


def test_elements_handled_one_by_one_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 3)
    for count, raw in ((3, False), (4, True)):
        drawn = Drawn([Tensor("x", "FP32", [count], [1] * count)])
        assert decode(grpc_message(drawn, raw=raw)).inputs["x"].data.shape == (count,)
    with pytest.raises(ServeError, match="raw_input_contents") as raised:
        decode(grpc_message(drawn, raw=False))
    assert raised.value.status is Status.TOO_LARGE


# The wire format, against protobuf's own reading of it.


def test_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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


NAMES = sorted(name for name in MESSAGES if not name.startswith("HealthCheck"))


def theirs(name: str) -> Any:
    assert model_config_pb2.DESCRIPTOR.package == "inference"
    return service_pb2.DESCRIPTOR.pool.FindMessageTypeByName(f"inference.{name}")


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
@pytest.mark.parametrize("name", NAMES)
def test_fields_are_the_protocols(name: str) -> None:
    ours, there = MESSAGES[name].DESCRIPTOR, theirs(name)
    nested = [(each, there.nested_types_by_name[each.name]) for each in ours.nested_types]
    for own, other in [(ours, there), *nested]:
        assert own.full_name == other.full_name
        wanted = fields(other)
        if own.name in PARTS:
            wanted = [field for field in wanted if field[1] in own.fields_by_name]
        assert fields(own) == wanted


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
