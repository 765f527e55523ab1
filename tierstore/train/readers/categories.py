"""Categories: the values of categorical columns, as integers, in bags of any number of them; hashed into tables.

Shapes: F columns, n rows, N categories.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...ids.texts import MISSING, mix_rows
from ...kernels.arrays import Bools, Int64s
from ...system.checks import require_choice

Hashing = Literal["mix", "mod", "none"]


class Categories(NamedTuple):
    """Bags of any number of categories."""

    columns: Sequence[Int64s]
    """Of each column, row after row; from 0 on unless they are ids. May be views of what a file is read into."""
    offsets: Int64s
    """[F, n + 1]: row r of column f has those from ``offsets[f, r]`` to ``offsets[f, r + 1]`` of all columns joined."""

    @classmethod
    def of_columns(
        cls, columns: Sequence[Int64s], offsets: Iterable[NDArray[Any] | int], num_rows: int
    ) -> "Categories":
        """From each column, and the offsets [n + 1] of its bags, from any number on; or one number, the length of all
        of them."""
        count, offsets = len(columns) * num_rows, list(offsets)
        if all(isinstance(each, int) and each == 1 for each in offsets):
            return cls(columns, _strided(_ascending(count + 1), len(columns)))
        flat, begin = np.zeros(count + 1, np.int64), 0
        for row, values, own in zip(flat[1:].reshape(len(columns), num_rows), columns, offsets, strict=True):
            places = np.arange(num_rows + 1) * own if isinstance(own, int) else own
            np.add(places[1:], np.int64(begin - int(places[0])), out=row)
            begin += len(values)
        return cls(columns, _strided(flat, len(columns)))

    @classmethod
    def of_matrix(cls, values: Int64s) -> "Categories":
        """From one category a row and column, [n, F], or ``MISSING``."""
        is_there = values.T != MISSING
        if is_there.all():
            return cls.of_columns(list(np.ascontiguousarray(values.T)), [1] * len(is_there), len(values))
        columns = [column[row] for column, row in zip(values.T, is_there, strict=True)]
        return cls.of_columns(columns, map(offsets_of, is_there), len(values))

    @classmethod
    def joined(cls, parts: Sequence["Categories"]) -> "Categories":
        """The rows of each part; they have the same columns."""
        columns = list(map(np.concatenate, zip(*(part.columns for part in parts), strict=True)))
        lengths = np.concatenate([np.diff(part.offsets) for part in parts], axis=1)
        return cls.of_columns(columns, map(offsets_of, lengths), lengths.shape[1])

    def take(self, rows: Int64s) -> "Categories":
        """These rows, in this order, copied."""
        begins = self.offsets[:, rows]
        lengths = self.offsets[:, rows + 1] - begins
        columns = []
        for values, begin, own in zip(self.columns, begins - self.offsets[:, :1], lengths, strict=True):
            offsets = offsets_of(own)
            columns.append(values[np.repeat(begin - offsets[:-1], own) + np.arange(offsets[-1])])
        return Categories.of_columns(columns, map(offsets_of, lengths), len(rows))

    def last(self, longest: int) -> "Categories":
        """Bags of the last ``longest`` categories each; 0: all."""
        if not longest:
            return self
        lengths = np.diff(self.offsets)
        columns = [last_of(values, own, longest) for values, own in zip(self.columns, lengths, strict=True)]
        return Categories.of_columns(columns, map(offsets_of, np.minimum(lengths, longest)), lengths.shape[1])


def last_of(values: Int64s, lengths: Int64s, longest: int) -> Int64s:
    """Of bags end to end [N], of these lengths [n], the last ``longest`` values each; ``values`` if none has more."""
    if lengths.max(initial=0) <= longest:
        return values
    return values[np.repeat(np.cumsum(lengths), lengths) - np.arange(len(values)) <= longest]


def offsets_of(lengths: NDArray[Any]) -> Int64s:
    """Offsets [n + 1] of bags of these lengths [n], from 0 on."""
    return np.append(0, np.cumsum(lengths))


def _strided(flat: Int64s, num_columns: int) -> Int64s:
    """Offsets of columns. A column's end where the next one's begin: rows of a view that overlap in one number."""
    num_rows = (len(flat) - 1) // num_columns
    return np.lib.stride_tricks.as_strided(flat, (num_columns, num_rows + 1), (8 * num_rows, 8), writeable=False)


@lru_cache(2)
def _ascending(count: int) -> Int64s:
    return np.arange(count)


def exact_bits(floats: NDArray[Any]) -> int:
    """Whole floating-point numbers of the array's type are exact below 2 to this power; from there on digits are
    lost."""
    return min(np.finfo(floats.dtype).nmant + 1, 53)


def are_whole(floats: NDArray[Any]) -> Bools:
    """Which floating-point numbers are whole and exact, or missing (NaN)."""
    good: Bools = np.isnan(floats) | ((np.abs(floats) < 2.0 ** exact_bits(floats)) & (floats == np.floor(floats)))
    return good


class HashedIds(NamedTuple):
    """The jagged ids of a batch: all of feature 0's bags, then feature 1's, and so on."""

    values: Int64s
    """[total]"""
    offsets: Int64s
    """[F * B + 1]: bag i is ``values[offsets[i]:offsets[i + 1]]``."""


class OutsideTableError(ValueError):
    """A category that is to be a row id, and that its table has no row for; ``row`` and ``column`` say which."""

    def __init__(self, message: str, row: int, column: int) -> None:
        super().__init__(message)
        self.row = row
        self.column = column


class FeatureHasher:
    """Turns categories into row ids of tables with ``num_embeddings`` rows each, a table a column.

    With ``mode="mix"`` the id of value v in column c is ``splitmix64(v + (c + 1) * 0x9E3779B97F4A7C15) mod n``, the
    output function of that generator (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014). With
    ``mode="mod"`` categories are row ids already, and with ``mode="none"`` they are ids of tables that take any.
    ``limits``: what categories of each column must be below; None if they may be any int64.
    """

    def __init__(self, num_embeddings: Sequence[int], *, mode: Hashing = "mix") -> None:
        require_choice(mode, get_args(Hashing), "mode")
        self._num_embeddings = np.asarray(num_embeddings, np.int64)
        if self._num_embeddings.ndim != 1 or not (self._num_embeddings > 0).all():
            raise ValueError(f"num_embeddings={list(num_embeddings)}: every table needs at least one row")
        self._mode = mode
        everywhere: dict[str, int | None] = {"mix": 1 << 63, "none": None}
        self.limits: tuple[int | None, ...] = tuple(everywhere.get(mode, int(size)) for size in num_embeddings)

    def __call__(self, categories: Categories) -> HashedIds:
        """The row ids of B rows of F columns. OutsideTableError: one of them is not below its limit."""
        columns, offsets = categories
        lengths = np.array([len(each) for each in columns], np.int64)
        ids, begin = np.empty(lengths.sum(), np.int64), 0
        for column, values in enumerate(columns):
            outside = self._hash(values, lengths, (column, column + 1), ids[begin : begin + len(values)])
            if outside >= 0:
                raise OutsideTableError(
                    f"category {values[outside]} has no row in a table of {self.limits[column]} rows; with "
                    'data.hashing = "mod" categories are row numbers: give the table more rows '
                    '(embedding.num_embeddings), or set data.hashing = "mix", which takes any',
                    row=int(np.searchsorted(offsets[column], begin + outside, side="right")) - 1,
                    column=column,
                )
            begin += len(values)
        return HashedIds(ids, np.append(offsets[:, :-1], len(ids)))

    def ids(self, categories: Int64s, lengths: Int64s) -> Int64s:
        """Row ids [N] of categories [N] below their limits, column by column; ``lengths`` [F]: how many each has."""
        ids = np.empty_like(categories)
        outside = self._hash(categories, lengths, (0, len(lengths)), ids)
        assert outside < 0, outside
        return ids

    def _hash(self, categories: Int64s, lengths: Int64s, columns: tuple[int, int], ids: Int64s) -> int:
        if len(lengths) != len(self._num_embeddings):
            raise ValueError(f"categories of {len(lengths)} columns for {len(self._num_embeddings)} tables")
        if self._mode == "none":
            ids[:] = categories
            return -1
        outside: int = mix_rows(categories, lengths, self._num_embeddings, columns, self._mode == "mix", ids)
        return outside
