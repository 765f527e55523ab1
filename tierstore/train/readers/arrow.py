"""What readers of Parquet and CSV share: files whose rows pyarrow streams, so that memory does not grow with them."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Bools, Bytes, Float64s, Floats, Int64s
from ...system.excerpt import excerpt, excerpt_names
from .base import CRITEO_SCHEMA, DataError, RawRows, Reader, Schema, fits_float32, require_data_file
from .categories import MAX_FLOAT, MISSING, Categories, read_texts

if TYPE_CHECKING:
    import pyarrow as pa

MAX_REASON: Final = 200
_TEXT_TYPES: Final = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_LABEL_TEXTS: Final = {"0": 0, "1": 1, "-1": -1, "false": 0, "true": 1, "0.0": 0, "1.0": 1, "-1.0": -1}


class Head(NamedTuple):
    """What a file tells without being read."""

    names: Sequence[str]
    """Of its columns."""
    num_rows: int | None = None
    """None where that is not told."""


class ArrowReader(Reader):
    """Reads one file, or all files of a folder that have the format's endings, in the order of their names.

    Raises:
        ImportError: without pyarrow.
        DataError: for a file that is not of the format or lacks a column, or a value that its column cannot hold.
    """

    endings: ClassVar[tuple[str, ...]]
    what: ClassVar[str]
    """What a file of the format is, for messages."""
    reads_floats: ClassVar[bool] = False
    """Whether texts may be integers that are written as "12.0"."""

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path = Path(path)
        self.schema = schema
        self._files = [self.path]
        if self.path.is_dir():
            self._files = sorted(file for file in self.path.iterdir() if file.name.endswith(self.endings))
        if not self._files:
            raise DataError(f"{self.path} holds no *{' or *'.join(self.endings)} file")
        lengths = []
        for file in self._files:
            with self._explained(file):
                head = self._head(file)
            lengths.append(head.num_rows)
            columns = Counter(head.names)
            wanted = self._columns
            if lacking := [name for name in wanted if name not in columns]:
                there = excerpt_names(sorted(columns))
                raise DataError(f"{file} lacks the columns {excerpt_names(lacking)}; it has {there}")
            if twice := [name for name in wanted if columns[name] > 1]:
                raise DataError(f"{file} has more than one column of the name {excerpt_names(twice)}")
        self._num_rows = None if None in lengths else sum(filter(None, lengths))

    @property
    def num_rows(self) -> int | None:
        return self._num_rows

    @property
    def _columns(self) -> list[str]:
        return [self.schema.label, *self.schema.dense, *self.schema.sparse]

    @abstractmethod
    def _head(self, file: Path) -> Head: ...

    @abstractmethod
    def _records(self, file: Path, skip: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        """The wanted columns of all rows, with the number of each record's first row. Records within the first ``skip``
        rows may be left out, but for the last one."""

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        row = start_row
        held: list[RawRows] = []
        num_held = 0
        for rows in self._convert(start_row):
            begin, end = 0, len(rows.labels)
            if stop_row is not None:
                end = min(end, stop_row - row)
            row += end
            while num_held + end - begin >= chunk_rows:
                cut = begin + chunk_rows - num_held
                yield RawRows.joined([*held, rows.part(begin, cut)])
                held, num_held, begin = [], 0, cut
            held.append(rows.part(begin, end))
            num_held += end - begin
            if row == stop_row:
                break
        if num_held:
            yield RawRows.joined(held)

    def _convert(self, skip: int) -> Iterator[RawRows]:
        for file in self._files:
            with self._explained(file):
                end = self._head(file).num_rows or 0
                if 0 < end <= skip:
                    skip -= end
                    continue
                for first, record in self._records(file, skip):
                    end = first + record.num_rows
                    if lacking := set(self._columns).difference(record.schema.names):
                        raise DataError(f"{file} is broken: its rows lack the columns {excerpt_names(lacking)}")
                    if skip < end:
                        start = max(skip - first, 0)
                        wanted = record.slice(start)
                        yield _Record(file, first + start, wanted, reads_floats=self.reads_floats).convert(self.schema)
            skip -= min(skip, end)

    @contextmanager
    def _explained(self, file: Path) -> Iterator[None]:
        """What pyarrow says of a file becomes an error that names it."""
        try:
            import pyarrow as pa
        except ImportError as error:
            message = f"reading {file} needs pyarrow; install it with: pip install 'PATH_OF_THE_CHECKOUT[parquet]'"
            raise ImportError(message) from error
        require_data_file(file)
        try:
            yield
        except (OSError, MemoryError, UnicodeError, pa.ArrowException) as error:
            raise DataError(self._explain(file, error)) from error

    def _explain(self, file: Path, error: Exception) -> str:
        return f"{file} is not {self.what}, or is broken: {str(error)[:MAX_REASON]}"


class _Record:
    """One record batch; ``row`` of the file is its first."""

    def __init__(self, path: Path, row: int, record: "pa.RecordBatch", *, reads_floats: bool) -> None:
        self._path = path
        self._row = row
        self._record = record
        self._reads_floats = reads_floats

    def convert(self, schema: Schema) -> RawRows:
        dense = np.empty((self._record.num_rows, len(schema.dense)), np.float32)
        for column, name in enumerate(schema.dense):
            numbers = self._numbers(name, self._column(name))
            self._check(name, fits_float32(numbers), "finite as float32; null stands for missing")
            dense[:, column] = numbers
        bags = [self._bags(name) for name in schema.sparse]
        categories = Categories.of_columns([values for values, _ in bags], np.stack([lengths for _, lengths in bags]))
        return RawRows(self._labels(schema.label), dense, categories)

    def _column(self, name: str) -> Any:
        import pyarrow as pa

        column = self._record.column(name)
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
        self._check(name, np.isin(labels, (-1, 0, 1)), "0 or 1, or else -1 or 1")
        return np.asarray(labels, np.float32)

    def _numbers(self, name: str, column: Any) -> Float64s:
        """float64 [n], NaN where null."""
        import pyarrow as pa

        try:
            numbers: Float64s = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{self._path}: column {name} of type {_type(column)} holds no numbers: {str(error)[:MAX_REASON]}"
            ) from error
        return numbers

    def _bags(self, name: str) -> tuple[Int64s, Any]:
        """The column's categories [N], and how many each row has, [n]."""
        import pyarrow as pa
        import pyarrow.compute

        column = self._column(name)
        types = pa.types
        if not any(kind(column.type) for kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            values = self._categories(name, column, np.arange(1, len(column) + 1))
            return values[values >= 0], values >= 0
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(lengths)
        elements = column.flatten()
        if pa.types.is_dictionary(elements.type):
            elements = elements.dictionary_decode()
        values = self._categories(name, elements, ends)
        is_there = values >= 0
        if is_there.all():
            return values, lengths
        return values[is_there], np.diff(np.append(0, np.cumsum(is_there))[np.append(0, ends)])

    def _categories(self, name: str, elements: Any, ends: Int64s) -> Int64s:
        """The categories of elements [N], ``MISSING`` where null; the elements of row i end before ``ends[i]``."""
        import pyarrow as pa

        kind = elements.type
        nulls = None if elements.null_count == 0 else elements.is_null().to_numpy(zero_copy_only=False)
        if _is_text(kind):
            categories = self._texts(elements.cast(pa.large_binary()))
            if nulls is not None:
                categories[nulls] = MISSING
            return categories
        if pa.types.is_floating(kind):
            floats = elements.cast(pa.float64()).to_numpy(zero_copy_only=False)
            good = np.isnan(floats) | ((floats >= 0) & (floats < MAX_FLOAT) & (floats == np.floor(floats)))
            self._check_elements(name, elements, good, ends, "a whole number from 0 to 2**53; null or NaN is missing")
            return np.where(np.isnan(floats), MISSING, floats).astype(np.int64)
        if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
            raise DataError(
                f"{self._path}: column {name} of type {_type(elements)} holds neither numbers nor strings; "
                "cast it to strings to take its values as categories"
            )
        try:
            filled = elements.cast(pa.int64()).fill_null(MISSING) if nulls is not None else elements.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self._path}: column {name} holds integers beyond 2**63: {str(error)[:MAX_REASON]}"
            ) from error
        numbers: Int64s = filled.to_numpy(zero_copy_only=False)
        if numbers.min(initial=0) < MISSING + (nulls is None):
            good = numbers >= 0 if nulls is None else (numbers >= 0) | nulls
            self._check_elements(name, elements, good, ends, "an integer from 0 on; null is missing")
        return numbers

    def _texts(self, texts: Any) -> Int64s:
        _, offsets, letters = texts.buffers()
        places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        read: Bytes = np.empty(0, np.uint8) if letters is None else np.frombuffer(letters, np.uint8)
        return read_texts(read, places, floats=self._reads_floats)

    def _check(self, name: str, good: Bools, expected: str) -> None:
        self._check_elements(name, self._record.column(name), good, np.arange(1, len(good) + 1), expected)

    def _check_elements(self, name: str, elements: Any, good: Bools, ends: Int64s, expected: str) -> None:
        if not good.all():
            broken = int(np.flatnonzero(~good)[0])
            row = self._row + int(np.searchsorted(ends, broken, side="right"))
            try:
                found = elements[broken].as_py()
                value = excerpt(found.decode(errors="backslashreplace") if isinstance(found, bytes) else found)
            except (ValueError, OverflowError):
                value = "a value that cannot be shown"
            raise DataError(f"{self._path}, row {row}, column {name}: {value} is not {expected}")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return any(getattr(pa.types, f"is_{name}")(kind) for name in _TEXT_TYPES)


def _type(column: Any) -> str:
    """The column's type; that of a nested one may be long."""
    return str(column.type)[:MAX_REASON]
