"""Parquet, and what its reader shares with that of CSV: files whose rows pyarrow streams, in memory of one size."""

import copy
import logging
import os
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from ...ids.texts import MAX_CATEGORY, CategoryRule, read_texts
from ...kernels.arrays import Bools, Bytes, Float64s, Floats, Ids, Int64s
from ...system.checks import excerpt, excerpt_names, packages_for
from .base import (
    CRITEO_SCHEMA,
    MAX_REASON,
    DataError,
    DataFile,
    RawRows,
    Reader,
    Schema,
    are_kept,
    are_labels,
    fits_float32,
    require_data_file,
)
from .categories import are_whole, exact_bits, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_LOG: Final = logging.getLogger("tierstore")
_HIDDEN: Final = (".", "_")
"""How names begin that Hadoop, Spark and pyarrow pass over: half-written files, checksums, notes."""
_RECORD_ROWS, _RECORD_BYTES = 32768, 8 << 20  # converted at a time: so many rows, or fewer whose values take so much
_VALUE_BYTES: Final = 8
_BUFFER_BYTES: Final = 1 << 20  # read at a time of each column

_TEXT_TYPES: Final = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_LABEL_TEXTS: Final = {"0": 0, "1": 1, "-1": -1, "false": 0, "true": 1, "0.0": 0, "1.0": 1, "-1.0": -1}


class ArrowReader(Reader):
    """Reads one file, or all files of a folder that have the format's endings, in the order of their names.
    ImportError: without pyarrow. DataError: for a file that is not of the format or lacks a column, or a value
    its column cannot hold."""

    endings: ClassVar[tuple[str, ...]]
    what: ClassVar[str]  # what a file of the format is, for messages
    reads_floats: ClassVar[bool] = False
    """Whether texts may be integers that are written as "12.0"."""

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path = Path(path)
        self.schema = schema
        self._columns = schema.columns
        self._paths = files_of(self.path, self.endings) if self.path.is_dir() else [self.path]
        if not self._paths:
            raise DataError(f"{self.path} holds no *{' or *'.join(self.endings)} file")
        files = []
        for path in self._paths:
            with self._explained(path):
                names, num_rows = self._head(path)
            self._require_columns(path, Counter(names))
            name = str(path.relative_to(self.path)) if path != self.path else path.name
            files.append(DataFile(name, path.stat().st_size, num_rows))
        self.files = tuple(files)
        self._lengths = [file.num_rows for file in files]
        """Rows of each file, where they are known by now."""

    def _require_columns(self, path: Path, columns: Counter[str]) -> None:
        wanted = self._columns
        if lacking := [name for name in wanted if name not in columns]:
            there = excerpt_names(sorted(columns))
            message = f"{path} lacks the columns {excerpt_names(lacking)}; it has {there}"
            if any(f"{name}=" in str(path) for name in lacking):
                message += ". Names of folders are not read as columns: write them into the files"
            raise DataError(message)
        if twice := [name for name in wanted if columns[name] > 1]:
            raise DataError(f"{path} has more than one column of the name {excerpt_names(twice)}")

    def reordered(self, order: Sequence[int]) -> "ArrowReader":
        """One that reads the files in this order, of their numbers; its ``files`` stay."""
        made = copy.copy(self)
        made._paths, made._lengths = [self._paths[file] for file in order], [self._lengths[file] for file in order]
        return made

    @property
    def num_rows(self) -> int | None:
        lengths = [file.num_rows for file in self.files]
        return None if None in lengths else sum(filter(None, lengths))

    def place(self, row: int) -> str:
        index = 0
        while index < len(self._lengths) - 1 and row >= (length := self._lengths[index] or 0):
            row -= length
            index += 1
        return f"{self._paths[index]}, row {row}"

    @abstractmethod
    def _head(self, file: Path) -> tuple[Sequence[str], int | None]:
        """What a file tells without being read: names of columns, and its rows, or None."""

    @abstractmethod
    def _records(self, file: Path, skip: int, chunk_rows: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        """The wanted columns of all rows, with the number of each record's first row. Records within the first
        ``skip`` rows may be left out, but for the last one. A chunk of more than one record is copied."""

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        held: list[RawRows] = []
        num_held = 0
        for rows in self._convert(start_row, sys.maxsize if stop_row is None else stop_row, chunk_rows):
            held.append(rows)
            num_held += len(rows.labels)
            if num_held == chunk_rows:
                yield RawRows.joined(held)
                held, num_held = [], 0
        if held:
            yield RawRows.joined(held)

    def _convert(self, start: int, stop: int, chunk_rows: int) -> Iterator[RawRows]:
        """Rows ``[start, stop)``, cut where a record or a chunk ends."""
        row, before = start, 0
        for index, path in enumerate(self._paths):
            end = self._lengths[index]
            if end is None or before + end > row:
                with self._explained(path):
                    end = 0
                    for first, record in self._records(path, row - before, chunk_rows):
                        end = first + record.num_rows
                        if lacking := set(self._columns).difference(record.schema.names):
                            raise DataError(f"{path} is broken: its rows lack the columns {excerpt_names(lacking)}")
                        while row < (limit := min(before + end, stop)):
                            count = min(limit - row, chunk_rows - (row - start) % chunk_rows)
                            part = record.slice(row - before - first, count)
                            yield _Record(path, row - before, part, reads_floats=self.reads_floats).convert(self.schema)
                            row += count
                        if row == stop:
                            return
                self._lengths[index] = end
            before += end

    @contextmanager
    def _explained(self, file: Path) -> Iterator[None]:
        """What pyarrow says of a file becomes an error that names it."""
        with packages_for(f"reading {file}", "'PATH_OF_THE_CHECKOUT[parquet]'"):
            import pyarrow as pa
        require_data_file(file)
        try:
            yield
        except (OSError, MemoryError, UnicodeError, pa.ArrowException) as error:
            raise DataError(f"{file} is not {self.what}, or is broken: {str(error)[:MAX_REASON]}") from error


class _Record:
    def __init__(self, path: Path, row: int, record: "pa.RecordBatch", *, reads_floats: bool) -> None:
        self._path, self._row, self._num_rows, self._reads_floats = path, row, record.num_rows, reads_floats
        self._columns = dict(zip(record.schema.names, record.columns, strict=True))

    def convert(self, schema: Schema) -> RawRows:
        dense = np.empty((self._num_rows, len(schema.dense)), np.float32)
        with np.errstate(over="ignore"):
            for column, name in enumerate(schema.dense):
                dense[:, column] = self._numbers(name, self._column(name))
        if not (good := fits_float32(dense)).all():
            for column, name in enumerate(schema.dense):
                self._check(name, good[:, column], "finite as float32; null stands for missing")
        bags, times = list[Any](), list[Any]()
        for name in schema.categorical:
            elements, places = self._lists(name)
            values, is_there = self._categories(name, elements, schema.rule, places)
            offsets: Any = 1 if places is None else places
            if is_there is not None:
                offsets = offsets_of(is_there) if places is None else offsets_of(is_there)[places - places[0]]
            bags.append((values, offsets))
            times += [(self._times(each, places, is_there), offsets) for each in schema.times if each[0] == name]
        each = [self._labels(name) for name in schema.labels]
        labels = each[0] if len(each) == 1 else np.stack(each, axis=1)
        weights = self._weights(schema.weight) if schema.weight else None
        moments = self._seconds(schema.event_time) if schema.event_time else None
        return RawRows.of_bags(labels, dense, bags, times)._replace(weights=weights, event_times=moments)

    def _column(self, name: str) -> Any:
        import pyarrow as pa

        column = self._columns[name]
        return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column

    def _labels(self, name: str) -> Floats:
        """float32 [n]: -1, 0 and 1."""
        import pyarrow as pa
        import pyarrow.compute

        column = self._column(name)
        if _is_text(column.type):
            known = pyarrow.compute.index_in(
                pyarrow.compute.utf8_lower(column.cast(pa.string())), value_set=pa.array(list(_LABEL_TEXTS))
            )
            labels = np.array([*_LABEL_TEXTS.values(), np.nan])[known.fill_null(len(_LABEL_TEXTS)).to_numpy()]
        else:
            labels = self._numbers(name, column)
        self._check(name, are_labels(labels), "0 or 1, or else -1 or 1")
        return np.asarray(labels, np.float32)

    def _weights(self, name: str) -> Floats:
        weights = self._numbers(name, self._column(name))
        self._check(name, fits_float32(weights) & (weights >= 0), "a weight, a finite number of 0 or more")
        return np.array(weights, np.float32)

    def _seconds(self, name: str) -> Float64s:
        import pyarrow as pa

        column, unit = self._column(name), 1.0
        if pa.types.is_timestamp(column.type):
            column, unit = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64()), 1e6
        return np.asarray(self._numbers(name, column), np.float64) / unit

    def _numbers(self, name: str, column: Any) -> Floats | Float64s:
        """[n], NaN where null."""
        import pyarrow as pa

        try:
            numbers = column if pa.types.is_floating(column.type) else column.cast(pa.float64(), safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            if _is_text(column.type):
                good = np.array([_is_number(each) for each in column])
                self._check(name, good, "a number; null stands for missing")
            raise DataError(
                f"{self._path}: column {name} of type {_type(column)} holds no numbers: {str(error)[:MAX_REASON]}"
            ) from error
        values: Floats | Float64s = numbers.to_numpy(zero_copy_only=False)
        return values

    def _times(self, names: tuple[str, str], places: Any, is_there: Bools | None) -> Int64s:
        """The times beside a column's categories; ``names``: of the column and its times."""
        import pyarrow as pa

        elements, own = self._lists(names[1])
        if not (pa.types.is_integer(elements.type) or pa.types.is_timestamp(elements.type)):
            held = f"column {names[1]} of type {_type(elements)} holds no times"
            raise DataError(f"{self._path}: {held}; cast it to integers or timestamps, or to lists of them")
        rows, ends = (np.arange(self._num_rows + 1) if each is None else each for each in (places, own))
        kept = are_kept((self._path, self._row), names, rows, ends, is_there)
        times = elements.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
        good = elements.is_valid().to_numpy(zero_copy_only=False) & ((times >= 0) | (elements.type != pa.uint64()))
        self._check(names[1], good | ~kept, f"a time below 2**63; {names[0]} has a category there", elements, own)
        return np.asarray(times[kept])

    def _lists(self, name: str) -> tuple[Any, Any]:
        """The column's values [N], and offsets [n + 1] of rows in them, from any number on; None: each row has one."""
        import pyarrow as pa
        import pyarrow.compute

        column = self._column(name)
        types = pa.types
        if not any(kind(column.type) for kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            return column, None
        if column.null_count or types.is_fixed_size_list(column.type):
            offsets = offsets_of(pyarrow.compute.list_value_length(column).fill_null(0).to_numpy())
            elements = column.flatten()
        else:
            offsets = column.offsets.to_numpy()
            elements = column.values.slice(offsets[0], offsets[-1] - offsets[0])
        if pa.types.is_dictionary(elements.type):
            elements = elements.dictionary_decode()
        return elements, offsets

    def _categories(
        self, name: str, elements: Any, rule: CategoryRule, offsets: Ids | None
    ) -> tuple[Int64s, Bools | None]:
        """The categories of those of the elements [N] that have one, and which have, [N]; None: all. Of rows by
        ``offsets`` [n + 1], from any number on; None: each row has one."""
        import pyarrow as pa

        kind = elements.type
        is_there: Bools | None = elements.is_valid().to_numpy(zero_copy_only=False) if elements.null_count else None
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
            filled = elements if pa.types.is_integer(kind) else elements.cast(pa.int64())
            values = (filled.fill_null(0) if elements.null_count else filled).to_numpy(zero_copy_only=False)
            if values.dtype == np.uint64:
                expected = "below 2**63; cast the column to strings, which are hashed where they are larger"
                self._check(name, values <= MAX_CATEGORY, expected, elements, offsets)
            elif values.min(initial=0) < rule.least:
                self._check(name, values >= 0, "an integer from 0 on; null is missing", elements, offsets)
        elif pa.types.is_floating(kind):
            values = elements.to_numpy(zero_copy_only=False)
            is_there = ~np.isnan(values)
            expected = (
                f"a whole number from 0 to 2**{exact_bits(values)}, as {values.dtype} holds exactly; null is missing"
            )
            self._check(name, are_whole(values) & ~(values < rule.least), expected, elements, offsets)
        elif _is_text(kind):
            values, is_text = self._texts(elements.cast(pa.large_binary()), rule)
            is_there = is_text if is_there is None else is_there & is_text
        else:
            to = "a list of numbers or of strings" if pa.types.is_nested(kind) else "strings"
            raise DataError(
                f"{self._path}: column {name} of type {_type(elements)} holds neither numbers nor strings nor lists of "
                f"them; cast it to {to} to take its values as categories"
            )
        if is_there is None or is_there.all():
            return np.asarray(values, np.int64), None
        return np.asarray(values[is_there], np.int64), is_there

    def _texts(self, texts: Any, rule: CategoryRule) -> tuple[Int64s, Bools]:
        """Their categories, and which are not empty."""
        _, offsets, letters = texts.buffers()
        places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        read: Bytes = np.empty(0, np.uint8) if letters is None else np.frombuffer(letters, np.uint8)
        return read_texts(read, places, rule, floats=self._reads_floats), places[1:] > places[:-1]

    def _check(self, name: str, good: Bools, expected: str, elements: Any = None, offsets: Ids | None = None) -> None:
        if not good.all():
            elements = self._columns[name] if elements is None else elements
            broken = int(np.flatnonzero(~good)[0])
            row = self._row + broken
            if offsets is not None:
                row = self._row + int(np.searchsorted(offsets, offsets[0] + broken, side="right")) - 1
            try:
                found = elements[broken].as_py()
                value = excerpt(found.decode(errors="backslashreplace") if isinstance(found, bytes) else found)
            except (ValueError, OverflowError):
                value = "a value that cannot be shown"
            raise DataError(f"{self._path}, row {row}, column {name}: {value} is not {expected}")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return any(getattr(pa.types, f"is_{name}")(kind) for name in _TEXT_TYPES)


def _is_number(text: Any) -> bool:
    import pyarrow as pa

    try:
        text.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _type(column: Any) -> str:
    """The column's type; that of a nested one may be long."""
    return str(column.type)[:MAX_REASON]


def names_below(folder: Path) -> list[str]:
    """The files below the folder, but for hidden folders, by their relative paths, in order. Links to folders count
    as files."""
    found = []
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN) and name not in linked]
        found += [str(Path(place, name).relative_to(folder)) for name in names + linked]
    return sorted(found)


def is_data(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the file is not hidden and ends in one of these, in letters of any size."""
    return name.lower().endswith(endings) and not Path(name).name.startswith(_HIDDEN)


def files_of(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """The folder's data files that have the endings. A warning names the others, but for marks such as _SUCCESS."""
    names = names_below(folder)
    taken = [name for name in names if is_data(name, endings)]
    left = [name for name in names if is_data(name, ("",)) != name.lower().endswith(endings)]
    if taken and left:
        _LOG.warning("%s: %d files are read; left out: %s", folder, len(taken), excerpt_names(left))
    return [folder / name for name in taken]


class ParquetReader(ArrowReader):
    """Reads Parquet: numbers for dense columns, numbers, strings or lists of them for sparse ones; null is missing.
    Row groups before the first wanted row are not read. For errors see ``ArrowReader``."""

    endings: ClassVar = (".parquet", ".pq")
    what: ClassVar = "a Parquet file"

    def _head(self, file: Path) -> tuple[Sequence[str], int | None]:
        with _opened(file) as parquet:
            return parquet.schema_arrow.names, parquet.metadata.num_rows

    def _records(self, file: Path, skip: int, chunk_rows: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        with _opened(file) as parquet:
            row, groups = 0, list(range(parquet.num_row_groups))
            while groups and row + (rows := parquet.metadata.row_group(groups[0]).num_rows) <= skip:
                row += rows
                groups.pop(0)
            if not groups:
                return  # pyarrow 18 cannot read none
            size = self._record_rows(parquet.metadata, groups)
            size -= size % chunk_rows if size > chunk_rows else 0
            for record in parquet.iter_batches(size, row_groups=groups, columns=self._columns, use_threads=False):
                yield row, record
                row += record.num_rows

    def _record_rows(self, metadata: "parquet.FileMetaData", groups: list[int]) -> int:
        """Rows that are converted at once: as many as fit if all are as long as on average in the worst row group."""
        names = set(self._columns)
        paths = [metadata.row_group(groups[0]).column(index).path_in_schema for index in range(metadata.num_columns)]
        wanted = [index for index, path in enumerate(paths) if path.split(".")[0] in names]
        rows = _RECORD_ROWS
        for number in groups:
            group = metadata.row_group(number)
            columns = [group.column(index) for index in wanted]
            size = sum(max(each.total_uncompressed_size, _VALUE_BYTES * each.num_values) for each in columns)
            rows = min(rows, _RECORD_BYTES * group.num_rows // size) if size else rows
        return max(rows, 1)


def _opened(file: Path) -> "parquet.ParquetFile":
    """Pre-buffering would keep every row group read so far, and without a buffer a column's whole part of a group."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
