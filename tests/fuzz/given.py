"""Targets: what users and clients give: run files, data in each format, requests to the server."""

import asyncio
import gzip
import io
import math
import re
from typing import Any

import numpy as np
import orjson

from tests.train.readers.rows import matrix
from tierstore.serve.grpc.codec import decode_request, encode_response, read_request
from tierstore.serve.grpc.messages import MESSAGES
from tierstore.serve.messages import DATATYPES, InferRequest, InferResponse, ServeError, Status
from tierstore.serve.rest.infer_body import InferCall, parse_infer, write_infer
from tierstore.settings.sections import to_toml
from tierstore.train import RunConfig
from tierstore.train.config import ConfigError, load, parse_override
from tierstore.train.readers import CriteoReader, DataError, NpyReader, ParquetReader, Schema

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


# Criteo's text, plain or compressed, against a slow and plain parser.

_DAY = _FOLDER / "day.tsv"
_LABEL = re.compile(rb"-?0{1,19}|0{0,18}1")
_INTEGER = re.compile(rb"(-?[0-9]{1,18})?")
_CATEGORY = re.compile(rb"[0-9a-fA-F]{0,15}")


def _rows_of(text: bytes) -> list[list[float]] | None:
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for line in lines:
        fields = line.removesuffix(b"\r").split(b"\t")
        kinds = [_LABEL, *[_INTEGER] * 13, *[_CATEGORY] * 26]
        if len(fields) != 40 or not all(map(re.fullmatch, kinds, fields)):
            return None
        dense = [float(int(field)) if field else math.nan for field in fields[1:14]]
        rows.append([float(int(fields[0])), *dense, *[float(int(f, 16)) if f else -1.0 for f in fields[14:]]])
    return rows


def _read_criteo(data: bytes) -> None:
    """If the first byte is ``!``, the rest is compressed first; if it is ``?``, it is the file as it is."""
    text = data[1:] if data[:1] in (b"!", b"?") else data
    _DAY.write_bytes(gzip.compress(text, 1, mtime=0) if data[:1] == b"!" else text)
    expected = _rows_of(text)
    try:
        list(CriteoReader(_DAY).read_chunks(2, None, 3))
        chunks = list(CriteoReader(_DAY).read_chunks(0, None, 3))
    except DataError:
        if data[:1] != b"?" and expected is not None:
            raise FindingError("a right line was refused") from None
        raise
    if data[:1] == b"?":
        return
    if expected is None:
        raise FindingError("a broken line was taken")
    rows = [
        [float(label), *map(float, dense), *map(float, categories)]
        for chunk in chunks
        for label, dense, categories in zip(chunk.labels, chunk.dense, matrix(chunk.categories), strict=True)
    ]
    if len(rows) != len(expected):
        raise FindingError(f"{len(rows)} rows instead of {len(expected)}")
    for row, wanted in zip(rows, expected, strict=True):
        for value, want in zip(row, wanted, strict=True):
            if not (math.isclose(value, want, rel_tol=1e-6) or (math.isnan(value) and math.isnan(want))):
                raise FindingError(f"{value} instead of {want}")


def _criteo_texts() -> list[bytes]:
    line = b"\t".join([b"1", *[b"-3", b"", b"77"] * 4, b"5", *[b"0a1b2c3d", b""] * 13])
    text = line + b"\n" + line.replace(b"77", b"123456789012345678") + b"\r\n" + line
    return [text, b"!" + text, b"?" + gzip.compress(text, mtime=0)]


# An npy file in place of one of the three.

_ARRAYS = {
    "dense.npy": np.array([[0.5, np.nan], [1, 2], [3, 4]], np.float64),
    "label.npy": np.array([0, 1, 1], np.uint8),
    "sparse.npy": np.array([[1], [-1], [2**40]], np.int64),
}


def _stored(array: Any) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


_WHOLE = {name: _stored(array) for name, array in _ARRAYS.items()}


def _read_npy(data: bytes) -> list[Any]:
    """The first byte chooses the array; the rest is its file."""
    for number, (name, whole) in enumerate(_WHOLE.items()):
        (_FOLDER / name).write_bytes(data[1:] if data and number == data[0] % 3 else whole)
    return list(NpyReader(_FOLDER, schema=Schema(label="y", dense=("a", "b"), sparse=("c",))).read_chunks(0, None, 2))


def _check_chunks(chunks: list[Any]) -> None:
    for chunk in chunks:
        columns, offsets = chunk.categories
        values = np.concatenate(columns)
        is_jagged = (np.diff(offsets) >= 0).all() and offsets[-1, -1] == len(values) and (values >= 0).all()
        if not np.isin(chunk.labels, (-1, 0, 1)).all() or np.isinf(chunk.dense).any() or not is_jagged:
            raise FindingError(f"{chunk} is not what a model takes")


def _npy_files() -> list[bytes]:
    return [bytes([number]) + whole for number, whole in enumerate(_WHOLE.values())]


# A Parquet file. What pyarrow makes of it is its business; no error but ours may come of it.


def _read_parquet(data: bytes) -> None:
    (path := _FOLDER / "x.parquet").write_bytes(data)
    schema = Schema(label="y", dense=("a",), sparse=("c", "d", "e"))
    list(ParquetReader(path, schema=schema).read_chunks(1, None, 2))


def _parquet_files() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"y": [0, 1, 1, 0], "a": [1.5, None, 3.0, 4.0], "c": ["ff", "", None, "1"], "d": [1, 2, None, 4]}
    columns["e"] = [[1, 2], None, [], [3, None]]
    found = []
    for options in ({"compression": "none"}, {"compression": "snappy", "data_page_version": "2.0"}):
        pq.write_table(pa.table(columns), file := io.BytesIO(), row_group_size=2, **options)
        found.append(file.getvalue())
    return found


# A request as it arrives: JSON with tensors, or with binary data behind it; or gRPC's message.

GRPC, WHOLE = 0xFFFE, 0xFFFF
_LENGTH_BYTES = 2


def _infer(data: bytes) -> None:
    """The first two bytes are the length of the JSON, ``WHOLE`` or ``GRPC``; what is taken is answered with."""
    length, body = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
    try:
        if length == GRPC:
            _check_datatypes(request := decode_request(read_request(body)))
            for is_raw in (True, False):
                sent = asyncio.run(encode_response(_response(request), is_raw=is_raw))
                MESSAGES["ModelInferResponse"].FromString(sent)
            return
        call = parse_infer(body, json_bytes=None if length == WHOLE else length, json_bytes_max=1 << 16, model="m")
        _check_datatypes(call.request)
        sent = asyncio.run(write_infer(_response(call.request), call)).body
    except ServeError as error:
        if error.status not in (Status.INVALID, Status.TOO_LARGE):
            raise FindingError("not the error it should be") from error
        raise
    _check_places(call, body, len(body) if length == WHOLE else length)
    if not sent.startswith(b'{"model_name"'):
        raise FindingError("an answer that is none")


def _response(request: InferRequest) -> InferResponse:
    numbers = {name: tensor for name, tensor in request.inputs.items() if tensor.datatype != "BYTES"}
    return InferResponse(model="m", version="1", id="", outputs=numbers)


def _check_datatypes(request: InferRequest) -> None:
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


def _binary(inputs: dict[str, Any]) -> bytes:
    entries = [
        {"name": name, "datatype": name, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, array in inputs.items()
    ]
    text = orjson.dumps({"inputs": entries, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + b"".join(each.tobytes() for each in inputs.values())


def _requests() -> list[bytes]:
    every = {name: np.ones((2, 2), dtype) for name, dtype in DATATYPES.items() if dtype.kind != "O"}
    nested = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3, 1e30]]}
    flat = {"name": "é", "datatype": "INT64", "shape": [2], "data": [1, -2]}
    parameters = {"timeout": 1000, "binary_data_output": True, "other": "a"}
    message = orjson.dumps({"id": "1", "inputs": [nested, flat], "parameters": parameters})
    grpc = MESSAGES["ModelInferRequest"](model_name="m", id="1", raw_input_contents=[bytes(8)])
    grpc.inputs.add(name="x", datatype="FP32", shape=[2])
    grpc.parameters["timeout"].int64_param = 5
    whole, over_grpc = (kind.to_bytes(_LENGTH_BYTES, "little") for kind in (WHOLE, GRPC))
    return [_binary(every), _binary({"INT64": every["INT64"]}), whole + message, over_grpc + grpc.SerializeToString()]


TARGETS = {
    "runfile": Target(
        read=_read_run_file, check=_check_run_file, seeds=_run_files, errors=(ConfigError,),
        words=b"nan|inf|1e999|true|[[|]]|'''|\"\"\"|\\u0000|1979-05-27|0x|{a=|a.|[train]|[store]\n|ddr|\xff|= [\n|#",
    ),
    "criteo": Target(
        read=_read_criteo, seeds=_criteo_texts, errors=(DataError,),
        words=b"\t|\n|\r\n|\x00|-|\t0\t|fffffffffffffff",
    ),
    "npy": Target(
        read=_read_npy, check=_check_chunks, seeds=_npy_files, errors=(DataError,),
        words=b"'descr'|'fortran_order'|'shape'|True|False|(|)|,|<f8|>i2|O8|<M8[ns]|99999999999999999999|-1|1L|"
        b"PK\x03\x04",
    ),
    "parquet": Target(
        read=_read_parquet, seeds=_parquet_files, errors=(DataError,),
        words=b"PAR1|\x15\x00|\x15\xff\xff\xff\xff\x0f|\x19\xfc",
    ),
    "infer": Target(
        read=_infer, seeds=_requests, errors=(ServeError,),
        words=b'"data"|"shape"|"datatype"|"INT32"|"INT64"|"FP32"|"binary_data_size"|-1|0|1e308|null|true|[[|]]|[],|'
        b"\0\0\0\0",
    ),
}  # fmt: skip
