"""The two formats of a whole model, safetensors and torch's: tensors whose places are known before the first byte.

A checkpoint of torch is a ZIP file of uncompressed entries with 64-bit headers; our metadata is an entry of its own.
"""

import io
import json
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch._utils

from ..system.files import write_all


class TensorSpec(NamedTuple):
    """One tensor of a file; its data is contiguous, little-endian."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFile(ABC):
    """A file to be written: several tensors at a time, each in order, then the rest. ``places``: where the next data
    of each goes."""

    def __init__(self, places: dict[str, int], size_bytes: int) -> None:
        self.places = places
        self.size_bytes = size_bytes

    def append(self, descriptor: int, name: str, data: Any) -> memoryview:
        """Add ``data``, a contiguous array, to a tensor; its bytes."""
        raw = memoryview(data).cast("B") if data.size else memoryview(b"")
        write_all(descriptor, raw, self.places[name])
        self.places[name] += len(raw)
        return raw

    @abstractmethod
    def finish(self, descriptor: int) -> None:
        """Write everything but the tensors' data."""


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


METADATA_ENTRY: Final = "archive/tierstore.json"
_PAD: Final = 0x4246
_STORAGES: Final[dict[torch.dtype, Any]] = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip


class _Storage(NamedTuple):
    kind: Any
    number: int
    numel: int


class _Tensor:
    def __init__(self, spec: TensorSpec, number: int) -> None:
        self.storage = _Storage(_STORAGES[spec.dtype], number, spec.numel)
        self.shape = spec.shape
        self.stride = torch.empty(spec.shape, device="meta").stride()


class _Pickler(pickle.Pickler):
    """Writes what ``torch.save`` would, without any data."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, str(value.number), "cpu", value.numel
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            arguments: tuple[Any, ...] = value.storage, 0, value.shape, value.stride, False, OrderedDict()
            return torch._utils._rebuild_tensor_v2, arguments
        return NotImplemented


class TorchFile(TensorFile):
    """As a torch checkpoint: a dict of tensors by name. ValueError for a dtype that is not in ``_STORAGES``."""

    def __init__(self, tensors: Sequence[TensorSpec], metadata: dict[str, Any]) -> None:
        entries = {
            "archive/data.pkl": _pickle(tensors),
            "archive/byteorder": sys.byteorder.encode(),
            METADATA_ENTRY: json.dumps(metadata).encode(),
        }
        self._end = 0
        self._entries = [(self._entry(name, len(data), zlib.crc32(data)), data) for name, data in entries.items()]
        starts = {}
        self._infos = {}
        for number, tensor in enumerate(tensors):
            info = self._infos[tensor.name] = self._entry(f"archive/data/{number}", tensor.size_bytes, 0)
            starts[tensor.name] = self._end - tensor.size_bytes
            self._entries.append((info, b""))
        super().__init__(starts, self._end)

    def _entry(self, name: str, size_bytes: int, checksum: int) -> zipfile.ZipInfo:
        """The next entry; its data, aligned, ends at ``_end``."""
        info = zipfile.ZipInfo(name)
        info.file_size = info.compress_size = size_bytes
        info.header_offset, info.CRC = self._end, checksum
        pad = -(self._end + len(info.FileHeader(zip64=True)) + 4) % _ALIGN
        info.extra = struct.pack("<HH", _PAD, pad) + bytes(pad)
        self._end += len(info.FileHeader(zip64=True)) + size_bytes
        return info

    def append(self, descriptor: int, name: str, data: Any) -> memoryview:
        raw = super().append(descriptor, name, data)
        self._infos[name].CRC = zlib.crc32(raw, self._infos[name].CRC)
        return raw

    def finish(self, descriptor: int) -> None:
        for info, data in self._entries:
            write_all(descriptor, info.FileHeader(zip64=True) + data, info.header_offset)
        with os.fdopen(os.dup(descriptor), "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.filelist.extend(info for info, _ in self._entries)
            archive.start_dir = self._end  # where it goes on, with one more entry and the directory of all
            archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _pickle(tensors: Sequence[TensorSpec]) -> bytes:
    for tensor in tensors:
        if tensor.dtype not in _STORAGES:
            raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype}, which an export to torch leaves out")
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump({tensor.name: _Tensor(tensor, number) for number, tensor in enumerate(tensors)})
    return out.getvalue()
