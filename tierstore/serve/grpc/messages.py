"""The messages of the Open Inference Protocol over gRPC, and of gRPC's health check: no compiler, no generated code.

They live in a pool of their own. A process that also imports a client's generated messages, which bear the same names,
would otherwise fail at the second description.
"""

import re
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

_INFERENCE: Final = """
message ServerLiveRequest {}
message ServerLiveResponse { bool live = 1; }
message ServerReadyRequest {}
message ServerReadyResponse { bool ready = 1; }
message ModelReadyRequest { string name = 1; string version = 2; }
message ModelReadyResponse { bool ready = 1; }
message ServerMetadataRequest {}
message ServerMetadataResponse { string name = 1; string version = 2; repeated string extensions = 3; }
message ModelMetadataRequest { string name = 1; string version = 2; }
message ModelMetadataResponse {
  message TensorMetadata { string name = 1; string datatype = 2; repeated int64 shape = 3; }
  string name = 1; repeated string versions = 2; string platform = 3;
  repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5;
}
message ModelInferRequest {
  message InferInputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4; InferTensorContents contents = 5;
  }
  message InferRequestedOutputTensor { string name = 1; map<string, InferParameter> parameters = 2; }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferInputTensor inputs = 5; repeated InferRequestedOutputTensor outputs = 6;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  message InferOutputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4; InferTensorContents contents = 5;
  }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6;
}
message InferParameter {
  oneof parameter_choice {
    bool bool_param = 1; int64 int64_param = 2; string string_param = 3; double double_param = 4;
    uint64 uint64_param = 5;
  }
}
message InferTensorContents {
  repeated bool bool_contents = 1; repeated int32 int_contents = 2; repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6;
  repeated double fp64_contents = 7; repeated bytes bytes_contents = 8;
}
// The rest is Triton's: streams of requests, the model repository, models' configuration and statistics.
message ModelStreamInferResponse { string error_message = 1; ModelInferResponse infer_response = 2; }
message RepositoryIndexRequest { string repository_name = 1; bool ready = 2; }
message RepositoryIndexResponse {
  message ModelIndex { string name = 1; string version = 2; string state = 3; string reason = 4; }
  repeated ModelIndex models = 1;
}
message ModelRepositoryParameter {
  oneof parameter_choice { bool bool_param = 1; int64 int64_param = 2; string string_param = 3; bytes bytes_param = 4; }
}
message RepositoryModelLoadRequest {
  string repository_name = 1; string model_name = 2; map<string, ModelRepositoryParameter> parameters = 3;
}
message RepositoryModelLoadResponse {}
message RepositoryModelUnloadRequest {
  string repository_name = 1; string model_name = 2; map<string, ModelRepositoryParameter> parameters = 3;
}
message RepositoryModelUnloadResponse {}
message ModelConfigRequest { string name = 1; string version = 2; }
message ModelConfigResponse { ModelConfig config = 1; }
// Of its fields those that are set. A data type is an enum in the original, on the wire the same.
message ModelInput { string name = 1; int32 data_type = 2; repeated int64 dims = 4; }
message ModelOutput { string name = 1; int32 data_type = 2; repeated int64 dims = 3; }
message ModelParameter { string string_value = 1; }
message ModelConfig {
  string name = 1; string platform = 2; int32 max_batch_size = 4; repeated ModelInput input = 5;
  repeated ModelOutput output = 6; map<string, ModelParameter> parameters = 14; string backend = 17;
}
message ModelStatisticsRequest { string name = 1; string version = 2; }
message StatisticDuration { uint64 count = 1; uint64 ns = 2; }
message InferStatistics {
  StatisticDuration success = 1; StatisticDuration fail = 2; StatisticDuration queue = 3;
  StatisticDuration compute_input = 4; StatisticDuration compute_infer = 5; StatisticDuration compute_output = 6;
  StatisticDuration cache_hit = 7; StatisticDuration cache_miss = 8;
}
message InferBatchStatistics { uint64 batch_size = 1; }
message ModelStatistics {
  string name = 1; string version = 2; uint64 last_inference = 3; uint64 inference_count = 4;
  uint64 execution_count = 5; InferStatistics inference_stats = 6; repeated InferBatchStatistics batch_stats = 7;
}
message ModelStatisticsResponse { repeated ModelStatistics model_stats = 1; }
"""
_HEALTH: Final = """
message HealthCheckRequest { string service = 1; }
message HealthCheckResponse { int32 status = 1; }  // an enum in the original, on the wire the same
"""

_PART: Final = re.compile(
    r"message (?P<message>\w+) {|oneof (?P<oneof>\w+) {|(?P<end>})|"
    r"(?P<repeated>repeated )?(?P<map>map<string, )?(?P<type>\w+)>? (?P<name>\w+) = (?P<number>\d+);"
)
"""Of what is used here of the language of .proto files."""
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message: Any, name: str, number: int, kind: str, *, repeated: object = None) -> Any:
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if hasattr(_Field, f"TYPE_{kind.upper()}"):
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, kind
    return field


def _file(package: str, text: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"tierstore/{package}.proto", package=package, syntax="proto3")
    open_ones: list[Any] = []
    is_oneof = False
    for part in _PART.finditer(text):
        if part["message"]:
            siblings = open_ones[-1].nested_type if open_ones else file.message_type
            open_ones.append(siblings.add(name=part["message"]))
        elif part["oneof"]:
            open_ones[-1].oneof_decl.add(name=part["oneof"])
            is_oneof = True
        elif part["end"]:
            if not is_oneof:
                open_ones.pop()
            is_oneof = False
        else:
            message, kind = open_ones[-1], part["type"]
            if part["map"]:  # on the wire a repeated message of keys and values
                entry = message.nested_type.add(name=part["name"].title().replace("_", "") + "Entry")
                entry.options.map_entry = True
                _add_field(entry, "key", 1, "string")
                _add_field(entry, "value", 2, kind)
                kind = entry.name
            field = _add_field(
                message, part["name"], int(part["number"]), kind, repeated=part["repeated"] or part["map"]
            )
            if is_oneof:
                field.oneof_index = 0
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    classes = {}
    for package, text in (("inference", _INFERENCE), ("grpc.health.v1", _HEALTH)):
        file = _file(package, text)
        pool.Add(file)
        for message in file.message_type:
            described = pool.FindMessageTypeByName(f"{package}.{message.name}")
            classes[message.name] = message_factory.GetMessageClass(described)
    return classes


_CLASSES: Final = _classes()


def message_class(name: str) -> Any:
    """The class of a message by its name, as "ModelInferRequest"; KeyError if there is none."""
    return _CLASSES[name]
