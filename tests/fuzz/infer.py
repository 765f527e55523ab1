"""A request as it arrives: JSON with tensors, or with binary data behind it; or gRPC's message."""

import asyncio

import numpy as np
import orjson

from tierstore.serve.grpc.codec import decode_request, encode_response, read_request
from tierstore.serve.grpc.messages import message_class
from tierstore.serve.messages import DATATYPES, InferRequest, InferResponse, ServeError, Status
from tierstore.serve.rest.infer_body import InferCall, parse_infer, write_infer

from .target import FindingError, Target

GRPC, WHOLE = 0xFFFE, 0xFFFF
_LENGTH_BYTES = 2


def run(data: bytes) -> None:
    """The first two bytes are the length of the JSON, ``WHOLE`` or ``GRPC``; what is taken is answered with."""
    length, body = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
    try:
        if length == GRPC:
            _check(request := decode_request(read_request(body)))
            for is_raw in (True, False):
                sent = asyncio.run(encode_response(_response(request), is_raw=is_raw))
                message_class("ModelInferResponse").FromString(sent)
            return
        call = parse_infer(body, json_bytes=None if length == WHOLE else length, json_bytes_max=1 << 16, model="m")
        _check(call.request)
        sent = asyncio.run(write_infer(_response(call.request), call)).body
    except ServeError as error:
        if error.status not in (Status.INVALID, Status.TOO_LARGE) or len(str(error)) > 1000:
            raise FindingError("not the error it should be") from error
        return
    _check_places(call, body, len(body) if length == WHOLE else length)
    if not sent.startswith(b'{"model_name"'):
        raise FindingError("an answer that is none")


def _response(request: InferRequest) -> InferResponse:
    numbers = {name: tensor for name, tensor in request.inputs.items() if tensor.datatype != "BYTES"}
    return InferResponse(model="m", version="1", id="", outputs=numbers)


def _check(request: InferRequest) -> None:
    for name, tensor in request.inputs.items():
        if tensor.data.dtype != DATATYPES[tensor.datatype] or not tensor.data.flags.c_contiguous:
            raise FindingError(f"{name!r} is not what its datatype says")


def _check_places(call: InferCall, body: bytes, end: int) -> None:
    """What was taken is what stands there: the tensors in order, each its bytes, and nothing left."""
    for given in orjson.loads(body[:end])["inputs"]:
        tensor = call.request.inputs[given["name"]]
        if list(tensor.data.shape) != given["shape"]:
            raise FindingError("another shape")
        if "data" not in given:
            begin, end = end, end + given["parameters"]["binary_data_size"]
            if tensor.datatype != "BYTES" and tensor.data.tobytes() != body[begin:end]:
                raise FindingError("other numbers")
    if end != len(body):
        raise FindingError("bytes of no tensor")


def _binary(inputs: dict[str, "np.ndarray"]) -> bytes:
    entries = [
        {"name": name, "datatype": name, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, array in inputs.items()
    ]
    text = orjson.dumps({"inputs": entries, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + b"".join(each.tobytes() for each in inputs.values())


def seeds() -> list[bytes]:
    every = {name: np.ones((2, 2), dtype) for name, dtype in DATATYPES.items() if dtype.kind != "O"}
    nested = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3, 1e30]]}
    flat = {"name": "é", "datatype": "INT64", "shape": [2], "data": [1, -2]}
    parameters = {"timeout": 1000, "binary_data_output": True, "other": "a"}
    message = orjson.dumps({"id": "1", "inputs": [nested, flat], "parameters": parameters})
    grpc = message_class("ModelInferRequest")(model_name="m", id="1", raw_input_contents=[bytes(8)])
    grpc.inputs.add(name="x", datatype="FP32", shape=[2])
    grpc.parameters["timeout"].int64_param = 5
    whole, over_grpc = (kind.to_bytes(_LENGTH_BYTES, "little") for kind in (WHOLE, GRPC))
    return [_binary(every), _binary({"INT64": every["INT64"]}), whole + message, over_grpc + grpc.SerializeToString()]


WORDS = tuple(
    b'"data"|"shape"|"datatype"|"INT32"|"INT64"|"FP32"|"binary_data_size"|-1|0|1e308|null|true|[[|]]|[],|\0\0\0\0'.split(
        b"|"
    )
)

TARGET = Target(run=run, seeds=seeds, dictionary=WORDS)
