"""Text to numbers for Criteo's format, a line at a time, without allocating."""

from enum import IntEnum
from typing import Final

import numpy as np

from ...kernels.arrays import Bytes, Floats, Int64s
from ...kernels.jit import inline, kernel

__all__ = ["Parse", "Scan", "parse_hexadecimal", "parse_lines", "skip_lines"]


_TAB: Final = 9
_NEWLINE: Final = 10
_RETURN: Final = 13
_MINUS: Final = 45
_ZERO: Final = 48
_A: Final = 97
_LAST_DENSE: Final = 13
_LAST_COLUMN: Final = 39
_MAX_DECIMAL_DIGITS: Final = 18
_MAX_HEX_DIGITS: Final = 15
_INVALID: Final = -2
_EMPTY: Final = -1


class Parse(IntEnum):
    """How a parse ended."""

    STOPPED = 0
    """The rows are full, or the text holds no further whole line."""
    BROKEN = 1
    """The line at the position is not in the format."""


class Scan(IntEnum):
    """Fields of the result of a kernel, int64 [4]."""

    ROWS = 0
    """Rows filled or skipped."""
    POSITION = 1
    """First byte that was not consumed: the start of a line."""
    STATUS = 2
    COLUMN = 3
    """Where a broken line stopped making sense."""


_ROWS: Final = int(Scan.ROWS)
_POSITION: Final = int(Scan.POSITION)
_STATUS: Final = int(Scan.STATUS)
_COLUMN: Final = int(Scan.COLUMN)
_BROKEN: Final = int(Parse.BROKEN)


@kernel
def skip_lines(text: Bytes, begin: int, end: int, lines: int, scan: Int64s) -> None:
    """Consume up to ``lines`` whole lines of ``text[begin:end]``."""
    skipped = 0
    position = begin
    at = begin
    while at < end and skipped < lines:
        if text[at] == _NEWLINE:
            skipped += 1
            position = at + 1
        at += 1
    scan[_ROWS] = skipped
    scan[_POSITION] = position


@kernel
def parse_lines(
    text: Bytes,
    begin: int,
    end: int,
    first_row: int,
    labels: Floats,
    dense: Floats,
    categories: Int64s,
    scan: Int64s,
) -> None:
    """Convert whole lines of ``text[begin:end]`` into rows from ``first_row`` on, until the arrays are full."""
    row = first_row
    position = begin
    scan[_STATUS] = 0
    while row < len(labels):
        at = _parse_line(text, position, end, row, labels, dense, categories, scan)
        if at < 0:
            break
        position = at
        row += 1
    scan[_ROWS] = row
    scan[_POSITION] = position


@inline
def _parse_line(
    text: Bytes,
    at: int,
    end: int,
    row: int,
    labels: Floats,
    dense: Floats,
    categories: Int64s,
    scan: Int64s,
) -> int:
    """Position after the line, or -1 if it is cut off at ``end`` or broken (then the status says so)."""
    for column in range(_LAST_COLUMN + 1):
        if column > _LAST_DENSE:
            at, category = parse_hexadecimal(text, at, end)
            categories[row, column - _LAST_DENSE - 1] = category
            valid = category != _INVALID
        else:
            at, number, valid = _parse_decimal(text, at, end)
            if column > 0:
                dense[row, column - 1] = number
            else:
                labels[row] = number
                valid = number == 0 or number == 1
        if at < end and text[at] == _RETURN and column == _LAST_COLUMN:
            at += 1
        if at >= end:
            return -1
        if not valid or text[at] != (_NEWLINE if column == _LAST_COLUMN else _TAB):
            scan[_STATUS] = _BROKEN
            scan[_COLUMN] = column
            return -1
        at += 1
    return at


@inline
def _parse_decimal(text: Bytes, at: int, end: int) -> tuple[int, float, bool]:
    """Position of the first byte that is no digit, the number (NaN if there is none), whether it may stand here."""
    negative = at < end and text[at] == _MINUS
    if negative:
        at += 1
    first = at
    number = 0
    while at < end and at - first <= _MAX_DECIMAL_DIGITS:
        digit = int(text[at]) - _ZERO
        if digit < 0 or digit > 9:
            break
        number = number * 10 + digit
        at += 1
    digits = at - first
    if digits == 0:
        return at, np.nan, not negative
    return at, float(-number if negative else number), digits <= _MAX_DECIMAL_DIGITS


@inline
def parse_hexadecimal(text: Bytes, at: int, end: int) -> tuple[int, int]:
    """Position of the first byte that is no digit, and the number: -1 if there is none, -2 if it is too long."""
    first = at
    number = 0
    while at < end and at - first <= _MAX_HEX_DIGITS:
        byte = int(text[at])
        digit = byte - _ZERO
        if digit < 0 or digit > 9:
            # Bit 5 set makes a letter small.
            digit = (byte | 32) - _A + 10
            if digit < 10 or digit > 15:
                break
        number = (number << 4) | digit
        at += 1
    digits = at - first
    if digits == 0:
        return at, _EMPTY
    if digits > _MAX_HEX_DIGITS:
        return at, _INVALID
    return at, number
