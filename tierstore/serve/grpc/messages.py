"""The messages of the Open Inference Protocol over gRPC, and of gRPC's health check.

``protocol.binpb`` describes them; ``protoc --descriptor_set_out=protocol.binpb inference.proto health.proto`` makes it.
They live in a pool of their own. A process that also imports a client's generated messages, which bear the same names,
would otherwise fail at the second description.
"""

from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"


def _classes() -> dict[str, Any]:
    pool, found = descriptor_pool.DescriptorPool(), {}
    described = Path(__file__).with_name("protocol.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(file)
        for message in file.message_type:
            described = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = message_factory.GetMessageClass(described)
    return found


MESSAGES: Final = _classes()
"""The class of each message by its name, as "ModelInferRequest"."""
