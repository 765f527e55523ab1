"""Tensors as the client sends and gets them: the protocol's binary tensor data extension."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..messages import DATATYPES, InferTensor, ServeError
from ..tensors.binary import JSON_LENGTH_HEADER, binary_data, parse_binary_data
from ..tensors.shapes import parse_head

__all__ = ["Answer", "Tensor", "decode_answer", "encode_request"]

Tensor: TypeAlias = "NDArray[Any] | torch.Tensor"

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items() if name not in ("BF16", "BYTES")}


class Answer(NamedTuple):
    """What a model answered.

    Attributes:
        outputs: by name, read-only; BF16 as uint16 bit patterns.
        version: of the store, that all outputs are of.
    """

    outputs: dict[str, NDArray[Any]]
    version: str


def _as_wire(name: str, tensor: Tensor) -> InferTensor:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return InferTensor("BF16", tensor.view(torch.int16).numpy())
        tensor = tensor.numpy()
    array = np.asarray(tensor)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _NAMES:
        raise ValueError(f"input {name!r}: dtype {array.dtype} is none of {', '.join(map(str, _NAMES))}, bfloat16")
    return InferTensor(_NAMES[array.dtype], array)


def encode_request(inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers.

    Raises:
        ValueError: a dtype that the protocol does not have; names the input.
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for name, tensor in inputs.items():
        datatype, array = wire = _as_wire(name, tensor)
        binary = {"binary_data_size": array.nbytes}
        described.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": binary})
        parts.append(binary_data(wire))
    request = {"inputs": described, "parameters": {"binary_data_output": True, **parameters}}
    header = json.dumps(request).encode()
    headers = {JSON_LENGTH_HEADER: str(len(header)), "Content-Type": "application/octet-stream"}
    return b"".join([header, *parts]), headers


def decode_answer(body: bytes, header_length: str | None) -> Answer:
    """What a body says. ValueError, whatever is wrong with it."""
    try:
        return _decode(body, header_length)
    except ServeError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decode(body: bytes, header_length: str | None) -> Answer:
    length = len(body) if header_length is None else int(header_length)
    if not 0 <= length <= len(body):
        raise ValueError(f"{JSON_LENGTH_HEADER} is {length} of {len(body)} bytes")
    header = json.loads(body[:length])
    outputs = {}
    for each in header["outputs"]:
        head = parse_head(each["name"], each["datatype"], each["shape"], kind="output")
        size_bytes = each.get("parameters", {}).get("binary_data_size")
        if size_bytes is None:
            array = np.array(each["data"], DATATYPES[head.datatype]).reshape(head.shape)
            array.flags.writeable = False
        else:
            array = parse_binary_data(head, memoryview(body)[length : length + size_bytes]).data
            length += size_bytes
        outputs[head.name] = array
    if length > len(body) or (header_length is not None and length < len(body)):
        raise ValueError(f"outputs of {length} bytes in a body of {len(body)}")
    return Answer(outputs, str(header.get("model_version", "")))
