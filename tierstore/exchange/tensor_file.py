"""What the two file formats have in common: tensors whose places are known before the first byte is written."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

__all__ = ["TensorFile", "TensorSpec"]


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
