"""How close together the rows of a cache lie on disk, by a trace: a block that is written takes along all that changed
in it, so neighbours that come and go together are written once."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS, RowLayout
from .accesses import Accesses

__all__ = ["Crowding", "crowding_of"]

_SIZES: Final = 64


class Crowding(NamedTuple):
    """By size of a cache of the rows that were used last.

    Attributes:
        sizes: int64 [sizes], rows, ascending.
        neighbours: float64 [sizes], how many other rows of the cache lie in a row's block, on average over its rows.
    """

    sizes: NDArray[np.int64]
    neighbours: NDArray[np.float64]

    def at(self, rows: float) -> float:
        """Neighbours in a cache of so many rows; of more than the trace has, as with all of these."""
        return float(np.interp(rows, self.sizes, self.neighbours))


def crowding_of(accesses: Accesses, layout: RowLayout) -> Crowding | None:
    """At the end of a trace, rows lying in order of their ids; None for a sample of the rows: it lacks neighbours."""
    if accesses.sampling_rate < 1 or not len(accesses.keys):
        return None
    distinct, last = np.unique(accesses.keys[::-1], return_index=True)
    newest_first = distinct[np.argsort(last)]
    row_mask = (1 << KEY_ROW_BITS) - 1
    blocks = (newest_first & ~row_mask) | (newest_first & row_mask) // layout.rows_per_block
    by_block = np.argsort(blocks, kind="stable")
    is_first = np.diff(blocks[by_block], prepend=-1) != 0
    places = np.arange(len(blocks))
    newer_in_block = np.empty(len(blocks), np.int64)
    newer_in_block[by_block] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    # Each row is a neighbour of those that came before it, and they are its neighbours.
    pairs = 2 * np.cumsum(newer_in_block)
    sizes = np.unique(np.geomspace(1, len(blocks), _SIZES).astype(np.int64))
    return Crowding(sizes, pairs[sizes - 1] / sizes)
