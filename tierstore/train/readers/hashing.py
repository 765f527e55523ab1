"""Categories of any size into tables of a fixed size."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from ...kernels.arrays import Int64s
from ...kernels.hashing import mix64
from ...kernels.jit import kernel
from ...system.checks import require_choice
from .categories import Categories

Hashing = Literal["mix", "mod", "none"]
STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""Between the hashes' counters of two columns."""
MOST: Final = np.uint64(0xFFFFFFFFFFFFFFFF)


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
        outside: int = _hash(categories, lengths, self._num_embeddings, columns, self._mode == "mix", ids)
        return outside


@kernel
def _hash(
    categories: Int64s, lengths: Int64s, num_embeddings: Int64s, columns: tuple[int, int], mix: bool, ids: Int64s
) -> int:
    """``ids[i]`` is the row of ``categories[i]``, of these columns only, of which each has so many. Returns -1, or the
    first that is no row."""
    begin = 0
    for column in range(columns[0], columns[1]):
        end, rows, first = begin + lengths[column], np.uint64(num_embeddings[column]), np.uint64(column) * STEP
        own, found, inverse = categories[begin:end], ids[begin:end], MOST // rows
        for i in range(len(own)):
            category = np.uint64(own[i])
            if not mix and category >= rows:
                return begin + i
            found[i] = np.int64(modulo(mix64(category + first), rows, inverse) if mix else category)
        begin = end
    return -1


@kernel
def modulo(number: np.uint64, divisor: np.uint64, inverse: np.uint64) -> np.uint64:
    """``number % divisor``, given ``MOST // divisor``; no division, so that it runs on vectors. The upper half of
    ``number * inverse`` is the quotient, or one less (Barrett: Implementing the RSA Algorithm on a Standard
    Digital Signal Processor, CRYPTO 1986)."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    number_low, number_high, inverse_low, inverse_high = number & low, number >> half, inverse & low, inverse >> half
    middle = number_high * inverse_low + ((number_low * inverse_low) >> half)
    other = number_low * inverse_high + (middle & low)
    quotient = number_high * inverse_high + (middle >> half) + (other >> half)
    rest = np.uint64(number - quotient * divisor)
    return np.uint64(rest - divisor) if rest >= divisor else rest
