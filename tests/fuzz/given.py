"""Targets: what users and clients give: run files, data in each format, requests to the server."""

import asyncio
import gzip
from typing import Any

import numpy as np
import orjson

from tests.train.readers.rows import matrix
from tierstore.serve.grpc.codec import MESSAGES, decode_request, encode_response, read_request
from tierstore.serve.messages import DATATYPES, InferRequest, InferResponse, ServeError, Status
from tierstore.serve.rest.infer_body import parse_infer, write_infer
from tierstore.settings.sections import to_toml
from tierstore.train import RunConfig
from tierstore.train.config import ConfigError, load, parse_override
from tierstore.train.readers import CriteoReader, DataError

from .target import FindingError, Target, scratch_folder

_FOLDER = scratch_folder()


# A run file in TOML, and an override.

_RUN_FILE = _FOLDER / "run.toml"


def _read_run_file(data: bytes) -> RunConfig:
    """The bytes are the file; if the first is ``!``, the rest is an override."""
    overrides = [parse_override(data[1:].decode(errors="replace"))] if data[:1] == b"!" else []
    _RUN_FILE.write_bytes(b"" if overrides else data)
    return load(_RUN_FILE, overrides)


def _check_run_file(config: RunConfig) -> None:
    _RUN_FILE.write_text(to_toml(config), encoding="utf-8")
    if load(_RUN_FILE) != config:
        raise FindingError(f"{config} is read back as another")


def _run_files() -> list[bytes]:
    return [to_toml(RunConfig()).encode(), b'[store]\nddr = "5% of tables"\n', b"!train.batch_size=5"]


# Criteo's text, plain or compressed.

_DAY = _FOLDER / "day.tsv"


def _read_criteo(data: bytes) -> list[Any]:
    """If the first byte is ``!``, the rest is compressed first; if it is ``?``, it is the file as it is."""
    text = data[1:] if data[:1] in (b"!", b"?") else data
    _DAY.write_bytes(gzip.compress(text, 1, mtime=0) if data[:1] == b"!" else text)
    list(CriteoReader(_DAY).read_chunks(2, None, 3))
    return list(CriteoReader(_DAY).read_chunks(0, None, 3))


def _check_criteo(chunks: list[Any]) -> None:
    for chunk in chunks:
        if not np.isin(chunk.labels, (0, 1)).all() or (matrix(chunk.categories) < -1).any():
            raise FindingError(f"{chunk} is not what a model takes")


def _criteo_texts() -> list[bytes]:
    line = b"\t".join([b"1", *[b"-3", b"", b"77"] * 4, b"5", *[b"0a1b2c3d", b""] * 13])
    text = line + b"\n" + line.replace(b"77", b"123456789012345678") + b"\r\n" + line
    return [text, b"!" + text, b"?" + gzip.compress(text, mtime=0)]


# A request as it arrives: JSON with tensors, or with binary data behind it; or gRPC's message.

GRPC, WHOLE = 0xFFFE, 0xFFFF


def _infer(data: bytes) -> None:
    """The first two bytes are the length of the JSON, ``WHOLE`` or ``GRPC``; what is taken is answered with."""
    length, body = int.from_bytes(data[:2], "little"), data[2:]
    try:
        if length == GRPC:
            _check_tensors(request := decode_request(read_request(body)))
            for is_raw in (True, False):
                sent = asyncio.run(encode_response(_response(request), is_raw=is_raw))
                MESSAGES["ModelInferResponse"].FromString(sent)
            return
        call = parse_infer(body, json_bytes=None if length == WHOLE else length, json_bytes_max=1 << 16, model="m")
        end = len(body) if length == WHOLE else length
        _check_tensors(call.request, orjson.loads(body[:end])["inputs"], body[end:])
        sent = asyncio.run(write_infer(_response(call.request), call)).body
    except ServeError as error:
        if error.status not in (Status.INVALID, Status.TOO_LARGE):
            raise FindingError("not the error it should be") from error
        raise
    if not sent.startswith(b'{"model_name"'):
        raise FindingError("an answer that is none")


def _check_tensors(request: InferRequest, inputs: Any = (), binary: bytes = b"") -> None:
    """Each is of its datatype; of JSON, what was taken is what stands there, in order, and nothing is left."""
    for name, tensor in request.inputs.items():
        if tensor.data.dtype != DATATYPES[tensor.datatype] or not tensor.data.flags.c_contiguous:
            raise FindingError(f"{name!r} is not what its datatype says")
    for given in inputs:
        tensor = request.inputs[given["name"]]
        size = 0 if "data" in given else given["parameters"]["binary_data_size"]
        if size and tensor.datatype != "BYTES" and tensor.data.tobytes() != binary[:size]:
            raise FindingError("other numbers")
        if list(tensor.data.shape) != given["shape"]:
            raise FindingError("another shape")
        binary = binary[size:]
    if binary:
        raise FindingError("bytes of no tensor")


def _response(request: InferRequest) -> InferResponse:
    numbers = {name: tensor for name, tensor in request.inputs.items() if tensor.datatype != "BYTES"}
    return InferResponse(model="m", version="1", id="", outputs=numbers)


def _binary(inputs: dict[str, Any]) -> bytes:
    entries = [
        {"name": name, "datatype": name, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, array in inputs.items()
    ]
    text = orjson.dumps({"inputs": entries, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
    return len(text).to_bytes(2, "little") + text + b"".join(each.tobytes() for each in inputs.values())


def _requests() -> list[bytes]:
    every = {name: np.ones((2, 2), dtype) for name, dtype in DATATYPES.items() if dtype.kind != "O"}
    nested = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3, 1e30]]}
    flat = {"name": "é", "datatype": "INT64", "shape": [2], "data": [1, -2]}
    parameters = {"timeout": 1000, "binary_data_output": True, "other": "a"}
    message = orjson.dumps({"id": "1", "inputs": [nested, flat], "parameters": parameters})
    grpc = MESSAGES["ModelInferRequest"](model_name="m", id="1", raw_input_contents=[bytes(8)])
    grpc.inputs.add(name="x", datatype="FP32", shape=[2])
    grpc.parameters["timeout"].int64_param = 5
    whole, over_grpc = (kind.to_bytes(2, "little") for kind in (WHOLE, GRPC))
    return [_binary(every), _binary({"INT64": every["INT64"]}), whole + message, over_grpc + grpc.SerializeToString()]


TARGETS = {
    "runfile": Target(
        read=_read_run_file, check=_check_run_file, seeds=_run_files, errors=(ConfigError,),
        words=b"nan|inf|1e999|true|[[|]]|'''|\"\"\"|\\u0000|1979-05-27|0x|{a=|a.|[train]|[store]\n|ddr|\xff|= [\n|#",
    ),
    "criteo": Target(
        read=_read_criteo, check=_check_criteo, seeds=_criteo_texts, errors=(DataError,),
        words=b"\t|\n|\r\n|\x00|-|\t0\t|fffffffffffffff",
    ),
    "infer": Target(
        read=_infer, seeds=_requests, errors=(ServeError,),
        words=b'"data"|"shape"|"datatype"|"INT32"|"INT64"|"FP32"|"binary_data_size"|-1|0|1e308|null|true|[[|]]|[],|'
        b"\0\0\0\0",
    ),
}  # fmt: skip
