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
        values, offsets = categories
        ids = np.empty_like(values)
        outside = self._hash(values, np.ascontiguousarray(offsets[:, -1]), ids)
        if outside >= 0:
            column = int(np.searchsorted(offsets[:, -1], outside, side="right"))
            raise OutsideTableError(
                f"category {values[outside]} has no row in a table of {self.limits[column]} rows; with "
                'data.hashing = "mod" categories are row numbers: give the table more rows '
                '(embedding.num_embeddings), or set data.hashing = "mix", which takes any',
                row=int(np.searchsorted(offsets[column], outside, side="right")) - 1,
                column=column,
            )
        return HashedIds(ids, np.append(offsets[:, :-1], len(ids)))

    def ids(self, categories: Int64s, ends: Int64s) -> Int64s:
        """Row ids [N] of categories [N] below their limits, column by column; ``ends`` [F] says where each column's
        end."""
        ids = np.empty_like(categories)
        outside = self._hash(categories, ends, ids)
        assert outside < 0, outside
        return ids

    def _hash(self, categories: Int64s, ends: Int64s, ids: Int64s) -> int:
        if len(ends) != len(self._num_embeddings):
            raise ValueError(f"categories of {len(ends)} columns for {len(self._num_embeddings)} tables")
        if self._mode == "none":
            ids[:] = categories
            return -1
        outside: int = _hash(categories, ends, self._num_embeddings, self._mode == "mix", ids)
        return outside


@kernel
def _hash(categories: Int64s, ends: Int64s, num_embeddings: Int64s, mix: bool, ids: Int64s) -> int:
    """``ids[i]`` is the row of ``categories[i]``; ``ends`` [F], where each column's end. Returns -1, or the first
    that is no row."""
    begin = 0
    for column in range(len(ends)):
        rows, first = np.uint64(num_embeddings[column]), np.uint64(column) * STEP
        for i in range(begin, ends[column]):
            category = np.uint64(categories[i])
            if not mix and category >= rows:
                return i
            ids[i] = np.int64(mix64(category + first) % rows if mix else category)
        begin = ends[column]
    return -1
