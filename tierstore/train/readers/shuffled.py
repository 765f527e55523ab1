"""Rows in a random order that a seed, the epoch and the rows' numbers decide, from any row on."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import Int64s
from .base import RawRows, Reader


def random_order(count: int, *, key: tuple[int, int], begin: int = 0) -> Int64s:
    """A permutation [count]: the argsort of Philox's 64-bit outputs (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), whose stream numpy keeps. ``key``, ``begin``: numbers in [0, 2**64); others give another."""
    bits = np.random.Philox(counter=[0, begin, 0, 0], key=list(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class ShuffledReader(Reader):
    """Reads ``block_rows`` rows at a time, a multiple of a chunk's, and shuffles them. ``key``: of ``random_order``."""

    def __init__(self, reader: Reader, block_rows: int, key: tuple[int, int]) -> None:
        self.path, self.schema, self.files = reader.path, reader.schema, reader.files
        self._reader, self._block_rows, self._key = reader, block_rows, key
        self._block = 0, np.empty(0, np.int64)  # that was read last: its first row, and its order

    @property
    def num_rows(self) -> int | None:
        return self._reader.num_rows

    def place(self, row: int) -> str:
        begin, order = self._block
        return self._reader.place(begin + int(order[row - begin]))

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        begin = start_row - start_row % self._block_rows
        for block in self._reader.read_chunks(begin, stop_row, self._block_rows):
            order = random_order(len(block.labels), key=self._key, begin=begin)
            self._block = begin, order
            for first in range(max(0, start_row - begin), len(order), chunk_rows):
                yield block.take(order[first : first + chunk_rows])
            begin += len(order)
