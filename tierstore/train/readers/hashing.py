"""Categories of any size into tables of a fixed size."""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.arrays import Int64s
from ...kernels.hashing import mix64
from ...kernels.jit import kernel

STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""Between the hashes' counters of two columns."""


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
        columns = categories.T
        present = columns >= 0
        return HashedIds(self.jagged(columns[present], present), np.append(0, np.cumsum(present)))

    def jagged(self, categories: Int64s, lengths: NDArray[Any]) -> Int64s:
        """Row ids [N] of jagged categories [N] from 0 on, of features as ``lengths`` [F, B] says."""
        if len(lengths) != len(self._num_embeddings):
            raise ValueError(f"categories of {len(lengths)} columns for {len(self._num_embeddings)} tables")
        ids = np.empty_like(categories)
        _hash(categories, np.cumsum(lengths.sum(axis=1)), self._num_embeddings, self._mix, ids)
        return ids


@kernel
def _hash(categories: Int64s, ends: Int64s, num_embeddings: Int64s, mix: bool, ids: Int64s) -> None:
    """``ids[i]`` is the row of ``categories[i]`` in its column's table; ``ends`` [F], where each column's end."""
    begin = 0
    for column in range(len(ends)):
        rows, first = np.uint64(num_embeddings[column]), np.uint64(column) * STEP
        for i in range(begin, ends[column]):
            category = np.uint64(categories[i])
            ids[i] = np.int64((mix64(category + first) if mix else category) % rows)
        begin = ends[column]
