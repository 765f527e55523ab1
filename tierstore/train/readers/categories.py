"""Categories: the values of categorical columns, as integers from 0 on, in bags of any number of them.

Shapes: F columns, n rows, N categories.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.arrays import Bytes, Int64s
from ...kernels.jit import inline, kernel

MISSING: Final = -1
"""What a reader puts where a category is absent, before it is left out."""

MAX_FLOAT: Final = 2**53
"""Whole floating-point numbers from here on have lost digits: an id as large is not the one that was written."""

_FNV_BASIS: Final = np.uint64(0xCBF29CE484222325)
_FNV_PRIME: Final = np.uint64(0x100000001B3)
_MAX_DIGITS: Final = 18
_ZERO: Final = 48
_POINT: Final = 46


class Categories(NamedTuple):
    """Column after column, and in it row after row."""

    values: Int64s
    """[N], from 0 on."""
    offsets: Int64s
    """[F, n + 1]: row r of column f has ``values[offsets[f, r]:offsets[f, r + 1]]``."""

    @classmethod
    def of_columns(cls, values: Sequence[Int64s], lengths: NDArray[Any]) -> "Categories":
        """From the values of each column, and ``lengths`` [F, n] of their bags."""
        flat = np.append(0, np.cumsum(lengths, dtype=np.int64))
        num_columns, num_rows = lengths.shape
        return cls(np.concatenate(values), flat[num_rows * np.arange(num_columns)[:, None] + np.arange(num_rows + 1)])

    @classmethod
    def of_matrix(cls, values: Int64s) -> "Categories":
        """From one category a row and column, [n, F], where negative ones are missing."""
        columns = values.T
        is_there = columns >= 0
        return cls.of_columns([columns[is_there]], is_there)

    @classmethod
    def joined(cls, parts: Sequence["Categories"]) -> "Categories":
        """The rows of all parts, which have the same columns."""
        columns = zip(*(part.columns() for part in parts), strict=True)
        lengths = np.concatenate([np.diff(part.offsets) for part in parts], axis=1)
        return cls.of_columns([np.concatenate(column) for column in columns], lengths)

    def columns(self) -> list[Int64s]:
        """The values of each column."""
        return [self.values[first:last] for first, last in self.offsets[:, [0, -1]].tolist()]

    def part(self, begin: int, end: int) -> "Categories":
        """Rows ``[begin, end)``."""
        offsets = self.offsets[:, begin : end + 1]
        cut = Categories(self.values, offsets)
        return Categories.of_columns(cut.columns(), np.diff(offsets))


def read_texts(letters: Bytes, offsets: Int64s, *, floats: bool = False) -> Int64s:
    """The categories [n] that texts stand for, where text i is ``letters[offsets[i]:offsets[i + 1]]``, in UTF-8.

    A text that is written as an integer of up to 18 digits, without sign and leading zeros, is that integer. Any other
    one is the upper 63 bits of its 64-bit FNV-1a hash (Fowler, Noll, Vo; IETF draft-eastlake-fnv). An empty text is
    ``MISSING``.

    Args:
        floats: "12.0" is the integer 12, too.
    """
    categories = np.empty(len(offsets) - 1, np.int64)
    _read_texts(letters, offsets, floats, categories)
    return categories


@kernel
def _read_texts(letters: Bytes, offsets: Int64s, floats: bool, categories: Int64s) -> None:
    for i in range(len(categories)):
        begin, end = offsets[i], offsets[i + 1]
        is_float = floats and end - begin > 2 and letters[end - 2] == _POINT and letters[end - 1] == _ZERO
        number = _read_integer(letters, begin, end - 2 if is_float else end)
        if number < 0 and begin < end:
            state = _FNV_BASIS
            for at in range(begin, end):
                state = np.uint64((state ^ np.uint64(letters[at])) * _FNV_PRIME)
            number = np.int64(state >> np.uint64(1))
        categories[i] = number


@inline
def _read_integer(letters: Bytes, begin: int, end: int) -> np.int64:
    """-1 unless the text is written as an integer."""
    digits = end - begin
    if digits == 0 or digits > _MAX_DIGITS or (letters[begin] == _ZERO and digits > 1):
        return np.int64(-1)
    number = np.int64(0)
    for at in range(begin, end):
        digit = np.int64(letters[at]) - _ZERO
        if digit < 0 or digit > 9:
            return np.int64(-1)
        number = number * 10 + digit
    return number
