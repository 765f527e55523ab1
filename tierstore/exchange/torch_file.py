"""A torch checkpoint, planned before it is written: ``torch.load(path, weights_only=True, mmap=True)`` reads it.

It is a ZIP archive of uncompressed entries: a pickle of the state dict in which each tensor names its storage, one
entry for each storage, and a few small ones. Sizes and places are 64-bit throughout (APPNOTE.TXT 4.5.3), so that small
files are written exactly as large ones are. Our own metadata is one more entry, which torch passes over.
"""

import io
import json
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch._utils

from .tensor_file import TensorSpec

__all__ = ["METADATA_ENTRY", "TorchFile"]

METADATA_ENTRY: Final = "archive/tierstore.json"
_ALIGN: Final = 64
"""Of each entry's data, as torch itself has it."""
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR: Final = struct.Struct("<IIQI")
_END: Final = struct.Struct("<IHHHHIIH")
_ZIP_64: Final = 45
"""Version of the format that knows 64-bit sizes."""
_NEW_YEAR_1980: Final = 0x21
_PAD: Final = 0x4246
_HERE: Final = 0xFFFFFFFF
"""Stands where a 64-bit number is given elsewhere."""
_STORAGES: Final[dict[torch.dtype, Any]] = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip


class _Storage(NamedTuple):
    """Stands for a storage in the pickle: an entry of the archive."""

    kind: Any
    number: int
    numel: int


class _Tensor:
    """Stands for a tensor in the pickle."""

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


class _Entry(NamedTuple):
    """One file of the archive; ``data`` is None for a tensor's."""

    name: bytes
    offset: int
    size_bytes: int
    data: bytes | None

    def _pad(self) -> int:
        return -(self.offset + _LOCAL.size + len(self.name) + 20 + 4) % _ALIGN

    @property
    def start(self) -> int:
        """Where its data begins."""
        return self.offset + _LOCAL.size + len(self.name) + 20 + 4 + self._pad()

    @property
    def end(self) -> int:
        return self.start + self.size_bytes

    def local(self, checksum: int) -> bytes:
        pad = self._pad()
        extra = struct.pack("<HHQQ", 1, 16, self.size_bytes, self.size_bytes) + struct.pack("<HH", _PAD, pad)
        head = _LOCAL.pack(
            0x04034B50, _ZIP_64, 0, 0, 0, _NEW_YEAR_1980, checksum, _HERE, _HERE, len(self.name), len(extra) + pad
        )
        return head + self.name + extra + bytes(pad)

    def central(self, checksum: int) -> bytes:
        extra = struct.pack("<HHQQQ", 1, 24, self.size_bytes, self.size_bytes, self.offset)
        head = _CENTRAL.pack(
            0x02014B50, _ZIP_64, _ZIP_64, 0, 0, 0, _NEW_YEAR_1980, checksum, _HERE, _HERE,
            len(self.name), len(extra), 0, 0, 0, 0, _HERE,
        )  # fmt: skip
        return head + self.name + extra


class TorchFile:
    """``TensorFile`` as a torch checkpoint: a dict of tensors by name.

    Raises:
        ValueError: a tensor of a dtype that is not in ``_STORAGES``.
    """

    needs_checksums = True

    def __init__(self, tensors: Sequence[TensorSpec], metadata: dict[str, Any]) -> None:
        self._entries: list[_Entry] = []
        self._add("archive/data.pkl", _pickle(tensors))
        self._add("archive/byteorder", sys.byteorder.encode())
        self._add(METADATA_ENTRY, json.dumps(metadata).encode())
        self._add("archive/version", b"3\n")
        self._numbers = {len(self._entries) + number: tensor.name for number, tensor in enumerate(tensors)}
        for number, tensor in enumerate(tensors):
            self._add(f"archive/data/{number}", None, tensor.size_bytes)
        self.starts = {name: self._entries[place].start for place, name in self._numbers.items()}
        self._directory = self._entries[-1].end
        central_bytes = sum(len(entry.central(0)) for entry in self._entries)
        self.size_bytes = self._directory + central_bytes + _END_64.size + _LOCATOR.size + _END.size

    def _add(self, name: str, data: bytes | None, size_bytes: int = 0) -> None:
        offset = self._entries[-1].end if self._entries else 0
        self._entries.append(_Entry(name.encode(), offset, size_bytes if data is None else len(data), data))

    def frame(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See ``TensorFile.frame``."""
        central = b""
        for place, entry in enumerate(self._entries):
            checksum = checksums[self._numbers[place]] if entry.data is None else zlib.crc32(entry.data)
            yield entry.offset, entry.local(checksum) + (entry.data or b"")
            central += entry.central(checksum)
        count, end = len(self._entries), self._directory + len(central)
        tail = _END_64.pack(0x06064B50, 44, _ZIP_64, _ZIP_64, 0, 0, count, count, len(central), self._directory)
        tail += _LOCATOR.pack(0x07064B50, 0, end, 1)
        tail += _END.pack(0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _HERE, _HERE, 0)
        yield self._directory, central + tail


def _pickle(tensors: Sequence[TensorSpec]) -> bytes:
    for tensor in tensors:
        if tensor.dtype not in _STORAGES:
            raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype}, which an export to torch leaves out")
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump({tensor.name: _Tensor(tensor, number) for number, tensor in enumerate(tensors)})
    return out.getvalue()
