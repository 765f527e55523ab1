"""Triton's model configuration and statistics, in the form that its clients read.

https://github.com/triton-inference-server/server/tree/main/docs/protocol: extension_model_configuration and
extension_statistics. REST sends these as JSON, gRPC as messages with the same fields.
"""

from typing import Any, Final

from .messages import ModelMetadata, ModelStatistics, TensorSpec

EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "statistics")
DATA_TYPES: Final = {"TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}
"""By the names in JSON, the numbers over gRPC."""


def model_config(model: ModelMetadata) -> dict[str, Any]:
    """``max_batch_size`` is 0: the shapes have their batch dimension."""
    return {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform,
        "max_batch_size": 0,
        "input": [_tensor(spec) for spec in model.inputs],
        "output": [_tensor(spec) for spec in model.outputs],
        "parameters": {name: {"string_value": str(value)} for name, value in model.parameters.items()},
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}


def model_statistics(model: ModelMetadata, found: ModelStatistics) -> dict[str, Any]:
    """Of a model since the server started, over all versions; it has no numbers by batch size."""
    return {
        "name": model.name,
        "version": model.versions[-1],
        "last_inference": found.last_ms,
        "inference_count": found.success_count,
        "execution_count": found.batches,
        "inference_stats": {
            "success": _duration(found.success_count, found.success_seconds),
            "fail": _duration(found.fail_count, found.fail_seconds),
            "queue": _duration(found.queries, found.queue_seconds),
            "compute_input": _duration(found.queries, 0.0),
            "compute_infer": _duration(found.queries, found.compute_seconds),
            "compute_output": _duration(found.queries, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}
