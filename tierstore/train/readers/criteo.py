"""Criteo's click logs: a row a line, tab-separated: label, 13 integers, 26 hexadecimal categories, empty = missing.

The format of the Kaggle display-advertising set and of the terabyte set, plain or compressed with gzip.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from ...system.excerpt import excerpt
from .base import CRITEO_SCHEMA, DataError, RawRows, Reader, require_data_file
from .criteo_kernels import Parse, Scan, parse_lines, skip_lines

__all__ = ["CriteoReader"]

BUFFER_BYTES: Final = 1 << 20
"""Text held at a time, and so the longest line."""
_GZIP_MAGIC: Final = b"\x1f\x8b"
_NUM_DENSE: Final = len(CRITEO_SCHEMA.dense)
_NUM_SPARSE: Final = len(CRITEO_SCHEMA.sparse)
_COLUMNS: Final = (CRITEO_SCHEMA.label, *CRITEO_SCHEMA.dense, *CRITEO_SCHEMA.sparse)
_EXPECTED: Final = ("0 or 1", *["an integer"] * _NUM_DENSE, *["a hexadecimal number of up to 15 digits"] * _NUM_SPARSE)


class CriteoReader(Reader):
    """Reads one file in Criteo's format; whether it is compressed is told from its first bytes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.schema = CRITEO_SCHEMA

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        with _open(self.path) as file:
            text = _Text(self.path, file)
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

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.row = 0
        """Rows consumed."""
        self._path = path
        self._file = file
        # One byte more, for the newline that the last line may lack.
        self._buffer = np.empty(BUFFER_BYTES + 1, np.uint8)
        self._begin = 0
        self._end = 0
        self._at_end = False

    def skip(self, rows: int) -> None:
        scan = np.zeros(len(Scan), np.int64)
        while self.row < rows:
            skip_lines(self._buffer, self._begin, self._end, rows - self.row, scan)
            self.row += int(scan[Scan.ROWS])
            self._begin = int(scan[Scan.POSITION])
            if self.row < rows and not self._refill():
                return

    def parse(self, rows: int) -> RawRows:
        """The next ``rows`` rows, or as many as are left."""
        chunk = RawRows(
            labels=np.empty(rows, np.float32),
            dense=np.empty((rows, _NUM_DENSE), np.float32),
            categories=np.empty((rows, _NUM_SPARSE), np.int64),
        )
        scan = np.zeros(len(Scan), np.int64)
        filled = 0
        while filled < rows:
            parse_lines(self._buffer, self._begin, self._end, filled, *chunk, scan)
            self.row += int(scan[Scan.ROWS]) - filled
            filled = int(scan[Scan.ROWS])
            self._begin = int(scan[Scan.POSITION])
            if scan[Scan.STATUS] == Parse.BROKEN:
                raise DataError(self._explain(int(scan[Scan.COLUMN])))
            if filled < rows and not self._refill():
                break
        return chunk.part(0, filled)

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
            count = self._file.readinto(self._buffer[kept:BUFFER_BYTES])  # type: ignore[attr-defined]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
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
