"""The REST API described for programs: OpenAPI 3.1, served at /v2/openapi.json."""

from typing import Any, Final

from ...system.release import __version__
from ..messages import DATATYPES
from ..tensors import JSON_LENGTH_HEADER, MAX_DIMS, MAX_NAME_CHARACTERS, MAX_TENSORS
from .infer_body import MAX_ID_CHARACTERS, MAX_PARAMETERS, MAX_TIMEOUT_MICROSECONDS

__all__ = ["DESCRIPTION"]

_Schema = dict[str, Any]


def _reference(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: _Schema) -> _Schema:
    return {"application/json": {"schema": schema}}


def _object(required: tuple[str, ...] = (), **properties: _Schema) -> _Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _answers(schema: _Schema, *statuses: int, good: str = "as asked") -> _Schema:
    answers: _Schema = {"200": {"description": good, "content": _json(schema)}}
    for status in (*statuses, 401):
        answers[str(status)] = {"description": "refused", "content": _json(_reference("Error"))}
    return answers


_STRING: Final[_Schema] = {"type": "string"}
_BOOLEAN: Final[_Schema] = {"type": "boolean"}
_ANY_PARAMETERS: Final[_Schema] = {
    "type": "object",
    "maxProperties": MAX_PARAMETERS,
    "additionalProperties": {"type": ["boolean", "number", "string"]},
}
_TENSOR: Final[_Schema] = {
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
    "datatype": {"type": "string", "enum": list(DATATYPES)},
    "shape": {"type": "array", "maxItems": MAX_DIMS, "items": {"type": "integer", "minimum": 0}},
    "data": {"type": "array", "description": "the elements in row-major order, flat or nested"},
}
_SPECS: Final[_Schema] = {
    "type": "array",
    "items": _object(
        ("name", "datatype", "shape"),
        name=_STRING,
        datatype=_TENSOR["datatype"],
        shape={"type": "array", "items": {"type": "integer", "minimum": -1}},
    ),
}

_SCHEMAS: Final[_Schema] = {
    "Error": _object(("error",), error=_STRING),
    "Server": _object(
        ("name", "version", "extensions"),
        name=_STRING,
        version=_STRING,
        extensions={"type": "array", "items": _STRING},
    ),
    "Live": _object(("live",), live=_BOOLEAN),
    "Ready": _object(("ready",), ready=_BOOLEAN),
    "Index": {
        "type": "array",
        "items": _object(("name", "version", "state"), name=_STRING, version=_STRING, state=_STRING),
    },
    "ModelReady": _object(("name", "ready"), name=_STRING, ready=_BOOLEAN),
    "Model": _object(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=_STRING,
        versions={"type": "array", "items": _STRING},
        platform=_STRING,
        inputs=_SPECS,
        outputs=_SPECS,
        parameters=_ANY_PARAMETERS,
    ),
    "InferRequest": _object(
        ("inputs",),
        id={"type": "string", "maxLength": MAX_ID_CHARACTERS},
        parameters=_ANY_PARAMETERS
        | {
            "properties": {
                "timeout": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": MAX_TIMEOUT_MICROSECONDS,
                    "description": "microseconds after which no answer is wanted; 0: none",
                },
                "binary_data_output": _BOOLEAN,
            }
        },
        inputs={
            "type": "array",
            "maxItems": MAX_TENSORS,
            "items": _object(("name", "datatype", "shape"), **_TENSOR),
        },
        outputs={
            "type": "array",
            "maxItems": MAX_TENSORS,
            "items": _object(
                ("name",), name=_STRING, parameters={"type": "object", "properties": {"binary_data": _BOOLEAN}}
            ),
        },
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        model_name=_STRING,
        model_version=_STRING,
        id=_STRING,
        parameters=_ANY_PARAMETERS,
        outputs={"type": "array", "items": _object(("name", "datatype", "shape"), **_TENSOR)},
    ),
}


def _get(summary: str, schema: str, *statuses: int) -> _Schema:
    return {"get": {"summary": summary, "responses": _answers(_reference(schema), *statuses)}}


def _health(summary: str, schema: str) -> _Schema:
    """Open to all, and the same form whether it is well or not."""
    answer = {"description": "whether it is", "content": _json(_reference(schema))}
    return {"get": {"summary": summary, "security": [], "responses": {"200": answer, "503": answer}}}


def _infer() -> _Schema:
    answers = _answers(_reference("InferResponse"), 400, 404, 408, 413, 431, 500, 503, 504)
    answers["200"]["content"]["application/octet-stream"] = {}
    content = {**_json(_reference("InferRequest")), "application/octet-stream": {}}
    summary = f"Predictions; with binary tensor data, {JSON_LENGTH_HEADER} is the length of the JSON"
    return {"post": {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": answers}}


def _model_ready() -> _Schema:
    described = _get("Whether a model takes requests", "ModelReady", 404)
    described["get"]["responses"]["503"] = described["get"]["responses"]["200"]
    return described


def _model_paths(path: str, *variables: str) -> _Schema:
    parameters = [{"name": name, "in": "path", "required": True, "schema": _STRING} for name in variables]
    operations = {
        path: _get("What a model takes and gives", "Model", 404),
        f"{path}/ready": _model_ready(),
        f"{path}/infer": _infer(),
    }
    return {place: {**operation, "parameters": parameters} for place, operation in operations.items()}


DESCRIPTION: Final[_Schema] = {
    "openapi": "3.1.0",
    "info": {"title": "tierstore: Open Inference Protocol v2", "version": __version__},
    "security": [{}, {"token": []}],
    "paths": {
        "/v2": _get("What is served", "Server"),
        "/v2/health/live": _health("Whether the server runs", "Live"),
        "/v2/health/ready": _health("Whether the server takes requests", "Ready"),
        "/v2/repository/index": {
            "post": {
                "summary": "All models, as Triton lists them",
                "responses": _answers(_reference("Index")),
            }
        },
        **_model_paths("/v2/models/{model}", "model"),
        **_model_paths("/v2/models/{model}/versions/{version}", "model", "version"),
    },
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    },
}
