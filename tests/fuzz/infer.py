"""The body of an infer request: JSON with tensors, or with binary data behind it."""

import asyncio

import numpy as np
import orjson

from tierstore.serve.messages import DATATYPES, InferResponse, InferTensor, ServeError, Status
from tierstore.serve.rest.infer_body import InferCall, parse_infer, write_infer

from .target import FindingError, Target

_LENGTH_BYTES = 2


def run(data: bytes) -> None:
    """The first two bytes are the length of the JSON, all ones for all of it; what is taken is answered with."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = data[_LENGTH_BYTES:]
    try:
        call = _parse(body, None if length == 0xFFFF else length)
        response = InferResponse(model="m", version="1", id="", outputs=call.request.inputs)
        sent = asyncio.run(write_infer(response, call))
    except ServeError as error:
        if error.status not in (Status.INVALID, Status.TOO_LARGE) or len(str(error)) > 1000:
            raise FindingError("not the error it should be") from error
        return
    for name, tensor in call.request.inputs.items():
        if tensor.data.dtype != DATATYPES[tensor.datatype] or not tensor.data.flags.c_contiguous:
            raise FindingError(f"{name!r} is not what its datatype says")
    if not sent.body.startswith(b'{"model_name"'):
        raise FindingError("an answer that is none")


def _parse(body: bytes, length: int | None) -> InferCall:
    return parse_infer(body, json_bytes=length, json_bytes_max=1 << 16, model="m")


def _binary(inputs: dict[str, InferTensor]) -> bytes:
    entries = []
    parts = []
    for name, (datatype, array) in inputs.items():
        parts.append(array.tobytes())
        size = {"binary_data_size": len(parts[-1])}
        entries.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": size})
    message = {"inputs": entries, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    text = orjson.dumps(message)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + b"".join(parts)


def seeds() -> list[bytes]:
    every = {name: InferTensor(name, np.ones((2, 2), dtype)) for name, dtype in DATATYPES.items()}
    nested = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3, 1e30]]}
    flat = {"name": "é", "datatype": "INT64", "shape": [2], "data": [1, -2]}
    parameters = {"timeout": 1000, "binary_data_output": True, "other": "a"}
    message = {"id": "1", "inputs": [nested, flat], "parameters": parameters}
    return [_binary(every), _binary({"x": every["INT64"]}), b"\xff\xff" + orjson.dumps(message)]


_WORDS = b'"data"|"shape"|"datatype"|"INT32"|"INT64"|"FP32"|"binary_data_size"|-1|0|1e308|null|true|[[|]]|[],|\0\0\0\0'

TARGET = Target(run=run, seeds=seeds, dictionary=tuple(_WORDS.split(b"|")))
