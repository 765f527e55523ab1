"""Parquet: record batches streamed through pyarrow, so that memory does not grow with the file."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...kernels.arrays import Bools, Bytes, Float64s, Int64s
from ...kernels.jit import kernel
from ...system.excerpt import excerpt, excerpt_names
from .base import CRITEO_SCHEMA, MISSING, DataError, RawRows, Reader, Schema, fits_float32, require_data_file
from .criteo import parse_hexadecimal

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_REASON: Final = 200
_RECORD_ROWS: Final = 8192
"""Rows converted at a time."""


class ParquetReader(Reader):
    """Reads one Parquet file, or all ``*.parquet`` files of a folder in the order of their names.

    Dense columns hold numbers, categorical ones integers from 0 on or strings of hexadecimal digits as in Criteo's
    format, the label 0 and 1; null is missing.

    Raises:
        ImportError: without pyarrow.
        DataError: for a file that is not Parquet or lacks a column, or a value that is none of the above.
    """

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path = Path(path)
        self.schema = schema
        self._files = sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]
        if not self._files:
            raise DataError(f"{self.path} holds no *.parquet file")
        for file in self._files:
            with _opened(file) as parquet:
                columns = Counter(parquet.schema_arrow.names)
            wanted = (schema.label, *schema.dense, *schema.sparse)
            lacking = [name for name in wanted if name not in columns]
            if lacking:
                there = excerpt_names(sorted(columns))
                raise DataError(f"{file} lacks the columns {excerpt_names(lacking)}; it has {there}")
            twice = [name for name in wanted if columns[name] > 1]
            if twice:
                raise DataError(f"{file} has more than one column of the name {excerpt_names(twice)}")

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        """Whole row groups before ``start_row`` are skipped unread."""
        row = start_row
        held: list[RawRows] = []
        num_held = 0
        for rows in self._convert(start_row):
            if stop_row is not None and row + len(rows.labels) > stop_row:
                rows = rows.part(0, stop_row - row)
            row += len(rows.labels)
            while num_held + len(rows.labels) >= chunk_rows:
                yield _join([*held, rows.part(0, chunk_rows - num_held)])
                rows = rows.part(chunk_rows - num_held)
                held, num_held = [], 0
            held.append(rows)
            num_held += len(rows.labels)
            if row == stop_row:
                break
        if num_held:
            yield _join(held)

    def _convert(self, start_row: int) -> Iterator[RawRows]:
        columns = [self.schema.label, *self.schema.dense, *self.schema.sparse]
        to_skip = start_row
        for file in self._files:
            with _opened(file) as parquet:
                groups = list(range(parquet.num_row_groups))
                while groups and to_skip >= parquet.metadata.row_group(groups[0]).num_rows:
                    to_skip -= parquet.metadata.row_group(groups.pop(0)).num_rows
                if not groups:
                    continue
                row = parquet.metadata.num_rows - sum(parquet.metadata.row_group(group).num_rows for group in groups)
                for record in parquet.iter_batches(_RECORD_ROWS, row_groups=groups, columns=columns, use_threads=False):
                    if lacking := set(columns).difference(record.schema.names):
                        raise DataError(f"{file} is broken: its rows lack the columns {excerpt_names(lacking)}")
                    wanted = record.slice(min(to_skip, record.num_rows))
                    to_skip -= record.num_rows - wanted.num_rows
                    row += record.num_rows - wanted.num_rows
                    yield _Columns(file, row, wanted).convert(self.schema)
                    row += wanted.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file; what pyarrow says of it becomes an error that names it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow; install it with: pip install 'tierstore[parquet]'") from error
    require_data_file(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            yield parquet
    except (OSError, MemoryError, UnicodeError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet file, or is broken: {str(error)[:_MAX_REASON]}") from error


def _join(chunks: list[RawRows]) -> RawRows:
    """A copy: the reader's caller may keep and change what it gets."""
    return RawRows(*map(np.concatenate, zip(*chunks, strict=True)))


class _Columns:
    """One record batch; ``row`` of the file is its first."""

    def __init__(self, path: Path, row: int, record: "pa.RecordBatch") -> None:
        self._path = path
        self._row = row
        self._record = record

    def convert(self, schema: Schema) -> RawRows:
        labels = self._numbers(schema.label)
        self._check(schema.label, np.isin(labels, (0, 1)), "0 or 1")
        dense = np.empty((len(labels), len(schema.dense)), np.float32)
        for column, name in enumerate(schema.dense):
            numbers = self._numbers(name)
            self._check(name, fits_float32(numbers), "finite as float32; null stands for missing")
            dense[:, column] = numbers
        categories = np.empty((len(labels), len(schema.sparse)), np.int64)
        for column, name in enumerate(schema.sparse):
            categories[:, column] = self._categories(name)
        return RawRows(labels=labels.astype(np.float32), dense=dense, categories=categories)

    def _numbers(self, name: str) -> Float64s:
        """float64 [n], NaN where null."""
        import pyarrow as pa

        column = self._record.column(name)
        try:
            numbers: Float64s = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{self._path}: column {name} of type {_type(column)} holds no numbers: {str(error)[:_MAX_REASON]}"
            ) from error
        return numbers

    def _categories(self, name: str) -> Int64s:
        import pyarrow as pa

        column = self._record.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_string(column.type):
            return self._hexadecimal(name, column.cast(pa.large_binary()))
        if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
            raise DataError(f"{self._path}: column {name} of type {_type(column)} holds neither integers nor strings")
        try:
            numbers: Int64s = column.cast(pa.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self._path}: column {name} holds integers beyond 2**63: {str(error)[:_MAX_REASON]}"
            ) from error
        self._check(name, (numbers >= 0) | _nulls(column), "an integer from 0 on")
        return numbers

    def _hexadecimal(self, name: str, column: Any) -> Int64s:
        """int64 [n] from large_binary; null and "" are missing."""
        numbers = np.empty(len(column), np.int64)
        _, offsets, text = column.buffers()
        positions = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        letters = np.frombuffer(text, np.uint8) if text is not None else np.empty(0, np.uint8)
        valid = np.empty(len(column), np.bool_)
        _parse_strings(letters, positions, numbers, valid)
        nulls = _nulls(column)
        numbers[nulls] = MISSING
        self._check(name, valid | nulls, "a hexadecimal number of up to 15 digits")
        return numbers

    def _check(self, name: str, good: Bools, expected: str) -> None:
        if not good.all():
            broken = int(np.flatnonzero(~good)[0])
            place = f"{self._path}, row {self._row + broken}, column {name}"
            try:
                value = excerpt(self._record.column(name)[broken].as_py())
            except (ValueError, OverflowError):
                value = "a value that cannot be shown"
            raise DataError(f"{place}: {value} is not {expected}")


def _type(column: Any) -> str:
    """The column's type; that of a nested one may be long."""
    return str(column.type)[:_MAX_REASON]


def _nulls(column: Any) -> Bools:
    nulls: Bools = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


@kernel
def _parse_strings(letters: Bytes, positions: Int64s, numbers: Int64s, valid: Bools) -> None:
    for i in range(len(numbers)):
        at, number = parse_hexadecimal(letters, positions[i], positions[i + 1])
        numbers[i] = number
        valid[i] = at == positions[i + 1] and number >= -1
