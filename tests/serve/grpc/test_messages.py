"""Our description of the protocol against the one that an independent client was made from."""

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from tierstore.serve.grpc import messages
from tierstore.serve.grpc.messages import INFERENCE_SERVICE, message_class

NAMES = sorted(name for name in messages._CLASSES if not name.startswith("HealthCheck"))


def theirs(name: str) -> Any:
    assert model_config_pb2.DESCRIPTOR.package == "inference"
    return service_pb2.DESCRIPTOR.pool.FindMessageTypeByName(f"inference.{name}")


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
    there = theirs(name)
    for ours, theirs_ in [(message_class(name).DESCRIPTOR, there), *nested(message_class(name).DESCRIPTOR, there)]:
        assert ours.full_name == theirs_.full_name
        wanted = fields(theirs_)
        if ours.name in PARTS:
            wanted = [field for field in wanted if field[1] in ours.fields_by_name]
        assert fields(ours) == wanted


def nested(ours: Any, there: Any) -> list[tuple[Any, Any]]:
    return [(each, there.nested_types_by_name[each.name]) for each in ours.nested_types]


def test_pool_is_our_own() -> None:
    assert message_class("ModelInferRequest").DESCRIPTOR.file.pool is not service_pb2.DESCRIPTOR.pool
    assert message_class("ModelInferRequest") is not service_pb2.ModelInferRequest


def test_service_has_the_clients_name() -> None:
    assert INFERENCE_SERVICE in [service.full_name for service in service_pb2.DESCRIPTOR.services_by_name.values()]


def test_bytes_are_the_same_in_both() -> None:
    there = service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"ab"])
    there.parameters["priority"].uint64_param = 3
    there.inputs.add(name="x", datatype="INT32", shape=[1, -2]).contents.int_contents.extend([1, -1])
    here = message_class("ModelInferRequest").FromString(there.SerializeToString())
    assert here.inputs[0].contents.int_contents == [1, -1]
    assert service_pb2.ModelInferRequest.FromString(here.SerializeToString()) == there
