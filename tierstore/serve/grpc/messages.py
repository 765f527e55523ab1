"""The messages of the Open Inference Protocol over gRPC, described in Python: no compiler, no generated code.

They live in a pool of their own. A process that also imports a client's generated messages, which bear the same names,
would otherwise fail at the second description.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["HEALTH_SERVICE", "INFERENCE_SERVICE", "message_class"]

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

_TENSOR: Final = {
    "name": "string 1",
    "datatype": "string 2",
    "shape": "repeated int64 3",
    "parameters": "map InferParameter 4",
    "contents": "InferTensorContents 5",
}
_MODEL: Final = {"name": "string 1", "version": "string 2"}

_INFERENCE: Final[Mapping[str, Mapping[str, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": "bool 1"},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": "bool 1"},
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": {"ready": "bool 1"},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": "string 1", "version": "string 2", "extensions": "repeated string 3"},
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": {
        "name": "string 1",
        "versions": "repeated string 2",
        "platform": "string 3",
        "inputs": "repeated ModelMetadataResponse.TensorMetadata 4",
        "outputs": "repeated ModelMetadataResponse.TensorMetadata 5",
    },
    "ModelMetadataResponse.TensorMetadata": {"name": "string 1", "datatype": "string 2", "shape": "repeated int64 3"},
    "ModelInferRequest": {
        "model_name": "string 1",
        "model_version": "string 2",
        "id": "string 3",
        "parameters": "map InferParameter 4",
        "inputs": "repeated ModelInferRequest.InferInputTensor 5",
        "outputs": "repeated ModelInferRequest.InferRequestedOutputTensor 6",
        "raw_input_contents": "repeated bytes 7",
    },
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": {"name": "string 1", "parameters": "map InferParameter 2"},
    "ModelInferResponse": {
        "model_name": "string 1",
        "model_version": "string 2",
        "id": "string 3",
        "parameters": "map InferParameter 4",
        "outputs": "repeated ModelInferResponse.InferOutputTensor 5",
        "raw_output_contents": "repeated bytes 6",
    },
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "InferParameter": {
        "bool_param": "oneof bool 1",
        "int64_param": "oneof int64 2",
        "string_param": "oneof string 3",
        "double_param": "oneof double 4",
        "uint64_param": "oneof uint64 5",
    },
    "InferTensorContents": {
        "bool_contents": "repeated bool 1",
        "int_contents": "repeated int32 2",
        "int64_contents": "repeated int64 3",
        "uint_contents": "repeated uint32 4",
        "uint64_contents": "repeated uint64 5",
        "fp32_contents": "repeated float 6",
        "fp64_contents": "repeated double 7",
        "bytes_contents": "repeated bytes 8",
    },
    # The rest is Triton's: streams of requests, and the list of models.
    "ModelStreamInferResponse": {"error_message": "string 1", "infer_response": "ModelInferResponse 2"},
    "RepositoryIndexRequest": {"repository_name": "string 1", "ready": "bool 2"},
    "RepositoryIndexResponse": {"models": "repeated RepositoryIndexResponse.ModelIndex 1"},
    "RepositoryIndexResponse.ModelIndex": {
        "name": "string 1",
        "version": "string 2",
        "state": "string 3",
        "reason": "string 4",
    },
}
"""Fields of each message as "[repeated | map | oneof] type number"; a map's keys are strings. A dot nests a message."""

_HEALTH: Final[Mapping[str, Mapping[str, str]]] = {
    "HealthCheckRequest": {"service": "string 1"},
    # An enum in the original; on the wire the same as an int32.
    "HealthCheckResponse": {"status": "int32 1"},
}

_ONEOF: Final = "parameter_choice"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def _set_type(field: Any, kind: str, package: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"


def _add_map_entry(message: Any, path: str, field_name: str, kind: str, package: str) -> str:
    """A map is a repeated message of keys and values on the wire; returns that message's path."""
    name = field_name.title().replace("_", "") + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    for number, (part, part_kind) in enumerate((("key", "string"), ("value", kind)), 1):
        _set_type(entry.field.add(name=part, number=number, label=_Field.LABEL_OPTIONAL), part_kind, package)
    return f"{path}.{name}"


def _add_field(message: Any, path: str, name: str, text: str, package: str) -> None:
    *modifiers, kind, number = text.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if modifiers == ["map"]:
        kind = _add_map_entry(message, path, name, kind, package)
    if modifiers in (["map"], ["repeated"]):
        field.label = _Field.LABEL_REPEATED
    if modifiers == ["oneof"]:
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONEOF)
        field.oneof_index = 0
    _set_type(field, kind, package)


def _file(package: str, messages: Mapping[str, Mapping[str, str]]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"tierstore/{package}.proto", package=package, syntax="proto3")
    added: dict[str, Any] = {}
    for path, fields in messages.items():
        parent, _, name = path.rpartition(".")
        message = added[parent].nested_type.add(name=name) if parent else file.message_type.add(name=name)
        added[path] = message
        for field_name, text in fields.items():
            _add_field(message, path, field_name, text, package)
    return file


def _classes(files: Iterable[tuple[str, Mapping[str, Mapping[str, str]]]]) -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    classes = {}
    for package, messages in files:
        pool.Add(_file(package, messages))
        for path in messages:
            classes[path] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{path}"))
    return classes


_CLASSES: Final = _classes([("inference", _INFERENCE), ("grpc.health.v1", _HEALTH)])


def message_class(name: str) -> Any:
    """The class of a message by its name, as "ModelInferRequest"; KeyError if there is none."""
    return _CLASSES[name]
