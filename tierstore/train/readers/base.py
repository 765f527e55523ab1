"""The contract of a reader: rows of click data, from any row on, as batches a model takes.

A format implements ``read_chunks``; here is what all share: raw values become a model's input, rows are shuffled.

Shapes: B rows of a batch, n rows of a chunk, C dense columns, F categorical columns.
"""

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ids.texts import FROM_ZERO, MISSING, CategoryRule
from ...kernels.arrays import Bools, Float64s, Floats, Int64s
from ...nn.jagged import KeyedJaggedTensor
from .categories import Categories, FeatureHasher, OutsideTableError


class DataError(ValueError):
    """A data file that cannot be read as what it should be; names the file and the place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Which columns a row has: a label or several, C dense ones, which may be none, F categorical ones, the model's
    feature names, and the row's weight in the loss, if it has one; and what values of categorical ones become.
    ``group``, ``segment``: categorical columns of metrics, which may be the model's, too.
    ``longest``: how many of a list are kept, the last ones; 0: all.
    ``event_time``: the column that says when a row happened; "": none.
    ``times``: pairs of a categorical column and one that has a time for each of its values."""

    label: str | tuple[str, ...]
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    rule: CategoryRule = FROM_ZERO
    weight: str = ""
    group: str = ""
    segment: str = ""
    longest: int = 0
    times: tuple[tuple[str, str], ...] = ()
    event_time: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def columns(self) -> list[str]:
        """The names of all."""
        single = filter(None, [self.weight, self.event_time])
        return [*self.labels, *single, *self.dense, *self.categorical, *self.time_columns]

    @property
    def categorical(self) -> tuple[str, ...]:
        """The names of columns of categories, the model's first."""
        return tuple(dict.fromkeys((*self.sparse, *filter(None, (self.group, self.segment)))))

    def __post_init__(self) -> None:
        names = self.columns
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"columns named more than once as label, weight, dense, sparse or time: {sorted(twice)}; name each once"
            )
        for column, time in self.times:
            if column not in self.sparse:
                raise ValueError(f"times: {time!r} has the times of {column!r}, which is no sparse column")
        if not self.sparse:
            raise ValueError("there are no sparse columns; name at least one in data.sparse_columns")

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The columns that have times, in the order of those that they are beside."""
        return tuple(time for column in self.sparse for own, time in self.times if own == column)


MAX_REASON: Final = 200  # characters of another library's words in a message
CRITEO_SCHEMA: Final = Schema(
    label="label", dense=tuple(f"I{i}" for i in range(1, 14)), sparse=tuple(f"C{i}" for i in range(1, 27))
)


class RawRows(NamedTuple):
    """Rows as a file holds them. The arrays are the caller's to keep, and but for categories to change."""

    labels: Floats
    """[n], or [n, L] of several: 0 or 1, or else -1 or 1."""
    dense: Floats
    """[n, C]; NaN where missing."""
    categories: Categories  # of ``Schema.categorical``
    times: Categories | None = None  # of ``Schema.time_columns``, in bags as those of their categorical columns
    weights: Floats | None = None
    """[n], 0 or more."""
    event_times: Float64s | None = None  # [n], Unix seconds; NaN where missing

    @classmethod
    def of_bags(cls, labels: Floats, dense: Floats, bags: Sequence[Any], times: Sequence[Any]) -> "RawRows":
        """From values and offsets of each column, as ``Categories.of_columns`` takes them."""
        both = [list(zip(*each, strict=True)) for each in (bags, times) if each]
        made: list[Any] = [Categories.of_columns(values, offsets, len(labels)) for values, offsets in both]
        return cls(labels, dense, *made)

    @classmethod
    def joined(cls, parts: Sequence["RawRows"]) -> "RawRows":
        """The rows of each part, copied unless there is one part."""
        if len(parts) == 1:
            return parts[0]
        labels, dense, categories, times, *single = zip(*parts, strict=True)
        beside = None if times[0] is None else Categories.joined(times)
        joined = [None if each[0] is None else np.concatenate(each) for each in single]
        return cls(np.concatenate(labels), np.concatenate(dense), Categories.joined(categories), beside, *joined)

    def take(self, rows: Int64s) -> "RawRows":
        """These rows, in this order, copied."""
        times = None if self.times is None else self.times.take(rows)
        single: Any = (None if each is None else each[rows] for each in (self.weights, self.event_times))
        return RawRows(self.labels[rows], self.dense[rows], self.categories.take(rows), times, *single)


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows as a model takes them: dense float32 [B, C], the ids of F features, labels float32 [B], or [B, L] of
    several, weights float32 [B] in the loss, or None."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    total_rows: int  # of the batch that this is a part of; B if it is whole
    weights: Tensor | None = None
    times: KeyedJaggedTensor | None = None  # int64, by their columns; one for each id of the categorical column
    keys: tuple[Tensor | None, ...] = (None, None)  # of ``Schema.group`` and ``segment``: int64 [B], -1 for none
    event_time: float | None = None  # the greatest of ``total_rows``, in Unix seconds
    position: dict[str, Any] | None = None  # after the batch, of a reader with ``seek``

    def __len__(self) -> int:
        return self.labels.shape[0]


class DataFile(NamedTuple):
    """A file of a data set: its name below the data's path, and how large it is."""

    name: str
    size_bytes: int
    num_rows: int | None = None  # None where only reading it would tell


class Reader(ABC):
    """Rows of one data set, in a fixed order, numbered from 0."""

    path: Path
    schema: Schema
    files: tuple[DataFile, ...]  # the data set's, in the order in which they are read

    @property
    def num_rows(self) -> int | None:
        """How many there are; None where only reading all of them would tell."""
        return None

    def place(self, row: int) -> str:
        """Where a row that was read lies, for messages."""
        return f"{self.path}, row {row}"

    @abstractmethod
    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        """Rows ``[start_row, stop_row)``, or to the end, ``chunk_rows`` at a time; only the last chunk may be
        shorter. Rows before ``start_row`` are skipped without being converted. Ends early where the data ends.
        Memory is bounded. DataError names the file and the line or row."""

    def batches(
        self,
        hasher: FeatureHasher,
        *,
        batch_size: int,
        start_row: int = 0,
        stop_row: int | None = None,
        log_dense: bool = True,
        part: int = 0,
        parts: int = 1,
    ) -> Iterator[Batch]:
        """Rows ``[start_row, stop_row)`` as batches of ``batch_size``; only the last may be shorter. Batches begun at
        row r are those of a run begun at 0 if r is a multiple of ``batch_size``.

        Args:
            part, parts: give a part of each batch only: consecutive rows; parts differ by at most one row.
            log_dense: dense values x become log(1 + max(x, 0)); False leaves them as they are. Missing ones are 0.

        Raises:
            DataError: for broken data, for a category without a row, and where the data ends before ``stop_row``.
            ValueError: unless ``0 <= start_row <= stop_row`` and ``batch_size >= 1``.
        """
        if start_row < 0 or batch_size < 1 or (stop_row is not None and stop_row < start_row):
            raise ValueError(f"rows [{start_row}, {stop_row}) in batches of {batch_size}: not a range of rows")

        def read() -> Iterator[Batch]:
            row = start_row
            lows, count = set[float](), len(self.schema.sparse)
            for whole in self.read_chunks(start_row, stop_row, batch_size):
                total = len(whole.labels)
                lows.update(low for low in (-1.0, 0.0) if low in whole.labels)
                if len(lows) > 1:
                    raise DataError(
                        f"{self.place(row)} or after it: labels are 0 in some rows and -1 in others; write one for both"
                    )
                first = total * part // parts
                rows = whole if parts == 1 else whole.take(np.arange(first, total * (part + 1) // parts))
                try:
                    features = Categories(rows.categories.columns[:count], rows.categories.offsets[:count])
                    values, offsets = map(torch.from_numpy, hasher(features.last(self.schema.longest)))
                except OutsideTableError as error:
                    place = f"{self.place(row + first + error.row)}, column {self.schema.sparse[error.column]}"
                    raise DataError(f"{place}: {error}") from None
                yield Batch(
                    dense=torch.from_numpy(dense_features(rows.dense, log=log_dense)),
                    sparse=KeyedJaggedTensor(keys=self.schema.sparse, values=values, offsets=offsets),
                    labels=torch.from_numpy(np.maximum(rows.labels, np.float32(0))),
                    total_rows=total,
                    weights=None if rows.weights is None else torch.from_numpy(rows.weights),
                    times=None if rows.times is None else self._jagged(rows.times.last(self.schema.longest)),
                    keys=(self.keys_of(rows, self.schema.group), self.keys_of(rows, self.schema.segment)),
                    event_time=None if whole.event_times is None else self._latest(whole.event_times, row),
                )
                row += total
            if stop_row is not None and row < stop_row:
                raise DataError(f"{self.path} ends before row {stop_row}: asked for rows {start_row} to {stop_row}")

        return read()

    def keys_of(self, rows: RawRows, name: str) -> Tensor | None:
        """The first category of each row in a column, int64 [n], -1 for none; None: there is no name."""
        if not name:
            return None
        column = self.schema.categorical.index(name)
        begins, lengths = rows.categories.offsets[column, :-1], np.diff(rows.categories.offsets[column])
        found = np.full(len(begins), MISSING)
        found[lengths > 0] = rows.categories.columns[column][(begins - begins[:1])[lengths > 0]]
        return torch.from_numpy(found)

    def _latest(self, seconds: Float64s, row: int) -> float | None:
        known = seconds[~np.isnan(seconds)]
        if not ((known >= 0) & (known < 1e11)).all():
            found = f"event times in {self.schema.event_time} are from {known.min():g} to {known.max():g}"
            raise DataError(f"{self.place(row)} or after it: {found}; expected Unix seconds, not milliseconds")
        return float(known.max()) if len(known) else None

    def _jagged(self, times: Categories) -> KeyedJaggedTensor:
        values, lengths = np.concatenate(times.columns), np.diff(times.offsets)
        return KeyedJaggedTensor(self.schema.time_columns, torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def random_order(count: int, *, key: tuple[int, int], begin: int = 0) -> Int64s:
    """A permutation [count]: the argsort of Philox's 64-bit outputs (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), whose stream numpy keeps. ``key``, ``begin``: numbers in [0, 2**64); others give another."""
    bits = np.random.Philox(counter=[0, begin, 0, 0], key=list(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class ShuffledReader(Reader):
    """Reads ``block_rows`` rows at a time, a multiple of a chunk's, and shuffles them. ``key``: of ``random_order``."""

    def __init__(self, reader: Reader, block_rows: int, key: tuple[int, int]) -> None:
        self.path, self.schema, self.files = reader.path, reader.schema, reader.files
        self._reader, self._block_rows, self._key = reader, block_rows, key
        self._block = 0, np.empty(0, np.int64)  # that was read last: its first row, and its order

    @property
    def num_rows(self) -> int | None:
        return self._reader.num_rows

    def place(self, row: int) -> str:
        begin, order = self._block
        return self._reader.place(begin + int(order[row - begin]))

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        begin = start_row - start_row % self._block_rows
        for block in self._reader.read_chunks(begin, stop_row, self._block_rows):
            order = random_order(len(block.labels), key=self._key, begin=begin)
            self._block = begin, order
            for first in range(max(0, start_row - begin), len(order), chunk_rows):
                yield block.take(order[first : first + chunk_rows])
            begin += len(order)


def are_kept(where: tuple[Path, int], names: tuple[str, str], places: Int64s, own: Int64s, is_there: Any) -> Bools:
    """Which times are of values that are there (None: all). DataError unless rows, from ``where`` on, have as many
    times, with offsets ``own`` [n + 1], as values, with offsets ``places``."""
    counts, times = np.diff(places), np.diff(own)
    for at in np.flatnonzero(counts != times)[:1].tolist():
        found = f"{counts[at]} values in {names[0]}, {times[at]} times in {names[1]}"
        raise DataError(f"{where[0]}, row {where[1] + at}: {found}; each value needs one, a missing one too")
    return np.ones(times.sum(), np.bool_) if is_there is None else is_there


def require_data_file(path: Path) -> None:
    """DataError unless there is a file that can be read twice; a pipe would hang, or could not be resumed."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is no plain file; write the data to one")


def are_labels(numbers: NDArray[np.number]) -> Bools:
    good: Bools = (numbers == 0) | (np.abs(numbers) == 1)
    return good


def fits_float32(values: NDArray[np.generic]) -> Bools:
    """Which values are missing (NaN), or finite as float32. An infinite one would end in a model of NaN."""
    if values.dtype.kind != "f":
        return np.ones(values.shape, np.bool_)
    fits: Bools = (np.abs(values) <= np.finfo(np.float32).max) | np.isnan(values)
    return fits


def dense_features(dense: Floats, *, log: bool) -> Floats:
    """float32 [n, C]: log(1 + max(x, 0)) of each value, 0 where it is missing (NaN). ``dense`` is overwritten."""
    dense[np.isnan(dense)] = 0
    if log:
        np.maximum(dense, np.float32(0), out=dense)
        np.log1p(dense, out=dense)
    return dense
