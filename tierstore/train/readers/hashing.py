"""Categories of any size into tables of a fixed size."""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...kernels.arrays import Int64s
from ...kernels.jit import inline, kernel

__all__ = ["GOLDEN", "FeatureHasher", "HashedIds", "splitmix64"]

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1: Final = np.uint64(30)
_SHIFT_2: Final = np.uint64(27)
_SHIFT_3: Final = np.uint64(31)


class HashedIds(NamedTuple):
    """The jagged ids of a batch: all of feature 0's bags, then feature 1's, and so on."""

    values: Int64s
    """[total]"""
    offsets: Int64s
    """[F * B + 1]: bag i is ``values[offsets[i]:offsets[i + 1]]``, of 0 or 1 ids."""


class FeatureHasher:
    """Turns a batch's categories into row ids of tables with ``num_embeddings`` rows each.

    With ``mode="mix"`` the id of value v in column c is ``splitmix64(v + (c + 1) * 0x9E3779B97F4A7C15) mod n``, where
    splitmix64 is the output function of that generator (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
    Generators", 2014); like values of different columns fall on unlike rows. With ``mode="mod"`` it is ``v mod n``: for
    categories that are row ids already.

    Args:
        num_embeddings: rows of each column's table.
        mode: "mix" or "mod".
    """

    def __init__(self, num_embeddings: Sequence[int], *, mode: Literal["mix", "mod"] = "mix") -> None:
        if mode not in ("mix", "mod"):
            raise ValueError(f'mode={mode!r}: expected "mix" or "mod"')
        self._num_embeddings = np.asarray(num_embeddings, np.int64)
        if self._num_embeddings.ndim != 1 or not (self._num_embeddings > 0).all():
            raise ValueError(f"num_embeddings={list(num_embeddings)}: every table needs at least one row")
        self._mix = mode == "mix"

    def __call__(self, categories: Int64s) -> HashedIds:
        """Categories [B, F], negative where missing, as jagged ids."""
        rows, columns = categories.shape
        if columns != len(self._num_embeddings):
            raise ValueError(f"categories of {columns} columns for {len(self._num_embeddings)} tables")
        values = np.empty(rows * columns, np.int64)
        offsets = np.empty(rows * columns + 1, np.int64)
        total = _hash_columns(categories, self._num_embeddings, self._mix, values, offsets)
        return HashedIds(values[:total], offsets)

    def jagged(self, categories: Int64s, lengths: Int64s) -> Int64s:
        """Row ids [N] of jagged categories [N] from 0 on, of features as ``lengths`` [F, B] says."""
        if len(lengths) != len(self._num_embeddings):
            raise ValueError(f"lengths of {len(lengths)} features for {len(self._num_embeddings)} tables")
        ids = np.empty_like(categories)
        _hash_jagged(categories, lengths, self._num_embeddings, self._mix, ids)
        return ids


@inline
def splitmix64(seed: np.uint64) -> np.uint64:
    """The 64 bits that the generator of this name gives for a state."""
    mixed = (seed ^ (seed >> _SHIFT_1)) * _MULTIPLY_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MULTIPLY_2
    return mixed ^ (mixed >> _SHIFT_3)


@inline
def _row_of(category: Any, offset: np.uint64, modulus: np.uint64, mix: bool) -> np.int64:
    hashed = np.uint64(category)
    if mix:
        hashed = splitmix64(hashed + offset)
    return np.int64(hashed % modulus)


@kernel
def _hash_jagged(categories: Int64s, lengths: Int64s, num_embeddings: Int64s, mix: bool, ids: Int64s) -> None:
    """``ids[i]`` is the row of ``categories[i]`` in its feature's table."""
    position = 0
    for column in range(lengths.shape[0]):
        modulus = np.uint64(num_embeddings[column])
        offset = np.uint64(column + 1) * GOLDEN
        end = position
        for sample in range(lengths.shape[1]):
            end += lengths[column, sample]
        for i in range(position, end):
            ids[i] = _row_of(categories[i], offset, modulus, mix)
        position = end


@kernel
def _hash_columns(
    categories: Int64s,
    num_embeddings: Int64s,
    mix: bool,
    values: Int64s,
    offsets: Int64s,
) -> int:
    """Fill ``offsets`` and the front of ``values``, column after column; return how many values there are."""
    rows, columns = categories.shape
    total = 0
    offsets[0] = 0
    for column in range(columns):
        modulus = np.uint64(num_embeddings[column])
        offset = np.uint64(column + 1) * GOLDEN
        for row in range(rows):
            category = categories[row, column]
            if category >= 0:
                values[total] = _row_of(category, offset, modulus, mix)
                total += 1
            offsets[column * rows + row + 1] = total
    return total
