"""A cache of pooled rows, keyed by the bag's list of ids: a repeated bag needs no row lookups.

A bag of 8 ids that is found costs 0.8 us, one that is not 0.4 us and 1.0 us to enter; of 32 ids 2.5, 0.7 and 1.5 us
(64 columns, 20,000 bags, one thread). A lookup costs 0.02 to 0.1 us an id whose row is in memory, some 12 us one on
SSD. Use it if bags repeat and their rows do not stay in memory, or if bags have many dozens of ids; else leave it off.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import cachetools
import numpy as np

from ..kernels.arrays import Floats, Int64s

ENTRY_OVERHEAD_BYTES: Final = 420
"""What Python needs for an entry beside its ids and columns: two byte strings, and places in three dictionaries just
after they grew."""


class PooledSplit(NamedTuple):
    """A batch split into hits and misses.

    Attributes:
        hits: int64 [H], positions of known bags, ascending.
        rows: float32 [H, columns], their pooled rows, read-only.
        misses: int64 [M], positions of the others, ascending.
        keys: of the others, to ``add`` them by; None for a bag that is not to be kept.
    """

    hits: Int64s
    rows: Floats
    misses: Int64s
    keys: Sequence[bytes | None]


class PooledCache:
    """Pooled rows of the bags used most recently. For one thread.

    A bag's key is its table, its ids in order and its weights, whole, so no two bags are mistaken for one another; a
    row is a copy of what was added, to the bit. Rows are those of one version of the tables: ``clear`` at the next.

    Args:
        budget_bytes: memory for keys, rows and what Python needs for them, at least 1.
        columns: float32 values of a pooled row.
        min_ids: bags of fewer ids are not kept: to look them up is as quick, if their rows are in memory. At least 1.

    Attributes:
        hits: bags found, since the start; ``clear`` leaves it.
        misses: bags of at least ``min_ids`` ids that were not found, since the start.
    """

    def __init__(self, budget_bytes: int, columns: int, *, min_ids: int = 8) -> None:
        self._columns: Final = columns
        self._min_ids: Final = min_ids
        self._entry_bytes = 0
        # cachetools asks for the size of a row alone; that of the entry lies in _entry_bytes while it is entered.
        self._rows: Final = cachetools.LRUCache[bytes, bytes](budget_bytes, getsizeof=lambda _: self._entry_bytes)
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """Of what is kept now, at most the budget."""
        return int(self._rows.currsize)

    def __len__(self) -> int:
        return len(self._rows)

    def split(self, values: Int64s, offsets: Int64s, *, table: int = 0, weights: Floats | None = None) -> PooledSplit:
        """Find a batch's bags.

        Args:
            values: int64 [N], ids.
            offsets: int64 [B + 1], where each bag begins, from 0 to N, ascending.
            table: a number for the table and its pooling; from 0, below 2**62.
            weights: float32 [N], per id, or None.
        """
        found, hits, misses, keys = [], [], [], []
        rows = self._rows
        for position, key in enumerate(self._keys(values, offsets, table, weights)):
            if key is not None and key in rows:
                hits.append(position)
                found.append(rows[key])
            else:
                misses.append(position)
                keys.append(key)
        self.hits += len(hits)
        self.misses += len(keys) - keys.count(None)
        flat = np.frombuffer(b"".join(found), np.float32)
        return PooledSplit(np.array(hits, np.int64), flat.reshape(-1, self._columns), np.array(misses, np.int64), keys)

    def _keys(self, values: Int64s, offsets: Int64s, table: int, weights: Floats | None) -> list[bytes | None]:
        # The last bit tells weights behind the ids from more ids.
        head = (table << 1 | (weights is not None)).to_bytes(8, "little")
        ids = np.ascontiguousarray(values, np.int64).tobytes()
        tail = b"" if weights is None else np.ascontiguousarray(weights, np.float32).tobytes()
        return [
            head + ids[8 * low : 8 * high] + tail[4 * low : 4 * high] if high - low >= self._min_ids else None
            for low, high in pairwise(offsets.tolist())
        ]

    def add(self, keys: Sequence[bytes | None], rows: Floats) -> None:
        """Keep the pooled rows of bags that were missed; evicts those used least recently.

        Args:
            keys: ``PooledSplit.keys``.
            rows: float32 [M, columns], of ``PooledSplit.misses``; copied.
        """
        row_bytes = 4 * self._columns
        flat = np.ascontiguousarray(rows).tobytes()
        for position, key in enumerate(keys):
            if key is None:
                continue
            self._entry_bytes = len(key) + row_bytes + ENTRY_OVERHEAD_BYTES
            if self._entry_bytes <= self._rows.maxsize:
                self._rows[key] = flat[position * row_bytes : (position + 1) * row_bytes]

    def clear(self) -> None:
        """Forget all rows: the tables have changed."""
        self._rows.clear()
