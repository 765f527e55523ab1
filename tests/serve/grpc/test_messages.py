"""Our description of the protocol against the one that an independent client was made from."""

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from tierstore.serve.grpc import messages
from tierstore.serve.grpc.messages import message_class

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
    ours, there = message_class(name).DESCRIPTOR, theirs(name)
    nested = [(each, there.nested_types_by_name[each.name]) for each in ours.nested_types]
    for own, other in [(ours, there), *nested]:
        assert own.full_name == other.full_name
        wanted = fields(other)
        if own.name in PARTS:
            wanted = [field for field in wanted if field[1] in own.fields_by_name]
        assert fields(own) == wanted


def test_pool_is_our_own() -> None:
    assert message_class("ModelInferRequest").DESCRIPTOR.file.pool is not service_pb2.DESCRIPTOR.pool
    assert message_class("ModelInferRequest") is not service_pb2.ModelInferRequest
