"""Rows to text in Criteo's format."""

from typing import Final

import numpy as np

from ..kernels.arrays import Bytes, Int64s
from ..kernels.jit import inline, kernel
from .readers.hashing import GOLDEN, splitmix64

__all__ = ["MAX_LINE_BYTES", "format_rows"]


_CATEGORY_DIGITS: Final = 8
_MAX_DECIMAL_DIGITS: Final = 19
MAX_LINE_BYTES: Final = 2 + 13 * (_MAX_DECIMAL_DIGITS + 1) + 26 * (_CATEGORY_DIGITS + 1)
_TAB: Final = 9
_NEWLINE: Final = 10
_ZERO: Final = 48
_A: Final = 97
_CATEGORY_SHIFT: Final = np.uint64(32)


@kernel
def format_rows(labels: Bytes, dense: Int64s, ranks: Int64s, text: Bytes) -> int:
    """Write one line a row into ``text``; returns the number of bytes.

    Args:
        labels: [n], 0 or 1.
        dense: [n, 13], 0 or more.
        ranks: [n, 26]; written as the upper half of the hash of column and rank, or empty where negative.
        text: at least n * MAX_LINE_BYTES.
    """
    at = 0
    for row in range(len(labels)):
        text[at] = _ZERO + labels[row]
        at += 1
        for column in range(dense.shape[1]):
            text[at] = _TAB
            at = _format_decimal(dense[row, column], text, at + 1)
        for column in range(ranks.shape[1]):
            text[at] = _TAB
            at += 1
            if ranks[row, column] >= 0:
                hashed = splitmix64(np.uint64(ranks[row, column]) + np.uint64(column + 1) * GOLDEN)
                at = _format_hexadecimal(int(hashed >> _CATEGORY_SHIFT), text, at)
        text[at] = _NEWLINE
        at += 1
    return at


@inline
def _format_decimal(number: int, text: Bytes, at: int) -> int:
    digits = 1
    rest = number // 10
    while rest:
        digits += 1
        rest //= 10
    for i in range(digits):
        text[at + digits - 1 - i] = _ZERO + number % 10
        number //= 10
    return at + digits


@inline
def _format_hexadecimal(number: int, text: Bytes, at: int) -> int:
    for i in range(_CATEGORY_DIGITS):
        digit = number & 15
        text[at + _CATEGORY_DIGITS - 1 - i] = (_ZERO + digit) if digit < 10 else (_A + digit - 10)
        number >>= 4
    return at + _CATEGORY_DIGITS
