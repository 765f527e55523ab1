"""A safetensors file, planned before it is written.

8 bytes, the length of the header; the header, JSON, padded with spaces; the tensors' data, one after another.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import torch

from ..system.durable import write_all
from .tensor_file import TensorFile, TensorSpec

METADATA_KEY: Final = "tierstore"
"""Where in the header's ``__metadata__`` our own stands, as JSON."""
_ALIGN: Final = 64
"""Of the data's beginning; the format asks for 8."""
DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsFile(TensorFile):
    """In safetensors format, ``head`` before the data. ValueError for a dtype that is not in ``DTYPES``."""

    def __init__(self, tensors: Sequence[TensorSpec], metadata: dict[str, Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA_KEY: json.dumps(metadata)}}
        end = 0
        # Wide types first, so that each tensor is aligned without gaps, which the format forbids.
        for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype}, which an export to safetensors leaves out")
            begin, end = end, end + tensor.size_bytes
            header[tensor.name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // _ALIGN) * _ALIGN - 8)
        self.head = len(text).to_bytes(8, "little") + text
        starts = {tensor.name: len(self.head) + header[tensor.name]["data_offsets"][0] for tensor in tensors}
        super().__init__(starts, len(self.head) + end)

    def finish(self, descriptor: int) -> None:
        write_all(descriptor, self.head, 0)
