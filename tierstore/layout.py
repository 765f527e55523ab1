"""The row: one embedding vector and its optimizer state, in memory and on disk.

Weights are float32, float16 or bfloat16, or, for inference, quantized row by row as torch's operators take them:
``int8`` is one byte a column, then scale and bias as float32 (``torch.ops.quantized.embedding_bag_byte_prepack``);
``int4`` is two columns a byte, the lower four bits first, then scale and bias as float16
(``embedding_bag_4bit_prepack``). Such rows have no optimizer state.

In a cache a row is two runs of 64-bit words: ``weight_words`` of weights and ``state_words`` of float32 optimizer
state, each zero-padded to a whole word. On disk ``rows_per_block`` rows make a block, which fills whole pages: two
words of header, and of each row its key, checksum and content, in the order of ``io/segments.py``. Blocks that
are written together make a segment, one LMDB value of at most ``rows_per_segment`` rows, whose first pages list all
their keys. docs/format.md draws it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    import torch

FloatName = Literal["float32", "float16", "bfloat16"]
QuantizedName = Literal["int8", "int4"]
DtypeName = Literal[FloatName, QuantizedName]

KEY_ROW_BITS: Final = 40  # a row key is ``table_index << KEY_ROW_BITS | row``: unique over all tables of a store
MAX_ROWS: Final = 1 << KEY_ROW_BITS
ROW_MASK: Final = MAX_ROWS - 1  # of a key, its row
MAX_TABLES: Final = 1 << 22

WORD_BYTES: Final = 8
PAGE_HEADER_WORDS: Final = 2  # LMDB's header before a value that has pages of its own
SEGMENT_HEADER_WORDS: Final = 6
BLOCK_HEADER_WORDS: Final = 2
PAIR_WORDS: Final = 2  # a row's key and its checksum
SEGMENT_PAGES: Final = 16  # of a full segment, unless one block takes more
MAX_PAGES_PER_BLOCK: Final = 64
_GOOD_FILL: Final = 0.75

_BYTE_SCALE_BYTES: Final = 8
_NIBBLE_SCALE_BYTES: Final = 4  # scale and bias of a quantized row: two float32 with int8, two float16 with int4


def _words(size_bytes: int) -> int:
    return -(-size_bytes // WORD_BYTES)


@dataclass(frozen=True, slots=False, kw_only=True)
class RowLayout:
    """How the rows of a table lie in memory and on disk; tables of equal layout share caches and kernels.

    Attributes:
        dim: columns of the embedding vector. dtype: of the weights; optimizer state is always float32.
        state_dim: float32 columns of optimizer state (0 for SGD and for quantized rows).
        page_bytes: page size of the LMDB file the rows go to.
    """

    dim: int
    dtype: DtypeName = "float32"
    state_dim: int = 0
    page_bytes: int = 4096

    @cached_property
    def is_quantized(self) -> bool:
        """Whether weights are int8 or int4 with a scale and a bias a row."""
        return self.dtype in get_args(QuantizedName)

    @cached_property
    def torch_dtype(self) -> "torch.dtype":
        """Of the weights as they are read and written; quantized ones are read as float32."""
        import torch  # which takes seconds to load

        return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(self.dtype, torch.float32)

    @cached_property
    def numpy_dtype(self) -> "np.dtype[np.float32] | np.dtype[np.uint16] | np.dtype[np.uint8]":
        """What kernels see: float32, the bit patterns of a 16-bit type as uint16, the bytes of a quantized row."""
        if self.is_quantized:
            return np.dtype(np.uint8)
        return np.dtype(np.float32) if self.dtype == "float32" else np.dtype(np.uint16)

    @cached_property
    def stored_columns(self) -> int:
        """Elements of ``numpy_dtype`` that the weights of one row are."""
        if self.dtype == "int8":
            return self.dim + _BYTE_SCALE_BYTES
        return -(-self.dim // 2) + _NIBBLE_SCALE_BYTES if self.dtype == "int4" else self.dim

    @cached_property
    def weight_words(self) -> int:
        return _words(self.stored_columns * self.numpy_dtype.itemsize)

    @cached_property
    def state_words(self) -> int:
        return _words(self.state_dim * 4)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of its weights in a cache, padding included: what pooling reads."""
        return self.weight_words * WORD_BYTES

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in a cache, padding included."""
        return (self.weight_words + self.state_words) * WORD_BYTES

    @property
    def stored_row_words(self) -> int:
        """Words of one row on disk: key, checksum, weights, state."""
        return self.weight_words + self.state_words + PAIR_WORDS

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
                f"{MAX_PAGES_PER_BLOCK * self.page_bytes - BLOCK_HEADER_WORDS * WORD_BYTES} fit a block. Split the "
                "table by columns."
            )
        return best

    def _rows_in(self, pages: int) -> int:
        return (pages * self.page_bytes // WORD_BYTES - BLOCK_HEADER_WORDS) // self.stored_row_words

    @cached_property
    def rows_per_block(self) -> int:
        return self._rows_in(self.pages_per_block)

    @cached_property
    def rows_per_segment(self) -> int:
        """As many whole blocks as fit ``SEGMENT_PAGES`` with the list of their keys; at least one block."""
        blocks = 1
        while self.segment_pages((blocks + 1) * self.rows_per_block) <= SEGMENT_PAGES:
            blocks += 1
        return blocks * self.rows_per_block

    def segment_pages(self, num_rows: int, *, is_mixed: bool = False) -> int:
        """Pages that a segment of so many rows takes; a mixed one lists the epoch of each."""
        index_words = PAGE_HEADER_WORDS + SEGMENT_HEADER_WORDS + num_rows * (1 + is_mixed)
        index_pages = -(-index_words * WORD_BYTES // self.page_bytes)
        return index_pages + -(-num_rows // self.rows_per_block) * self.pages_per_block

    @property
    def stored_row_bytes(self) -> float:
        """Bytes of the file that a row of a full segment takes, index, headers and padding included."""
        return self.segment_pages(self.rows_per_segment) * self.page_bytes / self.rows_per_segment

    def pages_for(self, num_rows: int, *, is_mixed: bool = False) -> int:
        """Pages that so many rows take together: whole segments, and one of the rest."""
        whole, rest = divmod(num_rows, self.rows_per_segment)
        pages = whole * self.segment_pages(self.rows_per_segment, is_mixed=is_mixed)
        return pages + self.segment_pages(rest, is_mixed=is_mixed) if rest else pages

    def rows_within(self, size_bytes: int) -> int:
        """Rows of as many whole segments as fit so many bytes; of one at least."""
        rows = self.rows_per_segment
        return max(1, size_bytes // (self.segment_pages(rows) * self.page_bytes)) * rows
