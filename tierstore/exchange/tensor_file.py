"""What the two file formats have in common: tensors whose places are known before the first byte is written."""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from ..system.durable import write_all


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
