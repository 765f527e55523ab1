"""The row: one embedding vector and its optimizer state, in memory and on disk.

In a cache a row is two runs of 64-bit words: ``weight_words`` of weights and ``state_words`` of float32 optimizer
state, each zero-padded to a whole word. On disk the two runs are followed by one checksum word, and
``rows_per_block`` neighbouring rows are packed behind a two-word header into one LMDB value that fills whole
overflow pages. docs/format.md draws it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
import torch

__all__ = ["KEY_ROW_BITS", "MAX_ROWS", "MAX_TABLES", "DtypeName", "RowLayout"]

DtypeName = Literal["float32", "float16", "bfloat16"]

KEY_ROW_BITS: Final = 40
"""A row key is ``table_index << KEY_ROW_BITS | row``: unique over all tables of a store."""
MAX_ROWS: Final = 1 << KEY_ROW_BITS
MAX_TABLES: Final = 1 << 22

WORD_BYTES: Final = 8
PAGE_HEADER_BYTES: Final = 16
"""LMDB's header at the start of an overflow page."""
BLOCK_HEADER_WORDS: Final = 2
CHECKSUM_WORDS: Final = 1
MAX_PAGES_PER_BLOCK: Final = 64
_GOOD_FILL: Final = 0.75

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def _words(size_bytes: int) -> int:
    return -(-size_bytes // WORD_BYTES)


@dataclass(frozen=True, slots=False, kw_only=True)
class RowLayout:
    """How the rows of a table lie in memory and on disk; tables of equal layout share caches and kernels.

    Attributes:
        dim: columns of the embedding vector.
        dtype: type of the weights; optimizer state is always float32.
        state_dim: float32 columns of optimizer state (0 for SGD).
        page_bytes: page size of the LMDB file the rows go to.
    """

    dim: int
    dtype: DtypeName = "float32"
    state_dim: int = 0
    page_bytes: int = 4096

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype]

    @property
    def numpy_dtype(self) -> "np.dtype[np.float32] | np.dtype[np.uint16]":
        """What kernels see: float32, or the bit patterns of a 16-bit type as uint16."""
        return np.dtype(np.float32) if self.dtype == "float32" else np.dtype(np.uint16)

    @property
    def weight_words(self) -> int:
        return _words(self.dim * self.numpy_dtype.itemsize)

    @property
    def state_words(self) -> int:
        return _words(self.state_dim * 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a cache, padding included."""
        return (self.weight_words + self.state_words) * WORD_BYTES

    @property
    def stored_row_words(self) -> int:
        """Words of one row on disk: weights, state, checksum."""
        return self.weight_words + self.state_words + CHECKSUM_WORDS

    @cached_property
    def pages_per_block(self) -> int:
        """The fewest pages that are at least three quarters full of rows, else the best-filled number up to 64."""
        best, best_fill = 0, 0.0
        for pages in range(1, MAX_PAGES_PER_BLOCK + 1):
            rows = self._rows_in(pages)
            fill = rows * self.stored_row_words * WORD_BYTES / (pages * self.page_bytes)
            if fill >= _GOOD_FILL:
                return pages
            if fill > best_fill:
                best, best_fill = pages, fill
        if not best:
            raise ValueError(
                f"embedding_dim={self.dim} with {self.state_dim} columns of optimizer state needs "
                f"{self.stored_row_words * WORD_BYTES} bytes a row; at most "
                f"{MAX_PAGES_PER_BLOCK * self.page_bytes - 32} fit a block. Split the table by columns."
            )
        return best

    def _rows_in(self, pages: int) -> int:
        words = (pages * self.page_bytes - PAGE_HEADER_BYTES) // WORD_BYTES - BLOCK_HEADER_WORDS
        return words // self.stored_row_words

    @property
    def rows_per_block(self) -> int:
        return self._rows_in(self.pages_per_block)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's LMDB value: whole overflow pages less the page header."""
        return self.pages_per_block * self.page_bytes - PAGE_HEADER_BYTES

    def num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_block)
