"""Writing the tensors of a planned file."""

import os
import zlib
from typing import Any

from .tensor_file import TensorFile

__all__ = ["TensorWriter"]


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
