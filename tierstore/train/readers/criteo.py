"""Criteo's click logs: a row a line, tab-separated: label, 13 integers, 26 hexadecimal categories, empty = missing.

The format of the Kaggle display-advertising set and of the terabyte set, plain or compressed with gzip.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from ...ids.texts import MISSING, CategoryRule, read_text
from ...kernels.arrays import Bytes, Floats, Int64s
from ...kernels.jit import inline, kernel
from ...system.checks import excerpt
from .base import CRITEO_SCHEMA, DataError, DataFile, RawRows, Reader, Schema, require_data_file
from .categories import Categories

BUFFER_BYTES: Final = 1 << 20  # text held at a time, and so the longest line
_GZIP_MAGIC: Final = b"\x1f\x8b"
_NUM_DENSE: Final = len(CRITEO_SCHEMA.dense)
_NUM_SPARSE: Final = len(CRITEO_SCHEMA.sparse)
_COLUMNS: Final = (CRITEO_SCHEMA.label, *CRITEO_SCHEMA.dense, *CRITEO_SCHEMA.sparse)
_EXPECTED: Final = ("0 or 1", *["an integer"] * _NUM_DENSE, *["a hexadecimal number of up to 15 digits"] * _NUM_SPARSE)
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


class CriteoReader(Reader):
    """Reads one file in Criteo's format; its first bytes say whether it is compressed."""

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path = Path(path)
        self.schema = schema
        require_data_file(self.path)
        self.files = (DataFile(self.path.name, self.path.stat().st_size),)

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        with _open(self.path) as file:
            text = _Text(self.path, file, self.schema.rule)
            text.skip(start_row)
            while stop_row is None or text.row < stop_row:
                wanted = chunk_rows if stop_row is None else min(chunk_rows, stop_row - text.row)
                chunk = text.parse(wanted)
                if len(chunk.labels):
                    yield chunk
                if len(chunk.labels) < wanted:
                    return


def _open(path: Path) -> BinaryIO:
    require_data_file(path)
    try:
        file = path.open("rb")
        magic = file.read(len(_GZIP_MAGIC))
        file.seek(0)
        if magic != _GZIP_MAGIC:
            return file
        file.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


class _Text:
    """A window over the file's text: bytes ``[_begin, _end)`` of the buffer are read and not yet consumed."""

    def __init__(self, path: Path, file: BinaryIO, rule: CategoryRule) -> None:
        self.row = 0  # consumed
        self._path, self._file, self._rule = path, file, (rule.are_ids, np.uint64(rule.seed))
        # One byte more, for the newline that the last line may lack.
        self._buffer = np.empty(BUFFER_BYTES + 1, np.uint8)
        self._begin, self._end, self._at_end = 0, 0, False

    def skip(self, rows: int) -> None:
        while self.row < rows:
            skipped, self._begin = skip_lines(self._buffer, self._begin, self._end, rows - self.row)
            self.row += skipped
            if self.row < rows and not self._refill():
                return

    def parse(self, rows: int) -> RawRows:
        """The next ``rows`` rows, or as many as are left."""
        labels = np.empty(rows, np.float32)
        dense = np.empty((rows, _NUM_DENSE), np.float32)
        categories = np.empty((rows, _NUM_SPARSE), np.int64)
        before, filled = self.row, 0
        while filled < rows:
            filled, self._begin, broken = parse_lines(
                self._buffer, self._begin, self._end, filled, *self._rule, labels, dense, categories
            )
            self.row = before + filled
            if broken >= 0:
                raise DataError(self._explain(broken))
            if filled < rows and not self._refill():
                break
        return RawRows(labels[:filled], dense[:filled], Categories.of_matrix(categories[:filled]))

    def _refill(self) -> bool:
        """Move the unfinished line to the front and read on; False at the end of the file."""
        if self._at_end:
            return False
        kept = self._end - self._begin
        if kept == BUFFER_BYTES:
            raise DataError(f"{self._path}, line {self.row + 1}: longer than {BUFFER_BYTES} bytes; not Criteo's format")
        self._buffer[:kept] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, kept
        try:
            # One read, not as many as fill the buffer: an error in a later one would lose what those before it read.
            count = self._file.readinto1(self._buffer[kept:BUFFER_BYTES])  # type: ignore[attr-defined]
        except EOFError as error:
            raise DataError(
                f"{self._path}, after line {self.row}: the file is truncated, its gzip data has no end; copy it again"
            ) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self._path}, after line {self.row}: the gzip data is broken: {error}") from error
        except OSError as error:
            raise DataError(
                f"{self._path}, after line {self.row}: cannot be read: {error.strerror or error}"
            ) from error
        self._end += count
        if not count:
            self._at_end = True
            if kept:
                self._buffer[kept] = ord("\n")
                self._end += 1
        return bool(count or kept)

    def _explain(self, column: int) -> str:
        while ord("\n") not in self._buffer[self._begin : self._end] and self._refill():
            pass
        line = self._buffer[self._begin : self._end].tobytes().split(b"\n", 1)[0].removesuffix(b"\r")
        fields = line.decode(errors="replace").split("\t")
        where = f"{self._path}, line {self.row + 1}"
        if len(fields) != len(_COLUMNS):
            return (
                f"{where}: {len(fields)} tab-separated columns; Criteo's format has {len(_COLUMNS)}: "
                f"a label, {_NUM_DENSE} integers, {_NUM_SPARSE} hexadecimal categories"
            )
        value = excerpt(fields[column])
        return f"{where}, column {column + 1} ({_COLUMNS[column]}): {value} is not {_EXPECTED[column]}"


# Text to numbers, a line at a time, without allocating


@kernel
def skip_lines(text: Bytes, begin: int, end: int, lines: int) -> tuple[int, int]:
    """Consume up to ``lines`` whole lines of ``text[begin:end]``: how many, and the start of the next."""
    skipped = 0
    position = begin
    at = begin
    while at < end and skipped < lines:
        if text[at] == _NEWLINE:
            skipped += 1
            position = at + 1
        at += 1
    return skipped, position


@kernel
def parse_lines(
    text: Bytes, begin: int, end: int, row: int, are_ids: bool, seed: np.uint64,
    labels: Floats, dense: Floats, categories: Int64s,
) -> tuple[int, int, int]:  # fmt: skip
    """Convert whole lines of ``text[begin:end]`` into rows from ``row`` on, until the arrays are full. Returns the
    rows that are filled; the start of the first line that was not consumed; the column where that stopped making
    sense, or -1."""
    position = begin
    broken = -1
    while row < len(labels):
        at, broken = _parse_line(text, position, end, row, are_ids, seed, labels, dense, categories)
        if at < 0:
            break
        position = at
        row += 1
    return row, position, broken


@inline
def _parse_line(
    text: Bytes, at: int, end: int, row: int, are_ids: bool, seed: np.uint64,
    labels: Floats, dense: Floats, categories: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Position after the line, or -1 if it is cut off at ``end`` or broken; the column where it is broken, or -1."""
    for column in range(_LAST_COLUMN + 1):
        if column > _LAST_DENSE:
            first = at
            at, category = _parse_hexadecimal(text, at, end)
            valid = category != _INVALID
            if are_ids and category >= 0:
                category = int(read_text(text, first, at, False, are_ids, seed))
            categories[row, column - _LAST_DENSE - 1] = category
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
            return -1, -1
        if not valid or text[at] != (_NEWLINE if column == _LAST_COLUMN else _TAB):
            return -1, column
        at += 1
    return at, -1


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
def _parse_hexadecimal(text: Bytes, at: int, end: int) -> tuple[int, int]:
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
        return at, MISSING
    if digits > _MAX_HEX_DIGITS:
        return at, _INVALID
    return at, number
