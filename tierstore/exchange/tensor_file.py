"""What the two file formats have in common: tensors whose places are known before the first byte is written."""

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["TensorFile", "TensorSpec", "TensorWriter"]


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


class TensorFile(Protocol):
    """The plan of a file.

    Attributes:
        starts: where each tensor's data begins.
        size_bytes: of the whole file.
        needs_checksums: whether ``frame`` wants the CRC-32 of each tensor's data.
    """

    starts: dict[str, int]
    size_bytes: int
    needs_checksums: bool

    def frame(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Everything but the tensors' data, as (offset, bytes)."""


class TensorWriter:
    """Writes the tensors of a planned file, several at a time, each in order."""

    def __init__(self, descriptor: int, plan: TensorFile) -> None:
        self._descriptor = descriptor
        self._plan = plan
        self._places = dict(plan.starts)
        self._checksums = dict.fromkeys(plan.starts, 0)

    def append(self, name: str, data: Any) -> None:
        """Add ``data``, a contiguous array, to a tensor."""
        raw = memoryview(data).cast("B") if data.size else memoryview(b"")
        if self._plan.needs_checksums:
            self._checksums[name] = zlib.crc32(raw, self._checksums[name])
        self._write(self._places[name], raw)
        self._places[name] += len(raw)

    def finish(self) -> None:
        """Write the rest of the file."""
        for offset, data in self._plan.frame(self._checksums):
            self._write(offset, memoryview(data))

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset, data = offset + written, data[written:]
