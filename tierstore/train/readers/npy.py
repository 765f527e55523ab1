"""Arrays in a folder, mapped into memory: labels, dense values, and categories as a matrix or as bags."""

import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...ids.texts import MAX_CATEGORY, MISSING, CategoryRule
from ...kernels.arrays import Bools, Int64s
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
from .categories import Categories, are_whole, exact_bits, offsets_of

_HEAD_BYTES: Final = 12
_MAX_HEADER_BYTES: Final = 10_000
_UNREADABLE: Final = (
    ArithmeticError,
    EOFError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)
"""What numpy lets out for one broken header or another, which it reads as Python literals."""


class NpyReader(Reader):
    """Reads arrays of numbers, a row of each at a time.

    - ``label.npy`` [N], or [N, L] of several: 0 or 1, or else -1 or 1. Weights, event times: ``NAME.npy`` [N].
    - ``dense.npy`` [N, C]: NaN where missing; there need be none without dense columns.
    - ``sparse.npy`` [N, F]: one category a column, then those of group and segment. Or an array for each column:
      ``NAME.npy`` [N], or [N, K] for up to K categories a row, or [total] with ``NAME.offsets.npy`` [N + 1], where row
      r has those from ``offsets[r]`` to ``offsets[r + 1]``. Times of a categorical column have as many a row.

    Categories are integers, booleans or whole floating-point numbers; NaN and negative ones are missing, of ids only
    -1 is. DataError where a file is missing, is no array of the right kind, or is longer than another.
    """

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path, self.schema = Path(path), schema
        has_matrix, width = (self.path / "sparse.npy").exists(), len(schema.labels)
        shapes: dict[str, tuple[int, ...]] = {"label": (width,) if width > 1 else ()}
        shapes |= {"dense": (len(schema.dense),)} if schema.dense else {}
        shapes |= {"sparse": (len(schema.categorical),)} if has_matrix else {}
        shapes |= {name: () for name in (schema.weight, schema.event_time) if name}
        self._arrays = {name: _map(self.path / f"{name}.npy", "biuf", shape) for name, shape in shapes.items()}
        lengths = {f"{name}.npy": len(each) for name, each in self._arrays.items()}
        rows, names = self.num_rows, () if has_matrix else schema.categorical
        self._columns = [_Column.open(self.path, name, rows) for name in names]
        if has_matrix and schema.times:
            self._columns = [_Column(self.path / "sparse.npy", each, 1, rows) for each in self._arrays["sparse"].T]
        self._times = [(of, _Column.open(self.path, name, rows, "iu")) for of, name in schema.times]
        lengths |= {column.path.name: column.num_rows for column in (*self._columns, *(own for _, own in self._times))}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{self.path}: the arrays differ in rows: {lengths}")
        self.files = tuple(DataFile(name, (self.path / name).stat().st_size, rows) for name in lengths)

    @property
    def num_rows(self) -> int:
        return len(self._arrays["label"])

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        stop = self.num_rows if stop_row is None else min(stop_row, self.num_rows)
        for begin in range(start_row, stop, chunk_rows):
            end = min(begin + chunk_rows, stop)
            part = {name: each[begin:end] for name, each in self._arrays.items()}
            label, dense = part["label"], part["dense"] if self.schema.dense else np.empty((end - begin, 0), np.float32)
            _check(self.path / "label.npy", begin, label, are_labels(label), "0 or 1, or else -1 or 1")
            _check(self.path / "dense.npy", begin, dense, fits_float32(dense), "finite as float32; NaN is missing")
            single: dict[str, Any] = {}
            if name := self.schema.weight:
                good = fits_float32(part[name]) & (part[name] >= 0)
                _check(self.path / f"{name}.npy", begin, part[name], good, "a weight, a finite number of 0 or more")
                single["weights"] = part[name].astype(np.float32)
            if name := self.schema.event_time:
                single["event_times"] = part[name].astype(np.float64)
            label, dense = label.astype(np.float32), dense.astype(np.float32)
            if self._columns:
                yield RawRows.of_bags(label, dense, *self._bags(begin, end))._replace(**single)
                continue
            matrix, _ = _read_categories(self.path / "sparse.npy", begin, part["sparse"], self.schema.rule)
            yield RawRows(label, dense, Categories.of_matrix(matrix), **single)

    def _bags(self, begin: int, end: int) -> tuple[list[Any], list[Any]]:
        bags, times = list[Any](), list[Any]()
        for name, column in zip(self.schema.categorical, self._columns, strict=True):
            values, offsets, is_there = column.read(begin, end, self.schema.rule)
            bags.append((values, offsets))
            times += [(own.beside(column, begin, end, is_there), offsets) for of, own in self._times if of == name]
        return bags, times


class _Column(NamedTuple):
    """A column's array: row r has ``values[offsets[r]:offsets[r + 1]]``, or so many as ``offsets`` says."""

    path: Path
    values: NDArray[Any]
    offsets: NDArray[Any] | int
    num_rows: int

    @classmethod
    def open(cls, folder: Path, name: str, num_rows: int, kinds: str = "biuf") -> "_Column":
        path, offsets_path = folder / f"{name}.npy", folder / f"{name}.offsets.npy"
        if offsets_path.exists():
            values, offsets = _map(path, kinds, ()), _map(offsets_path, "iu", ())
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values):
                form = f"[{num_rows} + 1] offsets, with the end, from 0 to {len(values)}, the length of {path.name}"
                raise DataError(f"{offsets_path} holds [{len(offsets)}]; expected {form}")
            return cls(path, values, offsets, len(offsets) - 1)
        values = _map(path, kinds, None)
        size = 1 if values.ndim == 1 else values.shape[1]
        return cls(path, values.reshape(-1), size, len(values))

    def read(self, begin: int, end: int, rule: CategoryRule) -> tuple[Int64s, Int64s | int, Bools | None]:
        """Categories of rows ``[begin, end)``, offsets of rows, from any number on, or the length of each, and which
        values have a category, None for all."""
        offsets = self._places(begin, end)
        values = self.values[offsets[0] : offsets[-1]]
        categories, are_all_there = _read_categories(self.path, int(offsets[0]), np.ascontiguousarray(values), rule)
        if are_all_there:
            return categories, self.offsets if isinstance(self.offsets, int) else offsets, None
        is_there = categories != MISSING
        return categories[is_there], offsets_of(is_there)[offsets - offsets[0]], is_there

    def beside(self, column: "_Column", begin: int, end: int, is_there: Bools | None) -> Int64s:
        """The times of a column's categories in rows ``[begin, end)``."""
        offsets, names = self._places(begin, end), (column.path.stem, self.path.stem)
        kept = are_kept((self.path, begin), names, column._places(begin, end), offsets, is_there)
        times = self.values[offsets[0] : offsets[-1]]
        _check(self.path, int(offsets[0]), times, (times <= MAX_CATEGORY) | ~kept, "below 2**63")
        return times[kept].astype(np.int64)

    def _places(self, begin: int, end: int) -> Int64s:
        """Offsets of rows ``[begin, end)`` and their end."""
        if isinstance(self.offsets, int):
            return np.arange(begin, end + 1) * self.offsets
        offsets: Int64s = self.offsets[begin : end + 1].astype(np.int64)
        good = (offsets[1:] >= offsets[:-1]) & (offsets[1:] <= len(self.values))
        _check(self.path.with_suffix(".offsets.npy"), begin, offsets[1:], good, f"from the last to {len(self.values)}")
        return offsets


def _read_categories(path: Path, begin: int, array: NDArray[Any], rule: CategoryRule) -> tuple[Int64s, bool]:
    """Categories of the array's shape, or ``MISSING``, a view where that is what it holds; and whether it is known that
    none is missing. ``begin`` is the number of its first row."""
    if array.dtype.kind == "f":
        expected = f"a whole number below 2**{exact_bits(array)}, as {array.dtype} holds exactly; NaN is missing"
        _check(path, begin, array, are_whole(array), expected)
        array = np.where(np.isnan(array), MISSING, array)
    if array.dtype.kind == "u":
        _check(path, begin, array, array <= MAX_CATEGORY, "below 2**63")
    categories: Int64s = np.require(array, np.int64, "A")
    least = categories.min(initial=0)
    return categories if least >= rule.least else np.where(categories < 0, MISSING, categories), bool(least >= 0)


def _check(path: Path, begin: int, rows: NDArray[Any], good: Bools, expected: str) -> None:
    if not good.all():
        row, *column = (int(indexes[0]) for indexes in np.nonzero(~good))
        place = f"row {begin + row}" + (f", column {column[0]}" if column else "")
        raise DataError(f"{path}, {place}: {rows[(row, *column)]} is not {expected}")


def _map(path: Path, kinds: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """The array, of a dtype of these kinds, whose rows have that shape; None: any up to a list."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist; the npy format needs label.npy, dense.npy for dense columns, and sparse.npy or a "
            "file for each sparse column"
        )
    require_data_file(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    length = int.from_bytes(head[8 : 10 if head[6:7] == b"\x01" else 12], "little")
    if length > _MAX_HEADER_BYTES:  # numpy would read up to 4 GiB of it before it looks
        raise DataError(f"{path} is not an npy file, or is cut short: its header would take {length:,} bytes")
    try:
        with np.errstate(over="raise"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the header is Python 2's, and read all the same
            array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except _UNREADABLE as error:
        raise DataError(f"{path} is not an npy file, or is cut short: {str(error)[:MAX_REASON]}") from error
    fits = array.shape[1:] == shape if shape is not None else array.ndim <= 2
    if array.dtype.kind not in kinds or not array.ndim or not fits:
        wanted = "[rows] or [rows, K]" if shape is None else f"[rows{''.join(f', {n}' for n in shape)}]"
        held = f"{str(array.dtype)[:MAX_REASON]} {list(array.shape)}"
        raise DataError(f"{path} holds {held}; expected {wanted} of numbers ({kinds})")
    return array
